"""Places in the user's program: the nearest line that is neither gpusim's nor Python's own."""

from __future__ import annotations

import os
import sysconfig
from types import FrameType, TracebackType

__all__ = ["at", "is_library", "place", "place_of_error", "place_of_frame"]

_GPUSIM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")  # folders inside that of the standard library


def is_library(filename: str) -> bool:
    """Whether a file belongs to gpusim or to Python.

    >>> is_library(os.__file__), is_library("<frozen runpy>"), is_library("train.py")
    (True, True, False)
    """
    if filename.startswith("<frozen "):
        return True
    if filename.startswith(_GPUSIM + os.sep):
        return True
    real = os.path.realpath(filename)
    return real.startswith(_STANDARD + os.sep) and not any(
        part in _INSTALLED for part in real.split(os.sep)
    )


def place(filename: str, line: int) -> str:
    """file:line, relative to the working directory where it is inside."""
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it has been removed
        here = "\0"
    return f"{filename.removeprefix(here)}:{line}"


def at(place: str) -> str:
    """The end of a sentence that names a place; empty if there is none."""
    return f" at {place}" if place else ""


def place_of_frame(frame: FrameType | None) -> str:
    """The nearest line of the user's program around a running frame; empty without one."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def place_of_error(error: BaseException) -> str:
    """The last line of the user's program in the traceback of an error, or of its cause."""
    if error.__cause__ is not None and (found := place_of_error(error.__cause__)):
        return found
    found = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if not is_library(trace.tb_frame.f_code.co_filename):
            found = place(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found
