"""The errors of simulated IPUs: devices that do not exist, and devices that are in use."""

from __future__ import annotations

from gpusim.errors import GpusimError

__all__ = ["AcquireError", "DeviceError", "DeviceIdError", "IpuCountError"]


class DeviceError(GpusimError):
    """The base of the errors of `gpusim.devices`."""


class DeviceIdError(DeviceError, ValueError):
    """A device id that the table does not have."""


class IpuCountError(DeviceError, ValueError):
    """A number of IPUs that no device has, or that the selected device does not have.

    `requested` is the number that was asked for. `reserved` is the number that rounding up would
    reserve, or that the selected device has; None where neither applies.
    """

    def __init__(self, message: str, requested: int, reserved: int | None = None) -> None:
        super().__init__(message)
        self.requested = requested
        self.reserved = reserved

    def __reduce__(self) -> tuple[type[IpuCountError], tuple[str, int, int | None]]:
        return type(self), (str(self), self.requested, self.reserved)


class AcquireError(DeviceError):
    """Every candidate is in use, and waiting was not asked for or took too long."""
