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

STALL = 1.0
"""Seconds between two looks, a hundredth apart, after which the machine has stalled: then limits
may have expired that no fault of the case let expire, and the case is run again."""


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
    """All ranks of a case, on a machine that does not stall meanwhile."""
    stall, found = STALL, {}
    while stall >= STALL:
        found, stall = run_once(case)
    return found


def run_once(case: Case) -> tuple[dict[str, Any], float]:
    """All ranks of a case; and the longest time between two looks at them, in seconds."""
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
        stall, looked = 0.0, time.monotonic()
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
            stall, looked = max(stall, time.monotonic() - looked), time.monotonic()
        seen = {str(rank): read(folder, rank) for rank in range(case.ranks)}
        return {"seen": seen, "codes": [codes[rank] for rank in range(case.ranks)]}, stall


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(Case(*json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
