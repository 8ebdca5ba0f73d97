"""Exclusive use of a device, with waiting, until its owner detaches, is collected or dies."""

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
from gpusim.devices.holders import Holder, holders, local_record
from gpusim.devices.locks import Hold, try_hold
from gpusim.devices.table import Device

__all__ = ["Attachment", "attach", "default_timeout"]

logger = logging.getLogger("gpusim.devices")

FIRST_SLEEP, LONGEST_SLEEP = 0.05, 1.0  # seconds, doubling in between
MAX_NAMED = 4  # holders that an error names


class Attachment:
    """A device that no other owner can attach to, until `detach`.

    The attachment also ends when this object is collected, when the process ends in any way, and
    at the end of a `with`. Forked and spawned processes do not inherit it.
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
        """Release the device for other owners; does nothing the second time."""
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


def attach(
    device: Device | Iterable[Device],
    *,
    timeout: float | None = None,
    log: logging.Logger = logger,
) -> Attachment:
    """Attach to a device, or to the first of several that is free.

    Waiting is logged.

    **Arguments**

    - `device`: a device, or several candidates, as `select_by_count` gives them. Attaching to a
      group takes all of its IPUs.
    - `timeout`: the number of seconds to wait for a free device: 0 does not wait, `math.inf` waits
      as long as it takes. None means what POPTORCH_WAIT_FOR_IPU says: 0 or unset does not wait, 1
      waits as long as it takes.

    **Raises**

    - `AcquireError`: if no device was free in that time. It names the processes that use them.
    - `DeviceError`: if the runtime folder cannot be used.
    - `ValueError`: for invalid arguments or variables.
    """
    candidates = (device,) if isinstance(device, Device) else tuple(device)
    if not candidates:
        raise ValueError("device=(): expected a Device, or at least one")
    patience = default_timeout() if timeout is None else timeout
    if not patience >= 0:  # NaN is neither
        raise ValueError(f"timeout={timeout!r}: expected a number of seconds of at least 0")
    attachment = wait_for(candidates, patience, log)
    logger.debug("Attached to device Id %d.", attachment.device.id)
    return attachment


def default_timeout() -> float:
    """The timeout that POPTORCH_WAIT_FOR_IPU sets: 0.0 if it is 0 or unset, infinity if it is 1."""
    value = os.environ.get("POPTORCH_WAIT_FOR_IPU", "")
    timeouts = {"": 0.0, "0": 0.0, "1": math.inf}
    try:
        return timeouts[value.strip()]
    except KeyError:
        raise ValueError(f"POPTORCH_WAIT_FOR_IPU={value!r}: expected 0 or 1") from None


def wait_for(candidates: tuple[Device, ...], patience: float, log: logging.Logger) -> Attachment:
    """Try until a device is free or `patience` seconds have passed; try once more at the end."""
    deadline = time.monotonic() + patience
    sleep, level = FIRST_SLEEP, logging.WARNING
    while True:
        for device in candidates:
            hold = try_hold(device.ipus, local_record(device))
            if hold is not None:
                return Attachment(device, hold)
        left = deadline - time.monotonic()
        if left <= 0:
            raise AcquireError(failure(candidates, patience))
        pause = min(sleep, left)
        log.log(level, "No IPU available, sleeping for %.2f seconds", pause)
        time.sleep(pause)
        sleep, level = min(2 * sleep, LONGEST_SLEEP), logging.DEBUG  # users read it once


def failure(candidates: tuple[Device, ...], patience: float) -> str:
    """The message of an AcquireError."""
    only = candidates[0]
    what = f"device Id {only.id}" if len(candidates) == 1 else f"{len(only)} IPU(s)"
    ipus = sorted({ipu for device in candidates for ipu in device.ipus})
    found = list(holders(ipus).values())
    waited = f" within {patience:g} seconds" if patience else ""
    users = "; ".join(map(in_use, found[:MAX_NAMED]))
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"Failed to acquire {what}{waited}" + (f": {users}{more}" if users else "")


def in_use(holder: Holder) -> str:
    command = f" ({holder.command})" if holder.command else ""
    return f"IPU {holder.ipu} is used by {holder}{command}"
