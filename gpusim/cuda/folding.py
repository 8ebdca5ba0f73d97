"""A fold on a device: the template and the arguments of its launch, from fallback's plan.
Everything is decided here, so that the kernels only load, add, round and store."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpusim.fallback import orders
from gpusim.fallback.arguments import check_batch_offset, check_out, check_partial
from gpusim.fallback.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    is_sub_32_bit,
    real_of,
)
from gpusim.fallback.plan import FoldPlan, plan_fold
from gpusim.fallback.rounding import check_counter
from gpusim.fallback.schedules import (
    ChainSchedule,
    CompiledOrder,
    GraphSchedule,
    ReductionGraph,
)
from gpusim.fallback.spec import Extent, FoldPart, FoldSpec, TreeNodes

from .device import (
    SHARED_PER_MULTIPROCESSOR,
    THREADS_PER_MULTIPROCESSOR,
    Array,
    Device,
    Kernel,
    Launch,
)
from .layout import MemberLayout, Members, layout_of, rows_of
from .structs import COMPENSATED, EXACT, FOLD, LAYOUT, LOGICAL, struct, writer
from .targets import NAMES, code, target

#: Enumerations of fold.cu and finish.cuh, by position.
OPS = ("sum", "prod", "max", "min", "complex prod")
RINGS = ("none", "flat", "sliced", "listed")
ROUNDINGS = ("none", "float16", "bfloat16", "float32", "target")
ENCODINGS = ("float32", "float64", "float16", "bfloat16", "float8", "integer")

TREE_MEMBERS = 1 << 16
# in_stages of fold.cu: threads of a block, and the members of all stages for each of its `batches`.
STAGE_THREADS, STAGE_BATCH, STAGES = 32, 16, 3
RESERVED_BYTES = 1024  # of shared memory, which CUDA takes for each block
# Members are split over blocks if they and their bytes are at least so many: else a second launch
# costs more than it saves. A block gets at least SHARE_MEMBERS.
SPLIT_MEMBERS, SPLIT_BYTES, SHARE_MEMBERS = 128, 1 << 17, 32
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
        self.any_order = self.integer or self.op in ("max", "min")  # gives the same bits
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


# The words of a launch's arguments that its plan leaves open.
write_members = writer(LAYOUT, "base", "table")
write_out = writer(LAYOUT, "out")
# FOLD, EXACT and COMPENSATED begin with the same structs.
_write_counters = writer(FOLD, "finish.call", "finish.batch_offset", "finish.batch_offsets")
_write_partial = {dtype: writer(dtype, "partial") for dtype in (FOLD, LOGICAL)}


@dataclass(frozen=True, eq=False)
class FoldLaunch:
    """The launch of a fold, without addresses and counters.

    **Attributes**:

    - `plan`: what is folded.
    - `kernel`, `threads`, `block`, `shared`: as in `Launch`. `kernel` is None if the result is
      empty, or if the members have too many axes.
    - `arguments`: the kernel's struct, of `dtype`; addresses and counters are zero.
    - `copies`: whether the members have too many axes, and have to be copied first.
    - `turned`: whether the last member comes first.
    - `draws`: whether the batch offsets matter.
    - `tables`: arrays of int64 that the kernel reads, by the words that hold their addresses.
    - `shares`, `last`: the launch gives this many partial results, each of a share of the members.
      The fold `last` of them gives the result.
    """

    plan: FoldPlan
    kernel: Kernel | None = None
    dtype: np.dtype[Any] = FOLD
    arguments: bytes = b""
    threads: int = 0
    block: int = 256
    shared: int = 0
    copies: bool = False
    turned: bool = False
    draws: bool = False
    tables: dict[str, bytes] = field(default_factory=dict)
    shares: int = 1
    last: tuple[FoldSpec, FoldPart] | None = None


def fold_members(
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
    """`run_fold` without a wire and levels, whose walks fold by this."""
    group = Members.of(members, device)
    extent = None if part is None else part.extent
    about = device.busy_threads, device.shared_bytes
    launch = plan_launch(spec, extent, group.layout, batch_ndim, *about)
    plan, earlier, offset, offsets = launch.plan, None, 0, None
    if type(call) is not int or not 0 <= call < 2**64:
        call = check_counter("call", call)
    if part is not None and part.partial is not None:
        earlier = _earlier(part.partial, plan, device)
    given: Any = batch_offset
    if type(given) is int and 0 <= given < 2**64:
        offset = given
    else:
        offsets = check_batch_offset(given, plan.batch)
    if out is None:
        out = device.empty(plan.shape, plan.arithmetic.result)
    else:
        check_out(out, plan.shape, plan.arithmetic.result)
    if launch.copies:
        group = group.contiguous(device)
        launch = plan_launch(spec, extent, group.layout, batch_ndim, *about)
    if launch.kernel is None:
        return out
    # The arrays whose addresses the launch takes stay alive until it is queued.
    table = group.table(device, turned=launch.turned)
    buffer = bytearray(launch.arguments)
    base, step = group.base, group.layout.step
    if launch.turned and step is not None:
        base += (plan.count - 1) * step
    write_members(buffer, base, 0 if table is None else device.pointer(table))
    result = out
    if launch.last is not None:
        result = device.empty((launch.shares, *plan.shape), plan.arithmetic.partial)
    write_out(buffer, device.pointer(result))
    if earlier is not None:
        _write_partial[launch.dtype](buffer, device.pointer(earlier))
    if launch.dtype is not LOGICAL:
        listed = None
        if launch.draws and offsets is not None:
            listed = device.constant(offsets.tobytes())
        _write_counters(buffer, call, offset, 0 if listed is None else device.pointer(listed))
    tables = {name: device.constant(data) for name, data in launch.tables.items()}
    for name, array in tables.items():
        _write_table[name](buffer, device.pointer(array))
    arguments = np.frombuffer(buffer, launch.dtype)
    device.run(Launch(launch.kernel, arguments, launch.threads, launch.block, launch.shared))
    if launch.last is not None:
        last, rest = launch.last
        fold_members(
            device,
            last,
            result,
            batch_ndim=batch_ndim,
            call=call,
            batch_offset=batch_offset,
            part=rest,
            out=out,
        )
    return out


def _earlier(partial: Any, plan: FoldPlan, device: Device) -> Array:
    """The partial result of the members folded before, contiguous."""
    if not device.is_array(partial):
        raise TypeError(f"partial is a {type(partial).__name__}: expected an array of the device")
    check_partial(partial, plan.shape, plan.arithmetic.partial)
    return device.contiguous(partial)


@lru_cache(maxsize=4096)
def plan_launch(
    spec: FoldSpec,
    extent: Extent | None,
    members: MemberLayout,
    batch_ndim: int,
    busy_threads: int,
    shared_bytes: int,
) -> FoldLaunch:
    """Check the arguments of a fold, and plan its launch on a device of so many busy threads, with
    so much shared memory on a multiprocessor.

    **Raises**: ValueError and TypeError for arguments that do not fit.
    """
    plan = plan_fold(spec, extent, members.dtype, members.number, members.shape, batch_ndim)
    if isinstance(plan.order, ReductionGraph | GraphSchedule) and plan.order.is_wide:
        raise ValueError(
            "order: the tree has additions of more than two terms at once; GPUs' kernels add two, "
            "NumPy's arrays are folded with them"
        )
    if plan.order == "tree" and plan.count > TREE_MEMBERS:
        raise ValueError(
            f"order='tree': {plan.count} members given, at most {TREE_MEMBERS} expected"
        )
    if not math.prod(plan.shape):
        return FoldLaunch(plan)
    if plan.arithmetic.computing == np.bool_:
        return _plan_logical(plan, members, busy_threads)
    if plan.arithmetic.exact:
        return _plan_exact(plan, members, busy_threads)
    if plan.order in orders.COMPENSATED:
        return _plan_compensated(plan, members, busy_threads)
    return plan_numbers(plan, members, busy_threads, shared_bytes=shared_bytes)


class Template(NamedTuple):
    """A kernel, the elements of its chunk, the members it loads at once, and its C++ type."""

    kernel: Kernel
    chunk: int
    ahead: int
    computing: np.dtype[Any]


def template(numbers: Numbers, order: CompiledOrder, *, small: bool = False) -> Template:
    """The kernel for these numbers in this order.

    `small`: chunks of 4 bytes (at least an element) that are copied ahead in stages, where elements
    are few or scattered; in a tree, chunks of one element.
    """
    integer = numbers.integer
    computing = numbers.computing
    if integer:
        wide = 8 in (numbers.source.itemsize, computing.itemsize)
        computing = np.dtype(np.uint64 if wide else np.uint32)
    tree = order == "tree" or isinstance(order, ReductionGraph | GraphSchedule)
    kind = "TREE" if tree and not numbers.any_order else "SEQUENCE"
    sums = numbers.op == "sum"
    chunk, ahead = 16 // numbers.source.itemsize, 8
    if numbers.step_drawn:
        chunk = 8  # the lanes of one block
    elif computing == FLOAT64:
        chunk = min(chunk, 8)
    if numbers.step_drawn or numbers.step == "TARGET":
        ahead = 1  # arithmetic rules there, not memory
    if small and not numbers.step_drawn and not (numbers.complex and numbers.op == "prod"):
        chunk = 1
        if ahead > 1 and kind == "SEQUENCE":
            chunk, ahead = max(1, 4 // numbers.source.itemsize), STAGE_BATCH
    flags = ("false", "true")
    name = (
        f"fold<{NAMES[numbers.source]}, {C_NAMES[computing]}, {numbers.step}, "
        f"{flags[numbers.step_drawn]}, {kind}, {flags[sums]}, {chunk}, {ahead}>"
    )
    return Template(Kernel("fold.cu", name), chunk, ahead, computing)


C_NAMES = {
    FLOAT32: "float",
    FLOAT64: "double",
    np.dtype(np.uint32): "u32",
    np.dtype(np.uint64): "u64",
}


def plan_numbers(
    plan: FoldPlan,
    members: MemberLayout,
    busy_threads: int,
    share: int | None = None,
    *,
    draws: bool = False,
    shared_bytes: int = SHARED_PER_MULTIPROCESSOR,
) -> FoldLaunch:
    """The launch of a fold of numbers.

    **Arguments**:

    - `share`: how many members a block folds, 0 if all; by default it is decided here.
    - `draws`: whether random numbers are drawn for anything else than the fold's own roundings.
    """
    numbers, order, window = Numbers(plan), plan.order, plan.extent.window
    free = numbers.any_order
    parts = 2 if plan.dtype.kind == "c" else 1
    integer = numbers.integer
    draws = draws or numbers.step_drawn or numbers.last_drawn
    # Where neither blocks nor random numbers depend on them, batch axes are axes like others.
    counted = plan.batch_ndim if draws or plan.in_blocks else 0
    itemsize = numbers.source.itemsize
    rows = rows_of(members, counted, itemsize, parts)
    if rows.too_many_axes:
        return FoldLaunch(plan, copies=True)
    # Wide accesses need elements side by side, and one alignment for all members.
    wide = members.alike == 16 and rows.stride == itemsize
    elements = rows.count * rows.length
    chunks = elements * itemsize // 16 if wide else elements
    if share is None:
        share = _share(plan, free, chunks, busy_threads)
        if share:
            launch = plan_numbers(_share_plan(plan), members, busy_threads, share)
            return _with_last(launch, plan, share)
    turned = order == "reverse" or (isinstance(order, ChainSchedule) and order.step < 0)
    if turned:
        members = members.turned()
    graphs = not free and isinstance(order, ReductionGraph | GraphSchedule)
    tree = graphs or (not free and order == "tree")
    # Up to eight members are all in flight at once, in chunks of any size.
    few = not share and not tree and plan.count > 8 and chunks < busy_threads // 2
    kernel, chunk, ahead, computing = template(numbers, order, small=few or not wide)
    complex_product = parts == 2 and numbers.op == "prod"
    arguments = struct(FOLD, op=OPS.index("complex prod" if complex_product else numbers.op))
    arguments["layout"] = layout_of(
        members,
        rows,
        chunk=chunk,
        itemsize=itemsize,
        first=parts * (window[0] if window else 0),
        fixed=draws or complex_product,
    )
    arguments["parts"] = parts
    if not integer and numbers.step == "TARGET":
        arguments["accumulator"] = target(numbers.accumulator)
    if order == "ring" and not free:
        arguments["ring"] = RINGS.index("flat" if plan.slice is None else "sliced")
        arguments["total"], arguments["count"] = plan.total, plan.count
        if plan.slice is not None and plan.spec.cut_axis is not None:
            inner = plan.value[plan.spec.cut_axis + 1 :]
            arguments["slice"] = plan.slice * math.prod(inner)
    if isinstance(order, ChainSchedule | GraphSchedule) and not free:
        arguments["ring"], arguments["count"] = RINGS.index("listed"), len(order.starts)
    if graphs:
        arguments["instructions"] = 2 * plan.count - 1
    if plan.extent.before:
        stored = real_of(plan.arithmetic.partial)
        arguments["before"] = plan.extent.before
        arguments["stored_bytes"] = stored.itemsize
        arguments["stored"] = ENCODINGS.index("integer" if integer else encoding_of(stored))
    arguments["level"], arguments["node"], arguments["leaves"] = plan.tree
    finish = arguments["finish"]
    finish["stream"], finish["seed"] = plan.spec.stream, plan.spec.seed
    finish["step"] = numbers.members
    if integer:
        _finish_integer(finish, numbers)
    else:
        finish_numbers(finish, numbers)
    threads = thread_count(arguments["layout"])
    # Small blocks where there are few threads: they spread over more multiprocessors.
    shares = -(-plan.count // share) if share else 1
    block, shared = (64 if threads * shares < busy_threads else 256), 0
    if ahead == STAGE_BATCH:
        batches = stage_batches(threads, chunk * itemsize, plan.count, busy_threads, shared_bytes)
        arguments["batches"] = batches
        block, shared = STAGE_THREADS, batches * stage_bytes(chunk * itemsize)
    elif isinstance(order, ReductionGraph | GraphSchedule) and not free:
        levels = 1 << max(0, order.depth - 1)  # the stack holds all values but the last
        block, shared = tree_block(levels, 1, chunk * computing.itemsize, block)
    elif order == "tree" and not free:
        block, shared = tree_block(share or plan.count, ahead, chunk * computing.itemsize, block)
    if share:
        arguments["share"], arguments["share_blocks"] = share, -(-threads // block)
        threads = -(-threads // block) * block * shares
    return FoldLaunch(
        plan,
        kernel,
        FOLD,
        arguments.tobytes(),
        threads,
        block,
        shared,
        turned=turned,
        draws=draws,
        tables={} if free else _tables(order, plan.count),
    )


def _share(plan: FoldPlan, any_order: bool, chunks: int, busy_threads: int) -> int:
    """How many members a block folds, if several blocks share the members of many replicas; or 0.

    Shares are aligned subtrees, so trees keep their bits, and so do folds with the same bits in any
    order. There are as many shares as keep the device busy.
    """
    tree = plan.order == "tree" or (any_order and isinstance(plan.order, str))
    whole = isinstance(plan.spec.order, str) and not plan.extent.before
    size = plan.count * math.prod(plan.shape) * plan.dtype.itemsize
    many = plan.count >= SPLIT_MEMBERS and size >= SPLIT_BYTES
    shares = min(-(-3 * busy_threads // (2 * chunks or 1)), TREE_MEMBERS)
    if not (tree and whole and many) or shares < 2:
        return 0
    share = max(SHARE_MEMBERS, 1 << (-(-plan.count // shares) - 1).bit_length())
    return share if share < plan.count else 0


def _share_plan(plan: FoldPlan) -> FoldPlan:
    """The plan as a tree of which subtrees are folded, to partial results."""
    spec = replace(plan.spec, order="tree", cut_axis=None)
    extent = Extent(plan.extent.window, 0, False, plan.tree)
    return plan_fold(spec, extent, plan.dtype, plan.count, plan.shape, plan.batch_ndim)


def _with_last(launch: FoldLaunch, plan: FoldPlan, share: int) -> FoldLaunch:
    """The launch of the shares, followed by the fold of their partial results."""
    if launch.kernel is None:
        return launch
    arithmetic = plan.arithmetic
    spec = replace(
        plan.spec,
        order="tree",
        cut_axis=None,
        accumulate=arithmetic.accumulator,
        out_dtype=arithmetic.result,
    )
    level, first, total = plan.tree
    up = share.bit_length() - 1
    part = FoldPart(
        window=plan.extent.window,
        final=plan.extent.final,
        nodes=TreeNodes(level + up, first >> up, total),
    )
    return replace(launch, plan=plan, shares=-(-plan.count // share), last=(spec, part))


def stage_bytes(chunk_bytes: int) -> int:
    """The shared memory of a block, for each batch that its stages hold."""
    return STAGE_THREADS * STAGE_BATCH * STAGES * chunk_bytes


def stage_batches(
    threads: int, chunk_bytes: int, members: int, busy_threads: int, shared_bytes: int
) -> int:
    """Batches in a stage: the fewer threads a multiprocessor has, the more each has under way. All
    blocks of a multiprocessor fit into its shared memory at once."""
    multiprocessors = max(1, busy_threads // THREADS_PER_MULTIPROCESSOR)
    blocks = -(-threads // (STAGE_THREADS * multiprocessors))
    room = min(SHARED_BYTES, shared_bytes // blocks - RESERVED_BYTES) // stage_bytes(chunk_bytes)
    return max(1, min(room, -(-members // (STAGE_BATCH * STAGES))))


def needs_shared(kernel: Kernel) -> bool:
    """Whether a kernel keeps stages or partial results in shared memory."""
    return "TREE" in kernel.name or kernel.name.endswith(f", {STAGE_BATCH}>")


def thread_count(layout: NDArray[Any]) -> int:
    """The number of threads that a layout needs: one for each chunk."""
    return int(layout["rows"] * layout["chunks"])


_write_table = {name: writer(FOLD, name) for name in ("edges", "starts", "graph")}


def _tables(order: CompiledOrder, members: int) -> dict[str, bytes]:
    """The arrays of chain schedules and graphs, by the names of their addresses."""
    if isinstance(order, ChainSchedule):
        starts = np.array(order.starts, np.int64)
        if order.step < 0:
            starts = members - 1 - starts  # the members are turned
        return {"edges": np.array(order.edges, np.int64).tobytes(), "starts": starts.tobytes()}
    if isinstance(order, ReductionGraph):
        return {"graph": np.array(order.postfix, np.int64).tobytes()}
    if isinstance(order, GraphSchedule):
        instructions = [each for graph in order.graphs for each in graph.postfix]
        first = (2 * members - 1) * np.array(order.starts, np.int64)
        return {
            "edges": np.array(order.edges, np.int64).tobytes(),
            "starts": first.tobytes(),
            "graph": np.array(instructions, np.int64).tobytes(),
        }
    return {}


def tree_block(members: int, leaf: int, chunk_bytes: int, most: int) -> tuple[int, int]:
    """Threads of a block, and the bytes of their stacks: a chunk for each level above a leaf."""
    levels = (-(-members // leaf) - 1).bit_length()
    each = levels * chunk_bytes
    block = most
    while block > 32 and block * each > SHARED_BYTES:
        block //= 2
    return block, block * each


def _plan_exact(plan: FoldPlan, members: MemberLayout, busy_threads: int) -> FoldLaunch:
    """A thread for each element, which adds all members."""
    numbers = Numbers(plan)
    draws = numbers.step_drawn or numbers.last_drawn
    itemsize = numbers.source.itemsize
    parts = 2 if numbers.complex else 1
    rows = rows_of(members, plan.batch_ndim if draws else 0, itemsize, parts)
    if rows.too_many_axes:
        return FoldLaunch(plan, copies=True)
    arguments = struct(EXACT, drawn=numbers.step_drawn)
    window = plan.extent.window
    arguments["layout"] = layout_of(
        members, rows, chunk=1, itemsize=itemsize, first=parts * (window[0] if window else 0)
    )
    if numbers.members > 1 and numbers.accumulator != FLOAT64:
        single = numbers.accumulator == FLOAT32
        arguments["rounding"] = ROUNDINGS.index("float32" if single else "target")
        arguments["accumulator"] = target(numbers.accumulator)
    finish = arguments["finish"]
    finish["stream"], finish["seed"] = plan.spec.stream, plan.spec.seed
    finish["step"] = numbers.members
    finish_numbers(finish, numbers)
    threads = thread_count(arguments["layout"])
    kernel = exact_template(numbers.source, numbers.computing)
    block = 64 if threads < busy_threads else 256
    return FoldLaunch(plan, kernel, EXACT, arguments.tobytes(), threads, block, draws=draws)


def _plan_compensated(plan: FoldPlan, members: MemberLayout, busy_threads: int) -> FoldLaunch:
    """A thread for each element, which keeps the sum and the compensation."""
    numbers = Numbers(plan)
    itemsize = numbers.source.itemsize
    parts = 2 if numbers.complex else 1
    rows = rows_of(members, 0, itemsize, parts)
    if rows.too_many_axes:
        return FoldLaunch(plan, copies=True)
    arguments = struct(COMPENSATED, neumaier=plan.order == orders.NEUMAIER)
    arguments["layout"] = layout_of(members, rows, chunk=1, itemsize=itemsize)
    if numbers.step != "EXACT":
        single = numbers.accumulator == FLOAT32  # of members in float64
        name = "float32" if single else numbers.step.lower()
        arguments["rounding"] = ROUNDINGS.index(name)
        arguments["accumulator"] = target(numbers.accumulator)
    finish = arguments["finish"]
    finish["step"] = numbers.members
    finish_numbers(finish, numbers)
    threads = thread_count(arguments["layout"])
    kernel = compensated_template(numbers.source, numbers.computing)
    block = 64 if threads < busy_threads else 256
    return FoldLaunch(plan, kernel, COMPENSATED, arguments.tobytes(), threads, block)


def compensated_template(source: np.dtype[Any], computing: np.dtype[Any]) -> Kernel:
    """The kernel of compensated sums."""
    return Kernel("compensated.cu", f"compensated<{NAMES[source]}, {C_NAMES[computing]}>")


def exact_template(source: np.dtype[Any], computing: np.dtype[Any]) -> Kernel:
    """The kernel of exact sums; `computing` is the type of a mean's division."""
    return Kernel("exact.cu", f"exact<{NAMES[source]}, {C_NAMES[computing]}>")


def finish_numbers(finish: NDArray[Any], numbers: Numbers) -> None:
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


def _plan_logical(plan: FoldPlan, members: MemberLayout, busy_threads: int) -> FoldLaunch:
    """0 or 1 according to whether members are nonzero; max of bools is their logical_or."""
    op, dtype, result = plan.spec.op, plan.dtype, plan.arithmetic.result
    itemsize = min(dtype.itemsize, 8)
    words = dtype.itemsize // itemsize
    rows = rows_of(members, 0, itemsize, words)
    if rows.too_many_axes:
        return FoldLaunch(plan, copies=True)
    share = _share(plan, True, rows.count * rows.length * itemsize // 16, busy_threads)
    if share:
        result = plan.arithmetic.partial
    arguments = struct(
        LOGICAL,
        all=op in ("logical_and", "min"),
        mask=_mask(dtype),
        one=_one(result),
        bytes=result.itemsize,
    )
    arguments["layout"] = layout_of(
        members, rows, chunk=16 // itemsize, itemsize=itemsize, fixed=words == 2
    )
    kernel = Kernel("logical.cu", f"logical<{itemsize}, {words}>")
    threads = thread_count(arguments["layout"])
    block = 64 if threads < busy_threads else 256
    if not share:
        return FoldLaunch(plan, kernel, LOGICAL, arguments.tobytes(), threads, block)
    arguments["share"], arguments["share_blocks"] = share, -(-threads // block)
    threads = -(-threads // block) * block * -(-plan.count // share)
    launch = FoldLaunch(plan, kernel, LOGICAL, arguments.tobytes(), threads, block)
    return _with_last(launch, plan, share)


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
