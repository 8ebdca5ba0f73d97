"""shard_map: global arrays sharded over a mesh; the function sees one replica's shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import trees
from ..libraries import call_on_bits, copy_array, first_unlike, on_device, owner
from .arguments import as_array, is_array, own_results, read_only
from .axis_environment import (
    Axes,
    AxisEntry,
    AxisName,
    agree_on,
    extend_axis_environment,
    lockstep_axes,
    mesh_sharding,
    new_axes,
)
from .mapped_array.align import expand, sizes
from .mapped_array.array import Array, MappedArray, unpack, wrap_array


class Mesh:
    """Replicas in a grid with named axes.

    **Arguments**:

    - `shape`: the number of replicas along each axis, all positive.
    - `axis_names`: a name for each.

    **Raises**:

    - ValueError: when the two do not fit together, a name comes twice or a size is not positive.

    >>> mesh = Mesh((4, 2), ("x", "y"))
    >>> mesh.size, mesh.shape
    (8, {'x': 4, 'y': 2})
    """

    def __init__(
        self, shape: int | Sequence[int], axis_names: AxisName | Sequence[AxisName]
    ) -> None:
        counts = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        names = tuple(axis_names) if isinstance(axis_names, Sequence) else (axis_names,)
        if isinstance(axis_names, str):
            names = (axis_names,)
        if len(counts) != len(names):
            raise ValueError(
                f"Mesh shape {counts} has {len(counts)} axes, but axis_names {names} has "
                f"{len(names)}"
            )
        if len(set(names)) != len(names):
            raise ValueError(f"Mesh axis_names {names} has a name twice")
        for count in counts:
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
                raise ValueError(f"Mesh shape {counts} must hold positive integers")
        self.axis_names: tuple[AxisName, ...] = names
        self.shape: dict[AxisName, int] = {
            name: int(count) for name, count in zip(names, counts, strict=True)
        }

    @property
    def size(self) -> int:
        """The number of replicas."""
        return math.prod(self.shape.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.shape.items()) == list(other.shape.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shape.items()))

    def __repr__(self) -> str:
        return f"Mesh({tuple(self.shape.values())}, {self.axis_names})"


class P:
    """How an array is split over a mesh: for each of its axes None, a mesh axis, or a tuple of
    them.

    ``P("x")`` splits axis 0 over x; ``P(None, ("x", "y"))`` splits axis 1 over both, x-major;
    ``P()`` splits nothing. Mesh axes that do not occur hold equal copies.

    >>> P("x", None, ("y", "z"))
    P('x', None, ('y', 'z'))
    """

    def __init__(self, *entries: Any) -> None:
        self.entries: tuple[tuple[AxisName, ...], ...] = tuple(
            () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
            for entry in entries
        )
        names = [name for entry in self.entries for name in entry]
        if len(set(names)) != len(names):
            raise ValueError(
                f"{self!r} has a mesh axis twice; each may split one axis of the array"
            )

    def __iter__(self) -> Iterator[tuple[AxisName, ...]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        shown = (e[0] if len(e) == 1 else (e or None) for e in self.entries)
        return f"P({', '.join(repr(entry) for entry in shown)})"


def shard_map(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    *,
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Run `f` on the shards of global arrays, one for each replica of a mesh.

    Each argument is split by its PartitionSpec (`P`). `f` sees MappedArrays of shard shape and may
    use collectives over the mesh's axes. Results are assembled by `out_specs`.

    **Arguments**:

    - `f`: a function of pytrees of arrays that returns a pytree of arrays.
    - `mesh`: the replicas.
    - `in_specs`: a P, or a tuple with a P or tree prefix of Ps for each argument.
    - `out_specs`: a P or tree prefix of Ps for the results. Mesh axes that a P does not name
      declare the result replicated along them.
    - `check_vma`: compare the replicas' copies of results that out_specs declares replicated;
      False takes the first copy without comparing.

    **Returns**: A function with the positional arguments of `f`. The caller owns its results: they
    are writable and share no memory with the arguments or each other.

    **Raises**:

    - ValueError: when specs do not fit the arguments or results, a size is not divisible by its
      mesh axes, or a result declared replicated has copies that differ.
    - TypeError: when specs hold anything but Ps.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> mesh = gpusim.Mesh((2, 2), ("x", "y"))
    >>> dot = gpusim.shard_map(
    ...     lambda a, b: lax.psum(a @ b, "y"),
    ...     mesh=mesh, in_specs=(gpusim.P("x", "y"), gpusim.P("y")), out_specs=gpusim.P("x"),
    ... )
    >>> dot(np.arange(16.0).reshape(4, 4), np.ones(4))
    array([ 6., 22., 38., 54.])
    """
    if not callable(f):
        raise TypeError(f"shard_map needs a function, but got {f!r:.60}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"shard_map mesh must be a gpusim.Mesh, but got {mesh!r:.60}")
    in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        _check_specs(what, specs, mesh)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        if isinstance(in_specs, tuple) and len(in_specs) != len(args):
            raise ValueError(
                f"shard_map in_specs has {len(in_specs)} entries for {len(args)} arguments"
            )
        leaves, structure = trees.flatten(args)
        specs = trees.broadcast_prefix(in_specs, args, "shard_map in_specs", _is_spec)
        shape = tuple(mesh.shape.values())
        mesh_axes = new_axes(mesh.axis_names, shape, sharding=mesh_sharding("shard_map", shape))
        outer = bool(lockstep_axes())
        with extend_axis_environment(mesh_axes):
            shards = [
                _split(leaf, spec, mesh_axes, f"shard_map: leaf {number} of the arguments")
                for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
            ]
            result = f(*trees.unflatten(structure, shards))
            parts, result_structure = trees.flatten(result)
            places = trees.broadcast_prefix(out_specs, result, "shard_map out_specs", _is_spec)
            whole = [
                _join(part, spec, mesh_axes, outer, check_vma, f"shard_map: result {number}")
                for number, (part, spec) in enumerate(zip(parts, places, strict=True))
            ]
        return trees.unflatten(result_structure, own_results(whole, leaves))

    return mapped


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)


def _check_specs(what: str, specs: Any, mesh: Mesh) -> None:
    found = [None] if specs is None else trees.broadcast_prefix(specs, specs, what, _is_spec)
    for spec in found:
        if not isinstance(spec, P):
            raise TypeError(
                f"shard_map {what} must hold PartitionSpecs (gpusim.P), but got {spec!r:.60}"
            )
        for name in (name for entry in spec for name in entry):
            if name not in mesh.shape:
                raise ValueError(
                    f"shard_map {what} has {spec!r}, but the mesh has no axis {name!r}; its axes "
                    f"are {mesh.axis_names!r}"
                )


def _mesh_axes_of(spec: P, mesh_axes: Axes) -> list[list[AxisEntry]]:
    by_name = {mesh_axis.name: mesh_axis for mesh_axis in mesh_axes}
    return [[by_name[name] for name in entry] for entry in spec]


def _split(leaf: Any, spec: P, mesh_axes: Axes, what: str) -> Any:
    """The argument as a MappedArray of shards: a split axis becomes the mesh axes and the rest."""
    if not is_array(leaf) and not spec.entries:
        return leaf
    data, axes = unpack(as_array(leaf, what))
    outer = len(axes)
    ndim = data.ndim - outer
    if len(spec) > ndim:
        raise ValueError(
            f"{what} has shape {data.shape[outer:]}, which has fewer axes than its spec {spec!r}"
        )
    shape = list(data.shape[:outer])
    mesh_places: dict[AxisEntry, int] = {}
    rest_places = []
    for axis, split in enumerate([*_mesh_axes_of(spec, mesh_axes), *[[]] * (ndim - len(spec))]):
        length = data.shape[outer + axis]
        count = math.prod(sizes(tuple(split)))
        if length % count:
            names = tuple(mesh_axis.name for mesh_axis in split)
            raise ValueError(
                f"{what} has shape {data.shape[outer:]}: axis {axis} of size {length} is not "
                f"divisible by the size {count} of mesh axes {names!r} (spec {spec!r})"
            )
        for mesh_axis in split:
            mesh_places[mesh_axis] = len(shape)
            shape.append(mesh_axis.size)
        rest_places.append(len(shape))
        shape.append(length // count)
    own = tuple(mesh_axis for mesh_axis in mesh_axes if mesh_axis in mesh_places)
    order = [*range(outer), *(mesh_places[mesh_axis] for mesh_axis in own), *rest_places]
    for mesh_axis in own if on_device(data) else ():
        mesh_axis.like = data
    if on_device(data):
        mesh_axes[0].read_only |= {id(owner(data))}
    shards = call_on_bits(np.reshape, data, shape).transpose(order)
    if order != sorted(order):
        shards = copy_array(shards)  # as moved axes of vmap
    return wrap_array(read_only(shards), (*axes, *own))


def _join(part: Any, spec: P, mesh_axes: Axes, outer: bool, check: bool, what: str) -> Any:
    """The global array that `part` holds the shards of."""
    value = as_array(part, what)
    data, axes = unpack(value)
    if not isinstance(value, MappedArray):
        data = copy_array(data)  # it may be an array of the caller's
    enclosing = tuple(mesh_axis for mesh_axis in axes if mesh_axis not in mesh_axes)
    ndim = data.ndim - len(axes)
    entries = _mesh_axes_of(spec, mesh_axes)
    if len(entries) > ndim:
        raise ValueError(
            f"{what} has shape {value.shape}, which has fewer axes than its out_specs {spec!r}"
        )
    named = tuple(
        mesh_axis for mesh_axis in mesh_axes if any(mesh_axis in entry for entry in entries)
    )
    data, axes = _one_copy(data, axes, [f for f in mesh_axes if f not in named], check, what, spec)
    full = expand(data, axes, (*enclosing, *named))
    places = {mesh_axis: len(enclosing) + place for place, mesh_axis in enumerate(named)}
    start = len(enclosing) + len(named)
    order = list(range(len(enclosing)))
    shape = list(full.shape[: len(enclosing)])
    for axis in range(ndim):
        split = entries[axis] if axis < len(entries) else []
        order += [places[mesh_axis] for mesh_axis in split] + [start + axis]
        shape.append(math.prod(sizes(tuple(split))) * full.shape[start + axis])
    joined = full.transpose(order).reshape(shape)
    return wrap_array(joined, enclosing) if outer else joined


def _one_copy(
    data: Array, axes: Axes, replicated: list[AxisEntry], check: bool, what: str, spec: P
) -> tuple[Array, Axes]:
    """The first of the copies along mesh axes that out_specs declares replicated.

    **Raises**:

    - ValueError: when a copy has other bits.
    """
    for mesh_axis in replicated:
        if mesh_axis not in axes:
            continue
        place = axes.index(mesh_axis)
        copies = np.moveaxis(data, place, 0)
        first = copies[0]
        if check:
            index = first_unlike(copies)
            if index is not None:
                raise ValueError(
                    f"{what} is declared replicated over mesh axis {mesh_axis.name!r} by out_specs "
                    f"{spec!r}, but replicas {mesh_axis.offset} and {mesh_axis.offset + index} "
                    "hold different values: name the axis in out_specs, or reduce over it "
                    "(lax.psum, lax.pmean, lax.all_gather)"
                )
            agree_on(
                first,
                mesh_axis.sharding,
                f"{what}, declared replicated over mesh axis {mesh_axis.name!r}",
            )
        data, axes = first, axes[:place] + axes[place + 1 :]
    return data, axes
