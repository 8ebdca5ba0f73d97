"""The processes that are attached to IPUs: the record that each writes, and reading it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpusim.devices.locks import read_locked
from gpusim.devices.table import Device, Table
from gpusim.platforms import user_id

__all__ = ["Holder", "holders", "local_record"]

LONGEST_COMMAND = 4096  # characters


@dataclass(frozen=True)
class Holder:
    """The process that is attached to an IPU, from its record; None where the record says nothing.

    `device` is the id that it attached to, of the IPU itself or of a group. `since` is a Unix time
    in seconds.
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


def local_record(device: Device) -> bytes:
    """The record of this process while it is attached to `device`."""
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
        import pwd

        return pwd.getpwuid(user_id()).pw_name
    except (KeyError, ImportError):  # Windows has no such list
        return str(user_id())


def holders(ipus: Iterable[int] | None = None) -> dict[int, Holder]:
    """The processes that are attached to the given IPUs (default: all), by IPU, without free ones.

    Looking changes nothing. Records that crashed processes have left are ignored.
    """
    asked = range(Table.from_environment().count) if ipus is None else ipus
    return {ipu: parse(ipu, record) for ipu, record in read_locked(tuple(asked)).items()}


def parse(ipu: int, record: bytes) -> Holder:
    """The record as a Holder. Other users may have written it: it can contain anything."""
    try:
        fields = json.loads(record)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Holder(ipu)  # attached; nothing else is known
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
    """The text without control characters, which could move a terminal's cursor."""
    if not isinstance(value, str):
        return None
    return "".join(char if char.isprintable() else "?" for char in value)
