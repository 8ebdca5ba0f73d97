"""Attaching to a device: exclusive, with waiting, and over when its owner is gone."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn

from gpusim.devices.errors import AcquireError
from gpusim.devices.holders import Holder, holders, own_record
from gpusim.devices.locks import Hold, try_hold
from gpusim.devices.table import Device

__all__ = ["Attachment", "attach", "default_timeout"]

logger = logging.getLogger("gpusim.devices")

FIRST_SLEEP, LONGEST_SLEEP = 0.05, 1.0  # seconds, doubling in between
MOST_NAMED = 4  # holders that an error names


class Attachment:
    """A device that nobody else can attach to, until `detach`.

    It is also over when this object is collected, when the process ends in any way, and at the
    end of a `with`. Forked and spawned processes do not inherit it.
    """

    def __init__(self, device: Device, hold: Hold) -> None:
        self.device = device  #: the device
        self._hold = hold
        self._finalizer = weakref.finalize(self, hold.release)

    @property
    def attached(self) -> bool:
        """Whether the device is still this owner's. False in a child of the process."""
        return self._hold.held

    def detach(self) -> None:
        """Let others have the device; does nothing the second time."""
        self._finalizer()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Attachment belongs to its process: send its device's id instead")

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        return f"<Attachment to device Id {self.device.id}, {state}>"


def attach(device: Device | Iterable[Device], *, timeout: float | None = None) -> Attachment:
    """Attach to a device, or to the first of several that is free.

    **Arguments**

    - `device`: a device, or those that would do, as `select_by_count` gives them. A group attaches
      to all of its IPUs.
    - `timeout`: how many seconds to wait for one to become free: 0 not at all, `math.inf` for as
      long as it takes. None is what POPTORCH_WAIT_FOR_IPU says: 0 or unset not at all, 1 for as
      long as it takes. Waiting is logged.

    AcquireError, which says who has it, if none was free in that time; DeviceError if the runtime
    folder cannot be used; ValueError for arguments or variables that make no sense.
    """
    candidates = (device,) if isinstance(device, Device) else tuple(device)
    if not candidates:
        raise ValueError("device=(): expected a Device, or at least one")
    patience = default_timeout() if timeout is None else timeout
    if not patience >= 0:  # NaN is neither
        raise ValueError(f"timeout={timeout!r}: expected a number of seconds of at least 0")
    attachment = wait_for(candidates, patience)
    logger.debug("Attached to device Id %d.", attachment.device.id)
    return attachment


def default_timeout() -> float:
    """What POPTORCH_WAIT_FOR_IPU says: 0.0 if it is 0 or unset, infinity if it is 1."""
    given = os.environ.get("POPTORCH_WAIT_FOR_IPU", "")
    waits = {"": 0.0, "0": 0.0, "1": math.inf}
    try:
        return waits[given.strip()]
    except KeyError:
        raise ValueError(f"POPTORCH_WAIT_FOR_IPU={given!r}: expected 0 or 1") from None


def wait_for(candidates: tuple[Device, ...], patience: float) -> Attachment:
    """Try until one is free or `patience` has passed; the last try is at its end."""
    deadline = time.monotonic() + patience
    sleep, level = FIRST_SLEEP, logging.WARNING
    while True:
        for device in candidates:
            hold = try_hold(device.ipus, own_record(device))
            if hold is not None:
                return Attachment(device, hold)
        left = deadline - time.monotonic()
        if left <= 0:
            raise AcquireError(failure(candidates, patience))
        pause = min(sleep, left)
        logger.log(level, "No IPU available, sleeping for %.2f seconds", pause)
        time.sleep(pause)
        sleep, level = min(2 * sleep, LONGEST_SLEEP), logging.DEBUG  # users read it once


def failure(candidates: tuple[Device, ...], patience: float) -> str:
    """What could not be had, and who has it."""
    only = candidates[0]
    what = f"device Id {only.id}" if len(candidates) == 1 else f"{len(only)} IPU(s)"
    ipus = sorted({ipu for device in candidates for ipu in device.ipus})
    found = list(holders(ipus).values())
    waited = f" within {patience:g} seconds" if patience else ""
    said = "; ".join(map(in_use, found[:MOST_NAMED]))
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"Failed to acquire {what}{waited}" + (f": {said}{more}" if said else "")


def in_use(holder: Holder) -> str:
    command = f" ({holder.command})" if holder.command else ""
    return f"IPU {holder.ipu} is used by {holder}{command}"
