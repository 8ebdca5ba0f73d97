"""Tracebacks of exceptions that other processes have raised, which come as text."""

from __future__ import annotations

import re
import traceback

__all__ = ["RemoteTraceback", "frames_of"]


class RemoteTraceback(Exception):
    """The traceback of an exception in a rank's process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_FRAME = re.compile(r'^  File "(.*)", line (\d+), in ', re.MULTILINE)


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an exception's traceback, also of one that a rank's process has raised."""
    if isinstance(error.__cause__, RemoteTraceback):
        found = _FRAME.findall(error.__cause__.args[0])
        return [traceback.FrameSummary(file, int(line), "") for file, line in found]
    return list(traceback.extract_tb(error.__traceback__))
