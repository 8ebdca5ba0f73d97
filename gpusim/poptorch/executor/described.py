"""Arguments as JSON: the dtypes and shapes of tensors, and the constants around them.

Reading JSON makes values of Python's and torch's own types only, whatever the text says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from gpusim.poptorch.executor.arguments import Arguments
from gpusim.poptorch.replicas.structures import StandIn

__all__ = ["Undescribed", "as_json", "from_json"]


class Undescribed(Exception):
    """An argument of a type that JSON cannot describe. The message names argument and type."""


def as_json(arguments: Arguments) -> dict[str, Any]:
    """Raises Undescribed for types other than Python's own and torch's.

    >>> from gpusim.poptorch.executor.arguments import Binder
    >>> bind = Binder(lambda x, scale: x)
    >>> as_json(bind((torch.zeros(2, 3), 0.5), {}))["args"]
    [{'tensor': ['float32', [2, 3]]}, 0.5]
    """
    named = zip(arguments.names, arguments.args, strict=True)
    return {
        "names": [*arguments.names],
        "args": [written(value, name) for name, value in named],
        "kwargs": {name: written(value, name) for name, value in arguments.kwargs.items()},
    }


def from_json(found: Any) -> Arguments:
    """The arguments, with meta tensors. ValueError for JSON that `as_json` does not write."""
    try:
        names, args, kwargs = found["names"], found["args"], found["kwargs"]
        if len(names) != len(args) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{len(names)} names of {len(args)} arguments")
        return Arguments(
            tuple(names), tuple(map(read, args)), {name: read(kwargs[name]) for name in kwargs}
        )
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"its arguments make no sense: {type(error).__name__}: {error}") from None


# ---------------------------------------------------------------- writing

AS_THEY_ARE = (type(None), bool, int, str)


def written(value: Any, name: str) -> Any:
    """A value as JSON: an object with a single key stands for a type that JSON lacks."""
    kind = value.kind if isinstance(value, StandIn) else type(value)
    if kind in AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [written(item, name) for item in value]
    if kind is dict:
        pairs = value.items()
        return {"dict": [[written(key, name), written(item, name)] for key, item in pairs]}
    if isinstance(value, torch.Tensor):
        return {"tensor": [dtype_name(value.dtype), [*value.shape]]}
    for key, (types, write, _) in FORMS.items():
        if kind is types:
            return {key: write(value, name)}
    raise Undescribed(f"argument {name} is of type {kind.__module__}.{kind.__qualname__}")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- reading


def read(found: Any) -> Any:
    if isinstance(found, list):
        return [read(item) for item in found]
    if not isinstance(found, dict):
        return found
    [(key, value)] = found.items()
    if key == "dict":
        return {read(name): read(item) for name, item in value}
    if key == "tensor":
        dtype, shape = value
        return torch.empty(tuple(shape), dtype=dtype_named(dtype), device="meta")
    return FORMS[key][2](value)


def dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


#: By the key: the type, what writes one, and what reads it.
FORMS: dict[str, tuple[type, Callable[[Any, str], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda v, n: [written(x, n) for x in v], lambda f: tuple(map(read, f))),
    "float": (float, lambda v, n: repr(v), float),
    "complex": (complex, lambda v, n: repr(v), complex),
    "bytes": (bytes, lambda v, n: v.hex(), bytes.fromhex),
    "dtype": (torch.dtype, lambda v, n: dtype_name(v), dtype_named),
    "device": (torch.device, lambda v, n: str(v), torch.device),
    "slice": (
        slice,
        lambda v, n: [written(x, n) for x in (v.start, v.stop, v.step)],
        lambda f: slice(*map(read, f)),
    ),
    "range": (range, lambda v, n: [v.start, v.stop, v.step], lambda f: range(*f)),
}
