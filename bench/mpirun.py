"""The mpirun that starts several processes of the bench: the one beside this Python, if any."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def command(processes: int) -> list[str] | None:
    """The words before a command that start several processes; None without mpirun.

    With more processes than cores, waiting processes yield.
    """
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return None
    return [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(processes)]


def environment() -> dict[str, str]:
    """This process's, in which root may start mpirun."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return os.environ | (allowed if os.geteuid() == 0 else {})
