"""Commands in forks of this process, which has torch imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["begin_fork", "exit_code", "run_in_fork"]

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_in_fork(run: Callable[[], int], output: Path | None) -> int:
    """Run a command in a fork of this process, which has torch imported; its exit code.

    `output` is a file for all that it writes; it has no standard input then. None leaves both.
    """
    process = begin_fork(run, output)
    try:
        _, status = os.waitpid(process, 0)
    except BaseException:
        # Ctrl-C reaches the fork too, which ends its ranks; any other end is told to it.
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)
        raise
    return exit_code(status)


def exit_code(status: int) -> int:
    """The exit code of a process that was waited for, as a shell has it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def begin_fork(run: Callable[[], int], output: Path | None, alone: bool = False) -> int:
    """Begin a command in a fork of this process; its process id, which the caller waits for.

    `alone`: in a process group of its own, to which a terminal sends no Ctrl-C; it ends with this
    process.
    """
    import torch  # noqa: F401  # once, before all forks

    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if not process:
        code = 1
        try:
            if alone:
                os.setpgid(0, 0)
                end_with(parent)
            # Those of the command above end this fork; the ranks' command has its own.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if output is not None:
                file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                null = os.open(os.devnull, os.O_RDONLY)
                for mine, own in ((null, 0), (file, 1), (file, 2)):
                    os.dup2(mine, own)
                # A caller may have put others in their place, as pytest does.
                sys.stdout, sys.stderr = (
                    open(each, "w", 1, closefd=False, encoding="locale") for each in (1, 2)
                )
            code = run()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def end_with(parent: int) -> None:
    """Have the kernel kill this process, just forked, when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # between the fork and the call above
        os._exit(1)
