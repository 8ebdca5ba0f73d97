"""The files in which ranks of torch.distributed.elastic leave their errors, and who reads them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpusim import bounded_json
from gpusim.platforms import PLAIN

__all__ = ["LARGEST", "ErrorFiles", "RecordedError", "error_files", "recorded_error", "variables"]

LARGEST = 1 << 20
"""How many bytes of an error file are read."""


@dataclass(frozen=True)
class RecordedError:
    """The message that a rank's `@record` has left in its error file, and its traceback if any."""

    message: str
    traceback: str = ""


class ErrorFiles:
    """The error files of a run's ranks, in a temporary folder.

    `@record` of torch.distributed.elastic writes them. They are the program's: what they have is
    read as text, up to a size, and never trusted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, rank: int, attempt: int) -> Path:
        """The file of a rank's in one start, whose folder is made."""
        path = self.folder / f"attempt_{attempt}" / str(rank) / "error.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def read(self, rank: int, attempt: int) -> RecordedError | None:
        """The error that a rank has left; None without one, or if the file makes no sense."""
        try:
            return recorded_error(self.path(rank, attempt))
        except (OSError, ValueError):
            return None


def recorded_error(path: Path) -> RecordedError | None:
    """Read an error file as torch's ErrorHandler writes it.

    **Raises**: OSError if there is none, ValueError if it is none of them, or too large.
    """
    # A pipe in its place would wait for a writer; a link could name any file.
    file = os.open(path, os.O_RDONLY | PLAIN)
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("an error file is a regular file")
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"an error file of more than {LARGEST} bytes")
    given = bounded_json.parse(content.decode("utf-8", "replace"))
    message = given.get("message") if isinstance(given, dict) else None
    if isinstance(message, str):
        return RecordedError(message)
    if not isinstance(message, dict):
        return None
    more = message.get("extraInfo")
    trace = more.get("py_callstack") if isinstance(more, dict) else None
    text = message.get("message")
    return RecordedError(
        text if isinstance(text, str) else "", trace if isinstance(trace, str) else ""
    )


@contextmanager
def error_files() -> Iterator[ErrorFiles]:
    """A block with error files, which are removed at its end."""
    with tempfile.TemporaryDirectory(prefix="gpusim-elastic-", ignore_cleanup_errors=True) as name:
        yield ErrorFiles(Path(name))


def variables(
    files: ErrorFiles, ranks: int, attempt: int = 0, max_restarts: int = 0
) -> list[dict[str, str]]:
    """The variables that torchrun's agent adds to the environment of each rank, in one start."""
    return [
        {
            "TORCHELASTIC_ERROR_FILE": str(files.path(rank, attempt)),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        }
        for rank in range(ranks)
    ]
