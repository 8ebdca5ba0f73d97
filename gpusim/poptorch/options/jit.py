"""Options.Jit: how the model becomes a graph, which PopTorch no longer lets one choose."""

from __future__ import annotations

from typing import Self

from gpusim.poptorch._logging import logger
from gpusim.poptorch.options.base import OptionsDict

__all__ = ["_JitOptions"]


class _JitOptions(OptionsDict):
    """Reached as `Options().Jit`."""

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> Self:
        """Deprecated: False is the only value, and the default. ValueError for True."""
        if trace_model:
            raise ValueError("options.Jit.traceModel(True) is no longer supported")
        logger.warning(
            "[Deprecated] Do not call options.Jit.traceModel(): options.Jit.traceModel(False) is "
            "now the default, and True is no longer supported, therefore this function will be "
            "removed shortly"
        )
        self.set(trace_model=trace_model)
        return self
