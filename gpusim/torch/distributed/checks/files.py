"""Files that one rank writes and another reads or writes, with nothing that orders the two."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from ..calls.store import RankStore
from ..runners.threads import Rank
from . import opens
from .findings import Finding, ranks_in_words
from .happens import Clock, replay
from .here import replace
from .log import Log

if TYPE_CHECKING:
    from .watch import Watch

__all__ = ["Files", "analyse", "install"]

SETS = frozenset("add append compare_set multi_set queue_push set store_barrier".split())
GETS = frozenset(
    "add check compare_set get multi_get queue_len queue_pop store_barrier wait".split()
)
"""The store's methods after which a rank knows what others did before they set the key."""

CONFLICTS = {
    "r": "wuaxm",
    "w": "rwuaxm",
    "u": "rwm",
    "a": "rw",
    "x": "rw",
    "m": "rwu",
}
"""By the mode of an access: those of another rank's that must not happen at the same time.

Ranks may append to one file, change parts of it, or replace it by renaming. Of those that create it
anew if it is not there ("x"), one does.
"""

WRITES = {
    "w": "writes",
    "u": "changes",
    "a": "appends to",
    "x": "creates",
    "m": "puts another file in the place of",
}


MANY = 100_000
"""How many questions about files a rank may ask. Of a rank with more, none is looked at."""


class Files:
    """A rank's use of files, that of threads that it has started included."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        # What has been noted since the last event of another kind, which stands at `_end` - 1.
        self._noted: set[tuple[str, str, str]] = set()
        self._end = -1
        self._locks: set[str] = set()
        #: Whether the rank's program has ended.
        self.is_over = False
        self._count = 0

    def opened(self, given: Any, mode: str) -> None:
        """Note that a file is opened, or written as a whole."""
        path = self._path(given)
        if path is None or opens.is_of_library(sys._getframe(2)):
            return
        event = mode, path, self.watch.site()
        if self._is_new(event):
            for lock in self._locks:
                self._time("got", lock)
            # Who sees that the file is there knows what was before, and not that it is whole.
            if mode != "r":
                self._time("set", f"file {path}")
                self._time("set", f"folder {os.path.dirname(path)}")
            if mode == "x":
                self._time("got", f"file {path}")
            self.watch.note("file", *event)
            for lock in self._locks:
                self._time("set", lock)
            self._noted.add(event)
            self._end = len(self.watch.log.events)

    def renamed(self, target: Any) -> None:
        """Note that a file comes to be there as a whole."""
        path = self._path(target)
        if path is not None and not opens.is_of_library(sys._getframe(2)):
            self.watch.note("file", "m", path, self.watch.site())
            self._time("set", f"file {path}")
            self._time("set", f"folder {os.path.dirname(path)}")

    def removed(self, given: Any) -> None:
        """Note that a file goes: one that was a lock is free."""
        path = self._path(given)
        if path is not None:
            self._time("set", f"file {path}")

    def seen(self, given: Any) -> None:
        """Note that the rank has seen that a file or a folder is there."""
        path = self._path(given)
        if path is None:
            return
        for kind in ("file", "folder"):
            event = "seen", kind, path
            if self._is_new(event):
                self._time("got", f"{kind} {path}")
                self._noted.add(event)
                self._end = len(self.watch.log.events)

    def locked(self, file: int, operation: int) -> None:
        """Note that the rank asks for a lock, or gives it back."""
        path = os.readlink(f"/proc/self/fd/{file}")
        locks = self.watch.log.rows.setdefault("locks", [])
        if path not in locks:
            locks.append(path)
        lock = f"lock {path}"
        # It may have to wait: it knows what others did when it opens the next file.
        if operation & 8:  # LOCK_UN
            self._time("set", lock)
        else:
            self._locks.add(lock)

    def finish(self) -> None:
        """Hear of no more."""
        self.is_over = True

    def _path(self, given: Any) -> str | None:
        """The file's absolute path, if ranks may exchange something by it."""
        if self.is_over or isinstance(given, int):
            return None
        path = os.path.abspath(os.fsdecode(given))
        if not opens.counts(path):
            return None
        self._count += 1
        if self._count > MANY:
            self.is_over = True
            self.watch.log.rows["files"] = ["many"]
            return None
        return _real(path)

    def _is_new(self, event: tuple[str, str, str]) -> bool:
        """Whether nothing else was noted since the same was."""
        if self._end != len(self.watch.log.events):
            self._noted.clear()
        return event not in self._noted

    def _time(self, kind: str, key: str) -> None:
        self.watch.note(kind, key, monotonic_ns())


@functools.lru_cache(4096)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def _real(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(_real_folder(folder), name)


def install(stack: ExitStack) -> None:
    """Note what ranks do with files, and what orders it."""
    opens.install(stack)
    replace(stack, Rank, "new_group", _join)
    for kind in _stores(RankStore):
        if "_ask" in vars(kind):
            replace(stack, kind, "_ask", _ask_store)


def _stores(kind: type) -> list[type]:
    found = [kind]
    child: type
    for child in kind.__subclasses__():
        found += _stores(child)
    return found


def _ask_store(watch: Watch, real: Any, store: Any, method: str, /, *args: Any) -> Any:
    start = monotonic_ns()
    keys = args[0] if args and isinstance(args[0], list) else args[:1]
    if method in SETS and args[1:] != (0,):  # add(key, 0) asks
        for key in keys:
            watch.note("set", f"key {key}", start)
    answer = real(store, method, *args)
    if method in GETS and answer is not False:
        end = monotonic_ns()
        for key in keys:
            watch.note("got", f"key {key}", end)
    return answer


def _join(watch: Watch, real: Any, rank: Any, name: str, ranks: Any, /, *rest: Any) -> Any:
    """Make a group. The ranks of a world meet there, and those of gloo's groups."""
    group = real(rank, name, ranks, *rest)
    if not ranks or "gloo" in rank.backend.lower():
        watch.note("joined", group._key.label, list(group._key.ranks))
    return group


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """Accesses of two ranks to one file, at least one of which writes, that nothing orders."""
    if any("files" in log.rows for log in logs):
        return []
    users: dict[str, set[int]] = {}
    writers: dict[str, set[int]] = {}
    for log in logs:
        for event in log.events:
            if event[0] == "file":
                users.setdefault(event[2], set()).add(log.rank)
                if event[1] != "r":
                    writers.setdefault(event[2], set()).add(log.rank)
    # What is written to a file that ranks lock is in the order of the lock, or nothing.
    locks = {path for log in logs for path in log.rows.get("locks", ())}
    shared = {path for path in writers if len(users[path]) > 1 and path not in locks}
    if not shared:
        return []
    races = _Races(logs, shared)
    replay(logs, races.access)
    return races.found


class _Races:
    """The last accesses of each rank to each shared file, by mode."""

    def __init__(self, logs: Sequence[Log], shared: set[str]) -> None:
        self.logs, self.shared = logs, shared
        #: By file: the places of the ranks that change parts of it.
        self.changers: dict[str, set[int]] = {path: set() for path in shared}
        for place, log in enumerate(logs):
            for event in log.events:
                if event[0] == "file" and event[1] == "u" and event[2] in shared:
                    self.changers[event[2]].add(place)
        #: By file, then by rank's place and mode: when, and where in the program.
        self.last: dict[str, dict[tuple[int, str], tuple[int, str]]] = {}
        self.found: list[Finding] = []

    def access(self, place: int, event: list[Any], clock: Clock) -> Clock:
        """Compare an access with those before it in the replay: none of them can come after it."""
        _, mode, path, site = event
        if path not in self.shared:
            return clock
        last = self.last.setdefault(path, {})
        for (other, how), (when, where) in last.items():
            if other == place or how not in CONFLICTS[mode] or when <= clock[other]:
                continue
            # Ranks that change parts of a file also read the parts that are theirs.
            if {mode, how} != {"r", "u"} or not {place, other} <= self.changers[path]:
                self._find((place, mode, site), (other, how, where), path)
        clock = clock.copy()
        clock[place] += 1
        last[place, mode] = int(clock[place]), site
        return clock

    def _find(self, one: tuple[int, str, str], other: tuple[int, str, str], path: str) -> None:
        # The access that reads has its site; of two that write, the second.
        if other[1] == "r":
            one, other = other, one
        reader, writer = self.logs[one[0]].rank, self.logs[other[0]].rank
        both = one[1] != "r"
        does = WRITES.get(one[1], "reads")
        text = (
            f"rank {reader} {does} {os.path.basename(path)}, which rank {writer} "
            f"{WRITES[other[1]]}{' too' if one[1] == other[1] else ''}; nothing orders the two"
        )
        ranks = sorted([reader, writer]) if both else [reader]
        related = [f"{other[2]}: {ranks_in_words([writer])} {WRITES[other[1]]} the file"]
        self.found.append(Finding("file-race", one[2], ranks, text, related=related))
