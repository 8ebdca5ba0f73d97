"""Which micro-batches' outputs and kept tensors a call returns, and how they are put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.executor.arguments import DEVICE_DTYPES
from gpusim.poptorch.executor.micro_batches import MicroBatchLayout
from gpusim.poptorch.options import Options
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas.program import find_name
from gpusim.poptorch.replicas.results import is_of_update

__all__ = ["Anchors", "Collector", "check_period"]

#: PopTorch's names of the modes in its log.
MODES = {
    OutputMode.All: "ALL",
    OutputMode.EveryN: "EVERYN",
    OutputMode.Final: "FINAL",
    OutputMode.Sum: "Sum",
    OutputMode.Default: "Default",
}


class Collector:
    """Collects tensors over a call's steps, as an output mode says.

    `add` takes them for all replicas at each step, in order. `results` returns what the call
    returns of each, along dimension 0, in memory of its own; it is empty if EveryN's period is
    longer than the call. A scalar of each micro-batch is a vector, or 0-d if only one is returned.

    >>> collector = Collector(OutputMode.Sum, 1, MicroBatchLayout(2, 1, 2, (0, 1)))
    >>> for iteration in range(2):
    ...     collector.add(iteration, 0, [torch.tensor([1.0, 10.0])])
    >>> collector.results()
    [tensor([ 2., 20.])]
    """

    def __init__(self, mode: OutputMode, period: int, layout: MicroBatchLayout) -> None:
        self.mode, self.period = mode, period
        self._layout = layout
        self._steps: list[list[Tensor]] = []
        self._empty: list[Tensor] = []

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
            if not self._empty:
                self._empty = [
                    returned(value.new_empty((0, *value.shape[2:]))) for value in tensors
                ]
            return
        values = [returned(value) for value in tensors]
        if self.mode is OutputMode.Sum and self._steps:
            values = [total + value for total, value in zip(self._steps[0], values, strict=True)]
            self._steps = []
        self._steps.append(values)

    def results(self) -> list[Tensor]:
        """The tensors that the call returns."""
        if not self._steps:
            return self._empty
        return [joined(steps) for steps in zip(*self._steps, strict=True)]


def check_period(mode: OutputMode, period: int, layout: MicroBatchLayout) -> None:
    """Raise poptorch.Error if the period of the outputs' EveryN does not divide the iterations."""
    if mode is OutputMode.EveryN and layout.iterations % period:
        raise createPoptorchError(
            f"Options.outputMode(EveryN, {period}): the period must divide "
            f"Options.deviceIterations({layout.iterations})"
        )


def returned(value: Tensor) -> Tensor:
    """A tensor in the dtype that a device returns it in."""
    return value.to(DEVICE_DTYPES.get(value.dtype, value.dtype))


def joined(steps: tuple[Tensor, ...]) -> Tensor:
    """The values of all steps and replicas along dimension 0."""
    whole = torch.cat(steps) if len(steps) > 1 else steps[0].clone()
    if whole.ndim == 1:  # scalars
        return whole.reshape(()) if whole.numel() == 1 else whole
    return whole.reshape(-1, *whole.shape[2:])


class Anchors:
    """The tensors of the graph that `Options.anchorTensor` keeps, by their short names.

    A gradient's name is "Gradient___" and its parameter's. It is that of each micro-batch, before
    any reduction, times the loss scaling. An anchor without a mode has the outputs' mode. Tensors
    of the update have one value for each device iteration, the others one for each micro-batch.
    """

    def __init__(self, options: Options, layout: MicroBatchLayout) -> None:
        self._layout = layout
        self._asked: dict[str, tuple[str, OutputMode, int]] = {}
        for short, (name, as_outputs, mode, period) in options.anchored_tensors.items():
            if as_outputs:
                mode, period = options.output_mode, options.output_return_period
            self._asked[short] = name, OutputMode(mode), period
        #: By the names that were asked for, those of tensors of the update.
        self.of_update: dict[str, str] = {}

    def find(self, of_update: Collection[str]) -> None:
        """Look the tensors of the update up, and log all anchors; Error for unknown ones."""
        for name, mode, period in self._asked.values():
            if is_of_update(name):
                self.of_update[name] = find_name(name, of_update)
            logger.debug(" anchor ( %s %s/%d )", name, MODES[mode], period)

    def collectors(self) -> dict[str, Collector]:
        """A collector for each anchor, for one call."""
        return {
            short: Collector(mode, period, self._layout)
            for short, (_, mode, period) in self._asked.items()
        }

    def add(
        self,
        collectors: Mapping[str, Collector],
        iteration: int,
        accumulation: int,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Add the tensors of a step or of an update to their collectors."""
        for short, collector in collectors.items():
            name = self._asked[short][0]
            if name in tensors:
                collector.add(iteration, accumulation, [tensors[name]])
