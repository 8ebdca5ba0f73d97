"""A call's inputs cut into micro-batches, for each step and replica.

Replicas vary fastest: micro-batch (iteration d, accumulation a, replica r) is number
(d * GA + a) * R + r, and a group of replicas that shares its input counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gpusim.groups import CommGroupType, Groups
from gpusim.poptorch.options import Options

__all__ = ["MicroBatchLayout", "MicroBatches"]

NOT_A_MULTIPLE = (
    "Invalid batch dimension: In the input %s, the batch dimension (%d) must be a multiple of "
    "Options.deviceIterations(%d) * (Options.replicationFactor(%d) / "
    "Options.inputReplicaGrouping.input_group_size(%d)) * "
    "Options.Training.gradientAccumulation(%d) = %d because it is used to calculate the batch "
    "size which will be executed on the device in any given iteration. For a full explanation see "
    "the batching semantics page of the documentation."
)


@dataclass(frozen=True)
class MicroBatchLayout:
    """The numbers of micro-batches of a call, and their replicas.

    `part_of` has, for each of the `replicas`, the number of its part of a step's inputs.

    >>> from gpusim.poptorch import CommGroupType
    >>> options = Options().deviceIterations(3).replicationFactor(4)
    >>> options = options.inputReplicaGrouping(2, CommGroupType.Orthogonal)
    >>> layout = MicroBatchLayout.of(options)
    >>> layout.factor, layout.part_of
    (6, (0, 1, 0, 1))
    """

    iterations: int
    accumulations: int
    replicas: int
    part_of: tuple[int, ...]

    @classmethod
    def of(cls, options: Options) -> MicroBatchLayout:
        """The layout that the options give, for the replicas of this instance."""
        replicas, size = options.replication_factor, options.input_group_size
        kind = CommGroupType(options.input_group_type)
        part_of = Groups.from_comm_group(kind, replicas, size).assignment
        return cls(
            options.device_iterations, options.Training.gradient_accumulation, replicas, part_of
        )

    def described(self) -> dict[str, Any]:
        """The layout by the names of its options."""
        return {
            "deviceIterations": self.iterations,
            "Training.gradientAccumulation": self.accumulations,
            "replicationFactor": self.replicas,
            "inputReplicaGrouping": [*self.part_of],
        }

    @cached_property
    def parts(self) -> int:
        """The number of parts of a step's inputs."""
        return max(self.part_of) + 1

    @cached_property
    def factor(self) -> int:
        """The number of micro-batches that the inputs of a call are cut into."""
        return self.iterations * self.accumulations * self.parts

    def check(self, tensor: torch.Tensor) -> None:
        """Raise AssertionError if the tensor's batch does not divide into micro-batches."""
        size = tensor.shape[0] if tensor.ndim else 1
        assert size % self.factor == 0, NOT_A_MULTIPLE % (
            tensor.shape,
            size,
            self.iterations,
            self.replicas,
            self.replicas // self.parts,
            self.accumulations,
            self.factor,
        )

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first micro-batch, which a model is traced with."""
        return self.cut(tensor)[0, 0, 0]

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view (iterations, accumulations, parts, *micro-batch); AssertionError as `check`."""
        self.check(tensor)
        steps = (self.iterations, self.accumulations, self.parts)
        if not tensor.ndim:
            return tensor.reshape(steps)
        return tensor.reshape(*steps, tensor.shape[0] // self.factor, *tensor.shape[1:])


class MicroBatches:
    """The inputs of one call, step by step."""

    def __init__(self, layout: MicroBatchLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._cut = [layout.cut(tensor) for tensor in tensors]
        self._changed: dict[int, torch.Tensor] = {}
        own = tuple(range(layout.replicas))
        self._index = None if layout.part_of == own else torch.tensor(layout.part_of)

    def step(self, iteration: int, accumulation: int) -> list[torch.Tensor]:
        """The inputs of all replicas, each (replicas, *micro-batch)."""
        inputs = [whole[iteration, accumulation] for whole in self._cut]
        if self._index is None:
            return inputs
        return [parts[self._index.to(parts.device)] for parts in inputs]

    def write(self, input: int, iteration: int, accumulation: int, value: torch.Tensor) -> None:
        """Note an input that a step changed in place; of sharing replicas, the first one counts."""
        if input not in self._changed:
            self._changed[input] = self._cut[input].clone()
        leaders = [self._layout.part_of.index(part) for part in range(self._layout.parts)]
        self._changed[input][iteration, accumulation] = value[leaders]

    def changed(self) -> dict[int, torch.Tensor]:
        """The inputs that steps have changed, by number, whole again."""
        return {
            input: whole.reshape(-1, *whole.shape[4:]) if whole.ndim > 3 else whole.reshape(())
            for input, whole in self._changed.items()
        }
