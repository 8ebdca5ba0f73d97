"""The axis environment: which named axes are bound around the running code, outermost first.

vmap and shard_map bind lockstep axes: all replicas advance in one batched operation. pmap binds a
threaded axis in each replica's thread; its entry has the replica's own index.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import GpusimError
from ..runtime.world import World, current_world

AxisName = Hashable


@dataclass(frozen=True)
class Sharding:
    """How an axis is sharded over the instances of a world.

    **Attributes**:

    - `world`: the world.
    - `counts`: how many indices of the axis each instance holds, in contiguous blocks.
    """

    world: World
    counts: tuple[int, ...]

    @property
    def offset(self) -> int:
        """The first index that this instance holds."""
        return sum(self.counts[: self.world.instance])


class AxisEntry:
    """One binding of an axis: its name, its size, its depth, and a thread's index along it.

    **Attributes**:

    - `name`: the axis name; None for a map without one.
    - `size`: the number of replicas.
    - `depth`: the number of enclosing axes; mapped axes are kept in this order.
    - `index`: the replica's own index along a threaded axis, None on a lockstep axis.
    - `sharding`: how the axis is sharded over instances; None if this instance holds all of it.
      `size` and `index` count this instance's replicas, `total` and `offset` all replicas.
    - `like`: an array of the library of the map's arguments, if that is not NumPy.
    - `read_only`: the ids of the arrays that own the arguments' memory, on a GPU, whose arrays have
      no flag.
    - `active`: False once the map has ended; its values must not be used any more.
    - `mesh`: whether the axis is that of a shard_map's mesh.
    """

    __slots__ = (
        "active",
        "depth",
        "index",
        "like",
        "mesh",
        "name",
        "read_only",
        "sharding",
        "size",
    )

    def __init__(
        self,
        name: AxisName,
        size: int,
        depth: int,
        index: int | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self.depth = depth
        self.index = index
        self.sharding = sharding
        self.like: Any = None
        self.read_only: frozenset[int] = frozenset()
        self.active = True
        self.mesh = False

    @property
    def total(self) -> int:
        """The number of replicas along the axis, on all instances."""
        return self.size if self.sharding is None else sum(self.sharding.counts)

    @property
    def offset(self) -> int:
        """The number of the first replica that this instance holds."""
        return 0 if self.sharding is None else self.sharding.offset

    def __repr__(self) -> str:
        where = "" if self.index is None else f"[{self.offset + self.index}]"
        return f"{self.name!r}{where} (size {self.total})"


Axes = tuple[AxisEntry, ...]

_axis_environment: ContextVar[Axes] = ContextVar("gpusim axis environment", default=())


def axis_environment() -> Axes:
    """The bound axes, outermost first."""
    return _axis_environment.get()


def lockstep_axes() -> Axes:
    """The bound axes that MappedArrays may be mapped over."""
    return tuple(entry for entry in _axis_environment.get() if entry.index is None)


def global_indices(entries: Sequence[AxisEntry]) -> tuple[NDArray[np.uint64], Axes]:
    """The replicas' linear indices over `entries`, row-major in their order, on all instances.

    **Returns**: The indices of the replicas that run here, along the lockstep axes among `entries`;
    and these axes, outermost first.
    """
    axes = tuple(sorted((f for f in entries if f.index is None), key=lambda entry: entry.depth))
    index: Any = np.zeros((1,) * len(axes), np.uint64)
    for entry in entries:
        shape = [entry.size if entry is other else 1 for other in axes]
        here = np.arange(entry.size).reshape(shape) if entry in axes else np.asarray(entry.index)
        index = index * np.uint64(entry.total) + (entry.offset + here).astype(np.uint64)
    return np.asarray(index), axes


class extend_axis_environment:
    """A block in which `entries` are bound inside the present ones; they end with the block."""

    __slots__ = ("entries", "token")

    def __init__(self, entries: Axes) -> None:
        self.entries = entries

    def __enter__(self) -> None:
        self.token = _axis_environment.set(_axis_environment.get() + self.entries)

    def __exit__(self, *exception: object) -> None:
        for entry in self.entries:
            entry.active = False
        _axis_environment.reset(self.token)


_diverging: ContextVar[tuple[Axes, Any]] = ContextVar("gpusim diverging axes", default=((), None))


class diverging:
    """A block of which only some replicas along lockstep `axes` need what all of them compute.

    `where` is a MappedArray that says which: the others keep what the block writes in place.
    """

    __slots__ = ("axes", "token", "where")

    def __init__(self, axes: Axes, where: Any) -> None:
        self.axes = axes
        self.where = where

    def __enter__(self) -> None:
        axes, where = _diverging.get()
        where = self.where if where is None else where & self.where
        self.token = _diverging.set((union(axes, self.axes), where))

    def __exit__(self, *exception: object) -> None:
        _diverging.reset(self.token)


def diverging_axes() -> Axes:
    """The axes along which some replicas discard what is computed here."""
    return _diverging.get()[0]


def diverging_where() -> Any:
    """A MappedArray that says which replicas keep what is computed here; None for all of them."""
    return _diverging.get()[1]


def refuse_diverging(what: str, entries: Sequence[AxisEntry]) -> None:
    """Refuse a collective that some devices of a mesh would not call.

    **Raises**:

    - GpusimError: if the code around it runs where a predicate differs along one of the axes.
    """
    for entry in _diverging.get()[0]:
        if entry.mesh and entry in entries:
            raise GpusimError(
                f"{what} over mesh axis {entry.name!r} in a cond, switch or while_loop whose "
                "predicate differs along that axis: the devices that do not take this branch would "
                "not call it, and the others would wait for ever; call it before the branch, or "
                "make the predicate the same on all of them (lax.pmax, say)"
            )


def new_axes(
    names: Sequence[AxisName],
    sizes: Sequence[int],
    index: int | None = None,
    sharding: Sharding | None = None,
) -> Axes:
    """Entries for the axes of one map, inside the present environment.

    `sharding` is that of the first axis; it replaces the axis's size.
    """
    if sharding is not None:
        sizes = (sharding.counts[sharding.world.instance], *sizes[1:])
    depth = len(_axis_environment.get())
    return tuple(
        AxisEntry(name, size, depth + place, index, None if place else sharding)
        for place, (name, size) in enumerate(zip(names, sizes, strict=True))
    )


def local_axis_size(what: str, axis_size: int | None) -> int | None:
    """The number of this instance's replicas for an argument axis_size, which counts all replicas.

    **Raises**:

    - ValueError: if the outermost axis has another size than the world.
    """
    world = current_world()
    if axis_size is None or world is None or _axis_environment.get():
        return axis_size
    if axis_size != world.replicas:
        raise ValueError(
            f"{what} axis_size is {axis_size}, but inside `with world` the outermost axis has the "
            f"world's {world.replicas} replicas"
        )
    return world.local_replicas


def outermost_sharding(what: str, size: int) -> Sharding | None:
    """The sharding of the outermost axis of a vmap or pmap; None if this instance holds all of it.

    **Raises**:

    - ValueError: if `size` is not the number of replicas that this instance holds.
    """
    world = current_world()
    if world is None or _axis_environment.get():
        return None
    if size != world.local_replicas:
        rows = f"[{world.replica_offset}:{world.replica_offset + world.local_replicas}]"
        raise ValueError(
            f"{what} inside `with world` maps over the world's replicas: instance "
            f"{world.instance} holds {world.local_replicas} of {world.replicas}, but got {size}"
            + (f"; pass the rows of its own replicas, {rows}" if size == world.replicas else "")
        )
    return Sharding(world, world.counts) if world.instances > 1 else None


def mesh_sharding(what: str, mesh: Sequence[int]) -> Sharding | None:
    """The same for a mesh whose replicas, or whose first axis, are the world's replicas.

    **Raises**:

    - ValueError: if neither are, or an instance would hold part of a row.
    """
    world = current_world()
    if world is None or _axis_environment.get():
        return None
    inner = math.prod(mesh[1:])
    each = {mesh[0] * inner: inner, mesh[0]: 1}.get(world.replicas)
    if each is None:
        raise ValueError(
            f"{what} mesh {tuple(mesh)} has {mesh[0] * inner} replicas, but inside `with world` "
            f"it, or its first axis, must have the world's {world.replicas}"
        )
    if any(count % each for count in world.counts):
        raise ValueError(
            f"{what} mesh {tuple(mesh)} has {each} replicas at each index of its first axis, which "
            f"do not divide the instances' {list(world.counts)}"
        )
    if world.instances == 1:
        return None
    return Sharding(world, tuple(count // each for count in world.counts))


def resolve(axis_name: AxisName) -> AxisEntry:
    """The innermost axis of that name.

    **Raises**:

    - NameError: if no enclosing map binds the name.
    """
    entries = _axis_environment.get()
    for entry in reversed(entries):
        if entry.name is not None and entry.name == axis_name:
            return entry
    names = ", ".join(repr(entry.name) for entry in entries if entry.name is not None)
    raise NameError(
        f"unbound axis name: {axis_name!r}; "
        + (f"the axes bound here are {names}" if names else "no axis is bound here")
        + " (axis names are bound by the axis_name of vmap or pmap, and by shard_map's mesh)"
    )


def union(first: Axes, second: Axes) -> Axes:
    """The axes of both, outermost first."""
    if first is second or not second:
        return first
    if not first:
        return second
    entries = sorted({*first, *second}, key=lambda entry: entry.depth)
    return tuple(entries)


def check_active(axes: Axes) -> None:
    """Refuse values whose map has ended.

    **Raises**:

    - GpusimError: naming the axis.
    """
    for entry in axes:
        if not entry.active:
            raise GpusimError(
                f"a MappedArray mapped over axis {entry.name!r} (size {entry.size}) was used after "
                "its map had ended; return it from the mapped function instead of keeping it"
            )
