"""Tensors in the safetensors format, which many programs read: a JSON table, then the bytes.

https://github.com/huggingface/safetensors describes it. Whatever a table claims is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

__all__ = ["DTYPES", "packed", "unpacked"]

#: The format's names of dtypes; tensors of others have to be seen as bytes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED = {name: dtype for dtype, name in DTYPES.items()}
LENGTH = 8  # bytes that say how long the table is, in little-endian order
ALIGNED = 8  # the table is filled up with spaces, so that the first tensor begins at such a place


def packed(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """The pieces of a file, bytes or buffers of bytes, in order.

    KeyError for a dtype that the format has not.

    >>> content = b"".join(packed({"w": torch.tensor([1.0, 2.0])}))
    >>> unpacked(content)
    {'w': tensor([1., 2.])}
    """
    table: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape]
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table).encode()
    text += b" " * (-(LENGTH + len(text)) % ALIGNED)
    yield len(text).to_bytes(LENGTH, "little")
    yield text
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def unpacked(content: bytes) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own.

    ValueError for what is no such file, or a damaged one.
    """
    length = int.from_bytes(content[:LENGTH], "little")
    begin = LENGTH + length
    if len(content) < LENGTH or begin > len(content):
        raise ValueError(f"tensors: {len(content)} bytes are fewer than their table has")
    try:
        table = json.loads(content[LENGTH:begin])
    except ValueError as error:  # of Unicode as well
        raise ValueError(f"tensors: their table is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError("tensors: their table is no object")
    table.pop("__metadata__", None)
    data = memoryview(content)[begin:]
    found, place = {}, 0
    for name, entry in sorted(table.items(), key=lambda item: offsets(*item)):
        dtype, shape, (first, last) = checked(name, entry)
        if first != place or last > len(data):
            raise ValueError(f"tensors: {name} is at {first} to {last}, expected from {place} on")
        found[name] = tensor_of(data[first:last], dtype, shape)
        place = last
    if place != len(data):
        raise ValueError(f"tensors: {len(data)} bytes, of which {place} are of tensors")
    return {name: found[name] for name in table}


def offsets(name: str, entry: Any) -> list[int]:
    """Where a tensor's bytes are."""
    found = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not are_counts(found) or len(found) != 2:
        raise ValueError(f"tensors: {name} has no data_offsets")
    return [*found]


def checked(name: str, entry: dict[str, Any]) -> tuple[torch.dtype, list[int], list[int]]:
    """An entry's dtype, shape and place, which agree."""
    kind, shape, place = entry.get("dtype"), entry.get("shape"), offsets(name, entry)
    if not isinstance(kind, str) or kind not in NAMED or not are_counts(shape):
        raise ValueError(f"tensors: {name} has dtype {kind!r} and shape {shape!r}")
    dtype = NAMED[kind]
    size = math.prod(shape) * dtype.itemsize
    if place[1] - place[0] != size:
        raise ValueError(f"tensors: {name} is at {place}, expected {size} bytes")
    return dtype, shape, place


def are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def tensor_of(data: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if not data:  # which torch makes no tensor of
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
