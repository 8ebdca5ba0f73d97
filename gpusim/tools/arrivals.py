"""Whether a process of a script could still come as a rank, where others wait for one.

It could, unless each process of the script waits: as a rank for the others of its world, or in a
`join` for a process that lives. (Of Linux's /proc.)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

__all__ = ["could_come"]

HELPERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Processes that a script has without starting them, by their command lines."""

SERVER = b"multiprocessing.forkserver"
"""The same of the server that forks processes; those have its command line too."""


class Process(NamedTuple):
    """A process that lives."""

    parent: int
    command: bytes


def could_come(
    root: int, ranks: Collection[int], joining: Mapping[int, Collection[int]], idle: Collection[int]
) -> bool:
    """Whether a process of the script does something else than to wait.

    **Arguments**: the script's first process, those that wait as ranks, those that wait in a `join`
    with the processes that they wait for, and those that start no others.
    """
    living = processes()
    for process in [root, *descendants(root, living)]:
        if process not in living or process in ranks or process in idle:
            continue
        if process in joining and all(each in living for each in joining[process]):
            continue
        command = living[process].command
        if any(helper in command for helper in HELPERS):
            continue
        above = living.get(living[process].parent)
        if SERVER in command and (above is None or SERVER not in above.command):
            continue
        return True
    return False


def descendants(root: int, living: Mapping[int, Process]) -> list[int]:
    """The processes that a process has started, and theirs."""
    below: dict[int, list[int]] = {}
    for process, (parent, _) in living.items():
        below.setdefault(parent, []).append(process)
    result: list[int] = []
    rest = list(below.get(root, ()))
    while rest:
        process = rest.pop()
        result.append(process)
        rest += below.get(process, ())
    return result


def processes() -> dict[int, Process]:
    """All processes that live; one that has ended, and that its parent has not noticed, does not.

    >>> os.getpid() in processes()
    True
    """
    result = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with suppress(OSError):  # it ends meanwhile
            with open(f"/proc/{name}/stat", "rb") as file:
                # After the name, which may have any characters: the state, and the parent.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
            if state not in (b"Z", b"X"):
                result[int(name)] = Process(int(parent), command)
    return result
