"""What a collective on tensors is to compute, as a text that an operator of a graph can carry.
The table says for each how it runs, what shapes and dtypes come out, and what its transpose is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fallback import schedules

from .. import collectives
from ..collectives.exchange import exchanged_axes
from ..collectives.operand import Operand, normalize_axis
from ..collectives.scatter import scattered_axis
from ..formats import Format
from ..groups import Groups
from ..maps.binding import Collective
from ..reduction import Reduction, current
from .alone import own_slice, own_slice_back, same
from .frames import Around

__all__ = ["Plan", "TABLE", "What"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class What:
    """One collective as its caller asks for it, wherever its axes are.

    Attributes:
        collective: its name in `TABLE`.
        arguments, options: its positional and keyword arguments after the operands, without:
        groups: the members of its groups, or None.
        reduction: one that was given with the call, or None.
        numbers: which leaves of the tree were Python numbers, not among the operands; they count as
            calls too.
        sizes: those that the axes had where a graph was traced; () elsewhere.
    """

    collective: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    reduction: Reduction | None = None
    numbers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def encode(self) -> str:
        """As a text, JSON of what is not at its default."""
        return _json({name: part for name, part in self._parts().items() if part})

    def _parts(self) -> dict[str, Any]:
        return {
            "arguments": self.arguments,
            "options": dict(self.options),
            "groups": self.groups,
            "reduction": None if self.reduction is None else _written(self.reduction),
            "numbers": self.numbers,
            "sizes": self.sizes,
        }

    @staticmethod
    @lru_cache(maxsize=1024)
    def decode(collective: str, text: str) -> What:
        """The inverse of `encode`.

        Raises:
            ValueError: for a name or a text that is none of gpusim's.
        """
        if collective not in TABLE:
            raise ValueError(f"no collective is called {collective!r}; expected one of {[*TABLE]}")
        parts = json.loads(text)
        reduction = parts.get("reduction")
        return What(
            collective,
            _tuples(parts.get("arguments", ())),
            tuple(parts.get("options", {}).items()),
            _tuples(parts.get("groups")),
            None if reduction is None else _read(reduction),
            _tuples(parts.get("numbers", ())),
            _tuples(parts.get("sizes", ())),
        )


def _json(value: Any) -> str:
    """JSON, of values whose strings need no escapes; torch.compile cannot trace json.dumps."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return "[" + ",".join([_json(item) for item in value]) + "]"
    if isinstance(value, dict):
        return "{" + ",".join([f'"{name}":{_json(item)}' for name, item in value.items()]) + "}"
    return f"{value}"


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


#: The classes whose values are written field by field: what a Reduction may be made of.
WRITTEN: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Reduction, Format, *vars(schedules).values())
    if isinstance(kind, type) and is_dataclass(kind)
}


def _written(value: Any) -> Any:
    """A Reduction, or a part of one, as what JSON knows."""
    if isinstance(value, np.dtype):
        return {"is": "dtype", "name": value.name}
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    name = type(value).__name__
    if name not in WRITTEN:
        return value
    parts = {part.name: _written(getattr(value, part.name)) for part in fields(value) if part.init}
    return {"is": name, **parts}


def _read(value: Any) -> Any:
    """The inverse of `_written`."""
    if isinstance(value, list):
        return tuple(map(_read, value))
    if not isinstance(value, dict):
        return value
    parts = {name: _read(part) for name, part in value.items()}
    kind = parts.pop("is")
    return np.dtype(parts["name"]) if kind == "dtype" else WRITTEN[kind](**parts)


@dataclass(frozen=True)
class Plan:
    """One collective with the axes around it, which its backward pass needs when they are gone.

    Attributes:
        what: the collective.
        names: the axes it runs over.
        around: all axes bound where it was called, outermost first.
    """

    what: What
    names: tuple[str, ...]
    around: tuple[Around, ...]

    def encode(self) -> str:
        """As a text; the same plan has the same."""
        return _text(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def decode(text: str) -> Plan:
        """The inverse of `encode`."""
        collective, what, names, around = json.loads(text)
        axes = tuple(Around(*axis) for axis in around)
        return Plan(What.decode(collective, what), tuple(names), axes)

    @property
    def entry(self) -> Entry:
        return TABLE[self.what.collective]

    @property
    def over(self) -> tuple[int, ...]:
        """The places in `around` of the axes that the collective runs over."""
        return tuple(
            max(place for place, axis in enumerate(self.around) if axis.name == name)
            for name in self.names
        )

    @property
    def members(self) -> int:
        """How many replicas take part in one group."""
        if self.what.groups is not None:
            return len(self.what.groups[0])
        return math.prod(self.around[place].total for place in self.over)

    @property
    def once(self) -> bool:
        """Whether the result is the same on all replicas along the axes."""
        return self.entry.once and self.what.groups is None

    @property
    def rounding(self) -> str:
        """How sums are rounded: as the reduction that was given says, or the one around."""
        return (self.what.reduction or current().reduction).rounding

    def transposed(self) -> Plan | None:
        """The collective that cotangents go back through; None where there is none."""
        change = self.entry.transpose
        return (
            None if change is None else replace(self, what=replace(change(self.what), numbers=()))
        )

    def collective(self) -> Collective:
        """What `gpusim.maps` runs."""
        what, entry = self.what, self.entry
        options = dict(what.options)
        if entry.grouped:
            options["groups"] = None if what.groups is None else Groups(what.groups)
        if entry.folds:
            options["reduction"] = None  # one that was given is the context's, for its call number
        return Collective(what.collective, entry.definition, what.arguments, options, entry.folds)

    def results(self, operands: list[tuple[Any, np.dtype[Any]]]) -> list[tuple[Any, Any]]:
        """The shapes and dtypes of all leaves' results from those of the operands, batch axes
        apart.

        Raises:
            ValueError, TypeError, AxisError: those of the collective itself.
        """
        arity = self.entry.arity
        leaves = [operands[first : first + arity] for first in range(0, len(operands), arity)]
        return [result for leaf in leaves for result in self.entry.results(leaf, self)]


@lru_cache(maxsize=1024)
def _text(plan: Plan) -> str:
    parts = [plan.what.collective, plan.what.encode(), plan.names, plan.around]
    return json.dumps(parts, separators=(",", ":"))


# Shapes.


def _like_operands(*places: int) -> Callable[[list[Any], Plan], list[Any]]:
    return lambda operands, plan: [operands[place] for place in places]


_same = _like_operands(0)


def _sum(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    return [(shape, np.dtype(np.int32) if dtype.kind == "b" else dtype)]


def _mean(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    if dtype.kind in "biu":
        dtype = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    return [(shape, dtype)]


def _holder(operands: list[Any], plan: Plan) -> list[Any]:
    return [(operands[0][0], np.dtype(np.int32))]


def _checked(shape: Shape, dtype: np.dtype[Any], plan: Plan) -> Operand:
    """An operand of one number's memory, for the collectives' own checks."""
    return Operand([np.broadcast_to(np.zeros((), dtype), shape)], 0, plan.what.collective)


def _gathered(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    tiled, count = plan.what.option("tiled"), plan.members
    axis = normalize_axis(plan.what.option("axis"), len(shape) + (not tiled), "axis")
    if tiled:
        return [((*shape[:axis], shape[axis] * count, *shape[axis + 1 :]), dtype)]
    return [((*shape[:axis], count, *shape[axis:]), dtype)]


def _scattered(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    tiled, count = plan.what.option("tiled"), plan.members
    given = plan.what.option("scatter_dimension")
    axis = scattered_axis(_checked(shape, dtype, plan), given, tiled, count)
    kept = (shape[axis] // count,) if tiled else ()
    return [((*shape[:axis], *kept, *shape[axis + 1 :]), dtype)]


def _exchanged(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    tiled, count = plan.what.option("tiled"), plan.members
    operand = _checked(shape, dtype, plan)
    split_axis, concat_axis = plan.what.arguments
    split, concat = exchanged_axes(operand, split_axis, concat_axis, tiled, count)
    sizes = list(shape)
    if tiled:
        sizes[split] //= count
        sizes[concat] *= count
    else:
        del sizes[split]
        sizes.insert(concat, count)
    return [(tuple(sizes), dtype)]


def _one_part(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    return [(shape[1:], dtype)]


def _all_parts(operands: list[Any], plan: Plan) -> list[Any]:
    ((shape, dtype),) = operands
    return [((plan.members, *shape), dtype)]


# Transposes.


def _to(name: str) -> Callable[[What], What]:
    return lambda what: replace(what, collective=name)


def _gather_back(what: What) -> What:
    options = (("scatter_dimension", what.option("axis")), ("tiled", what.option("tiled")))
    return replace(what, collective="psum_scatter", options=options)


def _scatter_back(what: What) -> What:
    options = (("axis", what.option("scatter_dimension")), ("tiled", what.option("tiled")))
    return replace(what, collective="all_gather", options=options)


def _exchange_back(what: What) -> What:
    split, concat = what.arguments
    return replace(what, arguments=(concat, split))


def _slice_back(what: What) -> What:
    return replace(what, collective="own_slice", options=())


@dataclass(frozen=True)
class Entry:
    """One collective.

    Attributes:
        definition: the function of `gpusim.collectives`; of what is computed `alone`, that of
            `gpusim.torch.alone`.
        results: the shapes and dtypes that come out.
        transpose: what it is differentiated by; None where there is nothing.
        grouped, folds: whether the definition takes groups, and a reduction.
        once: whether, without groups, its result is the same on all replicas.
        alone: whether each replica computes it from its own value, so that nobody waits.
        arity: how many operands a leaf has.
    """

    definition: Callable[..., Any]
    results: Callable[[list[Any], Plan], list[Any]]
    transpose: Callable[[What], What] | None = None
    grouped: bool = False
    folds: bool = False
    once: bool = False
    alone: bool = False
    arity: int = 1


TABLE: dict[str, Entry] = {
    "psum": Entry(collectives.psum, _sum, _to("psum"), grouped=True, folds=True, once=True),
    "pmean": Entry(collectives.pmean, _mean, _to("pmean"), grouped=True, folds=True, once=True),
    "pmax": Entry(collectives.pmax, _same, grouped=True, once=True),
    "pmin": Entry(collectives.pmin, _same, grouped=True, once=True),
    "pargmax": Entry(collectives.pargmax, _holder, once=True),
    "pargmin": Entry(collectives.pargmin, _holder, once=True),
    "psum_scatter": Entry(
        collectives.psum_scatter, _scattered, _scatter_back, grouped=True, folds=True
    ),
    "all_gather": Entry(collectives.all_gather, _gathered, _gather_back, grouped=True, once=True),
    "all_to_all": Entry(collectives.all_to_all, _exchanged, _exchange_back, grouped=True),
    "ppermute": Entry(collectives.ppermute, _same, _to("ppermute.transpose")),
    "ppermute.transpose": Entry(collectives.ppermute.transpose, _same, _to("ppermute")),
    "pshuffle": Entry(collectives.pshuffle, _same, _to("pshuffle.transpose")),
    "pshuffle.transpose": Entry(collectives.pshuffle.transpose, _same, _to("pshuffle")),
    "pbroadcast": Entry(collectives.pbroadcast, _same, _to("pbroadcast.transpose"), once=True),
    "pbroadcast.transpose": Entry(collectives.pbroadcast.transpose, _same, _to("pbroadcast")),
    "ragged_all_to_all": Entry(
        collectives.ragged_all_to_all,
        _like_operands(1),
        _to("ragged_all_to_all.transpose"),
        grouped=True,
        arity=6,
    ),
    "ragged_all_to_all.transpose": Entry(
        collectives.ragged_all_to_all.transpose,
        _like_operands(1, 2),
        _to("ragged_all_to_all"),
        grouped=True,
        arity=7,
    ),
    # Those of poptorch_experimental_addons, whose backward pass is declared: a sum or nothing, and
    # of a gathered value the own part.
    "all_reduce": Entry(collectives.psum, _sum, _to("all_reduce.backward"), folds=True, once=True),
    "all_reduce.backward": Entry(same, _same, _to("all_reduce"), alone=True),
    "all_gather_equal": Entry(collectives.all_gather, _gathered, _slice_back, once=True),
    "own_slice": Entry(own_slice, _one_part, _to("own_slice.transpose"), alone=True),
    "own_slice.transpose": Entry(own_slice_back, _all_parts, _to("own_slice"), alone=True),
}
