"""The inputs and results of a compiled model for each micro-batch, and a summary of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..optim.state import LOSS_SCALE, LOSS_SCALING, SPECIFIC

__all__ = [
    "CHECKED",
    "GRADIENT",
    "INVALID",
    "UPDATED",
    "Execution",
    "MicroBatch",
    "Step",
    "Summary",
    "is_of_update",
]

GRADIENT = "Gradient___"
"""The prefix of the names of gradients."""
UPDATED = "UpdatedVar___"
"""The prefix of the names of parameters after an update."""
INVALID = "Invalid___"
"""The prefix of the names of comparisons where NaNs are exceptions: whether an operand is one."""
CHECKED = "enableFloatingPointChecks"
"""PopART's name of the option that makes infinities and NaNs exceptions."""


def is_of_update(name: str) -> bool:
    """Whether a tensor of this name belongs to the update, not to a micro-batch.

    >>> is_of_update("UpdatedVar___w"), is_of_update("learningRate___specific___w")
    (True, True)
    """
    return name.startswith((UPDATED, LOSS_SCALE, LOSS_SCALING)) or SPECIFIC in name


@dataclass(frozen=True)
class Summary:
    """The findings of a run of the forward pass.

    **Attributes**:

    - `trained`: the parameters that the loss's gradient reaches, in the model's order.
    - `changed_buffers`, `changed_inputs`: the names of buffers and the indices of inputs that
      change in place.
    - `names`: the names of all tensors that were computed.
    - `losses`: the functions that computed losses.
    - `differentiated`: the computed tensors whose gradients are anchored.
    """

    trained: tuple[str, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    changed_inputs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    differentiated: tuple[str, ...] = ()


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of all local replicas; all tensors but `scale` lead with the replicas.

    **Attributes**:

    - `parameters`, `buffers`: values by name.
    - `inputs`: the tensors of the arguments, in the order of `flatten`.
    - `stream`: the streams of the replicas' random numbers.
    - `scale`: the factor of the loss in the backward pass.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Sequence[Tensor]
    stream: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Step:
    """The results of one micro-batch; all tensors lead with the local replicas.

    **Attributes**:

    - `outputs`: what forward returned.
    - `gradients`: of the loss times the loss scale, for each replica, by the names of the
      parameters that it reaches.
    - `buffers`: the values of all buffers after the step.
    - `changed_inputs`: the inputs that changed in place, by index.
    - `anchors`: the anchored tensors and gradients of computed tensors, by name.
    - `loss`: the loss that was differentiated; None in inference.
    """

    outputs: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    changed_inputs: dict[int, Tensor] = field(default_factory=dict)
    anchors: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


class Execution(Protocol):
    """A way to run the replicas: `Lockstep` or `Threads`.

    **Attributes**:

    - `name`: "lockstep" or "threads".
    - `summary`: of the model.
    """

    name: str
    summary: Summary

    def run(self, batch: MicroBatch) -> Step:
        """Run one micro-batch."""
        ...
