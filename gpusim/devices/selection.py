"""Selecting devices by id or by the number of IPUs."""

from __future__ import annotations

import logging

from gpusim.devices.errors import IpuCountError
from gpusim.devices.table import Device, Table

__all__ = ["MAX_PER_PROCESS", "ipus_needed", "reserved", "select_by_count", "select_by_id"]

logger = logging.getLogger("gpusim.devices")

MAX_PER_PROCESS = 64  # more IPUs take several processes


def ipus_needed(replicas: int, ipus_per_replica: int = 1) -> int:
    """The number of IPUs that a program uses.

    ValueError for a number below 1; IpuCountError (also a ValueError) for more than 64.

    >>> ipus_needed(8, 2)
    16
    >>> ipus_needed(64, 2)
    Traceback (most recent call last):
    ...
    gpusim.devices.errors.IpuCountError: Too many IPUs requested (128). Experiments that need
    more than 64 IPUs require distributed execution.
    """
    for name, value in (("replicas", replicas), ("ipus_per_replica", ipus_per_replica)):
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected a number of at least 1")
    needed = replicas * ipus_per_replica
    if needed > MAX_PER_PROCESS:
        raise IpuCountError(
            f"Too many IPUs requested ({needed}). Experiments that need more than "
            f"{MAX_PER_PROCESS} IPUs require distributed execution.",
            needed,
        )
    return needed


def reserved(needed: int) -> int:
    """The number of IPUs that a device must have: the smallest power of two from `needed` up.

    >>> [reserved(n) for n in (1, 2, 3, 5, 64)]
    [1, 2, 4, 8, 64]
    """
    return 1 << (needed - 1).bit_length()


def select_by_count(
    replicas: int,
    ipus_per_replica: int = 1,
    *,
    round_up: bool = False,
    table: Table | None = None,
) -> tuple[Device, ...]:
    """The devices that have as many IPUs as the program needs, by id.

    **Arguments**

    - `replicas`, `ipus_per_replica`: the program needs their product.
    - `round_up`: reserve the next power of two if the product is not one, and log a warning.
    - `table`: the system; the default is that of GPUSIM_IPUS.

    **Raises**: IpuCountError if the product is not a power of two and `round_up` is False, if it
    is above 64, or if the system has fewer IPUs.

    >>> select_by_count(1, 2, table=Table(4))
    (Device(id=4, ipus=(0, 1)), Device(id=5, ipus=(2, 3)))
    >>> select_by_count(3, round_up=True, table=Table(4))
    (Device(id=6, ipus=(0, 1, 2, 3)),)
    """
    needed = ipus_needed(replicas, ipus_per_replica)
    size = reserved(needed)
    if size != needed:
        if not round_up:
            raise IpuCountError(
                f"{replicas} replicas * {ipus_per_replica} IPUs = {needed} IPUs, which is not "
                f"a power of two: at least {size} would have to be reserved. Use a different "
                "number, or ask for rounding up.",
                needed,
                size,
            )
        logger.warning(
            "Reserving %d IPUs for a program that uses %d: %d will be reserved but not used.",
            size,
            needed,
            size - needed,
        )
    table = table or Table.from_environment()
    found = table.of_size(size)
    if not found:
        raise IpuCountError(
            f"{size} IPUs are needed, and there are {table.count}; GPUSIM_IPUS sets the number.",
            needed,
            size,
        )
    return found


def select_by_id(
    id: int, replicas: int, ipus_per_replica: int = 1, *, table: Table | None = None
) -> Device:
    """The device with an id of gc-info, which must have the IPUs that the program needs.

    The arguments are those of `select_by_count`. A device with more IPUs than replicas times IPUs
    per replica is a warning in the log.

    **Raises**: IpuCountError for a device with fewer IPUs; DeviceIdError for an unknown id.

    >>> select_by_id(5, replicas=2, table=Table(4))
    Device(id=5, ipus=(2, 3))
    >>> select_by_id(5, replicas=4, table=Table(4))
    Traceback (most recent call last):
    ...
    gpusim.devices.errors.IpuCountError: Expected at least replication factor * used IPUs
    = 4 * 1 = 4 IPUs but device Id 5 has 2
    """
    needed = ipus_needed(replicas, ipus_per_replica)
    device = (table or Table.from_environment()).device(id)
    product = f"replication factor * used IPUs = {replicas} * {ipus_per_replica} = {needed} IPUs"
    if len(device) < needed:
        raise IpuCountError(
            f"Expected at least {product} but device Id {id} has {len(device)}",
            needed,
            len(device),
        )
    if len(device) > needed:
        logger.warning(
            "Expected %s but device Id %d has %d, which means some of them will not be used.",
            product,
            id,
            len(device),
        )
    return device
