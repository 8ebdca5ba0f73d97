"""Settings that Python and torch keep for a process, and that are a rank's own in turns.

Most are set by contexts (`warnings.catch_warnings`, `sdpa_kernel`, `loss_parallel`, ...). Where a
rank waits inside of one, others must not see it, nor end it.
"""

from __future__ import annotations

import builtins
import copy
import gc
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .private import ATTRIBUTES, FLAGS

__all__ = ["Settings"]

_warnings: Any = warnings  # whose stub lacks private names


def _set_filters(filters: list[Any]) -> None:
    changed = filters != _warnings.filters
    _warnings.filters = filters
    if changed:  # else warnings that were shown once are shown again
        forget = getattr(_warnings, "_filters_mutated", None)
        (forget or _warnings._filters_mutated_lock_held)()


def _set_collecting(on: bool) -> None:
    (gc.enable if on else gc.disable)()


#: An owner and the name of its attribute.
PLACES: tuple[tuple[Any, str], ...] = (
    (builtins, "print"),
    (logging.root, "handlers"),
    (sys, "stderr"),
    (sys, "stdout"),
    (warnings, "_showwarnmsg_impl"),
    (warnings, "showwarning"),
    *((pkgutil.resolve_name(owner), name) for owner in ATTRIBUTES for name in ATTRIBUTES[owner]),
)

#: How to read a setting, and how to set what was read.
FUNCTIONS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (gc.isenabled, _set_collecting),
    (lambda: _warnings.filters, _set_filters),
    (lambda: logging.root.level, logging.root.setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    *FLAGS,
)


class Settings:
    """The settings, as they are at one time."""

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        """Take what is there now."""
        self.attributes = [getattr(owner, name) for owner, name in PLACES]
        self.others = [read() for read, _ in FUNCTIONS]

    def copy(self) -> Settings:
        """The same for another rank, with lists and dictionaries of its own."""
        found = object.__new__(Settings)
        found.attributes, found.others = (
            [copy.copy(value) if isinstance(value, (dict, list)) else value for value in values]
            for values in (self.attributes, self.others)
        )
        return found

    def restore(self, now: Settings) -> None:
        """Put this in place of `now`."""
        for (owner, name), own, other in zip(PLACES, self.attributes, now.attributes, strict=True):
            if own is not other:
                setattr(owner, name, own)
        for (_, write), own, other in zip(FUNCTIONS, self.others, now.others, strict=True):
            if own is not other and (isinstance(own, list) or own != other):
                write(own)
