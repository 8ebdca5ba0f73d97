"""The mpirun that starts several processes of the bench: the one beside this Python, if any."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def command(processes: int) -> list[str] | None:
    """What to put before a command; None where there is no mpirun.

    With more processes than cores they yield while they wait.
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
