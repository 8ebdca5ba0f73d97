"""Tensors of the graph that a program keeps: by which names, and what is kept of each call.

A gradient's name is "Gradient___" and its parameter's: of each micro-batch, before any reduction,
and times the loss scaling.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.executor.micro_batches import Layout
from gpusim.poptorch.executor.outputs import Collector, as_returned
from gpusim.poptorch.options import Options
from gpusim.poptorch.replicas import Step

__all__ = ["Anchors"]


class Anchors:
    """What `Options.anchorTensor` asked for; those without a mode have the outputs'."""

    def __init__(self, options: Options, layout: Layout) -> None:
        self._layout = layout
        self._asked: dict[str, tuple[str, OutputMode, int]] = {}
        for short, (name, as_outputs, mode, period) in options.anchored_tensors.items():
            if as_outputs:
                mode, period = options.output_mode, options.output_return_period
            self._asked[short] = name, OutputMode(mode), period

    def collectors(self) -> dict[str, Collector]:
        """One for each by its short name, for a call. poptorch.Error as `Collector`."""
        return {
            short: Collector(mode, period, self._layout)
            for short, (_, mode, period) in self._asked.items()
        }

    def add(
        self, collectors: Mapping[str, Collector], iteration: int, accumulation: int, step: Step
    ) -> None:
        """Take what a step has made of them."""
        for short, collector in collectors.items():
            value = step.anchors[self._asked[short][0]]
            collector.add(iteration, accumulation, as_returned(value))
