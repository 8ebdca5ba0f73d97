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
from typing import NoReturn, Protocol

from ...errors import InstanceError
from .. import activity
from ..frames import at, place_of_error, place_of_frame

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
        self._exit_call = ""  # the last call of sys.exit, which nothing else tells of
        sys.exit = self._on_exit
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
        """Tell the launcher: of an error that another instance caused, what it has ended."""
        if self.caused_by_another:
            activity.repeat()
        elif (error := self._uncaught) is not None:
            exits = isinstance(error, SystemExit) and self._exit_call
            activity.note(f"its end, after {exits or describe(error)}")

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._uncaught = error
        self.fail(error)
        self._print(kind, error, trace)

    def _on_exit(self, status: object = None) -> NoReturn:
        code = "" if status is None else f"{status!r:.60}"
        self._exit_call = f"sys.exit({code}){at(place_of_frame(sys._getframe(1)))}"
        raise SystemExit(status)

    def _at_exit(self) -> None:
        if (error := self._uncaught) is not None:
            message = f"gpusim: {self.name} failed with {type(error).__name__}"
            hint = "" if isinstance(error, SystemExit) else "; see above"
            self._engine.abort(message + hint, exit_code_of(error))
        by = f" by {self._exit_call}" if self._exit_call else ""
        self._engine.announce(f"{self.name} has ended its program{by}", ended=True)
        activity.note_end(by)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # MPI's end runs no Python


def end_after_delay(number: int, frame: FrameType | None) -> None:
    """End by a signal, after the thread that watches the others has had time to report.

    mpirun sends SIGTERM to all when it finds that one has ended, and SIGKILL soon after.
    """
    if activity.is_free() and (line := place_of_frame(frame)):
        activity.note(f"code of its own at {line}")
    time.sleep(TERMINATION_DELAY)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def describe(error: BaseException) -> str:
    """The type and the message of an error, and its place in the user's program.

    >>> describe(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text}{at(place_of_error(error))}"


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
