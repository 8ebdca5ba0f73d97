"""Log files in `Options.logDir`: what the logger prints, written there too."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path

from gpusim.poptorch._logging import Formatter, logger
from gpusim.poptorch.options import Options

__all__ = ["log_options", "log_to_file"]

_lock = threading.Lock()
_files: dict[Path, tuple[logging.FileHandler, int]] = {}


def log_to_file(owner: object, options: Options) -> Path | None:
    """Write the log to a file as well, as long as the owner lives; which one, or None for none.

    Several owners with one folder share its file; it is appended to. OSError where it cannot be
    written.
    """
    if not options._log_to_file and options.log_dir == ".":  # which nobody has chosen
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
    """One owner less."""
    with _lock:
        handler, count = _files.pop(path)
        if count > 1:
            _files[path] = handler, count - 1
            return
    logger.removeHandler(handler)
    handler.close()


def log_options(options: Options) -> None:
    """What they are set to, at DEBUG."""
    for group in (options, options.Training, options.Distributed, options.TensorLocations):
        for name, value in group._values.items():
            logger.debug("poptorch.Options set %s to value %s", name, value)


class Dated(Formatter):
    """The console's lines, with the day: a file is of many."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        day = super().formatTime(record, "%Y-%m-%d")
        return f"{day} {super().formatTime(record)}"
