"""A launch of a fold with a wire: the template and the arguments of chain.cu or machine.cu.
It depends on the fold and on how the members lie; addresses and counters are written later."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SUB_32_BIT,
    FormatInfo,
    NumberFormat,
)
from gpusim.fallback.plan import FoldPlan
from gpusim.fallback.schedules import ChainSchedule, ReductionGraph, neighbours
from gpusim.fallback.sends import UNROUNDED, edges_of, plan_of
from gpusim.fallback.spec import FIXED_TYPES, FoldSpec
from gpusim.fallback.unscaled import sends_first
from gpusim.fallback.wires import SCALES, WireInfo

from .device import THREADS_PER_MULTIPROCESSOR, Array, Device, Kernel, Launch
from .folding import (
    C_NAMES,
    ENCODINGS,
    ROUNDINGS,
    SHARED_BYTES,
    Numbers,
    encoding_of,
    finish_float,
    finish_numbers,
)
from .layout import MemberLayout
from .structs import FIXED, SENT, struct, writer
from .targets import NAMES, info_of, target

#: sending.cuh's enumeration At, by position.
AT = ("nowhere", "hops", "members")
WARP, MOST_THREADS, FEWEST_THREADS = 32, 512, 64
#: Chunks of a block that many thread blocks share, if there are few blocks: a thread block would
#: have sixteen chunks for each of its threads.
LONG_BLOCK = 16 * MOST_THREADS
DYNAMIC_BYTES = SHARED_BYTES - 512  # machine.cu has some of its own


class Task(NamedTuple):
    """The work of one launch.

    **Attributes**:

    - `kind`: "fold"; "each": every member is sent, and divided, for itself, to the computing type;
      "lone": a member is rounded as the sum of one; "result": the one member is a result that is
      sent; "message": it is a message of its own, sent at `step`.
    - `spec`: of one level.
    - `dtype`, `members`: the fold's members' dtype and number.
    - `level`, `row`, `first`: as of fallback.sends.Level.
    - `slices`: the number of slices of a ring's cut, and the elements of one in a row of them.
    - `divisor`: of members.
    """

    kind: str
    spec: FoldSpec
    dtype: np.dtype[Any]
    members: int
    level: int = 0
    row: int = 1
    first: int = 0
    slices: tuple[int, int] = (1, 1)
    divisor: int | None = None
    step: int = 0


class SentLaunch(NamedTuple):
    """A launch without addresses and counters.

    **Attributes**:

    - `kernel`, `arguments`, `threads`, `block`, `shared`: as in `Launch`.
    - `tables`: the int64s that the kernel reads.
    - `workspace`: its bytes.
    - `stops`: instructions in which a launch ends, and the values on the stack before them;
      `largest`: the words for the largest magnitudes that they find.
    - `turned`: whether the last member comes first; `draws`: whether batch offsets matter.
    - `shape`, `dtype`: the result's.
    """

    kernel: Kernel
    arguments: bytes
    tables: bytes
    threads: int
    block: int
    shared: int
    workspace: int
    stops: list[tuple[int, int]]
    largest: int
    turned: bool
    draws: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def chain_template(source: np.dtype[Any], *, scaled: bool, rounds: bool) -> tuple[Kernel, int]:
    """The kernel of chains, and the elements of its chunk."""
    count, ahead = 4 if source == FLOAT32 else 8, 4 if scaled or rounds else 8
    flags = ", ".join(str(flag).lower() for flag in (scaled, rounds))
    return Kernel("chain.cu", f"chain<{NAMES[source]}, {flags}, {count}, {ahead}>"), count


def machine_template(
    source: np.dtype[Any], computing: np.dtype[Any], *, quick: bool
) -> tuple[Kernel, int]:
    """The kernel of any folds, and the elements of its chunk."""
    count = 4 if computing == FLOAT64 or (quick and source == FLOAT32) else 8
    flag = str(quick).lower()
    return Kernel(
        "machine.cu", f"machine<{NAMES[source]}, {C_NAMES[computing]}, {flag}, {count}>"
    ), count


def is_plain(given: NumberFormat) -> bool:
    """Whether sending.cuh's `round_plain` rounds to a format.

    >>> is_plain(BFLOAT16), is_plain(FLOAT32)
    (True, False)
    """
    info = info_of(given) if isinstance(given, FormatInfo) or given in SUB_32_BIT else None
    return (
        info is not None
        and info.carrier == FLOAT32
        and 1 <= info.fraction_bits <= 22
        and info.min_exponent >= -126
        and -126 <= info.min_ulp + 23 <= 127
        and info.smallest == 2.0**info.min_ulp
        and info.lowest == -info.largest
    )


def quick_rounding(given: NumberFormat) -> int:
    """A plain format as sending.cuh's `round_all` takes it."""
    names = {FLOAT16: "float16", BFLOAT16: "bfloat16"}
    return ROUNDINGS.index(
        "target" if isinstance(given, FormatInfo) else names.get(given, "target")
    )


class _Blocks(NamedTuple):
    """The blocks that have one scale, or the chunks: see sending.cuh's tables."""

    edges: list[int]
    blocks: list[int]
    bases: list[int]
    starts: list[int]
    length: int
    span: int  # the most chunks that a block touches


@lru_cache(maxsize=4096)
def plan_sent(task: Task, members: MemberLayout, busy_threads: int) -> SentLaunch:
    """The launch for members of the shape (entries, elements), whose elements lie side by side.

    It is for a device of so many busy threads.
    """
    spec, kind = task.spec, task.kind
    wire: WireInfo = spec.wire or UNROUNDED
    plan = plan_of(spec, task.dtype, task.members, members.shape)
    numbers, computing = Numbers(plan), plan.arithmetic.computing
    entries, elements = members.shape
    source = members.dtype
    folds, message = kind == "fold", kind in ("result", "message")
    at = "nowhere"
    if message or (wire.at_members and kind != "lone"):
        at = "members"
    elif folds and spec.wire is not None and wire.at_hops:
        at = "hops"
    sends_result = folds and spec.wire is not None and wire.at_result and spec.gathered
    sends = at != "nowhere" or sends_result
    scaled, draws_wire = sends and wire.scale is not None, sends and wire.draws
    rounds = not message and numbers.step != "EXACT"
    draws_step = rounds and numbers.step_drawn and kind in ("fold", "lone")
    draws = draws_wire or draws_step or (kind in ("fold", "lone") and numbers.last_drawn)
    quick = computing == FLOAT32 and source != FLOAT64 and not (draws_wire or draws_step)
    quick = quick and (not sends or wire.info is None or is_plain(wire.format))
    quick = quick and (not rounds or is_plain(numbers.accumulator))
    order = plan.order
    graph = None
    if folds and (order == "tree" or isinstance(order, ReductionGraph)):
        graph = order if isinstance(order, ReductionGraph) else neighbours(task.members)
    chained = quick and folds and graph is None and task.divisor is None and at != "nowhere"
    turned = folds and direction_of(plan) < 0

    # The chunks
    machine, chunk = machine_template(source, computing, quick=quick)
    shift = 0
    if not draws and members.offset % source.itemsize == 0:
        shift = members.offset // source.itemsize % chunk
    blocks = _blocks(task, plan, wire if scaled else None, elements, chunk, shift)
    lanes = 1 << (blocks.span - 1).bit_length()
    chained = chained and lanes <= WARP
    kernel = chain_template(source, scaled=scaled, rounds=rounds)[0] if chained else machine
    program = list(graph.postfix) if graph else []
    depth = graph.depth if graph else 2 if folds else 1
    rows = entries * (members.number if kind == "each" else 1)
    units = blocks.blocks[-1]
    column, passes = depth * chunk * computing.itemsize, 1
    multiprocessors = busy_threads // THREADS_PER_MULTIPROCESSOR
    stops: list[tuple[int, int]] = []
    if rows * units < multiprocessors and blocks.span >= LONG_BLOCK:
        stops = _stops(program, task.members if folds else 1, at, sends_result)
        lanes = -(-blocks.span // WARP) * WARP
        threads, block = rows * units * lanes, 256
    elif lanes > WARP:
        block = max(FEWEST_THREADS, min(lanes, MOST_THREADS))
        passes, lanes = -(-blocks.span // block), 0
        threads = rows * units * block
    else:
        threads = rows * units * lanes
        block = 256 if threads >= busy_threads else 64  # they spread over more multiprocessors
        while not chained and block > WARP and block * column > DYNAMIC_BYTES:
            block //= 2
    shared, workspace = 0 if chained else block * passes * column, 0
    if shared > DYNAMIC_BYTES or stops:
        shared, workspace = 0, -(-threads // block) * shared

    # The arguments
    arrays = {name: getattr(blocks, name) for name in ("edges", "blocks", "bases", "starts")}
    if turned:
        arrays["starts"] = [task.members - 1 - start for start in blocks.starts]
    arrays["program"] = program
    places = dict(zip(arrays, accumulate(map(len, arrays.values()), initial=0), strict=False))
    arguments = struct(
        SENT,
        stride=(members.step or 0) * (-1 if turned else 1),
        members=members.number,
        visited=members.number if folds else 1,
        turned=turned,
        alike=members.alike,
        pitch=members.strides[0],
        rows=rows,
        entries=entries,
        elements=elements,
        **places,
        messages=len(blocks.starts),
        units=units,
        length=blocks.length,
        shift=shift,
        lanes=lanes,
        passes=passes,
        slices=task.slices[0],
        slice=task.slices[1],
        at=AT.index(at),
        result_sent=sends_result,
        first_is_sent=graph is None or sends_first(spec, task.members, elements, task.dtype),
        stream=0 if kind == "message" else 2 * task.level + 1,
        member_step={"result": task.members, "message": task.step}.get(kind, task.members + 1),
        result_step=task.members,
        lone_step=kind == "lone",
        divides=task.divisor is not None and not message,
        divisor=task.divisor or 0,
        instructions=len(program),
        depth=depth,
    )
    if sends:
        _set_wire(arguments, wire, computing, quick)
    if rounds:
        arguments["accumulator"] = target(numbers.accumulator)
        step = quick_rounding(numbers.accumulator) if quick else ROUNDINGS.index("target")
        arguments["step"] = step
        arguments["step_drawn"] = draws_step
    finish = arguments["finish"]
    if kind in ("fold", "lone"):
        finish_numbers(finish, numbers)
        held = numbers.out
        arguments["result_rounding"] = _result_rounding(computing, held)
    else:
        held = members.dtype if message else computing
        finish_float(finish, computing, held, rounds=message, drawn=False)
    finish["stream"], finish["seed"], finish["step"] = 2 * task.level, spec.seed, task.members
    shape = (members.number, entries, elements) if kind == "each" else (entries, elements)
    tables = np.array([word for array in arrays.values() for word in array], np.int64).tobytes()
    return SentLaunch(
        kernel,
        arguments.tobytes(),
        tables,
        threads,
        block,
        shared,
        workspace,
        stops,
        (stops[-1][0] + 1) * rows * units if stops else 0,
        turned,
        draws,
        shape,
        held,
    )


def _stops(program: list[int], members: int, at: str, sends_result: bool) -> list[tuple[int, int]]:
    """The instructions that need a largest magnitude, and the values on the stack before each."""
    chain = [0, *(each for step in range(1, members) for each in (step, -step))]
    found, values = [], 0
    for number, instruction in enumerate(program or chain):
        if at == ("members" if instruction >= 0 else "hops"):
            found.append((number, values))
        values += 1 if instruction >= 0 else -1
    if sends_result:
        found.append((len(program or chain) + 1, values))
    return found


def direction_of(plan: FoldPlan) -> int:
    """Whether chains visit the members up or down."""
    order = plan.order
    return order.step if isinstance(order, ChainSchedule) else -1 if order == "reverse" else 1


def _blocks(
    task: Task, plan: FoldPlan, wire: WireInfo | None, elements: int, chunk: int, shift: int
) -> _Blocks:
    """The blocks of a wire with a scale, or the chunks."""
    edges, starts = [0, elements], [0]
    if task.kind != "message":
        edges = edges_of(task.spec, plan, task.dtype)
        starts = [0] * (len(edges) - 1)
    if task.kind == "fold":
        order, first = plan.order, task.members - 1 if plan.order == "reverse" else 0
        given: Sequence[int] = range(task.members) if order == "ring" else ()
        if isinstance(order, ChainSchedule):
            given = order.starts
        starts = list(given) or [first] * (len(edges) - 1)
    if wire is None and len(set(starts)) == 1:  # what a message holds does not matter
        edges, starts = [0, elements], starts[:1]
    spans = zip(pairwise(edges), starts, strict=True)
    messages = [(a, b, start) for (a, b), start in spans if a < b]
    longest = max(b - a for a, b, _ in messages)
    if wire is None:
        length, anchor = chunk, -shift
    elif wire.block == "row":
        length = max(1, task.row)
        anchor = -task.first % length
    else:
        length, anchor = elements if wire.block is None else int(wire.block), 0
    whole = wire is not None and wire.block != "row"  # blocks begin where messages do
    bases = [a if whole else a - (a - anchor) % length for a, _, _ in messages]
    counts = [-(-(b - base) // length) for (_, b, _), base in zip(messages, bases, strict=True)]
    reach = min(length, longest)
    aligned = length % chunk == 0 or all(count == 1 for count in counts)
    span = (reach + 2 * chunk - 2) // chunk
    begins = [*bases, *(a for a, _, _ in messages)]
    if aligned and all((begin + shift) % chunk == 0 for begin in begins):
        span = -(-reach // chunk)
    return _Blocks(
        [0, *(b for _, b, _ in messages)],
        list(accumulate(counts, initial=0)),
        bases,
        [start for _, _, start in messages],
        length,
        1 if wire is None else span,
    )


def _set_wire(
    arguments: NDArray[Any], wire: WireInfo, computing: np.dtype[Any], quick: bool
) -> None:
    info = wire.info
    if info is None:
        if wire.format == FLOAT32 and computing == FLOAT64:
            arguments["rounding"] = ROUNDINGS.index("float32")
        return
    arguments["rounding"] = quick_rounding(wire.format) if quick else ROUNDINGS.index("target")
    arguments["rule"] = SCALES.index(wire.scale)
    arguments["wide"], arguments["drawn"] = info.carrier == FLOAT64, wire.draws
    arguments["max_exponent"], arguments["target"] = info.max_exponent, target(wire.format)


def _result_rounding(computing: np.dtype[Any], held: np.dtype[Any]) -> int:
    finish = struct(SENT)["finish"]
    finish_float(finish, computing, held, rounds=True, drawn=False)
    return int(finish["rounding"])


_write_members = {dtype: writer(dtype, "base", "table") for dtype in (SENT, FIXED)}
_write_out = {dtype: writer(dtype, "out") for dtype in (SENT, FIXED)}
_write_tables = writer(SENT, "tables")
_write_workspace = writer(SENT, "workspace", "largest", "begin", "values", "resumes")
_write_counters = writer(SENT, "finish.call", "finish.batch_offset", "finish.batch_offsets")


class Held(NamedTuple):
    """Members of the shape (entries, elements): how they lie, the first one's address, or all."""

    layout: MemberLayout
    base: int
    pointers: list[int] | None

    def addresses(self, device: Device, turned: bool) -> tuple[int, Array | None]:
        """The first one's address, and the table of a list."""
        if self.pointers is not None:
            pointers = self.pointers[::-1] if turned else self.pointers
            return 0, device.constant(np.array(pointers, np.uint64).tobytes())
        step, last = self.layout.step or 0, self.layout.number - 1
        return self.base + step * last if turned else self.base, None


def run_sent(
    device: Device, launch: SentLaunch, held: Held, call: int, places: Any, out: Array | None = None
) -> Array:
    """Run a launch; `places` are the entries' batch offsets, or one for all of them."""
    # The arrays whose addresses the launch takes stay alive until it is queued.
    base, table = held.addresses(device, launch.turned)
    buffer = bytearray(launch.arguments)
    _write_members[SENT](buffer, base, 0 if table is None else device.pointer(table))
    tables = device.constant(launch.tables)
    _write_tables(buffer, device.pointer(tables))
    workspace, largest, stops = 0, 0, launch.stops
    if launch.workspace:
        memory = device.empty((launch.workspace,), np.uint8)
        workspace = device.pointer(memory)
    if stops:
        zeros = device.upload(np.zeros(launch.largest, np.uint64))
        largest = device.pointer(zeros)
    place, listed = 0, None
    if launch.draws:
        if isinstance(places, int):
            place = places
        else:
            listed = device.constant(np.ascontiguousarray(places, np.uint64).tobytes())
    _write_counters(buffer, call, place, 0 if listed is None else device.pointer(listed))
    if out is None:
        out = device.empty(launch.shape, launch.dtype)
    _write_out[SENT](buffer, device.pointer(out))
    for begin, values, resumes in ((0, 0, False), *((*stop, True) for stop in stops)):
        _write_workspace(buffer, workspace, largest, begin, values, resumes)
        arguments = np.frombuffer(bytes(buffer) if stops else buffer, SENT)
        device.run(Launch(launch.kernel, arguments, launch.threads, launch.block, launch.shared))
    return out


UNIT = 256  # of fixed.cu


def fixed_template(source: np.dtype[Any]) -> Kernel:
    return Kernel("fixed.cu", f"fixed<{NAMES[source]}>")


def fold_fixed(device: Device, spec: FoldSpec, held: Held) -> Array:
    """The sum of integers of the order "fixed"; its result is not sent yet."""
    layout = held.layout
    entries, elements = layout.shape
    result = np.dtype(spec.out_dtype or layout.dtype)
    integers = FIXED_TYPES[str(spec.accumulate or "int32")]
    base, table = held.addresses(device, False)
    out = device.empty(layout.shape, result)
    arguments = struct(
        FIXED,
        base=base,
        table=0 if table is None else device.pointer(table),
        stride=layout.step or 0,
        members=layout.number,
        pitch=layout.strides[0],
        entries=entries,
        elements=elements,
        bits=integers - 2 - (layout.number - 1).bit_length(),
        out=device.pointer(out),
    )
    finish = arguments["finish"]
    finish_float(finish, FLOAT64, result, rounds=True, drawn=False)
    finish["divides"], finish["divisor"] = spec.divisor is not None, spec.divisor or 0
    assert finish["encoding"] == ENCODINGS.index(encoding_of(result))
    threads = entries * -(-elements // UNIT) * UNIT
    device.run(Launch(fixed_template(layout.dtype), arguments, threads, UNIT))
    return out
