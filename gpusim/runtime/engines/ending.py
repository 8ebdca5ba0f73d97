"""The end of an instance: it tells the others, so that they do not wait for it.

MPI_Finalize waits for all instances, which may be at work for hours, or wait for this one.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Protocol

from ...errors import InstanceError
from .. import activity

__all__ = ["ExitHandler"]

TERMINATION_DELAY = 0.1  # seconds
INTERRUPTED = 128 + signal.SIGINT  # the shell's exit code after Ctrl-C


class Announcer(Protocol):
    """An engine that can tell the other instances, and end them."""

    def announce(self, text: str, *, ended: bool = False) -> None: ...

    def abort(self, message: str, code: int = 1) -> None: ...


class ExitHandler:
    """Tells the other instances when the program ends, and ends them after an uncaught error.

    **Attributes**:

    - `name`: the name of this instance in messages.
    """

    def __init__(self, engine: Announcer, name: str) -> None:
        self.name = name
        self._engine = engine
        self._uncaught: BaseException | None = None
        self._print = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._at_exit)
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end_after_delay)

    @property
    def caused_by_another(self) -> bool:
        """Whether the program ends because another instance has failed."""
        return isinstance(self._uncaught, InstanceError)

    def fail(self, error: BaseException) -> None:
        """Announce that this instance takes no further part because of an error."""
        if isinstance(error, SystemExit):  # which does not reach sys.excepthook
            self._uncaught = error
        self._engine.announce(f"{self.name} failed with {describe(error)}")

    def note(self) -> None:
        """Tell the launcher."""
        if self._uncaught is not None:
            activity.note(f"its end, after {describe(self._uncaught)}")

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._uncaught = error
        self.fail(error)
        self._print(kind, error, trace)

    def _at_exit(self) -> None:
        if (error := self._uncaught) is not None:
            message = f"gpusim: {self.name} failed with {type(error).__name__}"
            hint = "" if isinstance(error, SystemExit) else "; see above"
            self._engine.abort(message + hint, exit_code_of(error))
        self._engine.announce(f"{self.name} has ended its program", ended=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # MPI's end runs no Python


def end_after_delay(number: int, frame: FrameType | None) -> None:
    """End by a signal, after the thread that watches the others has had time to report.

    mpirun sends SIGTERM to all when it finds that one has ended, and SIGKILL soon after.
    """
    time.sleep(TERMINATION_DELAY)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def describe(error: BaseException) -> str:
    """The type and the message of an error.

    >>> describe(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program that an error ends.

    >>> exit_code_of(SystemExit(3)), exit_code_of(ValueError()), exit_code_of(KeyboardInterrupt())
    (3, 1, 130)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code
        return (code & 0xFF) if isinstance(code, int) else int(code is not None)
    return 1
