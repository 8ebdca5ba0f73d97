"""PopTorch's logger: its name, levels and format.

POPTORCH_LOG_LEVEL sets the level from the start; WARN without it. Output goes to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TextIO

__all__ = ["logger", "setLogLevel", "setPopartLogLevel"]

logger = logging.getLogger("poptorch::python")

OFF = logging.CRITICAL + 10  # above everything: PopTorch's OFF prints nothing
# PopTorch's number, and Python's level
LEVELS = {
    "TRACE": (0, logging.DEBUG),
    "TRACE_ALL": (0, logging.DEBUG),
    "DEBUG": (1, logging.DEBUG),
    "DEBUG_IR": (1, logging.DEBUG),
    "INFO": (2, logging.INFO),
    "WARN": (3, logging.WARNING),
    "ERR": (4, logging.ERROR),
    "OFF": (6, OFF),
}
INTERNAL = ("TRACE_ALL", "DEBUG_IR")

RESET = "\033[0m"
COLOURS = {
    logging.DEBUG: "\033[36m",
    logging.INFO: RESET,
    logging.WARNING: "\033[1;33m",
    logging.ERROR: "\033[1;31m",
    logging.CRITICAL: "\033[1;31m",
}


def setLogLevel(level: str | int) -> None:
    """Set the level of PopTorch's log.

    **Arguments**

    - `level`: "TRACE", "DEBUG", "INFO", "WARN", "ERR" or "OFF", or its number: 0, 1, 2, 3, 4, 6.

    ValueError for anything else.

    >>> setLogLevel("LOUD")
    Traceback (most recent call last):
    ...
    ValueError: Unknown log level: LOUD. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN
    """
    if isinstance(level, int):
        named = [python for number, python in LEVELS.values() if number == level]
        if not named:
            raise ValueError("Invalid log level integer")
        logger.setLevel(named[0])
        return
    if level not in LEVELS:
        *most, last = sorted(LEVELS.keys() - INTERNAL)
        valid = f"{', '.join(most)} and {last}"
        raise ValueError(f"Unknown log level: {level}. Valid values are {valid}")
    logger.setLevel(LEVELS[level][1])


def setPopartLogLevel(level: str) -> None:
    """Check the level's name. It has no effect, as PopART is not used here."""
    if not isinstance(level, str) or level not in LEVELS:
        raise ValueError(f"Level must be one of {', '.join(LEVELS)}")


class Formatter(logging.Formatter):
    """`[12:34:56.789] [poptorch::python] [warning] text`, in colour on a terminal."""

    def __init__(self, coloured: bool = False) -> None:
        line = "[%(asctime)s] [%(name)s] [%(level)s] %(message)s"
        super().__init__(f"%(colour)s{line}{RESET}" if coloured else line)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if datefmt:
            return super().formatTime(record, datefmt)
        clock = time.strftime("%H:%M:%S", self.converter(record.created))
        return f"{clock}.{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        # new names: other handlers see the same record
        record.level = record.levelname.lower()
        record.colour = COLOURS.get(record.levelno, RESET)
        return super().format(record)


class Console(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, as tests and notebooks exchange it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(Formatter(coloured=sys.stdout.isatty() and sys.stderr.isatty()))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute there, looked up here
        return sys.stderr


def set_up() -> None:
    """Set the level of POPTORCH_LOG_LEVEL, and add one handler."""
    level = os.environ.get("POPTORCH_LOG_LEVEL", "WARN")
    try:
        setLogLevel(level)
    except ValueError as error:
        raise ValueError(f"POPTORCH_LOG_LEVEL={level!r}: {error}") from None
    if not any(isinstance(handler, Console) for handler in logger.handlers):
        logger.addHandler(Console())


set_up()
