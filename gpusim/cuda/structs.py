"""The kernels' arguments, laid out as in the .cu sources: every field has 8 bytes.
One struct per kernel, passed by value."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

AXES = 8  # layout.cuh: outer axes that a layout can have

TARGET = np.dtype(
    [
        ("fraction_bits", "i8"),
        ("min_exponent", "i8"),
        ("smallest", "f8"),
        ("largest", "f8"),
        ("lowest", "f8"),
        ("has_infinity", "i8"),
        ("has_negative_zero", "i8"),
        ("bytes", "i8"),
        ("nan_code", "i8"),
        ("infinity_code", "i8"),
    ]
)
LAYOUT = np.dtype(
    [
        ("base", "u8"),
        ("table", "u8"),
        ("member_stride", "i8"),
        ("members", "i8"),
        ("alike", "i8"),
        ("rows", "i8"),
        ("length", "i8"),
        ("chunks", "i8"),
        ("stride", "i8"),
        ("axes", "i8"),
        ("sizes", "i8", AXES),
        ("strides", "i8", AXES),
        ("rows_of_value", "i8"),
        ("first", "i8"),
        ("shift", "i8"),
        ("out", "u8"),
    ]
)
FINISH = np.dtype(
    [
        ("divisor", "f8"),
        ("divides", "i8"),
        ("rounding", "i8"),
        ("encoding", "i8"),
        ("drawn", "i8"),
        ("stream", "u8"),
        ("seed", "u8"),
        ("step", "u8"),
        ("call", "u8"),
        ("batch_offset", "u8"),
        ("batch_offsets", "u8"),
        ("target", TARGET),
        ("from_zero", "i8"),
        ("bytes", "i8"),
        ("wrap_bits", "i8"),
        ("wrap_sign", "i8"),
    ]
)
FOLD = np.dtype(
    [
        ("layout", LAYOUT),
        ("finish", FINISH),
        ("accumulator", TARGET),
        ("op", "i8"),
        ("parts", "i8"),
        ("ring", "i8"),
        ("total", "i8"),
        ("slice", "i8"),
        ("count", "i8"),
        ("before", "u8"),
        ("partial", "u8"),
        ("stored", "i8"),
        ("stored_bytes", "i8"),
        ("leaves", "i8"),
        ("level", "i8"),
        ("node", "i8"),
        ("edges", "u8"),
        ("starts", "u8"),
        ("graph", "u8"),
        ("instructions", "i8"),
        ("share", "i8"),
        ("share_blocks", "i8"),
        ("batches", "i8"),
    ]
)
EXACT = np.dtype(
    [
        ("layout", LAYOUT),
        ("finish", FINISH),
        ("accumulator", TARGET),
        ("rounding", "i8"),
        ("drawn", "i8"),
    ]
)
COMPENSATED = np.dtype(
    [
        ("layout", LAYOUT),
        ("finish", FINISH),
        ("accumulator", TARGET),
        ("rounding", "i8"),
        ("neumaier", "i8"),
    ]
)
LOGICAL = np.dtype(
    [
        ("layout", LAYOUT),
        ("all", "i8"),
        ("mask", "u8"),
        ("one", "u8"),
        ("bytes", "i8"),
        ("partial", "u8"),
        ("share", "i8"),
        ("share_blocks", "i8"),
    ]
)
ROUND = np.dtype([("layout", LAYOUT), ("finish", FINISH)])
SENT = np.dtype(
    [
        *((name, "u8") for name in ("base", "table")),
        *((name, "i8") for name in ("stride", "members", "visited", "turned", "alike", "pitch")),
        *((name, "i8") for name in ("rows", "entries", "elements")),
        ("tables", "u8"),
        *((name, "i8") for name in ("edges", "blocks", "bases", "starts", "program")),
        *((name, "i8") for name in ("messages", "units", "length", "shift", "lanes", "passes")),
        *((name, "i8") for name in ("slices", "slice", "at", "result_sent", "first_is_sent")),
        *((name, "i8") for name in ("rule", "rounding", "wide", "drawn", "max_exponent")),
        *((name, "u8") for name in ("stream", "member_step", "result_step")),
        ("target", TARGET),
        *((name, "i8") for name in ("step", "step_drawn")),
        ("lone_step", "u8"),
        ("accumulator", TARGET),
        ("divides", "i8"),
        ("divisor", "f8"),
        *((name, "i8") for name in ("instructions", "depth")),
        *((name, "u8") for name in ("workspace", "largest")),
        *((name, "i8") for name in ("begin", "values", "resumes")),
        ("finish", FINISH),
        ("result_rounding", "i8"),
        ("out", "u8"),
    ]
)
FIXED = np.dtype(
    [
        *((name, "u8") for name in ("base", "table")),
        *((name, "i8") for name in ("stride", "members", "pitch", "entries", "elements", "bits")),
        ("finish", FINISH),
        ("out", "u8"),
    ]
)
ROWS = np.dtype(
    [
        ("base", "u8"),
        ("table", "u8"),
        ("stride", "i8"),
        ("pitch", "i8"),
        ("replicas", "i8"),
        ("counts", "u8"),
        ("count", "i8"),
    ]
)
RAGGED = np.dtype(
    [
        ("source", ROWS),
        ("destination", ROWS),
        ("segments", "u8"),
        ("ends", "u8"),
        ("order", "u8"),
        ("fault", "u8"),
        ("count", "i8"),
        ("row_units", "i8"),
        ("units", "i8"),
        ("tiles", "u8"),
    ]
)
SCATTER = np.dtype(
    [
        ("array", "u8"),
        ("values", "u8"),
        ("places", "u8"),
        ("order", "u8"),
        ("count", "i8"),
        ("op", "i8"),
        ("first_of_equals", "i8"),
        ("is_signed", "i8"),
        ("target", TARGET),
    ]
)
#: The struct that the kernels of a source file take.
OF_SOURCE = {
    "fold.cu": FOLD,
    "exact.cu": EXACT,
    "compensated.cu": COMPENSATED,
    "logical.cu": LOGICAL,
    "round.cu": ROUND,
    "chain.cu": SENT,
    "machine.cu": SENT,
    "fixed.cu": FIXED,
    "ragged.cu": RAGGED,
    "scatter.cu": SCATTER,
}


def struct(dtype: np.dtype[Any], **values: Any) -> NDArray[Any]:
    """One struct with these `values`; the other fields are zero."""
    result = np.zeros((), dtype)
    for name, value in values.items():
        result[name] = value
    return result


def writer(dtype: np.dtype[Any], *paths: str) -> Callable[..., None]:
    """A function that writes neighbouring 8-byte words of a struct into a buffer that holds it.

    `paths` names the words in order, with dots for structs in structs.

    >>> buffer = bytearray(LAYOUT.itemsize)
    >>> writer(LAYOUT, "base", "table")(buffer, 3, 4)
    >>> np.frombuffer(buffer, LAYOUT)["table"].tolist()
    [4]
    """
    offsets = [_offset(dtype, path) for path in paths]
    first = offsets[0]
    assert offsets == [first + 8 * position for position in range(len(paths))], paths
    pack = Struct(f"={len(paths)}Q").pack_into

    def write(buffer: bytearray, *words: int) -> None:
        pack(buffer, first, *words)

    return write


def _offset(dtype: np.dtype[Any], path: str) -> int:
    offset = 0
    for name in path.split("."):
        assert dtype.fields is not None
        dtype, start = dtype.fields[name][:2]
        offset += start
    return offset
