"""The simulated IPUs and the devices made of them, in gc-info's numbering.

Single IPUs come first, then the groups of 2, 4, 8, ... neighbours. GPUSIM_IPUS sets the number of
IPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address

from gpusim.devices.errors import DeviceIdError

__all__ = [
    "DEFAULT_IPUS",
    "IPUS_PER_MACHINE",
    "MOST_IPUS",
    "PARTITION",
    "Device",
    "Ipu",
    "Table",
    "devices",
]

PARTITION = "gpusim"
DEFAULT_IPUS = 16
MOST_IPUS = 1024  # an attached IPU holds an open file, and 1024 of those is a process's usual limit
IPUS_PER_MACHINE = 4
FIRST_HOST = IPv4Address("127.0.0.1")  # IPU-Machines count up from here; all are this machine


@dataclass(frozen=True)
class Ipu:
    """One simulated IPU. `id` is its number, and the id of the device of this IPU alone.

    >>> ipu = Ipu(5)
    >>> ipu.host, ipu.number
    ('127.0.0.2', 2)
    """

    id: int

    @property
    def machine(self) -> int:
        """The number of its IPU-Machine, from 0."""
        return self.id // IPUS_PER_MACHINE

    @property
    def host(self) -> str:
        """The address of its IPU-Machine, which has four IPUs."""
        return str(FIRST_HOST + self.machine)

    @property
    def number(self) -> int:
        """Its number in its IPU-Machine, which counts down: ids 0, 1, 2, 3 are IPU# 3, 2, 1, 0."""
        return IPUS_PER_MACHINE - 1 - self.id % IPUS_PER_MACHINE

    def gpu_of(self, gpus: int) -> int | None:
        """The GPU that simulates it, of this many; None, the host, without GPUs. pmap asks.

        >>> Ipu(5).gpu_of(2), Ipu(5).gpu_of(0)
        (1, None)
        """
        return self.id % gpus if gpus else None


@dataclass(frozen=True)
class Device:
    """A device of gc-info's list: a single IPU, or a group of neighbours.

    **Arguments**

    - `id`: its id in the list.
    - `ipus`: the numbers of its IPUs, ascending. The position of an IPU is its DNC Id.
    """

    id: int
    ipus: tuple[int, ...]

    @property
    def target(self) -> str:
        """gc-info's word for its kind: "Fabric" for a single IPU, "Multi IPU" for a group."""
        return "Fabric" if len(self.ipus) == 1 else "Multi IPU"

    @property
    def members(self) -> tuple[Ipu, ...]:
        """Its IPUs, with their addresses."""
        return tuple(map(Ipu, self.ipus))

    def __len__(self) -> int:
        return len(self.ipus)


@dataclass(frozen=True)
class Table:
    """All devices of a system of `count` IPUs, a power of two from 1 to 1024.

    The ids are those that gc-info lists: `count` singles, then `count // 2` pairs, and so on up to
    the group of all. ValueError for another count.

    >>> [len(device) for device in Table(4).devices]
    [1, 1, 1, 1, 2, 2, 4]
    >>> Table(4).device(5)
    Device(id=5, ipus=(2, 3))
    >>> Table(8).of_size(4)
    (Device(id=12, ipus=(0, 1, 2, 3)), Device(id=13, ipus=(4, 5, 6, 7)))
    """

    count: int = DEFAULT_IPUS

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or not is_count(self.count):
            raise ValueError(f"count={self.count!r}: {EXPECTED}")

    @classmethod
    def from_environment(cls) -> Table:
        """The system that GPUSIM_IPUS describes, or 16 IPUs. ValueError for an invalid number."""
        text = os.environ.get("GPUSIM_IPUS", "").strip()
        if not text:
            return cls()
        # ASCII digits only: int() accepts "1_6" and the digits of other scripts
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and is_count(int(text))):
            raise ValueError(f"GPUSIM_IPUS={text!r}: {EXPECTED}")
        return cls(int(text))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, by id."""
        found: list[Device] = []
        size = 1
        while size <= self.count:
            starts = range(0, self.count, size)
            groups = (tuple(range(start, start + size)) for start in starts)
            found += [Device(i, ipus) for i, ipus in enumerate(groups, len(found))]
            size *= 2
        return tuple(found)

    @property
    def ipus(self) -> tuple[Ipu, ...]:
        """The single IPUs."""
        return tuple(map(Ipu, range(self.count)))

    def device(self, id: int) -> Device:
        """The device with this id. DeviceIdError (a ValueError) for an unknown id.

        >>> Table(2).device(3)
        Traceback (most recent call last):
        ...
        gpusim.devices.errors.DeviceIdError: there is no device Id 3: 2 IPUs have the ids 0 to 2
        """
        last = len(self.devices) - 1
        if not 0 <= id <= last:
            ipus, ids = ("IPU has", "id 0") if last == 0 else ("IPUs have", f"ids 0 to {last}")
            raise DeviceIdError(f"there is no device Id {id}: {self.count} {ipus} the {ids}")
        return self.devices[id]

    def of_size(self, ipus: int) -> tuple[Device, ...]:
        """The devices that have exactly this number of IPUs, by id."""
        return tuple(device for device in self.devices if len(device) == ipus)


EXPECTED = f"expected a power of two from 1 to {MOST_IPUS}, the number of simulated IPUs"


def is_count(number: int) -> bool:
    """Whether a system may have this number of IPUs: a power of two, as in each group."""
    return 1 <= number <= MOST_IPUS and number & (number - 1) == 0


def devices() -> tuple[Device, ...]:
    """The devices of this machine by id: singles first, then groups. See GPUSIM_IPUS.

    >>> devices()[0].ipus, len(devices()[-1]) == Table.from_environment().count
    ((0,), True)
    """
    return Table.from_environment().devices
