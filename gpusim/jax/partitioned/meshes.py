"""Meshes of devices in programs: their axes, shardings in terms of them, and groups of devices.

Devices are numbers here: the partitions of a program, in the order of its devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpusim.jax import private


class SubAxis(NamedTuple):
    """A part of a mesh's axis: `before` is the product of the parts that are more major."""

    axis: str
    before: int
    size: int


class Mesh(NamedTuple):
    """A mesh of all devices of a program.

    **Attributes**: `devices` are their numbers, in an array with a dimension for each of `axes`.
    """

    axes: tuple[str, ...]
    devices: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return self.devices.shape

    @property
    def is_in_order(self) -> bool:
        """Whether the devices are numbered in the order of the mesh."""
        return bool(np.array_equal(self.devices.reshape(-1), np.arange(self.devices.size)))

    def whole(self, part: SubAxis) -> bool:
        """Whether a part is an axis."""
        return part.size == self.shape[self.axes.index(part.axis)]

    def digits(self) -> list[SubAxis]:
        """The axes, split into parts of prime sizes, the most major first."""
        found = []
        for axis, size in zip(self.axes, self.shape, strict=True):
            before = 1
            for prime in primes(size):
                found.append(SubAxis(axis, before, prime))
                before *= prime
        return found


class Placement(NamedTuple):
    """Where the elements of an array are: parts of axes by dimension, and those with addends."""

    dimensions: list[list[SubAxis]]
    unreduced: list[SubAxis]


class Numbering:
    """The coordinates of devices along the digits of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.parts = mesh.digits()
        sizes = [part.size for part in self.parts]
        # By device and digit.
        indices = np.indices(sizes).reshape(len(sizes), mesh.devices.size).T
        self.coordinates = np.empty_like(indices)
        self.coordinates[mesh.devices.reshape(-1)] = indices

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        """For each digit two devices that differ in it alone, by one, the first device lowest."""
        origin = int(self.mesh.devices.reshape(-1)[0])
        found = []
        for k in range(len(self.parts)):
            target = np.zeros(len(self.parts), np.int64)
            target[k] = 1
            found.append((origin, int(np.flatnonzero((self.coordinates == target).all(1))[0])))
        return found

    def written_as(self, coordinate: NDArray[np.int64]) -> list[SubAxis] | None:
        """The digits that make up a coordinate (by device), the most major first; None if none do.

        >>> mesh = Mesh(("a", "b"), np.arange(8).reshape(2, 4))
        >>> Numbering(mesh).written_as(np.array([0, 0, 1, 1, 0, 0, 1, 1]))
        [SubAxis(axis='b', before=1, size=2)]
        """
        strides = [int(coordinate[end] - coordinate[start]) for start, end in self.steps]
        chosen = sorted((k for k, s in enumerate(strides) if s), key=lambda k: -strides[k])
        below = 1
        for k in reversed(chosen):
            if strides[k] != below:
                return None
            below *= self.parts[k].size
        total = sum(
            (self.coordinates[:, k] * strides[k] for k in chosen), np.zeros_like(coordinate)
        )
        if not np.array_equal(total, coordinate):
            return None
        return merged([self.parts[k] for k in chosen])

    def axes_of(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...] | None:
        """The names of the axes along which devices of a group differ; None if no axes make them.

        >>> mesh = Mesh(("a", "b"), np.arange(8).reshape(2, 4))
        >>> Numbering(mesh).axes_of([[0, 4], [1, 5], [2, 6], [3, 7]])
        ('a',)
        """
        size = len(groups[0])
        if any(len(group) != size for group in groups):
            return None
        first = self.coordinates[list(groups[0])]
        moving = (first != first[0]).any(0)
        if math.prod(p.size for p, moves in zip(self.parts, moving, strict=True) if moves) != size:
            return None
        for group in groups:
            fixed = self.coordinates[list(group)][:, ~moving]
            if (fixed != fixed[0]).any():
                return None
        names = [part.axis for part, moves in zip(self.parts, moving, strict=True) if moves]
        return tuple(dict.fromkeys(names))

    def place(self, sharding: Any, rank: int) -> Placement | None:
        """An array's sharding in parts of axes; None if it is not one of this mesh's.

        **Arguments**: `sharding` is XLA's HloSharding, `rank` the number of the array's dimensions.
        """
        nothing: list[list[SubAxis]] = [[] for _ in range(rank)]
        if sharding.is_replicated():
            return Placement(nothing, [])
        if sharding.is_unreduced():
            return Placement(nothing, merged(self.parts))
        if not sharding.is_tiled():
            return None
        tiles = sharding.tile_assignment_dimensions()
        devices = np.asarray(sharding.tile_assignment_devices())
        if devices.size != self.mesh.devices.size:
            return None
        positions = np.empty((len(tiles), devices.size), np.int64)
        positions[:, devices] = np.indices(tiles).reshape(len(tiles), devices.size)
        kinds = [kind.name for kind in sharding.subgroup_types()]
        if sharding.replicate_on_last_tile_dim():
            kinds = ["REPLICATED"]
        if len(tiles) != rank + len(kinds) or not {*kinds} <= {"REPLICATED", "UNREDUCED"}:
            return None
        written = [self.written_as(position) for position in positions[:rank]]
        unreduced: list[SubAxis] = []
        for kind, position in zip(kinds, positions[rank:], strict=True):
            found = self.written_as(position)
            if kind == "UNREDUCED":
                if found is None:
                    return None
                unreduced = merged(sorted(found, key=lambda p: (self.mesh.axes.index(p[0]), p[1])))
        if any(found is None for found in written):
            return None
        return Placement([found or [] for found in written], unreduced)


def merged(parts: Iterable[SubAxis]) -> list[SubAxis]:
    """Neighbouring parts of one axis as one part.

    >>> merged([SubAxis("a", 1, 2), SubAxis("a", 2, 2), SubAxis("b", 1, 3)])
    [SubAxis(axis='a', before=1, size=4), SubAxis(axis='b', before=1, size=3)]
    """
    found: list[SubAxis] = []
    for part in parts:
        if found and found[-1].axis == part.axis:
            last = found[-1]
            if part.before == last.before * last.size:
                found[-1] = last._replace(size=last.size * part.size)
                continue
        found.append(part)
    return found


def primes(number: int) -> Iterator[int]:
    """The prime factors, the smallest first."""
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1


def meshes_of(module: Any, devices: int) -> list[Mesh]:
    """The meshes of all devices that a module names, and at last one with an axis for each prime.

    **Arguments**: `devices` is the number of the program's partitions.
    """
    found = [mesh for mesh in named_meshes(module).values() if mesh.devices.size == devices]
    sizes = [*primes(devices)]
    names = tuple(f"axis_{k}" for k in range(len(sizes)))
    # XLA finds shardings of results by itself, of which the program's meshes may know nothing.
    found.append(Mesh(names, np.arange(devices).reshape(sizes)))
    return found


def named_meshes(module: Any) -> dict[str, Mesh]:
    """The meshes that a module has, by their names in it."""
    found = {}
    for operation in module.body.operations:
        if operation.operation.name == "sdy.mesh":
            given = private.sdy.MeshAttr(operation.operation.attributes["mesh"])
            axes = [private.sdy.MeshAxisAttr(axis) for axis in given.axes]
            sizes = [axis.size for axis in axes]
            ids = [*given.device_ids] or range(math.prod(sizes))
            if math.prod(sizes) == len(ids):  # not the mesh of one device of many
                name = private.ir.StringAttr(operation.operation.attributes["sym_name"]).value
                devices = np.array(ids, np.int64).reshape(sizes)
                found[name] = Mesh(tuple(axis.name for axis in axes), devices)
    return found


GROUPS = re.compile(
    r"channel_id=(?P<channel>\d+), replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<ids>[^()]*(?:\([^()]*\))?[^()]*)\))? \{(?P<parts>[^}]*)\}"
)
AXIS = re.compile(r"'(?P<name>[^']+)'=(?P<size>\d+)")
PART = re.compile(r"'(?P<name>[^']+)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")
IOTA = re.compile(r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?$")


class Stated(NamedTuple):
    """A collective's channel, and its groups in terms of a mesh, whose devices may be in any order.

    JAX gives all its own collectives one channel, so it takes all three to know the groups.
    """

    channel: int
    axes: tuple[tuple[str, int], ...]
    parts: tuple[SubAxis, ...]


def stated_groups(program: str) -> dict[Stated, list[list[int]] | None]:
    """The groups of collectives that XLA states in terms of a mesh; None where two are alike.

    StableHLO has them too, but jaxlib 0.10.2 loses the order of the mesh's devices on the way.

    **Arguments**: `program` is a partitioned one, as text of XLA's.

    >>> text = "channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add"
    >>> [*stated_groups(text).values()]
    [[[0, 1], [2, 3]]]
    """
    known: dict[Stated, list[list[int]] | None] = {}
    for found in GROUPS.finditer(program):
        mesh, parts = mesh_and_parts(found["axes"], found["ids"] or "", found["parts"])
        axes = tuple(zip(mesh.axes, mesh.shape, strict=True))
        key = Stated(int(found["channel"]), axes, tuple(parts))
        groups = groups_along(mesh, parts)
        known[key] = groups if known.get(key, groups) == groups else None
    return known


def stated_by(operation: Any, meshes: Mapping[str, Mesh]) -> Stated:
    """How a collective of StableHLO's states its groups; `meshes` are its module's, by name."""
    given = private.hlo.ReplicaGroupMeshAxesAttr(operation.attributes["replica_groups"])
    mesh = meshes[private.ir.FlatSymbolRefAttr(given.mesh).value]
    parts = []
    for axis in private.ir.ArrayAttr(given.axes):
        reference = private.hlo.AxisRefAttr(axis)
        info: Any = reference.sub_axis_info
        if info is None:
            size = mesh.shape[mesh.axes.index(reference.name)]
            parts.append(SubAxis(reference.name, 1, size))
        else:
            info = private.hlo.SubAxisInfoAttr(info)
            parts.append(SubAxis(reference.name, info.pre_size, info.size))
    channel = private.hlo.ChannelHandle(operation.attributes["channel_handle"]).handle
    return Stated(channel, tuple(zip(mesh.axes, mesh.shape, strict=True)), tuple(parts))


def mesh_and_parts(axes: str, ids: str, parts: str) -> tuple[Mesh, list[SubAxis]]:
    """A mesh, and parts of its axes, in the words of XLA.

    >>> mesh_and_parts("'a'=2,'b'=4", "[4,2]T(1,0)", "'b':(1)2")[1]
    [SubAxis(axis='b', before=1, size=2)]
    """
    sizes = {found["name"]: int(found["size"]) for found in AXIS.finditer(axes)}
    iota = IOTA.match(ids)
    if iota:
        shape = numbers(iota["shape"])
        devices = np.arange(math.prod(shape)).reshape(shape)
        if iota["order"]:
            devices = devices.transpose(numbers(iota["order"]))
    else:
        devices = np.array(numbers(ids) if ids else range(math.prod(sizes.values())))
    mesh = Mesh(tuple(sizes), devices.reshape(tuple(sizes.values())))
    found_parts = [
        SubAxis(found["name"], int(found["before"]), int(found["size"]))
        if found["size"]
        else SubAxis(found["name"], 1, sizes[found["name"]])
        for found in PART.finditer(parts)
    ]
    return mesh, found_parts


def numbers(text: str) -> list[int]:
    """The numbers in a text with commas between them."""
    return [int(number) for number in text.split(",")]


def groups_along(mesh: Mesh, parts: Sequence[SubAxis]) -> list[list[int]]:
    """Groups of devices that differ along these parts of axes, which are from major to minor.

    >>> mesh = Mesh(("a", "b"), np.arange(8).reshape(2, 4))
    >>> groups_along(mesh, [SubAxis("b", 1, 2)])
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    pieces: list[SubAxis] = []
    for axis, size in zip(mesh.axes, mesh.shape, strict=True):
        cuts = {1, size}
        for part in parts:
            if part.axis == axis:
                cuts |= {part.before, part.before * part.size}
        ordered = sorted(cuts)
        pieces += [SubAxis(axis, low, high // low) for low, high in pairwise(ordered)]
    split = mesh.devices.reshape([piece.size for piece in pieces])

    def position(part: SubAxis) -> list[int]:
        end = part.before * part.size
        return [
            k
            for k, piece in enumerate(pieces)
            if piece.axis == part.axis and part.before <= piece.before < end
        ]

    along = [k for part in parts for k in position(part)]
    rest = [k for k in range(len(pieces)) if k not in along]
    size = math.prod(pieces[k].size for k in along)
    found: list[list[int]] = split.transpose(rest + along).reshape(-1, size).tolist()
    return found
