"""ReplicaGrouping: the replicas that share a variable's value, or take part in one collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpusim.groups import Groups

if TYPE_CHECKING:
    from .ir import Ir

__all__ = ["ReplicaGrouping"]


class ReplicaGrouping:
    """A partition of an Ir's replicas into groups of one size; see `Ir.replica_grouping`.

    >>> import gpusim.popxl as popxl
    >>> grouping = popxl.Ir(replication=8).replica_grouping(stride=2, group_size=2)
    >>> grouping
    ReplicaGrouping(num_replicas=8, stride=2, group_size=2, num_groups=4)
    >>> grouping.transpose().assignment
    [0, 0, 1, 1, 0, 0, 1, 1]
    """

    _ir: Ir
    _groups: Groups

    def __init__(self) -> None:
        raise RuntimeError(
            "popxl.ReplicaGrouping cannot be constructed directly (use `ir.replica_grouping`)."
        )

    @classmethod
    def _create(cls, ir: Ir, groups: Groups) -> ReplicaGrouping:
        grouping = object.__new__(cls)
        grouping._ir, grouping._groups = ir, groups
        return grouping

    @classmethod
    def _from_stride(cls, ir: Ir, stride: int, group_size: int | None) -> ReplicaGrouping:
        replicas = ir.replication_factor
        counts = f"Replicas: {replicas}"
        if not 0 < stride <= replicas:
            raise ValueError(
                "Stride must be greater than zero and less than or equal to number of replicas. "
                f"Stride: {stride}. {counts}"
            )
        if replicas % stride:
            raise ValueError(
                f"Stride must be a factor of the number of replicas. Stride: {stride}. {counts}"
            )
        size = replicas // stride if group_size is None else group_size
        if not 0 < size <= replicas:
            raise ValueError(
                "Group size must be greater than zero and less than or equal to number of "
                f"replicas. Group size: {size}. {counts}"
            )
        return cls._create(ir, Groups.from_stride(replicas, stride, size))

    @classmethod
    def _from_assignment(cls, ir: Ir, assignment: Sequence[int]) -> ReplicaGrouping:
        numbers = list(assignment)
        if len(numbers) != ir.replication_factor:
            raise ValueError(
                f"The length of `assignment` ({len(numbers)}) does not equal the number of "
                f"replicas ({ir.replication_factor})."
            )
        unique, counts = (found.tolist() for found in np.unique(numbers, return_counts=True))
        if len(set(counts)) > 1:
            raise ValueError(
                "All groups should have the same size but they dont. (Group, Sizes): "
                f"{list(zip(unique, counts, strict=True))}"
            )
        if unique != list(range(len(unique))):
            raise ValueError(
                "The group numbers are not numbered consecutively and/or do not start at 0. "
                f"Groups: {unique}"
            )
        order = list(dict.fromkeys(numbers))
        if order != unique:
            raise ValueError(
                "When ordered by first appearance, the group numbers are not monotonically "
                f"increasing. Ordering: {order}"
            )
        return cls._create(ir, Groups.from_assignment(numbers))

    @property
    def stride(self) -> int:
        """The distance between neighbours of a group.

        **Raises**: NotImplementedError: if distances vary.
        """
        self._need_const()
        assert self._groups.stride is not None
        return self._groups.stride

    @property
    def group_size(self) -> int:
        """The number of replicas of a group."""
        return self._groups.group_size

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return self._groups.group_count

    @property
    def assignment(self) -> list[int]:
        """The group of each replica."""
        return list(self._groups.assignment)

    @property
    def is_const(self) -> bool:
        """Whether a stride and a size describe the groups, so that collectives can use them."""
        return self._groups.strided

    @property
    def const_rg(self) -> ReplicaGrouping:
        """The grouping on the device: itself, or parts of its groups if the stride varies.

        Each group is split wherever the distance to the next member exceeds the smallest distance
        of all. The parts of `const_rg` have that distance, and divide all of these pieces.

        >>> import gpusim.popxl as popxl
        >>> ir = popxl.Ir(replication=8)
        >>> ir.replica_grouping_from_assignments([0, 0, 1, 1, 0, 0, 1, 1]).const_rg.assignment
        [0, 0, 1, 1, 2, 2, 3, 3]
        """
        if self.is_const:
            return self
        groups = self._groups
        stride = min(b - a for members in groups.members for a, b in pairwise(members))
        pieces = []
        for members in groups.members:
            cuts = [i + 1 for i, (a, b) in enumerate(pairwise(members)) if b - a > stride]
            pieces += [end - start for start, end in pairwise((0, *cuts, len(members)))]
        size = math.gcd(*pieces)
        parts = Groups.from_stride(groups.size, stride if size > 1 else 1, size)
        return self._create(self._ir, parts)

    @property
    def to_device_map(self) -> list[int] | None:
        """For each group of `const_rg`, the group here whose value it gets; None if it is itself.

        >>> import gpusim.popxl as popxl
        >>> popxl.Ir(replication=4).replica_grouping_from_assignments([0, 1, 1, 0]).to_device_map
        [0, 1, 1, 0]
        """
        if self.is_const:
            return None
        return [self._groups.assignment[members[0]] for members in self.const_rg._groups.members]

    @property
    def to_host_map(self) -> list[int] | None:
        """For each group here, the group of `const_rg` whose value it returns; None if that is it.

        >>> import gpusim.popxl as popxl
        >>> popxl.Ir(replication=4).replica_grouping_from_assignments([0, 1, 1, 0]).to_host_map
        [0, 1]
        """
        if self.is_const:
            return None
        assignment = self.const_rg._groups.assignment
        return [assignment[members[0]] for members in self._groups.members]

    def transpose(self) -> ReplicaGrouping:
        """The groups of replicas that have the same position in their group."""
        return self._create(self._ir, self._groups.transpose())

    def _need_const(self) -> None:
        if not self.is_const:
            raise NotImplementedError(
                "This ReplicaGrouping has a non-constant stride and has no PopART C++ "
                "representation. You can't use this ReplicaGrouping with GCL ops. "
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReplicaGrouping):
            raise TypeError(
                f"Value must be of type popxl.ReplicaGrouping. Type: {type(other)}. Value: {other}."
            )
        return self._ir is other._ir and self._groups == other._groups

    def __hash__(self) -> int:
        return hash((id(self._ir), self._groups))

    def __repr__(self) -> str:
        if not self.is_const:
            return f"ReplicaGrouping(assignment={self.assignment})"
        return (
            f"ReplicaGrouping(num_replicas={self._groups.size}, stride={self.stride}, "
            f"group_size={self.group_size}, num_groups={self.num_groups})"
        )
