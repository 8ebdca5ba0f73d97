"""Partitions of an axis's replicas into the ordered groups that take part in one collective.

They come from a stride and a size, an assignment, JAX's axis_index_groups or a CommGroupType.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import index as as_index

import numpy as np
from numpy.typing import NDArray


class CommGroupType(enum.IntEnum):
    """PopTorch's arrangements of replicas in groups of k, with its numbers."""

    All = 0  #: one group of all replicas
    Consecutive = 1  #: {0 .. k-1}, {k .. 2k-1}, ...
    Orthogonal = 2  #: {0, m, 2m, ...}, {1, m+1, ...}, ... for m groups
    NoGrouping = 3  #: each replica is a group of its own
    Ungrouped = 3  #: PopART's name for it


@dataclass(frozen=True, repr=False)
class Groups:
    """An immutable partition of replicas 0..R-1 into ordered groups, themselves in an order.

    Two are equal when they have the same groups in the same order. The constructor takes the groups
    themselves, of any sizes; the ``from_`` methods check what their notation promises.

    >>> groups = Groups.from_stride(8, stride=2, group_size=2)
    >>> groups.assignment
    (0, 1, 0, 1, 2, 3, 2, 3)
    >>> groups.members
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> groups.transpose().members
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """

    members: tuple[tuple[int, ...], ...]  #: the replicas of each group, in group order

    def __post_init__(self) -> None:
        members = _replica_numbers(self.members, "groups")
        object.__setattr__(self, "members", members)
        _check_partition(members, sum(map(len, members)), "groups")

    # Notations

    @classmethod
    def all(cls, size: int) -> Groups:
        """One group of all ``size`` replicas, in their order."""
        return _everyone(_replica_count(size))

    @classmethod
    def from_stride(cls, size: int, stride: int = 1, group_size: int | None = None) -> Groups:
        """Groups of ``group_size`` replicas that lie ``stride`` apart (PopXL's notation).

        ``group_size`` defaults to ``size // stride``; groups of one replica have stride 1.
        Raises ValueError where the numbers do not divide the replicas evenly.
        """
        size = _replica_count(size)
        stride = _factor(stride, size, "stride")
        group_size = _factor(size // stride if group_size is None else group_size, size)
        if group_size == 1:
            stride = 1
        if size % (stride * group_size):
            raise ValueError(
                f"stride * group_size must be a factor of the number of replicas, got "
                f"{stride} * {group_size} = {stride * group_size} for {size} replicas"
            )
        blocks = np.arange(size).reshape(-1, group_size, stride)
        return cls(_rows(blocks.swapaxes(1, 2).reshape(-1, group_size)))

    @classmethod
    def from_assignment(cls, assignment: Iterable[int]) -> Groups:
        """The group number of each replica: equal groups, numbered as they first appear, from 0.

        >>> Groups.from_assignment([0, 1, 0, 0, 1, 1]).members
        ((0, 2, 3), (1, 4, 5))
        """
        numbers = tuple(as_index(number) for number in assignment)
        _replica_count(len(numbers))
        members: dict[int, list[int]] = {}
        for replica, group in enumerate(numbers):
            members.setdefault(group, []).append(replica)
        if list(members) != list(range(len(members))):
            raise ValueError(
                "assignment must number the groups 0, 1, 2, ... in the order in which they first "
                f"appear, got them in the order {list(members)}"
            )
        sizes = {group: len(replicas) for group, replicas in members.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"assignment must give every group the same number of replicas, got {sizes} "
                "(group: replicas)"
            )
        return cls(tuple(tuple(replicas) for replicas in members.values()))

    @classmethod
    def from_axis_index_groups(
        cls, axis_index_groups: Iterable[Iterable[int]], size: int, *, uneven: bool = False
    ) -> Groups:
        """JAX's list of lists: every index of an axis of ``size`` replicas exactly once.

        Groups of unequal sizes are a ValueError unless ``uneven`` allows them.
        """
        size = _replica_count(size)
        groups = _checked(_replica_numbers(axis_index_groups, "axis_index_groups"), size)
        if not (uneven or groups.even):
            raise ValueError(
                f"axis_index_groups must all have the same size here, got sizes "
                f"{list(groups.group_sizes)}"
            )
        return groups

    @classmethod
    def from_comm_group(
        cls, kind: CommGroupType, size: int, group_size: int | None = None
    ) -> Groups:
        """PopTorch's notation: an arrangement, and for two of the four the size of a group.

        >>> Groups.from_comm_group(CommGroupType.Orthogonal, 6, 3).members
        ((0, 2, 4), (1, 3, 5))
        """
        kind, size = CommGroupType(kind), _replica_count(size)
        if kind is CommGroupType.All:
            return cls.all(size)
        if kind is CommGroupType.NoGrouping:
            return cls.from_stride(size, 1, 1)
        if group_size is None:
            raise ValueError(f"CommGroupType.{kind.name} needs a group_size, got None")
        if kind is CommGroupType.Consecutive:
            return cls.from_stride(size, 1, group_size)
        group_size = _factor(group_size, size)
        return cls.from_stride(size, size // group_size, group_size)

    # What they are

    @cached_property
    def size(self) -> int:
        """The number of replicas."""
        return len(self.assignment)

    @cached_property
    def group_count(self) -> int:
        """The number of groups."""
        return len(self.members)

    @cached_property
    def group_sizes(self) -> tuple[int, ...]:
        """The number of replicas in each group."""
        return tuple(map(len, self.members))

    @cached_property
    def even(self) -> bool:
        """Whether all groups have the same size."""
        return len(set(self.group_sizes)) == 1

    @cached_property
    def group_size(self) -> int:
        """The size that all groups have; a ValueError where they differ."""
        if not self.even:
            raise ValueError(f"the groups differ in size: {list(self.group_sizes)}")
        return self.group_sizes[0]

    @cached_property
    def assignment(self) -> tuple[int, ...]:
        """The group number of each replica."""
        number = {replica: g for g, group in enumerate(self.members) for replica in group}
        return tuple(number[replica] for replica in range(len(number)))

    @cached_property
    def matrix(self) -> NDArray[np.int64]:
        """The replicas as a read-only array (groups, group size); a ValueError when uneven."""
        shape = self.group_count, self.group_size
        matrix = np.array(self.members, dtype=np.int64).reshape(shape)
        matrix.flags.writeable = False
        return matrix

    @cached_property
    def stride(self) -> int | None:
        """The one distance between neighbours in every group, None where distances vary.

        >>> Groups.from_assignment([0, 1, 0, 1]).stride
        2
        >>> Groups.from_assignment([0, 1, 1, 0]).stride is None
        True
        """
        steps = {b - a for group in self.members for a, b in pairwise(group)}
        if not self.even or len(steps) > 1:
            return None
        stride = steps.pop() if steps else 1
        return stride if stride > 0 else None

    @cached_property
    def strided(self) -> bool:
        """Whether these are the groups that `from_stride` makes of their stride and size."""
        return self.stride is not None and self == Groups.from_stride(
            self.size, self.stride, self.group_size
        )

    def transpose(self) -> Groups:
        """The groups of replicas that have the same position in theirs; twice is the original.

        A ValueError where groups differ in size.
        """
        return Groups(_rows(self.matrix.T))

    def __repr__(self) -> str:
        if self.strided and self.group_count > 1:
            return (
                f"Groups.from_stride({self.size}, stride={self.stride}, "
                f"group_size={self.group_size})"
            )
        return f"Groups({self.members})"


@lru_cache(64)  # checking many replicas takes longer than some collectives
def _everyone(size: int) -> Groups:
    return Groups((tuple(range(size)),))


# By the numbers as Python ints in tuples, never by the caller's lists, which may change. Equal keys
# are equal groups: `_replica_numbers` has refused 1.0, which equals 1.
@lru_cache(256)
def _checked(members: tuple[tuple[int, ...], ...], size: int) -> Groups:
    """The groups of an axis of `size` replicas; a refusal is not cached."""
    _check_partition(members, size, "axis_index_groups")
    return Groups(members)


def _rows(matrix: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, matrix.tolist()))


def _replica_count(size: int) -> int:
    size = as_index(size)
    if size < 1:
        raise ValueError(f"the number of replicas must be at least 1, got {size}")
    return size


def _factor(number: int, size: int, name: str = "group_size") -> int:
    number = as_index(number)
    if not 0 < number <= size or size % number:
        raise ValueError(
            f"{name} must be a positive factor of the number of replicas, got {name} {number} "
            f"for {size} replicas"
        )
    return number


def _replica_numbers(groups: Iterable[Iterable[int]], name: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple([tuple(map(as_index, group)) for group in groups])
    except TypeError as error:
        raise TypeError(f"{name} must be a list of lists of integers, got {groups!r}") from error


def _check_partition(members: Sequence[Sequence[int]], size: int, name: str) -> None:
    """Refuse groups that are not exactly replicas 0..size-1, each of them once."""
    if not members:
        raise ValueError(f"{name} must hold at least one group, got none")
    if empty := [g for g, group in enumerate(members) if not group]:
        raise ValueError(f"{name} must hold replicas in every group; empty: {empty}")
    times = Counter(replica for group in members for replica in group)
    faults = {
        "missing": [replica for replica in range(size) if replica not in times],
        "more than once": sorted(replica for replica, n in times.items() if n > 1),
        "out of range": sorted(replica for replica in times if not 0 <= replica < size),
    }
    if any(faults.values()):
        found = "; ".join(
            f"{fault}: {_few(numbers)}" for fault, numbers in faults.items() if numbers
        )
        raise ValueError(f"{name} must hold each replica 0..{size - 1} exactly once; {found}")


def _few(numbers: Sequence[int], limit: int = 8) -> str:
    """The numbers as a list that a message has room for."""
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return f"{list(numbers[:limit])}{more}"
