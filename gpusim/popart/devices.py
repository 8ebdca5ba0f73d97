"""DeviceManager: lists and acquires the simulated IPUs, as PopART does."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping

from gpusim.devices import Connection, ConnectionType, Device, Table, select_by_count
from gpusim.errors import GpusimError
from gpusim.popdist.popart import DeviceInfo, UnlistedDevice

__all__ = [
    "DeviceConnectionType",
    "DeviceInfo",
    "DeviceManager",
    "DeviceSelectionCriterion",
    "DeviceType",
    "SyncPattern",
]

#: When to attach: PopART's name for it.
DeviceConnectionType = ConnectionType


class DeviceSelectionCriterion(enum.IntEnum):
    """Which of several free devices to take."""

    First = 0
    Random = 1


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
        tilesPerIPU: int = 0,
    ) -> list[DeviceInfo]:
        """The devices with `numIpus` IPUs, not attached."""
        return [describe(device) for device in Table.from_environment().of_size(numIpus)]

    def createCpuDevice(self) -> DeviceInfo:
        """A device of one IPU that need not be acquired."""
        return UnlistedDevice(1)

    def createIpuModelDevice(self, options: Mapping[str, object]) -> DeviceInfo:
        """A device of any number of IPUs that need not be acquired.

        **Arguments**: `options`: numIPUs, by default 1; others have no effect.
        """
        return UnlistedDevice(int(str(options.get("numIPUs", 1))))

    def acquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIpu: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: ConnectionType = ConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
    ) -> DeviceInfo | None:
        """A free device with `numIpus` IPUs, attached; None if there is none.

        With another connection type than Always it is not attached yet.

        **Arguments**

        - `selectionCriterion`: whether to take the first free device, or any.
        - `tilesPerIpu`, `pattern`: have no effect.
        """
        try:
            infos = [describe(device) for device in select_by_count(numIpus)]
        except GpusimError:
            return None
        if selectionCriterion is DeviceSelectionCriterion.Random:
            random.shuffle(infos)
        return self._first(infos) if connectionType is ConnectionType.Always else infos[0]

    tryAcquireAvailableDevice = acquireAvailableDevice

    def acquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: ConnectionType = ConnectionType.Always,
    ) -> DeviceInfo | None:
        """The device with an id of gc-info, attached; None if it is in use.

        **Raises**: DeviceIdError (a ValueError): for an unknown id.
        """
        info = describe(Table.from_environment().device(id))
        return self._first([info]) if connectionType is ConnectionType.Always else info

    tryAcquireDeviceById = acquireDeviceById

    def _first(self, infos: Iterable[DeviceInfo]) -> DeviceInfo | None:
        return next((info for info in infos if info.attach()), None)


def describe(device: Device) -> DeviceInfo:
    return DeviceInfo(Connection(device, ConnectionType.OnDemand))
