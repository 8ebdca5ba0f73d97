"""Every instance of every template that can be launched, by translation unit.
The host build and the report compile these; a GPU compiles one when it is first launched."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from fallback.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, SUB_32_BIT, NumberFormat

from . import folding, ragged, rounding
from .device import Kernel
from .folding import Numbers
from .targets import NAMES, info_of

FLOATS = (*SUB_32_BIT, FLOAT32, FLOAT64)
INTEGERS = tuple(dtype for dtype in NAMES if dtype.kind in "iu" and dtype not in FLOATS)


def fold_templates(source: np.dtype[Any]) -> list[Kernel]:
    """The fold's instances for one source dtype, a real one."""
    found: dict[Kernel, None] = {}
    for numbers, order, small in _cases(source):
        found[folding.template(numbers, order, small=small)[0]] = None
    return list(found)


def _cases(source: np.dtype[Any]) -> list[tuple[Numbers, str, bool]]:
    if source in INTEGERS:
        wide = np.dtype(np.uint64)
        pairs: list[tuple[np.dtype[Any], NumberFormat]] = [(source, source), (wide, wide)]
    else:
        pairs = [(FLOAT64, FLOAT64), (FLOAT64, info_of(FLOAT16))]
        if source != FLOAT64:
            general = info_of(BFLOAT16)
            pairs += [(FLOAT32, form) for form in (FLOAT32, FLOAT16, BFLOAT16, general)]
    return [
        (Numbers(op, source, computing, accumulator, source, None, 2, stochastic), order, small)
        for (computing, accumulator), op, stochastic, order, small in product(
            pairs, ("sum", "prod"), (False, True), ("linear", "tree"), (False, True)
        )
    ]


def units() -> dict[str, list[Kernel]]:
    """All instances, by the name of the translation unit that holds them."""
    return {
        **{f"fold {NAMES[source]}": fold_templates(source) for source in (*FLOATS, *INTEGERS)},
        "logical": [
            Kernel("logical.cu", f"logical<{size}, {words}>")
            for size, words in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
        ],
        "round": [
            rounding.template(source, computing)[0]
            for source in FLOATS
            for computing in (FLOAT32, FLOAT64)
            if computing == FLOAT64 or source != FLOAT64
        ],
        "ragged": [
            Kernel("ragged.cu", "ragged_check"),
            *(ragged.template(width) for width in ragged.UNIT_NAMES),
        ],
    }
