"""The kernels compiled for this CPU: the sources of the GPU's kernels, over tiles of a row.
`fallback.kernels` says when they run. They have the bits of NumPy's kernels, which remain."""

from __future__ import annotations

from .arrays import add, check_slices, copy, copy_segments, draw, exchange_rows, fold_chain, send
from .build import compiler
from .folding import plan_fold, plan_sent
from .numbers import add_exactly, draw_rows, normal_quantile
from .rounding import round_to

__all__ = [
    "add",
    "add_exactly",
    "check_slices",
    "copy",
    "copy_segments",
    "draw",
    "draw_rows",
    "exchange_rows",
    "fold_chain",
    "normal_quantile",
    "plan_fold",
    "plan_sent",
    "problem",
    "round_to",
    "send",
]


def problem() -> str | None:
    """The reason why the kernels cannot be compiled here, or None."""
    if compiler() is None:
        return "ziglang is not installed: pip install 'gpusim[fast]'"
    return None
