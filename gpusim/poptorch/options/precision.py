"""Options.Precision: rounding, partial results and floating-point exceptions."""

from __future__ import annotations

from typing import Any, Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import HalfFloatCastingBehavior
from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.popart import _PopartOptions

__all__ = ["_PrecisionOptions"]

PARTIALS = {"torch.float32": "float", "torch.float16": "half"}


class _PrecisionOptions(OptionsDict):
    """Reached as `Options().Precision`."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(half_float_casting=HalfFloatCastingBehavior.HalfUpcastToFloat)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Deprecated: operations on float16 and float32 follow PyTorch whatever is given here.

        ValueError for other types than HalfFloatCastingBehavior.
        """
        if not isinstance(half_float_casting, HalfFloatCastingBehavior):
            raise ValueError(
                "halfFloatCasting must be set to "
                "poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat"
            )
        logger.warning(
            "[Deprecated] Do not call options.Precision.halfFloatCasting(): HalfUpcastToFloat is "
            "now the only supported option and matches PyTorch's behaviour so you don't need to "
            "explicitly set it."
        )
        self.set(half_float_casting=half_float_casting)
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Deprecated: running statistics have their tensors' type whatever is given here.

        ValueError for other types than bool.
        """
        if not isinstance(value, bool):
            raise ValueError("runningStatisticsAlwaysFloat needs to be set to a bool")
        logger.warning(
            "[Deprecated] Do not call options.Precision.runningStatisticsAlwaysFloat(): False is "
            "now the only supported option and matches PyTorch's behaviour so you don't need to "
            "explicitly set it."
        )
        self.createOrSet(running_statistics_always_float=value)
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Whether infinities and NaNs that an operation makes are an error; off by default.

        AssertionError for other types than bool.
        """
        assert isinstance(enabled, bool), "enableFloatingPointExceptions needs to be set to a bool"
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Whether float16 results are rounded stochastically, right on average; off by default."""
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: Any) -> Self:
        """The accumulator of matrix products and convolutions: torch.float32 or torch.float16.

        ValueError for anything else.
        """
        # by name, so that options work where PyTorch is not loaded
        name = PARTIALS.get(str(dtype)) if type(dtype).__module__ == "torch" else None
        if name is None:
            raise ValueError(
                "parameter to setPartialsType should be eithertorch.float or torch.half"
            )
        self._popart_options.set("partialsTypeMatMuls", name)
        self._popart_options.merge("convolutionOptions", {"partialsType": name})
        return self
