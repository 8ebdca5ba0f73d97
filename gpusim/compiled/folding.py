"""Folds by the compiled kernels: the struct of the GPU's kernel, filled in once for a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.fold_kernels import FoldKernel
from gpusim.fallback.formats import BFLOAT16, FLOAT16, FLOAT32
from gpusim.fallback.members import Members
from gpusim.fallback.orders import COMPENSATED, EXACT, NEUMAIER
from gpusim.fallback.plan import FoldPlan, SentPlan
from gpusim.fallback.schedules import GraphSchedule, ReductionGraph

from ..cuda import folding
from ..cuda.folding import Numbers
from ..cuda.layout import MemberLayout
from ..cuda.structs import FINISH, FOLD, TARGET, struct, writer
from ..cuda.targets import NAMES, target
from .build import TILE
from .run import function, instance, run

SENT_FOLD = np.dtype(
    [
        ("fold", FOLD),
        ("wire", TARGET),
        ("turned", "i8"),
        ("at_result", "i8"),
        ("received", FINISH),
    ]
)

write_members = writer(FOLD, "layout.base", "layout.table", "layout.member_stride")
write_out = writer(FOLD, "layout.out")
write_counters = writer(FOLD, "finish.call", "finish.batch_offset", "finish.batch_offsets")
write_partial = writer(FOLD, "partial")
write_table = {name: writer(FOLD, name) for name in ("edges", "starts", "graph")}


def plan_fold(plan: FoldPlan, strides: tuple[int, ...], stacked: bool) -> FoldKernel | None:
    """The kernel for sums and products of floating-point members.

    None for stacked members that NumPy adds as they are, as fast as the memory allows, and for
    members of more axes than the struct has.
    """
    if plan.spec.op not in ("sum", "prod") or plan.order == EXACT or not math.prod(plan.shape):
        return None
    if isinstance(plan.order, ReductionGraph | GraphSchedule) and plan.order.is_wide:
        return None
    numbers = Numbers(plan)
    if numbers.integer or numbers.source not in NAMES:
        return None
    if stacked and not _gains(numbers) and plan.order not in COMPENSATED:
        return None
    if numbers.complex and numbers.op == "prod":
        return None
    if plan.order in COMPENSATED:
        return _plan_compensated(plan, numbers, strides)
    members = MemberLayout(plan.count, plan.shape, strides, plan.dtype, 0, 0, 1)
    launch = folding.plan_numbers(plan, members, 0, 0)
    if launch.kernel is None:  # too many axes
        return None
    kernel = function(launch.kernel)
    if kernel is None:
        return None
    return _Fold(kernel, launch, numbers)


def _plan_compensated(
    plan: FoldPlan, numbers: Numbers, strides: tuple[int, ...]
) -> FoldKernel | None:
    """The kernel for a compensated order; None for accumulators that are rounded one by one."""
    if numbers.step == "TARGET":
        return None
    members = MemberLayout(plan.count, plan.shape, strides, plan.dtype, 0, 0, 1)
    launch = folding.plan_numbers(plan, members, 0, 0)
    if launch.kernel is None:  # too many axes
        return None
    neumaier = str(plan.order == NEUMAIER).lower()
    parameters = NAMES[numbers.source], folding.C_NAMES[numbers.computing], numbers.step, neumaier
    name = f"compensated_tiles<{', '.join(parameters)}>"
    kernel = instance("Fold", name, FOLD.itemsize, "compensated.h")
    return None if kernel is None else _Fold(kernel, launch, numbers)


@lru_cache(maxsize=512)
def plan_sent(plan: SentPlan, strides: tuple[int, ...]) -> FoldKernel | None:
    """The kernel for sums of which what is sent is rounded to a wire.

    None for float64, and for accumulators that round sums stochastically, or to a format other than
    float16: so that a program needs few kernels.
    """
    fold, wire = plan.fold, plan.wire
    numbers, info = Numbers(fold), wire.info
    if info is None or info.carrier != FLOAT32 or numbers.computing != FLOAT32:
        return None
    if numbers.step_drawn or numbers.step not in ("EXACT", "FLOAT16"):
        return None
    members = MemberLayout(fold.count, fold.shape, strides, fold.dtype, 0, 0, 1)
    launch = folding.plan_numbers(fold, members, 0, 0, draws=wire.draws)
    if launch.kernel is None:
        return None
    tree = fold.order == "tree" or isinstance(fold.order, ReductionGraph)
    second = tree and not plan.first_is_sent
    sends = "MEMBERS" if wire.at_members else "RIGHT" if second else "LEFT"
    kind = NAMES[info.dtype].upper() if info.dtype in (FLOAT16, BFLOAT16) else "TARGET"
    parameters = NAMES[numbers.source], "float", numbers.step, sends, kind, str(wire.draws).lower()
    name = f"fold_sent_tiles<{', '.join(parameters)}>"
    kernel = instance("SentFold", name, SENT_FOLD.itemsize)
    if kernel is None:
        return None
    arguments = struct(SENT_FOLD, turned=launch.turned, at_result=plan.at_result)
    arguments["fold"] = np.frombuffer(launch.arguments, FOLD)[0]
    arguments["wire"] = target(info)
    received = arguments["received"]
    folding.finish_float(received, numbers.computing, numbers.out, rounds=True, drawn=False)
    return _Fold(kernel, replace(launch, arguments=arguments.tobytes()), numbers)


def _gains(numbers: Numbers) -> bool:
    """Whether a step is more than one of NumPy's operations on the members as they are."""
    return numbers.step != "EXACT" or numbers.source != numbers.computing or numbers.last_drawn


class _Fold:
    """A planned fold: `fallback.kernels.FoldKernel`."""

    def __init__(self, kernel: Any, launch: folding.FoldLaunch, numbers: Numbers) -> None:
        plan = launch.plan
        self.kernel, self.plan, self.turned = kernel, plan, launch.turned
        self.draws = launch.draws
        self.arguments = launch.arguments
        layout = np.frombuffer(launch.arguments, FOLD, 1)["layout"][0]
        rows, length = int(layout["rows"]), int(layout["length"])
        self.tiles = rows * -(-length // TILE)
        self.steps = rows * length * plan.count
        self.tables = {name: np.frombuffer(data, np.int64) for name, data in launch.tables.items()}
        levels = 0
        if isinstance(plan.order, ReductionGraph | GraphSchedule):
            levels = plan.order.depth + 1
        elif plan.order == "tree":
            levels = plan.count.bit_length() + 1
        self.scratch = levels * TILE * numbers.computing.itemsize

    def __call__(
        self,
        group: Members,
        earlier: Members | None,
        out: NDArray[Any],
        call: int,
        offsets: NDArray[np.uint64] | None,
    ) -> None:
        arguments = bytearray(self.arguments)
        base, table, stride = group.addresses(turned=self.turned)
        write_members(arguments, base, 0 if table is None else table.ctypes.data, stride % 2**64)
        write_out(arguments, out.ctypes.data)
        listed = None  # alive until the kernel returns
        if self.draws:
            assert offsets is not None
            listed = np.ascontiguousarray(offsets)
            write_counters(arguments, call, 0, listed.ctypes.data)
        held = None
        if earlier is not None:
            held = np.ascontiguousarray(earlier.block(0, ()))
            write_partial(arguments, held.ctypes.data)
        for name, values in self.tables.items():
            write_table[name](arguments, values.ctypes.data)
        run(self.kernel, arguments, self.tiles, self.steps, self.scratch, fast=not self.draws)
