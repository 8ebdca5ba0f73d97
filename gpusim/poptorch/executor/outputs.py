"""Which micro-batches' outputs a call returns, and how they are put together."""

from __future__ import annotations

import torch

from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.executor.micro_batches import Layout
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["Collector", "as_returned"]

RETURNED = {torch.int64: torch.int32, torch.float64: torch.float32, torch.bfloat16: torch.float32}


def as_returned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that an IPU has: int32 for int64, float32 for float64 and bfloat16."""
    return tensor.to(RETURNED.get(tensor.dtype, tensor.dtype))


class Collector:
    """Collects one tensor over a call's steps, as an output mode says.

    `add` takes it for all replicas at each step, in order; `result` is what the call returns, along
    dimension 0. A scalar of each micro-batch is a vector, or 0-d if only one is returned.

    poptorch.Error if EveryN's period does not divide the iterations.

    >>> collector = Collector(OutputMode.Sum, 1, Layout(2, 1, 2, (0, 1)))
    >>> for iteration in range(2):
    ...     collector.add(iteration, 0, torch.tensor([1.0, 10.0]))
    >>> collector.result()
    tensor([ 2., 20.])
    """

    def __init__(self, mode: OutputMode | int, period: int, layout: Layout) -> None:
        self.mode, self.period = OutputMode(mode), period
        self._layout = layout
        self._kept: list[torch.Tensor] = []
        if self.mode is OutputMode.EveryN and layout.iterations % period:
            raise createPoptorchError(
                f"Options.outputMode(EveryN, {period}): the period must divide "
                f"Options.deviceIterations({layout.iterations})"
            )

    def wants(self, iteration: int, accumulation: int) -> bool:
        """Whether this step's outputs have a part in what is returned."""
        last = accumulation == self._layout.accumulations - 1
        last = last and iteration == self._layout.iterations - 1
        if self.mode is OutputMode.Final:
            return last
        if self.mode is OutputMode.EveryN:
            return (iteration + 1) % self.period == 0
        return True

    def transfers(self, iteration: int, accumulation: int) -> bool:
        """Whether something goes to the host after this step: a sum goes once, at the end."""
        if self.mode is OutputMode.Sum:
            return (iteration, accumulation) == (
                self._layout.iterations - 1,
                self._layout.accumulations - 1,
            )
        return self.wants(iteration, accumulation)

    def add(self, iteration: int, accumulation: int, value: torch.Tensor) -> None:
        """Take a step's tensor of all replicas, (replicas, *shape)."""
        if not self.wants(iteration, accumulation):
            return
        if self.mode is OutputMode.Sum and self._kept:
            self._kept[0] = self._kept[0] + value
        else:
            self._kept.append(value)

    def result(self) -> torch.Tensor:
        """What the call returns, in memory of its own."""
        if len(self._kept) == 1:
            (whole,) = self._kept
            whole = whole.clone()
        else:
            whole = torch.cat(self._kept)
        if whole.ndim == 1:  # scalars
            return whole.reshape(()) if len(whole) == 1 else whole
        return whole.reshape(-1, *whole.shape[2:])
