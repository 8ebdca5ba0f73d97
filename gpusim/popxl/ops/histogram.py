"""`histogram`: how many elements lie between levels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .._ops import reductions
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["check_increment", "histogram"]


def histogram(t: Tensor, levels: Sequence[float], absolute_of_input: bool) -> Tensor:
    """How many elements lie below the first level, between each and the next, and from the last on.

    **Arguments**

    - `levels`: rising numbers; an element that equals one counts as above it.
    - `absolute_of_input`: whether magnitudes are counted.

    The counts are uint32, one more than there are levels. ValueError for levels that do not rise.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.histogram(popxl.constant([0.1, -2.0, 5.0]), [1.0, 4.0], True)
    Tensor[histogram_out popxl.dtypes.uint32 (3,)]
    """
    check_increment(levels)
    attributes = {"levels": tuple(levels), "absolute": bool(absolute_of_input)}
    return add_op(reductions.HISTOGRAM, [t], attributes)[0]


def check_increment(levels: Sequence[float]) -> None:
    """Refuse levels that do not rise; ValueError."""
    if not all(below < above for below, above in pairwise(levels)):
        raise ValueError(f"The input levels `{levels}` is not a monotonically increasing list.")
