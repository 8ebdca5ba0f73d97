"""What a compiled model says of itself, and what each micro-batch gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

__all__ = ["GRADIENT", "Engine", "Step", "Summary"]

GRADIENT = "Gradient___"
"""What the names of gradients begin with."""


@dataclass(frozen=True)
class Summary:
    """What a run of the forward pass has shown.

    Attributes:
        trained: the parameters that the loss's gradient reaches, in the model's order.
        changed_buffers, changed_inputs: the names of buffers and the numbers of inputs that change
            in place.
        names: of all tensors that were computed.
        losses: the functions that computed losses.
        differentiated: which of the tensors computed have their gradients anchored.
    """

    trained: tuple[str, ...]
    changed_buffers: tuple[str, ...]
    changed_inputs: tuple[int, ...]
    names: tuple[str, ...]
    losses: tuple[str, ...]
    differentiated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """What one micro-batch gave; all tensors lead with the replicas that are here.

    Attributes:
        outputs: what forward returned.
        gradients: of the loss times the loss scale, by the names of those parameters that it
            reaches; of each replica its own.
        buffers: all of them, afterwards.
        changed_inputs: those that changed in place, by number.
        anchors: the tensors that were asked for, by name; gradients, too, of what was computed.
        loss: in training, the loss that was differentiated.
    """

    outputs: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    changed_inputs: dict[int, Tensor] = field(default_factory=dict)
    anchors: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None


class Engine(Protocol):
    """How replicas run."""

    execution: str
    summary: Summary

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        stream: Tensor,
        scale: Tensor,
    ) -> Step:
        """Run one micro-batch; tensors lead with the replicas, but for the scale of the loss."""
        ...
