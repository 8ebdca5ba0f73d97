"""What models take and return, as a list of its tensors and the structure around them.
Structures are lists, tuples, dictionaries, dataclasses, and types that have a parser."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from itertools import islice
from numbers import Number
from typing import Any, Protocol

import torch
from torch import Tensor

from ..poptorch_core import compiler_error

__all__ = ["PARSERS", "Parser", "Rebuild", "StandIn", "flatten", "flatten_outputs", "standing_in"]

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


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """A value with other tensors, of which its parser has made a value of another type.

    Its tensors are found as in the value itself, and what is made again is the parser's.

    Attributes:
        kind: what it was.
        value: what the parser has made of it, with these `tensors`.
    """

    kind: type
    value: Any
    tensors: tuple[Tensor, ...]


def standing_in(value: Any, tensors: Iterable[Tensor]) -> Any:
    """The structure around other tensors, with a StandIn where a parser makes another type."""
    return flatten(value)[1](_StandingIn(tensors))


class _StandingIn(Iterator[Tensor]):
    """Tensors for a Rebuild, which asks it for StandIns."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = iter(tensors)

    def __next__(self) -> Tensor:
        return next(self._tensors)


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
    kind = value.kind if isinstance(value, StandIn) else type(value)
    parser = next((PARSERS[base] for base in kind.__mro__ if base in PARSERS), None)
    if parser is not None:
        return _of_parsed(value, parser, found)
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


def _of_parsed(value: Any, parser: Parser, found: list[Tensor]) -> Rebuild:
    if isinstance(value, StandIn):
        kind, original, own = value.kind, value.value, [*value.tensors]
    else:
        kind, original, own = type(value), value, [*parser.yieldTensors(value)]
    found.extend(own)

    def rebuild(tensors: Iterator[Tensor]) -> Any:
        if not isinstance(tensors, _StandingIn):
            return parser.reconstruct(original, tensors)
        others = tuple(islice(tensors, len(own)))
        made = parser.reconstruct(original, iter(others))
        return made if type(made) is kind else StandIn(kind, made, others)

    return rebuild


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
