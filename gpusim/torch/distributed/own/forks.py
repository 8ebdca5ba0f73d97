"""Processes that a rank's program forks: they belong to the rank as its threads do.

A fork has all that the rank has, also what it is in the middle of: its turn, its end of the
connection to others. It must use none of that, as the rank itself goes on with it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

__all__ = ["ends_forks", "of_one_process"]


@contextmanager
def ends_forks() -> Iterator[None]:
    """A block of a rank's program. A process that is forked in it, and comes to its end, ends.

    It has the exit code, and the traceback, of a program of its own. Functions of `atexit` are the
    rank's, and are not called.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            _end(sys.exc_info()[1])


def _end(error: BaseException | None) -> NoReturn:
    code = 0
    with suppress(BaseException):
        if isinstance(error, SystemExit):
            code = 1
            if error.code is None or isinstance(error.code, int):
                code = error.code or 0
            else:
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


def of_one_process(handler: Callable[..., Any]) -> Callable[..., None]:
    """A handler of signals that the processes which this one forks do not have."""
    process = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            handler(number, frame)

    return handle
