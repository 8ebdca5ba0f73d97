"""Calls, files and waits of a rank, as faults count them: campaigns draw faults from them.

`ask` is called in the launching process, before ranks are forked; each rank's process has lists of
its own then. Without `ask` nothing is kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plans import Fault

__all__ = [
    "Seen",
    "ask",
    "begin_rank",
    "happened",
    "is_asked",
    "is_own",
    "saw_call",
    "saw_wait",
    "saw_write",
    "seen",
]


@dataclass
class Seen:
    """All that one rank has done that a fault can disturb, in its order.

    **Attributes**: `calls` has of each call, from number 1, its operation, its place in the
    program, and dtype and elements of each tensor; `writes` the name of each file that was opened
    for writing; `waits` the key of each question to a store.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


# Set before forks by the one thread of the launching process; a rank's process has a copy. `_seen`
# is made before the program begins, and each list is appended to by the thread that makes the call.
_folder: Path | None = None
_counts = False
_seen: Seen | None = None


def ask(folder: Path | None, counts: bool = True) -> None:
    """Watch the ranks of the launches to come; None ends it.

    **Arguments**: `folder` gets `happened.jsonl`, a line for each fault that happens. `counts`:
    whether calls, files and waits are kept, also where there are no faults.
    """
    global _folder, _counts
    _folder, _counts = folder, counts


def is_asked() -> bool:
    """Whether calls, files and waits are to be counted though there are no faults."""
    return _folder is not None and _counts


def seen() -> Seen | None:
    """The acts of the calling process, a rank; None if it is not kept."""
    return _seen


def is_own(path: str) -> bool:
    """Whether a file, by its real path, is one of those that this module writes."""
    return _folder is not None and path.startswith(f"{os.path.realpath(_folder)}{os.sep}")


def begin_rank() -> Seen:
    """Begin to keep what the calling process, a rank, does."""
    global _seen
    _seen = Seen()
    return _seen


def saw_call(operation: str, site: str, tensors: list[tuple[str, int]]) -> None:
    """Note a call that communicates: `tensors` are dtype and elements of its operands.

    As often as faults count calls, in the same order.
    """
    if _seen is not None:
        _seen.calls.append({"operation": operation, "site": site, "tensors": tensors})


def saw_write(name: str) -> None:
    """Note a file that is opened for writing, as often as faults count writes."""
    if _seen is not None:
        _seen.writes.append(name)


def saw_wait(key: str) -> None:
    """Note a question to a store, as often as faults count waits."""
    if _seen is not None:
        _seen.waits.append(key)


def happened(fault: Fault, site: str = "") -> None:
    """Note that a fault happens now, before it does: the process may be gone afterwards."""
    if _folder is None:
        return
    given = {key: value for key, value in asdict(fault).items() if value is not None}
    line = json.dumps({"fault": given, "site": site}) + "\n"
    # One write to a file that is opened for appending: lines of several ranks do not mix.
    file = os.open(_folder / "happened.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
