"""Who uses which IPU: what a holder writes about itself, and reading it."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpusim.devices.locks import read_locked
from gpusim.devices.table import Device, Table

__all__ = ["Holder", "holders", "own_record"]

LONGEST_COMMAND = 4096  # characters


@dataclass(frozen=True)
class Holder:
    """Who is attached to an IPU; None is what it did not say.

    `device` is the id it attached to, of the IPU itself or of a group; `since` seconds of the
    Unix time.
    """

    ipu: int
    device: int | None = None
    pid: int | None = None
    user: str | None = None
    command: str | None = None
    since: float | None = None

    @property
    def started(self) -> datetime | None:
        """`since` as a time in UTC."""
        try:
            return None if self.since is None else datetime.fromtimestamp(self.since, UTC)
        except (OverflowError, OSError, ValueError):
            return None

    def __str__(self) -> str:
        who = "an unknown process" if self.pid is None else f"process {self.pid}"
        if self.pid == os.getpid():
            who = "this process"
        return f"{who} of {self.user}" if self.user else who


def own_record(device: Device) -> bytes:
    """What this process says about itself while it is attached to `device`."""
    record = {
        "device": device.id,
        "pid": os.getpid(),
        "user": user_name(),
        "command": shlex.join(sys.orig_argv)[:LONGEST_COMMAND],
        "since": time.time(),
    }
    return json.dumps(record).encode()


def user_name() -> str:
    """This user's name; the number where the system knows none, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def holders(ipus: Iterable[int] | None = None) -> dict[int, Holder]:
    """Who is attached to the given IPUs (default: all of the table), by IPU; free ones are missing.

    Disturbs nobody. What crashed processes left behind is ignored.
    """
    asked = range(Table.from_environment().count) if ipus is None else ipus
    return {ipu: parse(ipu, record) for ipu, record in read_locked(tuple(asked)).items()}


def parse(ipu: int, record: bytes) -> Holder:
    """The record as a Holder. Others may have written it: anything can be in it."""
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Holder(ipu)  # it is attached, and that is all that is known
    return Holder(
        ipu,
        device=whole(fields.get("device")),
        pid=whole(fields.get("pid")),
        user=printable(fields.get("user")),
        command=printable(fields.get("command")),
        since=number(fields.get("since")),
    )


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    return value if isinstance(value, float) else None


def printable(value: Any) -> str | None:
    """The text without what would move a terminal's cursor or change its colours."""
    if not isinstance(value, str):
        return None
    return "".join(char if char.isprintable() else "?" for char in value)
