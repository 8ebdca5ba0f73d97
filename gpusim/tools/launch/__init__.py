"""The command `poprun`: starts a program as several instances, and reports failures.

- `command`: the arguments. `layout`: the replicas and the host of each instance.
- `mpirun`: finding mpirun, and its command line. `shim`: ends an instance with its mpirun.
- `supervise`: output, signals, and the end. `report`: the instance that failed, and how.
- `gpusim.runtime.reaper` kills what a failed or killed poprun leaves.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
