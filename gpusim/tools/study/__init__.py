"""Precision studies: what a reduction does to its result, by order, format, rounding and replicas.

`sweep` measures sums of any input against the exact ones; `train` trains a small network in narrow
formats. Both are `gpusim study` on the command line; `short` is what the demo shows of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim.tools.study.brief import short
    from gpusim.tools.study.results import Measurement, Row, Study
    from gpusim.tools.study.settings import Setting
    from gpusim.tools.study.sweeping import sweep
    from gpusim.tools.study.training import Training, train

__all__ = ["Measurement", "Row", "Setting", "Study", "Training", "short", "sweep", "train"]

_HOMES = {
    "Measurement": "results",
    "Row": "results",
    "Setting": "settings",
    "Study": "results",
    "Training": "training",
    "short": "brief",
    "sweep": "sweeping",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Load a room when its door is used: `gpusim --help` needs none of them."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gpusim.tools.study.{_HOMES[name]}"), name)
