"""Which part of a run is traced. Imports no torch, so that wrong usage is said at once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLACE", "Settings"]

PLACE = "{checkpoint}"
"""The word in the script's arguments that stands for the folder of the checkpoint."""


@dataclass(frozen=True)
class Settings:
    """How the state of a run is traced.

    **Attributes**: `folder`, where the trace is written; `checkpoint`, the folder that the script
    saves to and loads from; `stops`, whether the run ends before the first step that follows a
    checkpoint; `stop_after`, the number of steps from which on a checkpoint counts; `steps`,
    after how many steps the run ends, 0 for all; `limit`, bytes of all ranks' files.
    """

    folder: str
    checkpoint: str
    stops: bool = False
    stop_after: int = 1
    steps: int = 0
    limit: int = 4 << 30
