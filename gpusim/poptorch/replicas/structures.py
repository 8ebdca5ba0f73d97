"""The tensors in the arguments and results of models, and the structures around them.

Structures are lists, tuples, dictionaries, dataclasses, and types with a parser. They keep their
constants, subclasses and order of keys. optree does not serve here: subclasses of its containers
are leaves to it, it sorts keys, and its registry is for ever, while parsers can be replaced.
"""

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

__all__ = [
    "PARSERS",
    "Parser",
    "Rebuild",
    "StandIn",
    "flatten",
    "flatten_like",
    "flatten_outputs",
    "map_leaves",
    "standing_in",
]

Rebuild = Callable[[Iterator[Tensor]], Any]
"""Makes the structure again around other tensors, which it takes in order."""


class Parser(Protocol):
    """The methods of PopTorch's ICustomArgParser."""

    def yieldTensors(self, struct: Any) -> Iterator[Tensor]: ...

    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[Tensor]) -> Any: ...


PARSERS: dict[type, Parser] = {}
"""Parsers by the types that they are for (registerCustomArgParser)."""


def flatten(value: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors in a structure, in order, and a function that makes the structure again.

    Everything that is neither a tensor nor a structure is a constant.

    >>> import torch
    >>> tensors, rebuild = flatten({"x": torch.zeros(2), "name": "relu", "more": (torch.ones(1),)})
    >>> len(tensors)
    2
    >>> rebuild(iter([3, 4]))
    {'x': 3, 'name': 'relu', 'more': (4,)}
    """
    found: list[Tensor] = []
    return found, _flatten(value, found, None)


def flatten_like(like: Any, value: Any) -> list[Tensor]:
    """The tensors in a structure in the order of another one: mappings in that one's order of keys.

    **Raises**:

    - ValueError: for mappings with other keys, and structures with other numbers of children.

    >>> import torch
    >>> flatten_like({"x": 0, "y": 0}, {"y": torch.tensor(1), "x": torch.tensor(2)})
    [tensor(2), tensor(1)]
    """
    if isinstance(value, Tensor):
        return [value]
    kinds = type(value).__mro__
    node = None if PARSERS and any(kind in PARSERS for kind in kinds) else _node(value)
    of_like = None if node is None else _node(like)
    if node is None or of_like is None:
        return flatten(value)[0]
    children: Iterable[Any] = node[0]
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        if value.keys() != like.keys():
            raise ValueError(f"expected the keys {[*like]}, got {[*value]}")
        children = [value[key] for key in like]
    pairs = zip(of_like[0], children, strict=True)
    return [x for inner, child in pairs for x in flatten_like(inner, child)]


def flatten_outputs(value: Any) -> tuple[list[Tensor], Rebuild]:
    """As `flatten`, for the results of a model.

    **Raises**:

    - Error: for constants that may hold tensors, objects of unknown types.
    """
    found: list[Tensor] = []
    return found, _flatten(value, found, _refuse_unknown)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The structure with the function's results for its leaves, tensors and constants.

    >>> map_leaves(str, {"x": [1, (2, None)]})
    {'x': ['1', ('2', 'None')]}
    """
    node = _node(value)
    if node is None:
        return function(value)
    children, rebuild = node
    return rebuild([map_leaves(function, child) for child in children])


CONSTANTS = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device)
"""Constants that a model may return beside tensors."""


def _refuse_unknown(constant: Any) -> None:
    if not isinstance(constant, CONSTANTS):
        raise compiler_error(
            "Only nested lists and tuples of tensors are supported: the model returned "
            f"a value of type {type(constant).__name__}"
        )


def _flatten(value: Any, found: list[Tensor], check: Callable[[Any], None] | None) -> Rebuild:
    """Add tensors to those found, and check constants."""
    if isinstance(value, Tensor):
        found.append(value)
        return next
    if PARSERS:
        kind = value.kind if isinstance(value, StandIn) else type(value)
        for base in kind.__mro__:
            if base in PARSERS:
                return _flatten_parsed(value, PARSERS[base], found)
    node = _node(value)
    if node is None:
        if check is not None:
            check(value)
        return lambda tensors: value
    children, rebuild = node
    parts: list[Rebuild] = []
    for child in children:
        if isinstance(child, Tensor):
            found.append(child)
            parts.append(next)
        else:
            parts.append(_flatten(child, found, check))
    return lambda tensors: rebuild([part(tensors) for part in parts])


def _node(value: Any) -> tuple[Iterable[Any], Callable[[list[Any]], Any]] | None:
    """The children of a structure, and what makes it again around others; None for a leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return value, kind
    if kind is dict:
        keys = [*value]
        return value.values(), lambda items: dict(zip(keys, items, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        children = [getattr(value, name) for name in names]
        return children, lambda items: dataclasses.replace(
            value, **dict(zip(names, items, strict=True))
        )
    if isinstance(value, Mapping):
        keys = [*value]
        return [*value.values()], lambda items: _mapping_like(value, keys, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value, lambda items: kind(*items)
    if isinstance(value, (list, tuple)):
        return value, kind
    return None


def _mapping_like(value: Mapping[Any, Any], keys: list[Any], items: list[Any]) -> Any:
    kind: Any = type(value)
    found = dict(zip(keys, items, strict=True))

    if not isinstance(value, MutableMapping):
        return kind(found)
    made = copy.copy(value)  # keeps what is beside the items, a default for example
    for key, item in found.items():
        made[key] = item
    return made


# ---------------------------------------------------------------- parsers


@dataclasses.dataclass(frozen=True, eq=False)
class StandIn:
    """A value of another type that a parser has made around other tensors.

    Its tensors are found as in the original value, and the parser makes it again.

    **Attributes**:

    - `kind`: the type of the original value.
    - `value`: the parser's value, around these `tensors`.
    """

    kind: type
    value: Any
    tensors: tuple[Tensor, ...]


def standing_in(value: Any, tensors: Iterable[Tensor]) -> Any:
    """The structure around other tensors, with a StandIn where a parser makes another type."""
    return flatten(value)[1](_StandingIn(tensors))


class _StandingIn(Iterator[Tensor]):
    """Tensors for a Rebuild that is to make StandIns."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = iter(tensors)

    def __next__(self) -> Tensor:
        return next(self._tensors)


def _flatten_parsed(value: Any, parser: Parser, found: list[Tensor]) -> Rebuild:
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
