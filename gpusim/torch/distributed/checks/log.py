"""The acts of a rank, for the parts of the check that compare ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpusim.files import replace_text

from .findings import Finding

__all__ = ["Log", "read"]


@dataclass
class Log:
    """The log of one rank.

    **Attributes**:

    - `groups`: the global ranks of each group, by its label, which is the same on all its ranks.
    - `events`: in the order of the rank's program, each a list that begins with its kind:

      - ["post", id, group, number, operation, site, about]: a call is posted. `number` counts the
        group's collectives and is None for messages. `about` has "async", whether the program is
        to wait for it; "batch", the number of its batch_isend_irecv or None; "inside": "torch"
        if a module of torch's makes the call, as DDP and FSDP do, "forward" if the program makes
        it inside of a module's call, else ""; "root", "peer" (global ranks) and "tag" where the
        operation has them; "engine", the one that runs it; "bound" for a message on a group that
        is bound to a device.
      - ["done", id]: the rank knows that the call is complete: it has waited for it, or asked.
      - ["host", what, site, ids]: the host waits for all work of the GPU, or of a stream, and the
        calls of these numbers are complete then, which it did not know before.
      - ["made", ranks, local, site]: new_group is called, `local` with use_local_synchronization.
      - ["file", mode, path, site]: a file is opened to be read "r", written "w" or appended to "a".
        "u" is changed in part, "x" one that is made if it is not there, "m" one that is renamed.
      - ["set", key, time], ["got", key, time]: the store's key was set, or read after it was set.
        The time is before it was set, or after it was read. Files that are there, and locks, have
        keys too.
      - ["joined", group, ranks]: the rank has made a group where its ranks meet.

    - `rows`: what other parts note, by the name of the part.
    - `ended`: "" if the rank's program ended well, else the exception's name.
    """

    rank: int
    size: int
    engine: str = ""
    groups: dict[str, list[int]] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, list[Any]] = field(default_factory=dict)
    ended: str = ""

    def write(self, folder: Path) -> None:
        """Write it to the folder, as a whole: other ranks' errors may end the process meanwhile."""
        replace_text(folder / f"rank-{self.rank}.json", json.dumps(asdict(self)))


def read(folder: Path) -> list[Log]:
    """The logs of a folder, by rank. Ranks that were killed have none."""
    found = []
    for path in folder.glob("rank-*.json"):
        given = json.loads(path.read_text())
        given["findings"] = [Finding(**each) for each in given["findings"]]
        found.append(Log(**given))
    return sorted(found, key=lambda log: log.rank)
