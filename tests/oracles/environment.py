"""The environment of programs that tests start."""

from __future__ import annotations

import os

LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "POPDIST_", "POPTORCH_", "GPUSIM_IPUS")


def environment_outside_launchers() -> dict[str, str]:
    """This process's environment without the variables that a launcher sets, or that choose IPUs.

    The simulated IPUs stay the test process's own (`own_devices` in tests/conftest.py).
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
