"""Which micro-batches' outputs and kept tensors a call returns, and how they are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.executor.arguments import DEVICE_DTYPES
from gpusim.poptorch.executor.micro_batches import MicroBatchLayout
from gpusim.poptorch.options import Options
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas import Step

__all__ = ["Anchors", "Collector"]


class Collector:
    """Collects tensors over a call's steps, as an output mode says.

    `add` takes them for all replicas at each step, in order. `results` returns what the call
    returns of each, along dimension 0, in memory of its own. A scalar of each micro-batch is a
    vector, or 0-d if only one is returned.

    **Raises**:

    - poptorch.Error: if EveryN's period does not divide the iterations.

    >>> collector = Collector(OutputMode.Sum, 1, MicroBatchLayout(2, 1, 2, (0, 1)))
    >>> for iteration in range(2):
    ...     collector.add(iteration, 0, [torch.tensor([1.0, 10.0])])
    >>> collector.results()
    [tensor([ 2., 20.])]
    """

    def __init__(self, mode: OutputMode | int, period: int, layout: MicroBatchLayout) -> None:
        self.mode, self.period = OutputMode(mode), period
        self._layout = layout
        self._steps: list[list[Tensor]] = []
        if self.mode is OutputMode.EveryN and layout.iterations % period:
            raise createPoptorchError(
                f"Options.outputMode(EveryN, {period}): the period must divide "
                f"Options.deviceIterations({layout.iterations})"
            )

    def transfers(self, iteration: int, accumulation: int) -> bool:
        """Whether tensors go to the host after this step: a sum goes once, at the end."""
        if self.mode is OutputMode.EveryN:
            return (iteration + 1) % self.period == 0
        at_end = OutputMode.Final, OutputMode.Sum
        last = self._layout.iterations - 1, self._layout.accumulations - 1
        return self.mode not in at_end or (iteration, accumulation) == last

    def add(self, iteration: int, accumulation: int, tensors: Sequence[Tensor]) -> None:
        """Take a step's tensors of all replicas, each (replicas, *shape)."""
        if self.mode is not OutputMode.Sum and not self.transfers(iteration, accumulation):
            return
        values = [value.to(DEVICE_DTYPES.get(value.dtype, value.dtype)) for value in tensors]
        if self.mode is OutputMode.Sum and self._steps:
            values = [total + value for total, value in zip(self._steps[0], values, strict=True)]
            self._steps = []
        self._steps.append(values)

    def results(self) -> list[Tensor]:
        """The tensors that the call returns."""
        return [joined(steps) for steps in zip(*self._steps, strict=True)]


def joined(steps: tuple[Tensor, ...]) -> Tensor:
    """The values of all steps and replicas along dimension 0."""
    whole = torch.cat(steps) if len(steps) > 1 else steps[0].clone()
    if whole.ndim == 1:  # scalars
        return whole.reshape(()) if whole.numel() == 1 else whole
    return whole.reshape(-1, *whole.shape[2:])


class Anchors:
    """The tensors of the graph that `Options.anchorTensor` keeps, by their short names.

    A gradient's name is "Gradient___" and its parameter's. It is that of each micro-batch, before
    any reduction, times the loss scaling. An anchor without a mode has the outputs' mode.
    """

    def __init__(self, options: Options, layout: MicroBatchLayout) -> None:
        self._layout = layout
        self._asked: dict[str, tuple[str, OutputMode, int]] = {}
        for short, (name, as_outputs, mode, period) in options.anchored_tensors.items():
            if as_outputs:
                mode, period = options.output_mode, options.output_return_period
            self._asked[short] = name, OutputMode(mode), period

    def collectors(self) -> dict[str, Collector]:
        """A collector for each anchor, for one call. Raises what Collector raises."""
        return {
            short: Collector(mode, period, self._layout)
            for short, (_, mode, period) in self._asked.items()
        }

    def add(
        self, collectors: Mapping[str, Collector], iteration: int, accumulation: int, step: Step
    ) -> None:
        """Add a step's tensors to the collectors."""
        for short, collector in collectors.items():
            collector.add(iteration, accumulation, [step.anchors[self._asked[short][0]]])
