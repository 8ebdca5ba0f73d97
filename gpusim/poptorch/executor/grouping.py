"""replicaGrouping: parameters of which groups of replicas have a copy of their own.

Dimension 0 of such a parameter counts the groups; inside the model it is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpusim.groups import CommGroupType, Groups
from gpusim.poptorch.enums import VariableRetrievalMode
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["GroupedParameter", "Grouping"]


@dataclass(frozen=True)
class Grouping:
    """What `replicaGrouping` was told about a parameter.

    - `kind`: how replicas are arranged in groups; `shards`: how many replicas a Consecutive or
      Orthogonal group has, of no meaning for All and NoGrouping.
    - `mode`: whether the host gets one value of each group, or of each replica.
    """

    kind: CommGroupType
    shards: int
    mode: VariableRetrievalMode

    def groups(self, name: str, parameter: torch.Tensor, replicas: int) -> Groups:
        """The groups of so many replicas.

        poptorch.Error for a scalar, for groups that the replicas do not divide into, and where
        dimension 0 is not their number.
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
        """How long dimension 0 may be: the host may hold every replica's value."""
        every = self.mode is VariableRetrievalMode.AllReplicas
        return {groups.group_count, *([groups.size] if every else [])}


class GroupedParameter:
    """A parameter as an executor's attribute: itself, and with the method `replicaGrouping`.

    **Arguments**

    - `parameter`: whose attributes these are; `name`: how the model calls it.
    - `groupings`: where the grouping is noted, by that name.
    """

    def __init__(self, parameter: nn.Parameter, name: str, groupings: dict[str, Grouping]) -> None:
        self._parameter, self._name, self._groupings = parameter, name, groupings

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas its own value of this parameter; call it before compiling.

        **Arguments**

        - `comm_group_type`: how the groups are arranged; dimension 0 is their number.
        - `shards`: how many replicas a group has, for Consecutive and Orthogonal.
        - `variable_retrieval_mode`: OnePerGroup, or AllReplicas: the host's parameter then gets
          every replica's value, along dimension 0.
        """
        self._groupings[self._name] = Grouping(
            CommGroupType(comm_group_type), shards, VariableRetrievalMode(variable_retrieval_mode)
        )

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._parameter, attribute)

    def __repr__(self) -> str:
        return repr(self._parameter)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [one._parameter if isinstance(one, cls) else one for one in args]
        return func(*given, **(kwargs or {}))
