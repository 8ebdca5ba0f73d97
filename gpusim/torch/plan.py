"""A collective call on tensors, serialized so that a graph operator can carry it; and, for every
collective, how it runs, its results and its derivative, from its record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from gpusim.fallback import schedules

from .. import collectives
from ..collectives import Call, Collective
from ..collectives.record import COLLECTIVES, ShapeDtype
from ..formats import Format
from ..groups import Groups
from ..reduction import Reduction, as_reduction, current
from ..wires import Wire
from .axes import EnclosingAxis
from .local import identity, own_slice, own_slice_transpose

__all__ = ["ALL_REDUCE", "CollectiveSpec", "CollectivePlan", "operation"]


@dataclass(frozen=True)
class CollectiveSpec:
    """A collective call, without its operands and axes.

    **Attributes**

    - `collective`: its name, see `operation`.
    - `parameters`: its parameters by name.
    - `groups`: the members of its groups, or None.
    - `reduction`: one that was given with the call, or None.
    - `numbers`: which leaves of the tree were Python numbers; they are not among the operands, and
      count as calls too.
    - `sizes`: the sizes of the axes where a graph was traced; () elsewhere.
    - `reduction_text`: instead of `reduction` its text, where torch.compile traces the call.
    """

    collective: str
    parameters: tuple[tuple[str, Any], ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    reduction: Reduction | None = None
    numbers: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    reduction_text: str | None = None

    def encode(self) -> str:
        """JSON of the fields that are not at their default."""
        return _json({name: part for name, part in self._parts().items() if part})

    def _parts(self) -> dict[str, Any]:
        return {
            "parameters": dict(self.parameters),
            "groups": self.groups,
            "reduction": self.reduction_text
            if self.reduction is None
            else _to_json(self.reduction),
            "numbers": self.numbers,
            "sizes": self.sizes,
        }

    @staticmethod
    @lru_cache(maxsize=1024)
    def decode(collective: str, text: str) -> CollectiveSpec:
        """The inverse of `encode`.

        **Raises**: ValueError for an unknown name.
        """
        operation(collective)
        parts = json.loads(text)
        reduction = parts.get("reduction")
        return CollectiveSpec(
            collective,
            _tuples(tuple(parts.get("parameters", {}).items())),
            _tuples(parts.get("groups")),
            as_reduction(reduction) if isinstance(reduction, str) else _from_json(reduction),
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


#: The classes whose values are serialized field by field: the parts of a Reduction.
SERIALIZABLE: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Reduction, Format, Wire, *vars(schedules).values())
    if isinstance(kind, type) and is_dataclass(kind)
}


def _to_json(value: Any) -> Any:
    """A Reduction, or a part of one, as what JSON knows."""
    if isinstance(value, np.dtype):
        return {"is": "dtype", "name": value.name}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    name = type(value).__name__
    if name not in SERIALIZABLE:
        return value
    parts = {part.name: _to_json(getattr(value, part.name)) for part in fields(value) if part.init}
    return {"is": name, **parts}


def _from_json(value: Any) -> Any:
    """The inverse of `_to_json`."""
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    parts = {name: _from_json(part) for name, part in value.items()}
    kind = parts.pop("is")
    return np.dtype(parts["name"]) if kind == "dtype" else SERIALIZABLE[kind](**parts)


@dataclass(frozen=True)
class CollectivePlan:
    """One collective with the axes around it, which its backward pass needs when they are gone.

    **Attributes**: `spec` is the call, `names` are the axes it runs over, `enclosing` all axes
    bound where it was called, outermost first.
    """

    spec: CollectiveSpec
    names: tuple[str, ...]
    enclosing: tuple[EnclosingAxis, ...]

    def encode(self) -> str:
        """As JSON; equal plans have equal texts."""
        return _text(self)

    @staticmethod
    @lru_cache(maxsize=1024)
    def decode(text: str) -> CollectivePlan:
        """The inverse of `encode`."""
        collective, spec, names, enclosing = json.loads(text)
        axes = tuple(EnclosingAxis(*axis) for axis in enclosing)
        return CollectivePlan(CollectiveSpec.decode(collective, spec), tuple(names), axes)

    @property
    def operation(self) -> Operation:
        return operation(self.spec.collective)

    @property
    def over(self) -> tuple[int, ...]:
        """The places in `enclosing` of the axes that the collective runs over."""
        return tuple(
            max(place for place, axis in enumerate(self.enclosing) if axis.name == name)
            for name in self.names
        )

    @property
    def members(self) -> int:
        """How many replicas take part in one group."""
        if self.spec.groups is not None:
            return len(self.spec.groups[0])
        return math.prod(self.enclosing[place].total for place in self.over)

    @property
    def replicated(self) -> bool:
        """Whether the result is the same on all replicas along the axes."""
        return self.operation.replicated and self.spec.groups is None

    @property
    def draws(self) -> bool:
        """Whether sums take random numbers, by the given reduction, or that of the context."""
        return (self.spec.reduction or current().reduction).draws

    def transposed(self) -> CollectivePlan | None:
        """The collective of the cotangents; None where there is none."""
        back = self.operation.transpose(self.spec)
        return None if back is None else replace(self, spec=replace(back, numbers=()))

    def call(self) -> Call:
        """The call that `gpusim.maps` runs; a given reduction is the context's there."""
        groups = None if self.spec.groups is None else Groups(self.spec.groups)
        collective = self.operation.collective
        assert collective is not None
        parameters = dict(self.spec.parameters)
        return Call(collective, (), self.names, groups, None, parameters, self.spec.collective)

    def results(self, operands: list[ShapeDtype]) -> list[ShapeDtype]:
        """The shapes and dtypes of all leaves' results from those of the operands, batch axes
        apart.

        **Raises** the errors of the collective itself.
        """
        found: list[ShapeDtype] = []
        count = self.operation.operands
        for first in range(0, len(operands), count):
            leaf, parameters = operands[first : first + count], dict(self.spec.parameters)
            found += self.operation.result(leaf, self.members, **parameters)
        return found


@lru_cache(maxsize=1024)
def _text(plan: CollectivePlan) -> str:
    parts = [plan.spec.collective, plan.spec.encode(), plan.names, plan.enclosing]
    return json.dumps(parts, separators=(",", ":"))


@dataclass(frozen=True)
class Operation:
    """How the operators run one collective and differentiate it.

    **Attributes**

    - `collective`: its record; None for what each replica computes from its own value, by `local`.
    - `result`, `operands`, `replicated`: as in the record.
    - `transpose`: the call of the cotangents, from the call; None where there is no derivative.
    """

    collective: Collective[Any] | None
    result: Callable[..., list[ShapeDtype]]
    transpose: Callable[[CollectiveSpec], CollectiveSpec | None]
    local: Callable[..., Any] | None = None
    operands: int = 1
    replicated: bool = False


def operation(name: str) -> Operation:
    """The operation of a name: one declared here, or that of a collective's record.

    **Raises**: ValueError for an unknown name.
    """
    if name in DECLARED:
        return DECLARED[name]
    record = COLLECTIVES.get(name)
    if record is None or record.result is None:
        known = [*COLLECTIVES, *DECLARED]
        raise ValueError(f"no collective is called {name!r}; expected one of {known}")
    return _operation_of(record)


@lru_cache(maxsize=256)
def _operation_of(record: Collective[Any]) -> Operation:
    assert record.result is not None
    return Operation(
        record, record.result, _transpose_of(record), None, record.operands, record.replicated
    )


def _transpose_of(record: Collective[Any]) -> Callable[[CollectiveSpec], CollectiveSpec | None]:
    def transpose(spec: CollectiveSpec) -> CollectiveSpec | None:
        if record.transpose is None:
            return None
        back = record.transpose.call_by_name(
            (None,) * record.transpose.operands, None, None, None, dict(spec.parameters)
        )
        parameters = tuple(back.parameters.items())
        return replace(spec, collective=back.collective.key, parameters=parameters)

    return transpose


# Collectives whose backward pass is declared, and is not their transpose: those of
# poptorch_experimental_addons, where all replicas have the gradient of one loss.


def _to(name: str) -> Callable[[CollectiveSpec], CollectiveSpec]:
    return lambda spec: replace(spec, collective=name, parameters=())


def _same(operands: Sequence[ShapeDtype], members: int) -> list[ShapeDtype]:
    return [*operands]


def _one_part(operands: Sequence[ShapeDtype], members: int) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    return [(shape[1:], dtype)]


def _all_parts(operands: Sequence[ShapeDtype], members: int) -> list[ShapeDtype]:
    ((shape, dtype),) = operands
    return [((members, *shape), dtype)]


def _gather_back(spec: CollectiveSpec) -> CollectiveSpec:
    return replace(spec, collective="own_slice", parameters=())


assert collectives.psum.result is not None and collectives.all_gather.result is not None

ALL_REDUCE = "all_reduce_cross_replica_sum"

DECLARED: dict[str, Operation] = {
    # The sum is in the forward pass, and gradients go on as they are; or the other way round.
    ALL_REDUCE: Operation(
        collectives.psum,
        collectives.psum.result,
        _to(f"{ALL_REDUCE}.backward"),
        replicated=True,
    ),
    f"{ALL_REDUCE}.backward": Operation(None, _same, _to(ALL_REDUCE), identity),
    "all_gather_cross_replica": Operation(
        collectives.all_gather, collectives.all_gather.result, _gather_back, replicated=True
    ),
    "own_slice": Operation(None, _one_part, _to("own_slice.transpose"), own_slice),
    "own_slice.transpose": Operation(None, _all_parts, _to("own_slice"), own_slice_transpose),
}
