"""When an owner attaches to its device: at once, when it first runs, or never."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable

from gpusim.devices.attach import Attachment, attach, logger
from gpusim.devices.errors import DeviceError
from gpusim.devices.table import Device

__all__ = ["Connection", "ConnectionType"]


class ConnectionType(enum.IntEnum):
    """When to attach; the numbers are PopTorch's."""

    Always = 0
    """From the start."""
    OnDemand = 1
    """When it first runs."""
    Never = 2
    """Not at all: to compile on a machine without devices."""


class Connection:
    """An owner's connection to a device, attached and detached as its type says.

    **Arguments**

    - `device`: a device, or several candidates. The connection takes the first that is free, and
      keeps to it. The candidates may be empty for `Never`.
    - `type`: when to attach; `Always` attaches now.
    - `timeout`, `log`: as for `attach`.

    **Raises**: the errors of `attach`; DeviceError for calls that the state or the type forbids.

    >>> from gpusim.devices import Table
    >>> offline = Connection(Table(4).device(6), ConnectionType.Never)
    >>> offline.attached
    False
    >>> offline.attach()
    Traceback (most recent call last):
    ...
    gpusim.devices.errors.DeviceError: Trying to attach to an offline device (ConnectionType.Never)
    """

    def __init__(
        self,
        device: Device | Iterable[Device],
        type: ConnectionType = ConnectionType.Always,
        *,
        timeout: float | None = None,
        log: logging.Logger = logger,
    ) -> None:
        self._log = log
        self._candidates = (device,) if isinstance(device, Device) else tuple(device)
        self._attachment: Attachment | None = None
        self.type = ConnectionType(type)  #: when it attaches
        self.timeout = timeout  #: how long it waits then
        if self.type is ConnectionType.Always:
            self.attach()

    @property
    def device(self) -> Device | None:
        """The device; None as long as there are several candidates."""
        return self._candidates[0] if len(self._candidates) == 1 else None

    @property
    def attached(self) -> bool:
        """Whether the device is this owner's now."""
        return self._attachment is not None and self._attachment.attached

    def attach(self) -> Device:
        """Attach, and return the device. DeviceError if it is attached, or for `Never`."""
        if self.type is ConnectionType.Never:
            raise DeviceError("Trying to attach to an offline device (ConnectionType.Never)")
        if self.attached:
            raise DeviceError("Device is already attached")
        self._attachment = attach(self._candidates, timeout=self.timeout, log=self._log)
        self._candidates = (self._attachment.device,)
        return self._attachment.device

    def detach(self) -> None:
        """Release the device for other owners. DeviceError if it is not attached."""
        if self._attachment is None or not self._attachment.attached:
            raise DeviceError("Device is not attached")
        self._attachment.detach()

    def before_run(self) -> Device:
        """Attach if necessary, and return the device: an owner calls this before each run.

        `OnDemand` attaches at its first run, and every type but `Never` after a `detach`. `Never`
        is a DeviceError.
        """
        if self.type is ConnectionType.Never:
            raise DeviceError("Trying to run on an offline device (ConnectionType.Never)")
        if self._attachment is not None and self._attachment.attached:
            return self._attachment.device
        return self.attach()

    def __repr__(self) -> str:
        ids = ", ".join(str(device.id) for device in self._candidates)
        state = "attached" if self.attached else "not attached"
        return f"<Connection {self.type.name} to device Id {ids or 'none'}, {state}>"
