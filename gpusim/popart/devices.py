"""DeviceManager: lists and acquires the simulated IPUs, as PopART does."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from gpusim.devices import Connection, ConnectionType, Device, Table, select_by_count
from gpusim.errors import GpusimError
from gpusim.popdist.popart import DeviceInfo

__all__ = ["DeviceConnectionType", "DeviceInfo", "DeviceManager", "DeviceType", "SyncPattern"]

#: When to attach: PopART's name for it.
DeviceConnectionType = ConnectionType


class DeviceType(enum.IntEnum):
    """The kind of a device."""

    IpuModel = 0
    Cpu = 1
    Ipu = 2
    OfflineIpu = 3
    Sim = 4


class SyncPattern(enum.IntEnum):
    """How IPUs wait for each other. It has no effect here."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class DeviceManager:
    """Lists the simulated IPUs, and attaches to them.

    >>> DeviceManager().enumerateDevices(numIpus=2)[0].numIpus
    2
    """

    def enumerateDevices(
        self,
        pattern: SyncPattern = SyncPattern.Full,
        numIpus: int = 1,
        deviceType: DeviceType = DeviceType.Ipu,
        connectionType: ConnectionType = ConnectionType.OnDemand,
    ) -> list[DeviceInfo]:
        """The devices with `numIpus` IPUs, not attached."""
        return [describe(device) for device in Table.from_environment().of_size(numIpus)]

    def acquireAvailableDevice(
        self, numIpus: int = 1, connectionType: ConnectionType = ConnectionType.Always
    ) -> DeviceInfo | None:
        """The first free device with `numIpus` IPUs, attached; None if there is none.

        With another connection type than Always it is not attached yet.
        """
        infos = (describe(device) for device in self._select(numIpus))
        return self._first(infos) if connectionType is ConnectionType.Always else next(infos, None)

    def acquireDeviceById(
        self, id: int, connectionType: ConnectionType = ConnectionType.Always
    ) -> DeviceInfo | None:
        """The device with an id of gc-info, attached; None if it is in use.

        **Raises**: DeviceIdError (a ValueError): for an unknown id.
        """
        info = describe(Table.from_environment().device(id))
        if connectionType is not ConnectionType.Always:
            return info
        return self._first([info])

    def tryAcquireAvailableDevice(self, numIpus: int = 1) -> DeviceInfo | None:
        """As `acquireAvailableDevice`."""
        return self.acquireAvailableDevice(numIpus)

    def _select(self, numIpus: int) -> tuple[Device, ...]:
        try:
            return select_by_count(numIpus)
        except GpusimError:
            return ()

    def _first(self, infos: Iterable[DeviceInfo]) -> DeviceInfo | None:
        return next((info for info in infos if info.attach()), None)


def describe(device: Device) -> DeviceInfo:
    return DeviceInfo(Connection(device, ConnectionType.OnDemand))
