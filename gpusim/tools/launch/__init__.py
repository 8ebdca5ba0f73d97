"""The command `poprun`: starts a program as many instances, and says what became of them.

- `command`: the arguments. `layout`: which instance holds which replicas, on which host.
- `mpirun`: the real mpirun, and its command line. `leash`: ends a program with its parent.
- `supervise`: output, signals, and the end. `report`: which instance failed, and how. `guard`:
  clears up if poprun is killed.
"""

from __future__ import annotations

from .command import main

__all__ = ["main"]
