"""Runs a program that gets a signal when its parent dies, in any way: a script of its own.

    python -I leash.py SIGNAL PARENT INPUT PROGRAM [ARGUMENTS]

PARENT is the process id of the parent, which is poprun for mpirun, and 0 (whoever it is) for an
instance. INPUT is the file that becomes standard input, - to leave it. This process becomes the
program.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
CANNOT_RUN, NOT_FOUND = 126, 127  # the shell's exit codes


def main(number: int, parent: int, given: str, command: list[str]) -> int:
    """Become the program; the exit code if that cannot be."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:  # it died before we asked
            return 128 + number
    if given != "-":
        source = os.open(given, os.O_RDONLY)  # returns when poprun has opened its end too
        os.dup2(source, 0)
        os.close(source)
    if not parent:  # mpirun goes on when poprun no longer reads: it has to end the instances
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so by what it becomes
            signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"poprun: cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
