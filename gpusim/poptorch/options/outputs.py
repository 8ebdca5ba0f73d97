"""Options of what comes back: outputs, anchored tensors, buffers that can be updated."""

from __future__ import annotations

from typing import Any, Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.options.base import OptionsDict

__all__ = ["DEFAULTS", "OutputOptions"]

DEFAULTS: dict[str, Any] = {
    "anchored_tensors": {},
    "output_mode": OutputMode.Default.value,
    "output_return_period": 1,
}
PERIOD = "EveryN anchor must have output_return_period set to valid positive integer"


class OutputOptions(OptionsDict):
    """Which results a call returns, and which tensors can be asked for afterwards."""

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which micro-batches' outputs a call returns.

        **Arguments**

        - `output_mode`: an OutputMode; AssertionError for anything else.
        - `output_return_period`: the N of EveryN, where it is needed, else AssertionError;
          elsewhere ignored, which is logged.
        """
        assert isinstance(output_mode, OutputMode)
        if output_mode is OutputMode.EveryN:
            check_period(output_return_period)
        elif output_return_period:
            logger.info(
                "Anchor return period argument ignored with output_mode set to %s", output_mode
            )
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self) -> bool:
        """Whether `outputMode` has been left at Default."""
        return bool(self.output_mode == OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> Self:
        """Keep a tensor of each run, for `getAnchoredTensor`.

        **Arguments**

        - `short_name`: what to ask for it by; `long_name`: its name in the graph,
          "Gradient___lin.weight" for example.
        - `output_mode`: of which micro-batches; None: as the outputs.
        - `output_return_period`: the N of EveryN, else AssertionError; elsewhere ignored.
        """
        self.checkIsFrozen()
        if output_mode is OutputMode.EveryN:
            check_period(output_return_period)
        else:
            output_return_period = 1
        # What the backend expects: name, whether the outputs' mode counts, mode, period
        anchored = [long_name, output_mode is None, output_mode, output_return_period]
        self.anchored_tensors[short_name] = anchored
        return self

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """Which buffers `copyNamedBuffersToDevice` copies, by name."""
        self.createOrSet(updatable_named_buffers=buffers)
        return self


def check_period(period: int | None) -> None:
    assert isinstance(period, int) and period > 0, PERIOD
