"""Simulated IPUs: which there are, who may use them, and what gc-info says about them.

- `table`: the devices and their ids. `selection`: by id or by number of IPUs. `placement`: on
  which GPU and stream an IPU is.
- `attach`: exclusive use, with waiting. `connection`: when an owner attaches. `holders`: who has.
- `gc_info`, `gc_monitor`: the commands; `attributes`: what they print about an IPU.
- `locks`, `runtime_folder`: flock, and the folder of the lock files. `gpus`, `nvml`, `host`:
  what the hardware says. `errors`: what goes wrong.
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
