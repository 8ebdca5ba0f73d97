"""Settings that Python and torch keep for a process, and that are a rank's own in turns.

Most are set by contexts (`warnings.catch_warnings`, `sdpa_kernel`, `loss_parallel`, ...). Where a
rank waits inside of one, others must not see it, nor end it.
"""

from __future__ import annotations

import builtins
import copy
import gc
import logging
import multiprocessing.context
import operator
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from .loggers import LoggerStates
from .private import ATTRIBUTES, FLAGS, PrintOptions

__all__ = ["Settings"]

_warnings: Any = warnings  # whose stub lacks private names
_context: Any = multiprocessing.context


def _set_filters(filters: list[Any]) -> None:
    changed = filters != _warnings.filters
    _warnings.filters = filters
    if changed:  # else warnings that were shown once are shown again
        forget = getattr(_warnings, "_filters_mutated", None)
        (forget or _warnings._filters_mutated_lock_held)()


def _set_collecting(on: bool) -> None:
    (gc.enable if on else gc.disable)()


SAFE_GLOBALS = "_marked_safe_globals_set"

#: What modules have added to it in the course of their imports, which happen once for all ranks.
OF_IMPORTS: set[Any] = set()

#: Types of settings that are changed in their place, so that each rank needs a copy.
CHANGED = (dict, list, set, PrintOptions)

#: An owner and the name of its attribute.
Place = tuple[Any, str]

PLACES: tuple[Place, ...] = (
    (builtins, "print"),
    (_context._default_context, "_actual_context"),  # set_start_method
    (logging.root, "handlers"),
    (sys, "breakpointhook"),
    (sys, "displayhook"),
    (sys, "excepthook"),
    (sys, "stderr"),
    (sys, "stdout"),
    (sys, "unraisablehook"),
    (threading, "excepthook"),
    (warnings, "_showwarnmsg_impl"),
    (warnings, "filters"),
    (warnings, "showwarning"),
    *((pkgutil.resolve_name(owner), name) for owner in ATTRIBUTES for name in ATTRIBUTES[owner]),
)

#: How to read a setting, and how to set what was read.
FUNCTIONS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (gc.isenabled, _set_collecting),
    (gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    *FLAGS,
)
READS = [read for read, _ in FUNCTIONS]


def _is_empty(place: Place) -> bool:
    value = getattr(*place)
    return isinstance(value, (dict, list, set)) and not value


#: Places of containers that are empty as a rule, as those of hooks. While all are, ranks share
#: them; the rank that fills one keeps it, and the next rank gets a new one.
CONTAINERS = [place for place in PLACES if _is_empty(place)]
KINDS: list[Callable[[], Any]] = [type(getattr(*place)) for place in CONTAINERS]
OTHERS = [place for place in PLACES if place not in CONTAINERS]


def _reader(places: Sequence[Place]) -> Callable[[], list[Any]]:
    spaces, names = [vars(owner) for owner, _ in places], [name for _, name in places]
    return lambda: list(map(operator.getitem, spaces, names))


_read_containers, _read_others = _reader(CONTAINERS), _reader(OTHERS)


class Settings:
    """The settings, as they are at one time."""

    def __init__(self) -> None:
        self.save()
        self.containers: list[Any] | None = _read_containers()

    def save(self) -> None:
        """Take what is there now."""
        containers = _read_containers()
        self.containers = containers if any(containers) else None
        self.attributes = _read_others()
        self.values = [read() for read in READS]
        self.loggers = LoggerStates()

    def copy(self) -> Settings:
        """The same for another rank, with lists and dictionaries of its own."""
        found = object.__new__(Settings)
        own = self.containers or ()
        found.containers = _copied(own) if any(own) else None
        found.attributes, found.values = _copied(self.attributes), _copied(self.values)
        found.loggers = self.loggers
        return found

    def restore(self, now: Settings) -> None:
        """Put this in place of `now`."""
        if self.containers is not None or now.containers is not None:
            containers = self.containers or [kind() for kind in KINDS]
            for (owner, name), own in zip(CONTAINERS, containers, strict=True):
                setattr(owner, name, own)
        differ = map(operator.is_not, self.attributes, now.attributes)
        for (owner, name), own in compress(zip(OTHERS, self.attributes, strict=True), differ):
            if name == "filters":
                _set_filters(own)
            elif name == SAFE_GLOBALS:
                setattr(owner, name, own if own >= OF_IMPORTS else own | OF_IMPORTS)
            else:
                setattr(owner, name, own)
        if self.values != now.values:
            for (_, write), own, other in zip(FUNCTIONS, self.values, now.values, strict=True):
                if own != other:
                    write(own)
        self.loggers.restore()


def _copied(values: Sequence[Any]) -> list[Any]:
    return [copy.copy(value) if isinstance(value, CHANGED) else value for value in values]
