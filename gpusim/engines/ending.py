"""How a process ends that is one of many: others must not wait for it in vain.

MPI's own end waits for all instances, which may be at work for hours, or wait for this one.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from types import TracebackType
from typing import Protocol

__all__ = ["Ending"]

INTERRUPTED = 128 + signal.SIGINT  # the shell's exit code of a program that Ctrl-C has ended


class Announcing(Protocol):
    """What tells the others, and ends them."""

    def announce(self, text: str, *, ended: bool = False) -> None: ...

    def abort(self, message: str, code: int = 1) -> None: ...


class Ending:
    """Tells the others when the program ends; if an error ends it, once that is printed, ends them.

    Attributes:
        name: what messages call this instance.
    """

    def __init__(self, engine: Announcing, name: str) -> None:
        self.name = name
        self._engine = engine
        self._uncaught: BaseException | None = None
        self._print = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._at_exit)

    def fail(self, error: BaseException) -> None:
        """Announce that this instance takes part no more because of an error."""
        if isinstance(error, SystemExit):  # ends the program without a word to sys.excepthook
            self._uncaught = error
        self._engine.announce(f"{self.name} failed with {describe(error)}")

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._uncaught = error
        self.fail(error)
        self._print(kind, error, trace)

    def _at_exit(self) -> None:
        if (error := self._uncaught) is not None:
            message = f"gpusim: {self.name} failed with {type(error).__name__}"
            seen = "" if isinstance(error, SystemExit) else "; see above"
            self._engine.abort(message + seen, exit_code_of(error))
        self._engine.announce(f"{self.name} has ended its program", ended=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # MPI's end runs no Python


def describe(error: BaseException) -> str:
    """An error in a line.

    >>> describe(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """The exit code of a program that this error ends.

    >>> exit_code_of(SystemExit(3)), exit_code_of(ValueError()), exit_code_of(KeyboardInterrupt())
    (3, 1, 130)
    """
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        code = error.code
        return (code & 0xFF) if isinstance(code, int) else int(code is not None)
    return 1
