"""What models take and return, as a list of its tensors and the structure around them.
Structures are lists, tuples, dictionaries, dataclasses, and types that have a parser."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from numbers import Number
from typing import Any, Protocol

import torch
from torch import Tensor

from ..poptorch_core import compiler_error

__all__ = ["PARSERS", "Parser", "Rebuild", "flatten", "flatten_outputs"]

Rebuild = Callable[[Iterator[Tensor]], Any]
"""Makes the structure again around other tensors, which it takes in order."""


class Parser(Protocol):
    """What PopTorch's ICustomArgParser has."""

    def yieldTensors(self, struct: Any) -> Iterator[Tensor]: ...

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Any: ...


PARSERS: dict[type, Parser] = {}
"""Parsers by the types that they are for (registerCustomArgParser)."""


def flatten(value: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors in a structure, in order, and what makes it again.

    Everything that is neither a tensor nor a structure is a constant.

    >>> import torch
    >>> tensors, rebuild = flatten({"x": torch.zeros(2), "name": "relu", "more": (torch.ones(1),)})
    >>> len(tensors)
    2
    >>> rebuild(iter([3, 4]))
    {'x': 3, 'name': 'relu', 'more': (4,)}
    """
    found: list[Tensor] = []
    return found, _flatten(value, found, lambda constant: None)


PLAIN = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device)
"""Constants that a model may return beside tensors."""


def flatten_outputs(value: Any) -> tuple[list[Tensor], Rebuild]:
    """The same of what a model returns.

    Raises:
        Error: for types that may hold tensors, but that are no structures.
    """
    found: list[Tensor] = []
    return found, _flatten(value, found, _refuse_unknown)


def _refuse_unknown(constant: Any) -> None:
    if not isinstance(constant, PLAIN):
        raise compiler_error(
            "Only nested lists and tuples of tensors are supported: the model returned "
            f"a value of type {type(constant).__name__}"
        )


def _flatten(value: Any, found: list[Tensor], take: Callable[[Any], None]) -> Rebuild:
    """Tensors are added to those found, and constants are shown to `take`."""
    if isinstance(value, Tensor):
        found.append(value)
        return next
    parser = next((PARSERS[kind] for kind in type(value).__mro__ if kind in PARSERS), None)
    if parser is not None:
        found.extend(parser.yieldTensors(value))
        return lambda tensors: parser.reconstruct(value, tensors)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _of_dataclass(value, found, take)
    if isinstance(value, Mapping):
        return _of_mapping(value, found, take)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named, fields = type(value), [_flatten(item, found, take) for item in value]
        return lambda tensors: named(*(field(tensors) for field in fields))
    if isinstance(value, (list, tuple)):
        kind, items = type(value), [_flatten(item, found, take) for item in value]
        return lambda tensors: kind(item(tensors) for item in items)
    take(value)
    return lambda tensors: value


def _of_dataclass(value: Any, found: list[Tensor], take: Callable[[Any], None]) -> Rebuild:
    names = [field.name for field in dataclasses.fields(value) if field.init]
    parts = {name: _flatten(getattr(value, name), found, take) for name in names}
    return lambda tensors: dataclasses.replace(
        value, **{name: part(tensors) for name, part in parts.items()}
    )


def _of_mapping(
    value: Mapping[Any, Any], found: list[Tensor], take: Callable[[Any], None]
) -> Rebuild:
    kind: Any = type(value)
    parts = {key: _flatten(item, found, take) for key, item in value.items()}

    def rebuild(tensors: Iterator[Tensor]) -> Any:
        items = {key: part(tensors) for key, part in parts.items()}
        if not isinstance(value, MutableMapping):
            return kind(items)
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made

    return rebuild
