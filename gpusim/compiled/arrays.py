"""Kernels on whole arrays: messages that are rounded to a wire, random numbers, copies of rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.fallback import limits, threads
from gpusim.fallback.formats import FLOAT32, FLOAT64, NumberFormat
from gpusim.fallback.wires import SCALES, WireInfo

from ..cuda.cache import once
from ..cuda.structs import TARGET, struct, writer
from ..cuda.targets import NAMES, target
from . import build
from .build import ADDRESS, INTEGER, TILE, WORD

MESSAGE = np.dtype(
    [
        ("values", "u8"),
        ("entries", "i8"),
        ("elements", "i8"),
        ("starts", "u8"),
        ("blocks", "i8"),
        ("lanes", "u8"),
        ("rule", "i8"),
        ("max_exponent", "i8"),
        ("drawn", "i8"),
        ("target", TARGET),
    ]
)
ADDITION = np.dtype(
    [
        ("message", MESSAGE),
        ("sends", "i8"),
        ("other", "u8"),
        ("pitch", "i8"),
        ("lanes", "u8"),
        ("rounds", "i8"),
        ("drawn", "i8"),
        ("accumulator", TARGET),
    ]
)
CHAIN = np.dtype(
    [
        ("out", "u8"),
        *((name, "i8") for name in ("pitch", "entries", "elements")),
        *((name, "u8") for name in ("members", "numbers")),
        *((name, "i8") for name in ("count", "member_pitch", "source")),
        ("starts", "u8"),
        ("blocks", "i8"),
        ("places", "u8"),
        ("index", "i8"),
        *((name, "u8") for name in ("call", "seed", "added", "sent")),
        *((name, "i8") for name in ("at_hops", "at_members", "wire_drawn", "rule", "max_exponent")),
        ("target", TARGET),
        *((name, "i8") for name in ("rounds", "drawn")),
        ("accumulator", TARGET),
    ]
)
EXCHANGE = np.dtype(
    [
        *((name, "u8") for name in ("target", "source", "output")),
        *((name, "i8") for name in ("source_pitch", "output_pitch")),
        *((name, "u8") for name in ("offsets", "sizes", "starts", "received", "members")),
        *((name, "i8") for name in ("entries", "slices", "group_size", "source_rows")),
        *((name, "i8") for name in ("target_rows", "row", "streams")),
        ("fault", "u8"),
    ]
)
#: The source's formats, in the order of arrays.h.
SOURCES = tuple(
    dtype
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"),
    )
    for dtype, other in NAMES.items()
    if other == name
)
_CHAIN_WORDS = (
    *("out", "pitch", "entries", "elements", "members", "numbers", "count", "member_pitch"),
    *("source", "starts", "blocks", "places", "index", "call"),
)
_write_chain = writer(CHAIN, *_CHAIN_WORDS)
_NAMES = ("values", "entries", "elements", "starts", "blocks", "lanes")
_write_exchange = writer(EXCHANGE, *EXCHANGE.names or ())
_write_message = writer(MESSAGE, *_NAMES)
_write_values = writer(ADDITION, *(f"message.{name}" for name in _NAMES))
_write_other = writer(ADDITION, "other", "pitch", "lanes")
_BLOCK = 8  # random numbers of one of Philox's blocks
LEAST_DRAWN = 512  # fewer are drawn as fast by NumPy
COPIED = 1 << 20  # bytes of segments that a thread copies at once
RECEIVERS = 16  # whose slices are checked together, as in arrays.h
RUN = 256  # bytes side by side, of which fewer are copied as fast by NumPy
COVERED = 64  # rows for each slice; of more, NumPy sorts the slices


@once
def _library() -> Any:
    """The functions, or None if they cannot be compiled."""
    steps = [f"{name}_{kind}" for name in ("send", "add", "chain") for kind in ("float", "double")]
    return build.functions(
        '#include "arrays.h"\n',
        ADDITION.itemsize + CHAIN.itemsize + EXCHANGE.itemsize,
        **dict.fromkeys(steps, (ADDRESS,)),
        copy_segments=(ADDRESS, ADDRESS, ADDRESS, *[INTEGER] * 5),
        copy_runs=(ADDRESS, ADDRESS, INTEGER, ADDRESS, INTEGER),
        exchange_int=(ADDRESS, INTEGER, INTEGER),
        exchange_long=(ADDRESS, INTEGER, INTEGER),
        check_slices=(*[ADDRESS] * 6, *[INTEGER] * 6),
        draw_blocks=(ADDRESS, INTEGER, *[WORD] * 6),
    )


@lru_cache(maxsize=256)
def _message(wire: WireInfo, drawn: bool) -> bytes:
    info = wire.info
    assert info is not None
    return struct(
        MESSAGE,
        rule=SCALES.index(wire.scale),
        max_exponent=info.max_exponent,
        drawn=drawn,
        target=target(info),
    ).tobytes()


@lru_cache(maxsize=256)
def _addition(
    wire: WireInfo | None, drawn: bool, accumulator: NumberFormat | None, sum_drawn: bool
) -> bytes:
    values = struct(
        ADDITION, sends=wire is not None, rounds=accumulator is not None, drawn=sum_drawn
    )
    if wire is not None:
        values["message"] = np.frombuffer(_message(wire, drawn), MESSAGE)[0]
    if accumulator is not None:
        values["accumulator"] = target(accumulator)
    return values.tobytes()


def _takes(values: NDArray[Any], wire: WireInfo | None) -> bool:
    """Whether values of this dtype and layout can be sent in place."""
    if values.dtype not in (FLOAT32, FLOAT64) or not values.flags.carray:
        return False
    return wire is None or _holds(values.dtype, wire)


def _holds(dtype: np.dtype[Any], wire: WireInfo) -> bool:
    """Whether the dtype has all values of the wire's format."""
    return wire.info is not None and wire.info.carrier in (FLOAT32, dtype)


def _numbers(
    values: NDArray[Any], starts: NDArray[np.intp] | None, lanes: NDArray[np.uint32] | None
) -> tuple[list[int], list[Any]]:
    """The first words of a message, and the arrays that have to stay alive."""
    begins = None if starts is None else np.ascontiguousarray(starts, np.int64)
    drawn = None if lanes is None else np.ascontiguousarray(lanes, np.uint32)
    words = [values.ctypes.data, *values.shape]
    words += [0, 0] if begins is None else [begins.ctypes.data, len(begins)]
    words.append(0 if drawn is None else drawn.ctypes.data)
    return words, [begins, drawn]


def send(
    rows: NDArray[Any],
    wire: WireInfo,
    starts: NDArray[np.intp],
    lanes: NDArray[np.uint32] | None,
) -> bool:
    """`fallback.wires.round_message` in place, on rows (entries, elements) of float32 or float64.

    False: the case is left to NumPy.
    """
    if not _takes(rows, wire) or (library := _library()) is None:
        return False
    lanes = lanes if wire.draws else None
    arguments = bytearray(_message(wire, lanes is not None))
    words, _alive = _numbers(rows, starts, lanes)
    _write_message(arguments, *words)
    function = library.send_float if rows.dtype == FLOAT32 else library.send_double
    function((ctypes.c_char * len(arguments)).from_buffer(arguments))
    return True


def add(
    sent: NDArray[Any],
    kept: NDArray[Any],
    wire: WireInfo | None,
    starts: NDArray[np.intp] | None,
    lanes: NDArray[np.uint32] | None,
    accumulator: NumberFormat | None,
    sum_lanes: NDArray[np.uint32] | None,
) -> bool:
    """Add `kept` to what arrives of `sent`, in place.

    **Arguments**:

    - `sent`, `kept`: (entries, elements) of float32 or float64, the elements side by side.
    - `wire`, `starts`, `lanes`: as for `send`; None: `sent` is not rounded.
    - `accumulator`: what the message and the sum are rounded to, if they are. `sum_lanes` are the
      random numbers of the sum.

    **Returns**: False if the case is left to NumPy.
    """
    pitch, rest = divmod(kept.strides[0], kept.itemsize)
    aligned = not rest and kept.strides[1] == kept.itemsize and kept.flags.aligned
    if kept.dtype != sent.dtype or not aligned or not _takes(sent, wire):
        return False
    library = _library()
    if library is None:
        return False
    arguments = bytearray(_addition(wire, lanes is not None, accumulator, sum_lanes is not None))
    words, _alive = _numbers(sent, starts, lanes)
    _write_values(arguments, *words)
    drawn = None if sum_lanes is None else np.ascontiguousarray(sum_lanes, np.uint32)
    _write_other(
        arguments, kept.ctypes.data, pitch % 2**64, 0 if drawn is None else drawn.ctypes.data
    )
    function = library.add_float if sent.dtype == FLOAT32 else library.add_double
    function((ctypes.c_char * len(arguments)).from_buffer(arguments))
    return True


@lru_cache(maxsize=256)
def _chain(
    wire: WireInfo,
    accumulator: NumberFormat | None,
    draws: bool,
    seed: int,
    streams: tuple[int, int],
) -> bytes:
    values = struct(
        CHAIN,
        seed=seed,
        added=streams[0],
        sent=streams[1],
        at_hops=wire.at_hops,
        at_members=wire.at_members,
        wire_drawn=wire.draws,
        rule=SCALES.index(wire.scale),
        rounds=accumulator is not None,
        drawn=draws,
    )
    if wire.info is not None:
        values["target"], values["max_exponent"] = target(wire.info), wire.info.max_exponent
    if accumulator is not None:
        values["accumulator"] = target(accumulator)
    return values.tobytes()


def fold_chain(
    out: NDArray[Any],
    addresses: NDArray[np.uint64],
    numbers: NDArray[np.int64],
    like: NDArray[Any],
    wire: WireInfo,
    starts: NDArray[np.intp],
    accumulator: NumberFormat | None,
    *,
    draws: bool,
    seed: int,
    call: int,
    streams: tuple[int, int],
    places: NDArray[np.uint64],
    index: int,
) -> bool:
    """Fold the members of one message in the order of their visits.

    **Arguments**:

    - `out`: (entries, elements) of float32 or float64, which the totals are written to.
    - `addresses`, `numbers`: of the members, (entries, elements) each, and their numbers in the
      group. They have the dtype and the strides of `like`.
    - `wire`, `starts`: what is sent is rounded to it; the first elements of blocks with one scale.
    - `accumulator`: what partial sums are rounded to, if they are, and whether that `draws`.
    - `seed`, `call`, `streams`, `places`, `index`: of the random numbers: the streams of sums and
      of messages, the batch offset of each entry, and the number of the first element.

    **Returns**: False if the case is left to NumPy.
    """
    if like.dtype not in SOURCES or not _holds(out.dtype, wire):
        return False
    ends = np.append(starts[1:], out.shape[1])
    if wire.scale is not None and int((ends - starts).max(initial=0)) > TILE:
        return False
    rows = [out, like]
    pitches = [array.strides[0] // array.itemsize for array in rows]
    even = all(not array.strides[0] % array.itemsize for array in rows)
    if not even or any(array.strides[1] != array.itemsize for array in rows):
        return False
    library = _library()
    if library is None:
        return False
    arguments = bytearray(_chain(wire, accumulator, draws, seed, streams))
    begins = np.ascontiguousarray(starts, np.int64)
    offsets = np.ascontiguousarray(places, np.uint64)
    _write_chain(
        arguments,
        out.ctypes.data,
        pitches[0] % 2**64,
        *out.shape,
        addresses.ctypes.data,
        numbers.ctypes.data,
        len(addresses),
        pitches[1] % 2**64,
        SOURCES.index(like.dtype),
        begins.ctypes.data,
        len(begins),
        offsets.ctypes.data,
        index,
        call,
    )
    function = library.chain_float if out.dtype == FLOAT32 else library.chain_double
    function((ctypes.c_char * len(arguments)).from_buffer(arguments))
    return True


def draw(
    count: int, start: int, key: tuple[int, int], counters: tuple[int, int, int]
) -> NDArray[np.uint32] | None:
    """The lanes start, start + 1, ... of a key (seed, stream) at (step, call, batch offset).

    None: so few are left to NumPy.
    """
    if count < LEAST_DRAWN or (library := _library()) is None:
        return None
    block, skipped = divmod(start, _BLOCK)
    blocks = -(-(skipped + count) // _BLOCK)
    lanes = np.empty(blocks * _BLOCK, np.uint32)
    library.draw_blocks(lanes.ctypes.data, blocks, *key, 1 + block, *counters)
    return lanes[skipped : skipped + count]


def check_slices(
    table: NDArray[np.int64], members: NDArray[np.int64], source_rows: int, target_rows: int
) -> NDArray[np.int64] | None:
    """The segments of a ragged_all_to_all, whose slices NumPy need not check any more.

    `table` is (4, replicas, entries, slices), `members` (groups, members). None: a slice is wrong,
    or the case is left to NumPy.
    """
    _, replicas, entries, slices = table.shape
    rows = replicas * entries * target_rows
    if rows > COVERED * table[0].size or (library := _library()) is None:
        return None
    segments, filled = np.empty((table[0].size, 5), np.int64), np.full(1, -1)
    covered, places = np.zeros(rows, np.uint8), np.argsort(members, axis=None)
    arrays = segments, filled, covered, table, members, places
    sizes = (replicas, entries, slices, members.shape[1], source_rows, target_rows)
    library.check_slices(*(array.ctypes.data for array in arrays), *sizes)
    return segments[: filled[0]] if filled[0] >= 0 else None


def exchange_rows(
    target: NDArray[Any],
    source: NDArray[Any],
    output: NDArray[Any],
    tables: Sequence[NDArray[Any]],
    members: NDArray[np.int64],
) -> bool:
    """A ragged_all_to_all into a new array, `target`.

    **Arguments**:

    - `target`, `source`, `output`: (replicas, batch entries, rows, *row).
    - `tables`: input_offsets, send_sizes, output_offsets and recv_sizes, each (replicas, batch
      entries, slices), all of them int32 or int64.
    - `members`: (groups, members).

    **Returns**: False if a slice is wrong, or the case is left to NumPy, as are long slices and
    those that a receiver does not get in the order of their senders. `target` is undefined then.
    """
    replicas, entries, slices = tables[0].shape
    if target.nbytes > COPIED * tables[0].size or target.dtype.hasobject:
        return False
    if not all(array[0].flags.c_contiguous for array in (source, output)):
        return False
    if (library := _library()) is None:
        return False
    fault, given = np.zeros(1, np.int64), [np.ascontiguousarray(table) for table in tables]
    arguments = bytearray(EXCHANGE.itemsize)
    addresses = [array.ctypes.data for array in (target, source, output, *given, members, fault)]
    _write_exchange(
        arguments,
        *addresses[:3],
        source.strides[0] % 2**64,
        output.strides[0] % 2**64,
        *addresses[3:8],
        *(entries, slices, members.shape[1], source.shape[2], target.shape[2]),
        math.prod(target.shape[3:]) * target.itemsize,
        target.nbytes >= limits.STREAMED,
        addresses[8],
    )
    shared = (ctypes.c_char * len(arguments)).from_buffer(arguments)
    exchange = library.exchange_int if given[0].itemsize == 4 else library.exchange_long
    receivers = replicas * entries
    part = max(1, receivers * COPIED // max(1, target.nbytes))
    part -= part % RECEIVERS if part > RECEIVERS else 0

    def exchange_part(first: int) -> None:
        exchange(shared, first, min(first + part, receivers))

    threads.share(exchange_part, range(0, receivers, part), target.nbytes)
    return not fault[0]


def copy(target: NDArray[Any], source: NDArray[Any]) -> bool:
    """np.copyto past the caches, for arrays that are larger than these.

    False: the case is left to NumPy.
    """
    if target.dtype != source.dtype or target.dtype.hasobject or not target.flags.writeable:
        return False
    if source.shape != target.shape:
        source = np.broadcast_to(source, target.shape)
    axes = [*zip(target.shape, target.strides, source.strides, strict=True)]
    run = target.itemsize
    while axes and (axes[-1][0] == 1 or axes[-1][1:] == (run, run)):
        run *= axes.pop()[0]
    if not target.size or run < RUN or (library := _library()) is None:
        return False
    table = _axes(len(axes))(*chain.from_iterable(axes))
    library.copy_runs(target.ctypes.data, source.ctypes.data, run, table, len(axes))
    return True


@cache
def _axes(count: int) -> Any:
    """The type of a table of so many axes: length, and two strides."""
    return ctypes.c_longlong * (3 * count)


def copy_segments(
    source: NDArray[Any], target: NDArray[Any], segments: NDArray[np.int64], size: int
) -> bool:
    """`fallback.ragged_copy` of contiguous arrays (replicas, rows, row); `size` is in bytes.

    False: the case is left to NumPy, as are long segments, which threads share.
    """
    if source.dtype.hasobject or size > COPIED * len(segments):
        return False
    if (library := _library()) is None:
        return False
    table = np.ascontiguousarray(segments, np.int64)
    row = source.shape[2] * source.itemsize
    part = max(1, len(table) * COPIED // size)
    addresses = target.ctypes.data, source.ctypes.data
    sizes = source.shape[1], target.shape[1], row
    streams = size >= limits.STREAMED

    def copy_part(first: int) -> None:
        count = min(part, len(table) - first)
        at = table.ctypes.data + first * table.strides[0]
        library.copy_segments(*addresses, at, count, *sizes, streams)

    threads.share(copy_part, range(0, len(table), part), size)
    return True
