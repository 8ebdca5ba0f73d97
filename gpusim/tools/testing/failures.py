"""The report of a failed test on its ranks: exceptions, their places, and ranks in words."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import NamedTuple

from gpusim.maps.call_site import GPUSIM_MODULES, is_users
from gpusim.words import plural

__all__ = [
    "Failure",
    "alike",
    "names",
    "of_user",
    "place",
    "short",
    "shown_trace",
    "stack_of",
    "with_notes",
]

DEEPEST = 8
"""Frames of a stack that are shown, the innermost."""


class Failure(NamedTuple):
    """An exception of a rank, with its traceback: several ranks may raise the same object."""

    error: BaseException
    trace: TracebackType | None


def alike(one: Failure, other: Failure) -> bool:
    """Whether two ranks failed with the same type of exception at the same line."""
    return type(one.error) is type(other.error) and place(one.trace) == place(other.trace)


def shown_trace(trace: TracebackType | None) -> TracebackType | None:
    """The part of a rank's traceback to show: the user's code alone, if gpusim has raised.

    An exception that several ranks raise has the frames of all of them, the last one's first.
    Frames of what runs the test, PyTorch's and gpusim's, are left out.
    """
    name = ""
    trace = within_test(trace)
    entry = trace
    while entry is not None:
        module = entry.tb_frame.f_globals.get("__name__", "")
        if is_users(entry.tb_frame) or module.startswith(GPUSIM_MODULES):
            name = module
        entry = entry.tb_next
    return of_user(trace) if name.startswith(GPUSIM_MODULES) else trace


def within_test(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback inside of the test: behind the last frame of what runs it."""
    shown = entry = trace
    while entry is not None:
        if entry.tb_frame.f_globals.get("__name__", "").startswith("gpusim.tools.testing."):
            shown = entry.tb_next or shown
        entry = entry.tb_next
    return shown


def with_notes(error: BaseException, notes: Sequence[str]) -> BaseException:
    for note in notes:
        error.add_note(note)
    return error


def names(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> names([3]), names([0, 1, 2, 4, 6, 7])
    ('rank 3', 'ranks 0-2, 4, 6, 7')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"{plural('rank', len(ranks))} {', '.join(shown)}"


def users_frames(trace: TracebackType | None) -> Iterator[tuple[TracebackType, str]]:
    """The entries of a rank's traceback that are the user's, each with the function it calls."""
    within = False
    while trace is not None:
        following = trace.tb_next
        frame = trace.tb_frame
        if frame.f_globals.get("__name__", "").startswith("gpusim."):
            if within and frame.f_code.co_name == "run_rank":  # another rank's begin
                return
        elif is_users(frame):
            within = True
            yield trace, "" if following is None else called(following.tb_frame)
        trace = following


def called(frame: FrameType) -> str:
    """The name of the function, or of the collective, that a frame runs."""
    name = frame.f_code.co_name
    return getattr(frame.f_locals.get("self"), "__name__", name) if name == "__call__" else name


def place(trace: TracebackType | None) -> tuple[str, str]:
    """file:line of the innermost code of the user's, and the function that it called."""
    found = list(users_frames(trace))
    if not found:
        return "unknown line", ""
    entry, function = found[-1]
    return short(f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"), function


def of_user(trace: TracebackType | None) -> TracebackType | None:
    """A traceback of the user's own code alone; None if there is none."""
    own: TracebackType | None = None
    for entry, _ in reversed(list(users_frames(trace))):
        own = TracebackType(own, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return own


def stack_of(trace: TracebackType | None) -> tuple[str, ...]:
    """The user's own frames, the innermost last: where each is, and what stands there."""
    lines = []
    for entry, _ in users_frames(trace):
        code = entry.tb_frame.f_code
        text = linecache.getline(code.co_filename, entry.tb_lineno).strip()
        lines.append(f"{short(code.co_filename)}:{entry.tb_lineno} in {code.co_name}: {text}")
    return tuple(lines[-DEEPEST:])


def short(site: str) -> str:
    """A call site relative to the working directory."""
    return site.removeprefix(os.getcwd() + os.sep)
