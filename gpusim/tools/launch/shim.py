"""Becomes a program that the kernel kills when its parent dies: a script.

    python -I shim.py INPUT PROGRAM [ARGUMENTS]

The parent is mpirun or its daemon on another host. INPUT is the file that becomes standard input;
- leaves it as it is. The program finds gpusim's stand-ins for `poptorch`, `popxl`, ... on its path.
"""

from __future__ import annotations

import os
import signal
import sys

STAND_INS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "standins")
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
CANNOT_RUN, NOT_FOUND = 126, 127  # the shell's exit codes


def main(source: str, command: list[str]) -> int:
    """Become the program; the exit code if that fails."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            return 128 + signal.SIGKILL
    if source != "-":
        file = os.open(source, os.O_RDONLY)  # returns when poprun has opened its end too
        os.dup2(file, 0)
        os.close(file)
    paths = os.environ.get("PYTHONPATH", "")
    if STAND_INS not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = STAND_INS + (os.pathsep + paths if paths else "")
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # says where; Open MPI then leaves it alone
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"poprun: cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
