"""replicaGrouping: each group of replicas has its own copy of a parameter.

Dimension 0 of such a parameter counts the groups; inside the model it is removed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from gpusim.groups import CommGroupType, Groups
from gpusim.poptorch.enums import VariableRetrievalMode
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["Groupable", "Grouping", "OnGrouping", "assign", "groupings_of"]


class Grouping(NamedTuple):
    """How the replicas share a parameter (`replicaGrouping`).

    - `kind`: how replicas form groups; `shards`: the number of replicas of a Consecutive or
      Orthogonal group, ignored for NoGrouping.
    - `mode`: whether the host gets one value of each group, or of each replica.
    """

    kind: CommGroupType
    shards: int
    mode: VariableRetrievalMode

    def groups(self, name: str, parameter: torch.Tensor, replicas: int) -> Groups:
        """The groups of the replicas.

        **Raises**:

        - poptorch.Error: for a scalar, if the replicas do not divide into groups of this size, or
          if dimension 0 is not the number of groups.
        """
        if not parameter.ndim:
            raise createPoptorchError(
                "Scalars cannot be passed as per-replica weight tensor values"
            )
        try:
            groups = Groups.from_comm_group(self.kind, replicas, self.shards)
        except ValueError as error:
            raise createPoptorchError(f"replicaGrouping of parameter {name}: {error}") from None
        if parameter.shape[0] not in self._sizes(groups):
            raise createPoptorchError(
                f"replicaGrouping of parameter {name}: its first dimension is "
                f"{parameter.shape[0]}, and {self.kind.name} groups of {replicas} replicas are "
                f"{groups.group_count}"
            )
        return groups

    def _sizes(self, groups: Groups) -> set[int]:
        """The sizes that dimension 0 may have: the host may hold every replica's value."""
        every = self.mode is VariableRetrievalMode.AllReplicas
        return {groups.group_count, *([groups.size] if every else [])}


OnGrouping = Callable[[Any, Grouping], None]
"""Called with a parameter and its grouping."""


class Groupable:
    """Parameters of a model that an executor has: they have the method `replicaGrouping`.

    A parameter is of such a class while an executor has its model; what is pickled or copied is of
    the original class.
    """

    poptorch_original: ClassVar[type]
    poptorch_on_grouping: ClassVar[OnGrouping]

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas its own value of this parameter; call it before compiling.

        **Arguments**

        - `comm_group_type`: how replicas form groups; dimension 0 is the number of groups. All
          removes a grouping: all replicas have the same value.
        - `shards`: the number of replicas of a group, for Consecutive and Orthogonal.
        - `variable_retrieval_mode`: OnePerGroup, or AllReplicas: the host's parameter then gets
          every replica's value, along dimension 0.

        poptorch.Error for a model that is compiled; ValueError for other types and modes.
        """
        kind, mode = CommGroupType(comm_group_type), VariableRetrievalMode(variable_retrieval_mode)
        type(self).poptorch_on_grouping(self, Grouping(kind, shards, mode))

    def __deepcopy__(self, memory: dict[int, Any]) -> Any:
        with as_original(self):
            return copy.deepcopy(self, memory)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_original(self):
            return self.__reduce_ex__(protocol)


@contextmanager
def as_original(parameter: Any) -> Iterator[None]:
    """A block in which a parameter is of its original class."""
    kind = type(parameter)
    parameter.__class__ = kind.poptorch_original
    try:
        yield
    finally:
        parameter.__class__ = kind


def assign(
    groupings: dict[str, Grouping], model: nn.Module, parameter: Any, grouping: Grouping
) -> None:
    """Note a grouping by the parameter's name; one group of all replicas removes it.

    **Raises**:

    - poptorch.Error: if the parameter does not belong to the model.
    """
    named = model.named_parameters()
    name = next((name for name, own in named if own is parameter), None)
    if name is None:
        raise createPoptorchError("replicaGrouping: the model has no such parameter any more")
    if grouping.kind is CommGroupType.All:
        groupings.pop(name, None)
    else:
        groupings[name] = grouping


def groupings_of(per_replica_params: Mapping[str, Any], model: nn.Module) -> dict[str, Grouping]:
    """The groupings that a user's `per_replica_params` says, by the parameters' names.

    **Raises**:

    - poptorch.Error: for a name that is not a parameter's, and for a value that is not a
      (CommGroupType, number of replicas of a group, VariableRetrievalMode).
    """
    known = {name for name, _ in model.named_parameters()}
    found: dict[str, Grouping] = {}
    for name, value in per_replica_params.items():
        if name not in known:
            raise createPoptorchError(f"per_replica_params: {name!r} is not a parameter")
        try:
            kind, shards, mode = value
            grouping = Grouping(CommGroupType(kind), int(shards), VariableRetrievalMode(mode))
        except (TypeError, ValueError):
            raise createPoptorchError(
                f"per_replica_params[{name!r}] is {value!r}: expected (CommGroupType, number of "
                "replicas of a group, VariableRetrievalMode)"
            ) from None
        if grouping.kind is not CommGroupType.All:
            found[name] = grouping
    return found
