"""Simulated IPUs: their ids, exclusive use by one owner at a time, and gc-info.

- `table`: the devices and their ids. `selection`: by id or by number of IPUs. `placement`: the
  GPUs, and the GPU and the stream of an IPU.
- `attach`: exclusive use, with waiting. `connection`: when an owner attaches. `holders`: the
  processes that are attached. `locks`: the lock files.
- `gc_info`, `gc_monitor`: the commands, with `command` in common. `attributes`: what they print.
- `host`: this machine's hardware.
"""

from __future__ import annotations

from .attach import Attachment, attach
from .connection import Connection, ConnectionType
from .errors import AcquireError, DeviceError, DeviceIdError, IpuCountError
from .holders import Holder, holders
from .placement import Placement, place
from .selection import ipus_needed, reserved, select_by_count, select_by_id
from .table import Device, Ipu, Table, devices

__all__ = [
    "AcquireError",
    "Attachment",
    "Connection",
    "ConnectionType",
    "Device",
    "DeviceError",
    "DeviceIdError",
    "Holder",
    "Ipu",
    "IpuCountError",
    "Placement",
    "Table",
    "attach",
    "devices",
    "holders",
    "ipus_needed",
    "place",
    "reserved",
    "select_by_count",
    "select_by_id",
]
