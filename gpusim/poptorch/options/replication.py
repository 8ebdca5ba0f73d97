"""Options of the loops: device iterations, replicas, and which replicas share an input."""

from __future__ import annotations

from typing import Any, Self

from gpusim.groups import CommGroupType
from gpusim.poptorch.options.base import OptionsDict, check_count

__all__ = ["DEFAULTS", "ReplicationOptions"]

DEFAULTS: dict[str, Any] = {
    "replication_factor": 1,
    "input_group_size": 1,
    "input_group_type": CommGroupType.Consecutive.value,
    "broadcast_buffers": True,
    "device_iterations": 1,
}


class ReplicationOptions(OptionsDict):
    """The numbers of device iterations and replicas of a call."""

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set the number of iterations that a call runs before it returns.

        AssertionError for other types than int, ValueError below 1.
        """
        check_count(device_iterations=device_iterations)
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of replicas of the model.

        AssertionError for other types than int, ValueError below 1.
        """
        self._set_replicas(replication_factor)
        return self

    def _set_replicas(self, replication_factor: int) -> None:
        check_count(replication_factor=replication_factor)
        self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Let the replicas of a group share a micro-batch; call it after `replicationFactor`.

        **Arguments**

        - `input_group_size`: the number of replicas of a group; divides the number of replicas.
        - `input_group_type`: which replicas form a group; not All.

        AssertionError for another type, ValueError for a size or type that is impossible.
        """
        if input_group_type == CommGroupType.All:
            raise ValueError("input_group_type cannot be All")
        check_count(input_group_size=input_group_size)
        self._check_groups(input_group_size)
        assert isinstance(input_group_type, CommGroupType)
        self.set(input_group_size=input_group_size, input_group_type=input_group_type.value)
        return self

    def _check_input_groups(self) -> None:
        """Raise ValueError if a later number of replicas does not divide into the groups."""
        self._check_groups(self.input_group_size)

    def _check_groups(self, size: int) -> None:
        if size > self.replication_factor:
            raise ValueError("input_group_size cannot be larger than replication_factor")
        if self.replication_factor % size:
            raise ValueError("input_group_size must be a factor of replication_factor")

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Choose whether all replicas share their buffers; False lets each change its own."""
        self.set(broadcast_buffers=broadcast_buffers)
        return self
