"""Every instance of every template that can be launched, by translation unit.
The host build and the report compile these; a GPU compiles one when it is first launched."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from gpusim.fallback.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    NumberFormat,
)
from gpusim.fallback.plan import plan_fold
from gpusim.fallback.spec import FoldSpec

from . import folding, ragged, rounding, scatter, sending
from .device import Kernel
from .folding import Numbers
from .targets import NAMES, info_of

FLOATS = (*SUB_32_BIT, FLOAT32, FLOAT64)
INTEGERS = tuple(dtype for dtype in NAMES if dtype.kind in "iu" and dtype not in FLOATS)

COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))

#: A format of fewer than 32 bits whose values only float64 holds.
WIDE = FormatInfo(20, -254, 2.0**-274, 2.0**255, -(2.0**255), True, True, True)


def fold_templates(source: np.dtype[Any]) -> list[Kernel]:
    """The fold's instances for one source dtype, a real one."""
    accumulators: list[NumberFormat] = [source, np.dtype(np.uint64)]
    if source in FLOATS:
        accumulators = [FLOAT64, WIDE]
        if source != FLOAT64:
            accumulators += [FLOAT32, FLOAT16, BFLOAT16, info_of(BFLOAT16)]
    found: dict[Kernel, None] = {}
    for accumulate, op, mode, order, small in product(
        accumulators,
        ("sum", "prod"),
        ("nearest", "stochastic"),
        ("linear", "tree"),
        (False, True),
    ):
        spec = FoldSpec(op=op, order=order, accumulate=accumulate, rounding=mode)
        plan = plan_fold(spec, None, source, 2, (1,), 0)
        found[folding.template(Numbers(plan), order, small=small).kernel] = None
    return list(found)


def main_folds() -> list[Kernel]:
    """The sums that have targets of speed: wide and staged, in sequence and as trees."""
    found: dict[Kernel, None] = {}
    for name, accumulate, mode in (
        ("float32", FLOAT32, "nearest"),
        ("float16", FLOAT16, "nearest"),
        ("float16", FLOAT32, "nearest"),
        ("bfloat16", FLOAT32, "nearest"),
        ("float8_e4m3fn", FLOAT16, "nearest"),
        ("float8_e5m2", FLOAT16, "nearest"),
        ("float64", FLOAT64, "nearest"),
        ("float16", FLOAT16, "stochastic"),
        ("float8_e4m3fn", FLOAT16, "stochastic"),
    ):
        (source,) = (dtype for dtype, other in NAMES.items() if other == name)
        for order, small in (("linear", False), ("tree", False), ("linear", True)):
            spec = FoldSpec(order=order, accumulate=accumulate, rounding=mode)
            plan = plan_fold(spec, None, source, 2, (1,), 0)
            found[folding.template(Numbers(plan), order, small=small).kernel] = None
    return list(found)


def main_sends() -> dict[str, list[Kernel]]:
    """The folds with wires that have targets of speed, by translation unit."""
    chains = [
        sending.chain_template(source, scaled=scaled, rounds=False)[0]
        for source in (FLOAT32, BFLOAT16)
        for scaled in (False, True)
    ]
    rounded = sending.chain_template(FLOAT16, scaled=True, rounds=True)[0]
    machine = sending.machine_template(FLOAT32, FLOAT32, quick=True)[0]
    return {"main chains": [*chains, rounded], "main machine": [machine]}


def units() -> dict[str, list[Kernel]]:
    """All instances, by the name of the translation unit that holds them."""
    return {
        **{f"fold {NAMES[source]}": fold_templates(source) for source in (*FLOATS, *INTEGERS)},
        "exact": [
            folding.exact_template(source, computing)
            for source in FLOATS
            for computing in (FLOAT32, FLOAT64)
            if computing == FLOAT64 or source != FLOAT64
        ],
        "compensated": [
            folding.compensated_template(source, computing)
            for source in FLOATS
            for computing in (FLOAT32, FLOAT64)
            if computing == FLOAT64 or source != FLOAT64
        ],
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
        "chain": [
            sending.chain_template(source, scaled=scaled, rounds=rounds)[0]
            for source in (*SUB_32_BIT, FLOAT32)
            for scaled in (False, True)
            for rounds in (False, True)
        ],
        "machine": [
            sending.machine_template(source, computing, quick=quick)[0]
            for source in FLOATS
            for computing, quick in ((FLOAT32, True), (FLOAT32, False), (FLOAT64, False))
            if not (quick and source == FLOAT64)
        ],
        "fixed": [sending.fixed_template(source) for source in FLOATS],
        "ragged": [
            Kernel("ragged.cu", "ragged_check"),
            ragged.TILES,
            *(ragged.template(width) for width in ragged.UNIT_NAMES),
        ],
        "scatter": [scatter.template(dtype) for dtype in (*FLOATS, *INTEGERS, *COMPLEX)],
    }
