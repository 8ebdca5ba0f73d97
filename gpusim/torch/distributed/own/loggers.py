"""Levels, handlers and filters of loggers: a rank's own, in turns.

Programs set the level of their loggers by the rank, and give them a handler in each. All loggers
are too many to look at with each turn: those are the ranks' own that a rank has changed, but not in
the course of an import, which happens once for all ranks. The root is in `table`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..private import replace
from .threads import is_importing, rank_of_thread

__all__ = ["LoggerStates", "own_loggers"]

CHANGES = ("setLevel", "addHandler", "removeHandler", "addFilter", "removeFilter")

State = tuple[int, bool, bool, tuple[Any, ...], tuple[Any, ...]]

#: The state that each logger had before a rank changed it first. Written by the rank whose turn it
#: is, read with each turn.
_before: dict[logging.Logger, State] = {}


def _state(logger: logging.Logger) -> State:
    more = tuple(logger.handlers), tuple(logger.filters)
    return logger.level, logger.propagate, logger.disabled, *more


class LoggerStates:
    """The states of the loggers that ranks have changed, as they are at one time."""

    def __init__(self) -> None:
        self.states = {logger: _state(logger) for logger in _before}

    def restore(self) -> None:
        """Put this in place of what is there now."""
        for logger, before in _before.items():
            own = self.states.get(logger, before)
            if own == _state(logger):
                continue
            if own[0] != logger.level:
                logger.setLevel(own[0])  # which forgets what the level was for
            logger.propagate, logger.disabled = own[1:3]
            logger.handlers, logger.filters = list(own[3]), list(own[4])


def own_loggers(stack: ExitStack) -> None:
    """Let ranks have the loggers to themselves that they change, until the stack ends."""

    def noting(change: Callable[..., Any]) -> Callable[..., Any]:
        def note(logger: Any, *given: Any, **named: Any) -> Any:
            is_new = logger not in _before and logger is not logging.root
            if is_new and isinstance(logger, logging.Logger):
                if rank_of_thread() is not None and not is_importing():
                    _before[logger] = _state(logger)
                    # The rank changes lists of its own, not those that are there.
                    logger.handlers, logger.filters = [*logger.handlers], [*logger.filters]
            return change(logger, *given, **named)

        return note

    stack.callback(_before.clear)
    for name in CHANGES:
        replace(stack, logging.Logger, name, noting(getattr(logging.Logger, name)))
