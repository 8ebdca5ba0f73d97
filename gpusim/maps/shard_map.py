"""shard_map: global arrays sharded over a mesh; the function sees one replica's shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from .. import collectives, trees
from ..libraries import call_on_bits, copy_array, first_unlike, on_device, owner, to_host
from .agreement import DIGEST_BYTES, agree_on_arguments, agree_on_results, digest
from .arguments import as_array, is_array, own_results, read_only
from .axis_environment import (
    Axes,
    AxisEntry,
    AxisName,
    extend_axis_environment,
    lockstep_axes,
    mesh_sharding,
    new_axes,
)
from .bind import MappedCollective
from .call_site import call_site
from .mapped_array.align import expand
from .mapped_array.array import Array, MappedArray, unpack, wrap_array
from .records import NOBODY, called_by

_all_gather = MappedCollective(collectives.all_gather, __name__)

MISSING: Any = object()


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

    def along(self, axis_names: Collection[AxisName]) -> Mesh:
        """The mesh of some of the axes, in the order of this one; of all of them if none is named.

        **Raises**: ValueError: if there is no axis of a name.
        """
        if unknown := [name for name in axis_names if name not in self.shape]:
            raise ValueError(f"the mesh has no axes {unknown!r}; its axes are {self.axis_names!r}")
        names = [name for name in self.axis_names if name in axis_names] or self.axis_names
        return Mesh([self.shape[name] for name in names], names)

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

    def names(self, mesh_axis: AxisName) -> bool:
        """Whether an axis of the array is split over the mesh axis."""
        return any(mesh_axis in entry for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(self.entries)

    def __repr__(self) -> str:
        shown = (e[0] if len(e) == 1 else (e or None) for e in self.entries)
        return f"P({', '.join(repr(entry) for entry in shown)})"


_current_mesh: ContextVar[Mesh | None] = ContextVar("gpusim mesh", default=None)


@contextmanager
def set_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """A block in which `mesh` is that of every `shard_map` without one, as by jax.set_mesh.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> @gpusim.shard_map(in_specs=gpusim.P("x"), out_specs=gpusim.P())
    ... def total(v):
    ...     return lax.psum(v.sum(), "x")
    >>> with gpusim.set_mesh(gpusim.Mesh(4, "x")):
    ...     total(np.arange(8))
    array(28)
    """
    with _set_mesh(_checked_mesh(mesh)):
        yield mesh


@contextmanager
def _set_mesh(mesh: Mesh | None) -> Iterator[None]:
    token = _current_mesh.set(mesh)
    try:
        yield
    finally:
        _current_mesh.reset(token)


def _checked_mesh(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"shard_map mesh must be a gpusim.Mesh, but got {mesh!r:.60}")
    return mesh


def shard_map(
    f: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Any = MISSING,
    out_specs: Any = MISSING,
    *,
    axis_names: Collection[AxisName] = frozenset(),
    check_vma: bool = True,
    global_arrays: bool | None = None,
) -> Callable[..., Any]:
    """Run `f` on the shards of global arrays, one for each replica of a mesh.

    Each argument is split by its PartitionSpec (`P`). `f` sees MappedArrays of shard shape and may
    use collectives over the mesh's axes. Results are assembled by `out_specs`. Without `f` it is a
    decorator.

    **Arguments**:

    - `f`: a function of pytrees of arrays that returns a pytree of arrays.
    - `mesh`: the replicas. None: the mesh of the enclosing `set_mesh` or shard_map when the
      function is called.
    - `in_specs`: a P, or a tuple with a P or tree prefix of Ps for each argument. It is required:
      JAX infers it from the arrays' shardings, and NumPy's arrays have none.
    - `out_specs`: a P or tree prefix of Ps for the results. Mesh axes that a P does not name
      declare the result replicated along them.
    - `axis_names`: the axes of the mesh that `f` sees; all of them if empty. Along the others
      nothing is split.
    - `check_vma`: compare the replicas' copies of results that out_specs declares replicated;
      False takes the first copy without comparing.
    - `global_arrays`: for a World of several instances. True: each instance passes the same whole
      arrays, and receives whole results, as in one process. False: each passes the rows of its own
      replicas of an array that the mesh's first axis splits, and receives their rows. None is
      False, but refuses an array that looks like the whole one: equal on all instances, of a size
      that all replicas divide. Without such a World the three are the same.

    **Returns**: A function with the positional arguments of `f`, or a decorator. The caller owns
    its results: they are writable and share no memory with the arguments or each other.

    **Raises**:

    - ValueError: when there is no mesh, specs do not fit the arguments or results, a size is not
      divisible by its mesh axes, a result declared replicated has copies that differ, or an
      instance passes a whole array where its own rows are expected.
    - CollectiveMismatchError: when arguments that all instances share differ between them.
    - TypeError: when specs are missing or hold anything but Ps.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> mesh = gpusim.Mesh((2, 2), ("x", "y"))
    >>> @gpusim.shard_map(
    ...     mesh=mesh, in_specs=(gpusim.P("x", "y"), gpusim.P("y")), out_specs=gpusim.P("x")
    ... )
    ... def dot(a, b):
    ...     return lax.psum(a @ b, "y")
    >>> dot(np.arange(16.0).reshape(4, 4), np.ones(4))
    array([ 6., 22., 38., 54.])
    """
    if out_specs is MISSING or in_specs is MISSING:
        raise TypeError(
            f"shard_map needs {'out_specs' if out_specs is MISSING else 'in_specs'}= (gpusim.P for "
            "each of them; NumPy's arrays have no shardings to infer in_specs from)"
        )
    if f is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            global_arrays=global_arrays,
        )
    if not callable(f):
        raise TypeError(f"shard_map needs a function, but got {f!r:.60}")
    if isinstance(axis_names, str) or not isinstance(axis_names, Collection):
        raise TypeError(f"shard_map axis_names must be a set of names, but got {axis_names!r:.60}")
    if not isinstance(global_arrays, bool | None):
        raise TypeError(
            f"shard_map global_arrays must be True, False or None, but got {global_arrays!r:.60}"
        )
    in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    local_rows = global_arrays is False  # whether instances are known to pass their own rows

    def checked(mesh: Mesh) -> Mesh:
        mesh = _checked_mesh(mesh).along(axis_names)
        for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            _check_specs(what, specs, mesh)
        return mesh

    if mesh is not None:
        checked(mesh)

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        nonlocal local_rows
        full = _current_mesh.get() if mesh is None else mesh
        if full is None:
            raise ValueError(
                "shard_map has no mesh: give mesh=, or call the function in `with "
                "gpusim.set_mesh(mesh)`"
            )
        seen = full.along(axis_names) if mesh is not None else checked(full)
        if isinstance(in_specs, tuple) and len(in_specs) != len(args):
            raise ValueError(
                f"shard_map in_specs has {len(in_specs)} entries for {len(args)} arguments"
            )
        leaves, structure = trees.flatten(args)
        specs = trees.broadcast_prefix(in_specs, args, "shard_map in_specs", _is_spec)
        shape = tuple(seen.shape.values())
        sharding = mesh_sharding("shard_map", shape)
        mesh_axes = new_axes(seen.axis_names, shape, sharding=sharding)
        for mesh_axis in mesh_axes:
            mesh_axis.mesh = True
        whole = bool(global_arrays) and sharding is not None
        if sharding is not None:
            numbered = [*zip(range(len(leaves)), leaves, specs, strict=True)]
            shared = (
                (number, leaf, "global_arrays=True" if whole and spec.entries else repr(spec))
                for number, leaf, spec in numbered
                if whole or not spec.names(mesh_axes[0].name)
            )
            agree_on_arguments("shard_map", shared, sharding)
            if not (whole or local_rows):
                local_rows = _refuse_whole_arrays(numbered, mesh_axes)
        outer = bool(lockstep_axes())
        rest = full.along([name for name in full.axis_names if name not in seen.shape])
        with extend_axis_environment(mesh_axes), _set_mesh(rest if rest != full else None):
            shards = [
                _split(leaf, spec, mesh_axes, whole, f"shard_map: leaf {number} of the arguments")
                for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
            ]
            result = f(*trees.unflatten(structure, shards))
            parts, result_structure = trees.flatten(result)
            places = trees.broadcast_prefix(out_specs, result, "shard_map out_specs", _is_spec)
            joined = [
                _join(part, spec, mesh_axes, outer, whole, check_vma, f"shard_map: result {number}")
                for number, (part, spec) in enumerate(zip(parts, places, strict=True))
            ]
        return trees.unflatten(result_structure, own_results(joined, leaves))

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


def _refuse_whole_arrays(leaves: Iterable[tuple[int, Any, P]], mesh_axes: Axes) -> bool:
    """Compare between instances the arguments whose sizes could be those of whole arrays.

    **Returns** whether that has shown that instances pass rows of their own.

    **Raises**:

    - ValueError: if one of them is the same on all instances.
    """
    sharded = mesh_axes[0]
    assert sharded.sharding is not None
    counts, world = sharded.sharding.counts, sharded.sharding.world
    if not world.checks_values:
        return False
    split = [entry for entry in leaves if is_array(entry[1]) and entry[2].names(sharded.name)]
    found = np.zeros((len(split), 1 + DIGEST_BYTES), np.uint8)
    for row, (_, leaf, spec) in zip(found, split, strict=True):
        if _may_be_whole(leaf.shape, spec, mesh_axes):
            row[0], row[1:] = 1, np.frombuffer(digest(to_host(leaf)), np.uint8)
    # Where instances hold as many replicas as each other, a size says the same on all of them.
    if not (found[:, 0].any() or (split and len({*counts}) > 1)):
        return False
    everywhere = world.gather(f"shard_map at {call_site()}", found)
    for place, (number, leaf, spec) in enumerate(split):
        if (everywhere[:, place] == everywhere[0, place]).all() and everywhere[0, place, 0]:
            raise ValueError(
                f"shard_map: leaf {number} of the arguments, of shape {leaf.shape} and split by "
                f"{spec!r}, is the same on all instances, as a whole array is. Inside `with world` "
                f"each instance passes its own rows: those of indices {sharded.offset} to "
                f"{sharded.offset + sharded.size - 1} of {sharded.total} along mesh axis "
                f"{sharded.name!r}. Pass them, or whole arrays with shard_map(..., "
                "global_arrays=True); global_arrays=False takes equal rows as they are"
            )
    return True


def _may_be_whole(shape: Sequence[int], spec: P, mesh_axes: Axes) -> bool:
    """Whether all replicas divide the axes of an array that its spec splits; not if it is empty."""
    splits = zip(shape, _mesh_axes_of(spec, mesh_axes), strict=False)
    return 0 not in shape and not any(size % _extent(split, whole=True) for size, split in splits)


def _extent(split: Iterable[AxisEntry], whole: bool) -> int:
    """The number of shards along mesh axes: of all instances, or of this one."""
    return math.prod(entry.total if whole else entry.size for entry in split)


def _split(leaf: Any, spec: P, mesh_axes: Axes, whole: bool, what: str) -> Any:
    """The argument as a MappedArray of shards: a split axis becomes the mesh axes and the rest.

    `whole` says whether it is the array of all instances.
    """
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
        count = _extent(split, whole)
        if length % count:
            names = tuple(mesh_axis.name for mesh_axis in split)
            if count == (total := _extent(split, whole=True)):
                here = ""
            else:
                here = f" on this instance; {total} on all: for whole arrays, global_arrays=True"
            raise ValueError(
                f"{what} has shape {data.shape[outer:]}: axis {axis} of size {length} is not "
                f"divisible by the size {count} of mesh axes {names!r} (spec {spec!r}){here}"
            )
        for mesh_axis in split:
            mesh_places[mesh_axis] = len(shape)
            shape.append(_extent([mesh_axis], whole))
        rest_places.append(len(shape))
        shape.append(length // count)
    own = tuple(mesh_axis for mesh_axis in mesh_axes if mesh_axis in mesh_places)
    order = [*range(outer), *(mesh_places[mesh_axis] for mesh_axis in own), *rest_places]
    for mesh_axis in own if on_device(data) else ():
        mesh_axis.like = data
    if on_device(data):
        mesh_axes[0].read_only |= {id(owner(data))}
    shards = call_on_bits(np.reshape, data, shape).transpose(order)
    if whole and mesh_axes[0] in own:
        shards = shards[mesh_axes[0].offset :][: mesh_axes[0].size]
    if order != sorted(order):
        shards = copy_array(shards)  # as moved axes of vmap
    return wrap_array(read_only(shards), (*axes, *own))


def _join(
    part: Any, spec: P, mesh_axes: Axes, outer: bool, whole: bool, check: bool, what: str
) -> Any:
    """The global array that `part` holds the shards of; of all instances where `whole`."""
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
    if whole and mesh_axes[0] in named:
        with called_by(NOBODY):
            gathered = unpack(_all_gather(wrap_array(full, named), mesh_axes[0].name))
        full = np.moveaxis(expand(*gathered, named[1:]), len(named) - 1, 0)
    places = {mesh_axis: len(enclosing) + place for place, mesh_axis in enumerate(named)}
    start = len(enclosing) + len(named)
    order = list(range(len(enclosing)))
    shape = list(full.shape[: len(enclosing)])
    for axis in range(ndim):
        split = entries[axis] if axis < len(entries) else []
        order += [places[mesh_axis] for mesh_axis in split] + [start + axis]
        shape.append(_extent(split, whole) * full.shape[start + axis])
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
        first = data
        if mesh_axis in axes:
            place = axes.index(mesh_axis)
            copies = np.moveaxis(data, place, 0)
            first, axes = copies[0], axes[:place] + axes[place + 1 :]
            index = first_unlike(copies) if check else None
            if index is not None:
                raise ValueError(
                    f"{what} is declared replicated over mesh axis {mesh_axis.name!r} by out_specs "
                    f"{spec!r}, but replicas {mesh_axis.offset} and {mesh_axis.offset + index} "
                    "hold different values: name the axis in out_specs, or reduce over it "
                    "(lax.psum, lax.pmean, lax.all_gather)"
                )
        if check:
            agree_on_results(
                f"{what}, declared replicated over mesh axis {mesh_axis.name!r}",
                [first],
                mesh_axis.sharding,
            )
        data = first
    return data, axes
