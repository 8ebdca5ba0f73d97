"""run_fold on a device: the template and the arguments of its launch, from fallback's plan.
Everything is decided here, so that the kernels only load, add, round and store."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fallback.arguments import check_batch_offset, check_out, check_partial
from fallback.arithmetic import Arithmetic
from fallback.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    is_sub_32_bit,
    real_of,
)
from fallback.plan import FoldPlan, plan_fold
from fallback.rounding import check_counter
from fallback.schedules import ChainSchedule, CompiledOrder, ReductionGraph
from fallback.spec import FoldPart, FoldSpec

from .device import Array, Device, Kernel, Launch
from .layout import Members, laid_out, layout_of
from .structs import FOLD, LOGICAL, struct
from .targets import NAMES, code, target

#: Enumerations of fold.cu and finish.cuh, by position.
OPS = ("sum", "prod", "max", "min", "complex prod")
RINGS = ("none", "flat", "sliced", "listed")
ROUNDINGS = ("none", "float16", "bfloat16", "float32", "target")
ENCODINGS = ("float32", "float64", "float16", "bfloat16", "float8", "integer")

TREE_MEMBERS = 1 << 16
SHARED_BYTES = 48 * 1024  # what every block may have without asking for more
_FLOATS = (*SUB_32_BIT, FLOAT32, FLOAT64)


class Numbers:
    """The arithmetic of a plan as fold.cu has it; for complex values dtypes are of their parts."""

    def __init__(self, plan: FoldPlan) -> None:
        arithmetic = plan.arithmetic
        self.op, self.complex = plan.spec.op, plan.dtype.kind == "c"
        self.source, self.out = real_of(plan.dtype), real_of(arithmetic.result)
        self.computing, self.accumulator = arithmetic.computing, arithmetic.accumulator
        self.divisor, self.from_zero = arithmetic.divisor, arithmetic.from_zero
        self.members = plan.folded
        self.integer = self.source not in _FLOATS
        self.step = self._step()
        drawn = plan.spec.stochastic and not self.complex
        self.step_drawn = drawn and self.step != "EXACT" and is_sub_32_bit(self.accumulator)
        held = self.accumulator if self.members > 1 else self.source  # one is never rounded
        self.rounds_last = plan.extent.final and (self.divisor is not None or held != self.out)
        self.last_drawn = drawn and self.rounds_last and is_sub_32_bit(self.out)

    def _step(self) -> str:
        """The rounding of partial results, by its name in fold.cu's enumeration Step."""
        if self.members == 1 or self.op in ("max", "min") or self.integer:
            return "EXACT"
        if self.accumulator == self.computing:
            return "EXACT"
        if self.op == "sum" and self.computing == FLOAT32:
            return {FLOAT16: "FLOAT16", BFLOAT16: "BFLOAT16"}.get(self.accumulator, "TARGET")
        return "TARGET"


def run_fold(
    device: Device,
    spec: FoldSpec,
    members: Any,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: ArrayLike = 0,
    part: FoldPart | None = None,
    out: Any = None,
) -> Array:
    """`fallback.run_fold` for arrays of `device`: the same arguments, errors and bits."""
    group = Members.of(members, device)
    extent = None if part is None else part.extent
    plan = plan_fold(spec, extent, group.dtype, group.count, group.shape, batch_ndim)
    counter = check_counter("call", call)
    earlier = None
    if part is not None and part.partial is not None:
        earlier = _earlier(part.partial, group, plan.arithmetic, device)
    offsets = check_batch_offset(batch_offset, plan.batch).reshape(-1)
    if plan.order == "tree" and plan.count > TREE_MEMBERS:
        raise ValueError(
            f"order='tree': {plan.count} members given, at most {TREE_MEMBERS} expected"
        )
    if out is None:
        out = device.empty(plan.shape, plan.arithmetic.result)
    else:
        check_out(out, plan.shape, plan.arithmetic.result)
    if not math.prod(plan.shape):
        return out
    if plan.arithmetic.computing == np.bool_:
        _fold_logical(device, group, spec.op, plan.arithmetic.result, earlier, out)
    else:
        _fold_numbers(device, group, plan, counter, offsets, earlier, out)
    return out


def _earlier(partial: Any, group: Members, arithmetic: Arithmetic, device: Device) -> Array:
    """The partial result of the members folded before, contiguous."""
    if not device.is_array(partial):
        raise TypeError(f"partial is a {type(partial).__name__}: expected an array of the device")
    check_partial(partial, group.shape, arithmetic.partial)
    return device.contiguous(partial)


def template(
    numbers: Numbers, order: CompiledOrder, *, small: bool = False
) -> tuple[Kernel, int, np.dtype[Any]]:
    """The kernel for these numbers, its chunk's elements, and the C++ type that it computes in.

    `small`: chunks of one element with many members ahead, where elements are few or scattered.
    """
    integer = numbers.integer
    computing = numbers.computing
    if integer:
        wide = 8 in (numbers.source.itemsize, computing.itemsize)
        computing = np.dtype(np.uint64 if wide else np.uint32)
    tree = order == "tree" or isinstance(order, ReductionGraph)
    kind = "TREE" if tree and not integer else "SEQUENCE"
    sums = numbers.op == "sum"
    chunk, ahead = 16 // numbers.source.itemsize, 8
    if numbers.step_drawn:
        chunk = 8  # the lanes of one block
    elif computing == FLOAT64:
        chunk = min(chunk, 8)
    if numbers.step_drawn or numbers.step == "TARGET":
        ahead = 1  # arithmetic rules there, not memory
    if small and not numbers.step_drawn and not (numbers.complex and numbers.op == "prod"):
        chunk, ahead = 1, 32 if ahead > 1 and kind == "SEQUENCE" else ahead
    flags = ("false", "true")
    name = (
        f"fold<{NAMES[numbers.source]}, {C_NAMES[computing]}, {numbers.step}, "
        f"{flags[numbers.step_drawn]}, {kind}, {flags[sums]}, {chunk}, {ahead}>"
    )
    return Kernel("fold.cu", name), chunk, computing


C_NAMES = {
    FLOAT32: "float",
    FLOAT64: "double",
    np.dtype(np.uint32): "u32",
    np.dtype(np.uint64): "u64",
}


def _fold_numbers(
    device: Device,
    group: Members,
    plan: FoldPlan,
    call: int,
    offsets: NDArray[np.uint64],
    earlier: Array | None,
    out: Array,
) -> None:
    numbers, order, window = Numbers(plan), plan.order, plan.extent.window
    parts = 2 if group.dtype.kind == "c" else 1
    integer = numbers.integer
    drawn = numbers.step_drawn or numbers.last_drawn
    # Where neither blocks nor random numbers depend on them, batch axes are axes like others.
    counted = plan.batch_ndim if drawn or plan.in_blocks else 0
    itemsize = numbers.source.itemsize
    group, rows = laid_out(device, group, counted, itemsize, parts)
    if order == "reverse" or (isinstance(order, ChainSchedule) and order.step < 0):
        group = group.turned()
    few = rows.count * rows.length * itemsize // 16 < device.busy_threads
    # Wide accesses need elements side by side, and one alignment for all members.
    small = few or not group.alike or rows.stride != itemsize
    kernel, chunk, computing = template(numbers, order, small=small)
    table = None if group.pointers is None else device.upload(np.array(group.pointers, np.uint64))
    uploaded = device.upload(offsets) if drawn and offsets.size > 1 else None
    complex_product = parts == 2 and numbers.op == "prod"
    arguments = struct(FOLD, op=OPS.index("complex prod" if complex_product else numbers.op))
    arguments["layout"] = layout_of(
        group,
        rows,
        device.pointer(out),
        chunk=chunk,
        itemsize=itemsize,
        table=0 if table is None else device.pointer(table),
        first=parts * (window[0] if window else 0),
        fixed=drawn or complex_product,
    )
    arguments["parts"] = parts
    if not integer and numbers.step == "TARGET":
        arguments["accumulator"] = target(numbers.accumulator)
    if order == "ring" and not integer:
        arguments["ring"] = RINGS.index("flat" if plan.slice is None else "sliced")
        arguments["total"], arguments["count"] = plan.total, group.count
        if plan.slice is not None and plan.spec.cut_axis is not None:
            inner = plan.value[plan.spec.cut_axis + 1 :]
            arguments["slice"] = plan.slice * math.prod(inner)
    listed = [] if integer else _listed(device, order, group.count)
    for name, array in listed:
        arguments[name] = device.pointer(array)
    if isinstance(order, ChainSchedule) and not integer:
        arguments["ring"], arguments["count"] = RINGS.index("listed"), len(order.starts)
    if isinstance(order, ReductionGraph) and not integer:
        arguments["instructions"] = len(order.postfix)
    if earlier is not None:
        stored = real_of(earlier.dtype)
        arguments["before"], arguments["partial"] = plan.extent.before, device.pointer(earlier)
        arguments["stored_bytes"] = stored.itemsize
        arguments["stored"] = ENCODINGS.index("integer" if integer else encoding_of(stored))
    arguments["level"], arguments["node"], arguments["leaves"] = plan.tree
    finish = arguments["finish"]
    finish["seed"], finish["call"] = plan.spec.seed, call
    finish["step"] = numbers.members
    finish["batch_offset"] = offsets[0] if offsets.size else 0
    finish["batch_offsets"] = 0 if uploaded is None else device.pointer(uploaded)
    if integer:
        _finish_integer(finish, numbers)
    else:
        finish_float(
            finish,
            numbers.computing,
            numbers.out,
            rounds=numbers.rounds_last,
            drawn=numbers.last_drawn,
        )
        finish["from_zero"] = numbers.from_zero
        finish["divides"] = numbers.divisor is not None
        finish["divisor"] = numbers.divisor or 0
    threads = int(arguments["layout"]["rows"] * arguments["layout"]["chunks"])
    # Small blocks where there are few threads: they spread over more multiprocessors.
    block, shared = (64 if threads < device.busy_threads else 256), 0
    if isinstance(order, ReductionGraph) and not integer:
        levels = 1 << max(0, order.depth - 1)  # the stack holds all values but the last
        block, shared = tree_block(levels, 1, chunk * computing.itemsize, block)
    elif order == "tree" and not integer:
        leaves = 1 if kernel.name.endswith(", 1>") else 8
        block, shared = tree_block(group.count, leaves, chunk * computing.itemsize, block)
    device.run(Launch(kernel, arguments, threads, block, shared))


def _listed(device: Device, order: CompiledOrder, members: int) -> list[tuple[str, Array]]:
    """The arrays of chain schedules and graphs, on the device, by the names of their addresses."""
    if isinstance(order, ChainSchedule):
        edges = np.array(order.edges, np.int64)
        starts = np.array(order.starts, np.int64)
        if order.step < 0:
            starts = members - 1 - starts  # the members are turned
        return [("edges", device.upload(edges)), ("starts", device.upload(starts))]
    if isinstance(order, ReductionGraph):
        return [("graph", device.upload(np.array(order.postfix, np.int64)))]
    return []


def tree_block(members: int, leaf: int, chunk_bytes: int, most: int) -> tuple[int, int]:
    """Threads of a block, and the bytes of their stacks: a chunk for each level above a leaf."""
    levels = (-(-members // leaf) - 1).bit_length()
    each = levels * chunk_bytes
    block = most
    while block > 32 and block * each > SHARED_BYTES:
        block //= 2
    return block, block * each


def _finish_integer(finish: NDArray[Any], numbers: Numbers) -> None:
    accumulator = numbers.accumulator
    assert isinstance(accumulator, np.dtype)
    finish["encoding"] = ENCODINGS.index("integer")
    finish["bytes"] = numbers.out.itemsize
    finish["wrap_bits"] = 8 * accumulator.itemsize
    finish["wrap_sign"] = accumulator.kind == "i"


def encoding_of(stored: np.dtype[Any]) -> str:
    """How finish.cuh's enumeration Encoding names a floating-point dtype."""
    return "float8" if stored in SUB_32_BIT and stored.itemsize == 1 else NAMES[stored]


def finish_float(
    finish: NDArray[Any],
    computing: np.dtype[Any],
    out: np.dtype[Any] | FormatInfo,
    *,
    rounds: bool,
    drawn: bool,
) -> None:
    """Fill in the last rounding and the encoding; the carrier stores a FormatInfo's values."""
    finish["encoding"] = ENCODINGS.index(
        encoding_of(out.carrier if isinstance(out, FormatInfo) else out)
    )
    if isinstance(out, FormatInfo) or out in SUB_32_BIT:
        finish["target"] = target(out)
    finish["drawn"] = drawn
    if not rounds:
        return
    exact = "float64" if computing == FLOAT64 else "float32"
    name = "target" if isinstance(out, FormatInfo) else NAMES[out]
    if name in (exact, "float64"):
        return
    if exact == "float64" and name != "float32":
        name = "target"
    finish["rounding"] = ROUNDINGS.index(name if name in ROUNDINGS else "target")


def _fold_logical(
    device: Device,
    group: Members,
    op: str,
    out_type: np.dtype[Any],
    earlier: Array | None,
    out: Array,
) -> None:
    """0 or 1 according to whether members are nonzero; max of bools is their logical_or."""
    itemsize = min(group.dtype.itemsize, 8)
    words = group.dtype.itemsize // itemsize
    group, rows = laid_out(device, group, 0, itemsize, words)
    table = None if group.pointers is None else device.upload(np.array(group.pointers, np.uint64))
    chunk = 16 // itemsize
    arguments = struct(
        LOGICAL,
        all=op in ("logical_and", "min"),
        mask=_mask(group.dtype),
        one=_one(out_type),
        bytes=out_type.itemsize,
        partial=0 if earlier is None else device.pointer(earlier),
    )
    arguments["layout"] = layout_of(
        group,
        rows,
        device.pointer(out),
        chunk=chunk,
        itemsize=itemsize,
        table=0 if table is None else device.pointer(table),
        fixed=words == 2,
    )
    threads = int(arguments["layout"]["rows"] * arguments["layout"]["chunks"])
    device.run(Launch(Kernel("logical.cu", f"logical<{itemsize}, {words}>"), arguments, threads))


def _mask(dtype: np.dtype[Any]) -> int:
    """The bits of a word that make a value nonzero: for floats, all but the sign."""
    bits = 8 * min(dtype.itemsize, 8)
    everything = (1 << bits) - 1
    if dtype.kind in "biu" or (dtype in SUB_32_BIT and not SUB_32_BIT[dtype].has_negative_zero):
        return everything
    mask = everything >> 1
    return mask & ~(1 << 31) if dtype == np.complex64 else mask


def _one(dtype: np.dtype[Any]) -> int:
    if dtype == np.bool_:
        return 1
    return code(np.array(1.0), real_of(dtype)) if dtype.kind != "u" else 1
