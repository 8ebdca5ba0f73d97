"""PopART under PopDist: session options, and the device of this instance."""

from __future__ import annotations

from typing import Any

from gpusim.devices import Connection, ConnectionType, Table
from gpusim.errors import GpusimError
from gpusim.popdist.device_id import getDeviceId
from gpusim.popdist.replicas import (
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
)

__all__ = ["DeviceInfo", "UnlistedDevice", "configureSessionOptions", "getDevice"]


class DeviceInfo:
    """A device of this instance, as PopART hands it to a session."""

    def __init__(self, connection: Connection) -> None:
        assert connection.device is not None
        self._connection = connection
        self._device = connection.device

    @property
    def id(self) -> int:
        """Its id in gc-info's list."""
        return self._device.id

    @property
    def numIpus(self) -> int:
        """The number of its IPUs."""
        return len(self._device)

    @property
    def connectionType(self) -> ConnectionType:
        """When it attaches."""
        return self._connection.type

    @property
    def isAttached(self) -> bool:
        """Whether it is attached."""
        return self._connection.attached

    def attach(self) -> bool:
        """Attach if necessary; whether it is attached then."""
        if not self.isAttached:
            try:
                self._connection.attach()
            except GpusimError:
                return False
        return True

    def detach(self) -> None:
        """Release it for other owners; does nothing if it is not attached."""
        if self.isAttached:
            self._connection.detach()

    def __repr__(self) -> str:
        return f"<DeviceInfo of {self._connection!r}>"


class UnlistedDevice(DeviceInfo):
    """A device that gc-info does not list, such as a CPU or a model of IPUs: it is always free."""

    id = 0
    connectionType = ConnectionType.Always
    isAttached = False

    def __init__(self, ipus: int) -> None:
        self._ipus = ipus

    @property
    def numIpus(self) -> int:
        """The number of its IPUs."""
        return self._ipus

    def attach(self) -> bool:
        """Attach."""
        self.isAttached = True
        return True

    def detach(self) -> None:
        """Detach."""
        self.isAttached = False

    def __repr__(self) -> str:
        return f"<UnlistedDevice of {self._ipus} IPUs>"


def configureSessionOptions(opts: Any) -> None:
    """Set the session options of distributed replicas, on any object with the attributes.

    They are `enableDistributedReplicatedGraphs`, `globalReplicationFactor`, `globalReplicaOffset`,
    `enableReplicatedGraphs` (True if this instance holds several replicas) and
    `replicatedGraphCount`.
    """
    local = getNumLocalReplicas()
    opts.enableDistributedReplicatedGraphs = True
    opts.globalReplicationFactor = getNumTotalReplicas()
    opts.globalReplicaOffset = getReplicaIndexOffset()
    opts.enableReplicatedGraphs = local > 1
    opts.replicatedGraphCount = local


def getDevice(ipusPerReplica: int = 0, connectionType: int = ConnectionType.Always) -> DeviceInfo:
    """The device with the IPUs of this instance's replicas, attached as `connectionType` says.

    **Arguments**

    - `ipusPerReplica`: as for `popdist.getDeviceId`, whose errors it raises.
    - `connectionType`: popart's Always (now), OnDemand or Never, by value.

    **Raises**: AcquireError (a RuntimeError) if the device is in use; it names the processes.

    >>> device = getDevice(connectionType=ConnectionType.OnDemand)
    >>> device.id, device.numIpus, device.isAttached
    (0, 1, False)
    """
    device = Table.from_environment().device(getDeviceId(ipusPerReplica))
    return DeviceInfo(Connection(device, ConnectionType(int(connectionType))))
