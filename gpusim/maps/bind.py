"""From a collective's call inside a map to the dispatcher, and back.

Operands of lockstep axes are stacked already; in threaded axes the replicas' threads meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, ParamSpec

import numpy as np

from .. import trees
from ..collectives import Call, Collective
from ..collectives.dispatch import Resolved, resolve
from ..groups import Groups
from ..libraries import copy_array, on_device
from .agreement import agreement
from .arguments import as_array, as_stacked
from .axis_environment import AxisEntry, axis_environment, lockstep_axes, refuse_diverging
from .axis_environment import resolve as resolve_name
from .call_site import call_site
from .direct import fold_directly
from .lockstep import is_scalar, run_lockstep, sharded_axis
from .mapped_array.array import MappedArray, unpack, wrap_array
from .names import AxisName, is_positional, refuse_positional, split_names
from .rendezvous import Contribution, meet

P = ParamSpec("P")


class MappedCollective(Generic[P]):
    """A collective inside vmap, pmap and shard_map, called with one replica's values.

    Its `transpose`, where it is linear, is the adjoint map on cotangents: for all x and y, the
    inner products (summed over replicas) <f(x), y> and <x, f.transpose(y)> are equal. It takes the
    cotangent of the result in the place of x, and otherwise the same arguments. A result that is
    stored once counts as R equal values, and so does a cotangent that is the same on all replicas.
    """

    def __init__(self, collective: Collective[P], module: str) -> None:
        self.collective = collective
        self._call = collective.call
        self.__name__ = self.__qualname__ = collective.name
        self.__module__ = module
        self.__doc__ = collective.__doc__
        self.__wrapped__ = collective.call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        return bind(self._call(*args, **kwargs))

    @property
    def transpose(self) -> MappedCollective[Any]:
        """The collective of the cotangents; AttributeError where there is none."""
        back = self.collective.transpose
        if back is None:
            raise AttributeError(f"{self.__name__} has no transpose: it is not linear")
        return self if back is self.collective else MappedCollective(back, self.__module__)

    def __repr__(self) -> str:
        return f"<collective {self.__module__}.{self.__name__}>"

    def __reduce__(self) -> str:
        return self.__name__


def bind(call: Call) -> Any:
    """Run a call on each leaf of its operand, a pytree; or once, if it has several operands.

    **Raises**: NameError for an axis name that is not bound, and the errors of the collective.
    """
    operand = call.operands[0]
    if call.collective.fold is not None and isinstance(operand, MappedArray):
        direct = fold_directly(call, operand)
        if direct is not None:
            return direct
    single = call.collective.operands == 1
    if single and type(operand) not in trees.LEAF_TYPES:
        leaves, structure = trees.flatten(operand)
        found = bind_leaves(call, [(leaf,) for leaf in leaves], structure)
        return trees.unflatten(structure, [result for (result,) in found])
    (results,) = bind_leaves(call, (call.operands,), trees.LEAF if single else None)
    return results[0] if len(results) == 1 else tuple(results)


def bind_leaves(
    call: Call, leaves: Sequence[Sequence[Any]], structure: Any = None
) -> list[list[Any]]:
    """Run a call on leaves, for each the operands; its own operands are not looked at.

    **Arguments**: `structure` is the structure of the leaves' tree, to be compared between
    replicas.

    **Returns** for each leaf its results (most collectives have one).
    """
    collective, names = call.collective, split_names(call.axis_name)
    entries, positional = [], False
    for name in names:
        if type(name) is not str and is_positional(name):
            positional = True
        else:
            entries.append(resolve_name(name))
    if positional and collective.identity is None:
        refuse_positional(collective.name, call.axis_name)
    refuse_diverging(collective.name, entries)
    groups = None if call.groups is None else read_groups(call, entries, positional)
    if not names:
        return [[_lift(operand) for operand in operands] for operands in leaves]
    resolved = resolve(call, groups, len(leaves))
    ready = []
    for operands in leaves:
        ready.append(_ready(operands, resolved))
    enclosing = axis_environment()
    for entry in entries:
        if entry.index is not None or entry.sharding is not None:
            break
    else:
        return run_lockstep(resolved, names, entries, ready, enclosing)
    line = call_site() if sharded_axis(entries) is not None else ""
    contribution = Contribution(resolved, names, entries, ready, enclosing, structure, line)
    if any(entry.index is not None for entry in entries):
        return meet(contribution)
    return run_lockstep(resolved, names, entries, ready, enclosing, agreement(contribution))


def read_groups(call: Call, entries: Sequence[AxisEntry], positional: bool = False) -> Groups:
    """A call's axis_index_groups as a partition of the replicas along its axes, the entries.

    **Raises**: ValueError where they are not a partition, or with positional axes.
    """
    if isinstance(call.groups, Groups):
        return call.groups
    if positional:
        raise ValueError(
            f"axis_index_groups is for named axes only, but axis_name is {call.axis_name!r}; "
            "leave one of them out"
        )
    assert call.groups is not None
    uneven = call.collective.groups == "any"
    size = 1
    for entry in entries:
        size *= entry.total
    return Groups.from_axis_index_groups(call.groups, size, uneven=uneven)


def _ready(operands: Sequence[Any], call: Resolved) -> list[Any]:
    """Operands as stacked data; a Python number stays one where the collective has a rule for
    it."""
    if is_scalar(operands[0]) and call.collective.scalar is not None:
        if call.groups is None or call.groups.even:
            return [operands[0]]
    ready: list[Any] = []
    for operand in operands:
        ready.append(as_stacked(operand, f"{call.collective.name}'s operand"))
    return ready


def _lift(value: Any) -> Any:
    """The result of a collective over no axes: a copy, as others return new arrays."""
    if is_scalar(value):
        return value
    if isinstance(value, MappedArray) or lockstep_axes():
        data, axes = unpack(value if isinstance(value, MappedArray) else as_array(value, "operand"))
        return wrap_array(copy_array(data), axes)
    return copy_array(value) if isinstance(value, np.ndarray) or on_device(value) else value


__all__ = ["AxisName", "MappedCollective", "bind", "bind_leaves", "read_groups"]
