"""Run cases on real ranks over gloo: processes that this one forks, which has imported torch.

A line of JSON with (ranks, kind, dead, how, deferred) comes on stdin for each case; for each a line
with what every rank saw, and the exit codes, goes to stdout. It imports nothing of gpusim.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist

from tests.faults.real.cases import TIMEOUT, Case, die, read, watch

IDLE = 6000
"""Looks, one a hundredth of a second, in which no rank uses the CPU or ends: then all are killed. A
machine that stalls does not look. It is longer than gloo's own limit."""


def used(processes: list[int]) -> int:
    """The CPU time of processes, in ticks."""
    total = 0
    for process in processes:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total


def begin(rank: int, ranks: int, folder: str) -> None:
    """Make the group, by a file."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )


def rank_of(case: Case, rank: int, folder: str) -> None:
    """The program of one rank, in its process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Where the others call before the dead is gone, chance has it whether they see an end or a
    # reset connection.
    wait = (lambda: None) if case.how == "hang" else (lambda: wait_for(Path(folder, "gone")))
    watch(
        rank,
        case,
        folder,
        lambda: begin(rank, case.ranks, folder),
        (lambda: die(case.how)) if rank == case.dead else wait,
    )


def wait_for(path: Path) -> None:
    """Wait until there is a file, which the parent writes."""
    while not path.exists():
        time.sleep(0.01)


def run(case: Case) -> dict[str, Any]:
    """All ranks of a case."""
    with tempfile.TemporaryDirectory() as folder:
        living = {}
        for rank in range(case.ranks):
            process = os.fork()
            if not process:
                code = 1
                try:
                    rank_of(case, rank, folder)
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                finally:
                    os._exit(code)
            living[rank] = process
        codes: dict[int, int] = {}
        idle, before = 0, (0, 0)
        while len(codes) < case.ranks:
            rest = [rank for rank in living if rank not in codes]
            now = len(codes), used([living[rank] for rank in rest])
            idle, before = (0, now) if now != before else (idle + 1, before)
            if rest == [case.dead] or idle > IDLE:
                for rank in rest:  # it hangs
                    os.kill(living[rank], signal.SIGKILL)
            for rank in rest:
                process, status = os.waitpid(living[rank], os.WNOHANG)
                if process:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    Path(folder, "gone").touch()
            time.sleep(0.01)
        seen = {str(rank): read(folder, rank) for rank in range(case.ranks)}
        return {"seen": seen, "codes": [codes[rank] for rank in range(case.ranks)]}


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(Case(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
