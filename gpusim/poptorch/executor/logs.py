"""Log files in `Options.logDir`, and warnings that repeat as often as `Options.maxRepeatLogs`."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from gpusim.poptorch._logging import Formatter, logger
from gpusim.poptorch.options import Options

__all__ = ["Warnings", "log_options", "log_to_file"]

_lock = threading.Lock()
_files: dict[Path, tuple[logging.FileHandler, int]] = {}


def log_to_file(owner: object, options: Options) -> Path | None:
    """Write the log to a file as well, as long as the owner lives, and return its path.

    Owners with the same folder append to one file. Without a folder there is no file, and the
    result is None. Raises OSError if the file cannot be written.
    """
    if not options._log_to_file and options.log_dir == ".":  # the default
        return None
    processes = options.Distributed.numProcesses
    name = f"poptorch.{options.Distributed.processId}.log" if processes > 1 else "poptorch.log"
    path = (Path(options.log_dir) / name).resolve()
    with _lock:
        handler, count = _files.get(path, (None, 0))
        if handler is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(path, encoding="utf-8")
            handler.setFormatter(Dated())
            logger.addHandler(handler)
        _files[path] = handler, count + 1
    weakref.finalize(owner, release, path)
    return path


def release(path: Path) -> None:
    """Remove one owner; the last one closes the file."""
    with _lock:
        handler, count = _files.pop(path)
        if count > 1:
            _files[path] = handler, count - 1
            return
    logger.removeHandler(handler)
    handler.close()


def log_options(values: Mapping[str, object]) -> None:
    """Log the options of `Options.toDict` at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG):
        for name, value in values.items():
            if not callable(value):  # the progress bar is not a value
                log_option(name, value)


def log_option(name: str, value: object) -> None:
    """Log one option: sets and lists element by element, dictionaries key by key."""
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            logger.debug("poptorch.Options added %s to %s", printed(item), name)
    elif isinstance(value, dict):
        for key, item in value.items():
            logger.debug("poptorch.Options set %s[%s] to value %s", name, key, printed(item))
    else:
        logger.debug("poptorch.Options set %s to value %s", name, printed(value))


def printed(value: object) -> object:
    """A value as C++ prints it."""
    return str(value).lower() if isinstance(value, bool) else value


class Warnings:
    """Log each warning of a model at most `Options.maxRepeatLogs` times."""

    def __init__(self, options: Options) -> None:
        self._most: int | None = options.max_repeat_logs
        self._repeats: Counter[str] = Counter()

    def __call__(self, text: str) -> None:
        """Log a warning."""
        self._repeats[text] += 1
        if self._most is not None and self._repeats[text] > self._most:
            return
        last = self._repeats[text] == self._most
        logger.warning("%s%s", text, " (no more of these)" if last else "")


class Dated(Formatter):
    """The console's lines, with the date: a file covers many days."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        day = super().formatTime(record, "%Y-%m-%d")
        return f"{day} {super().formatTime(record)}"
