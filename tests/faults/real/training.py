"""A training whose rank dies at a call, on torchrun and on gpusim: by itself, or by a plan.

`DIES` is "how rank call" for real ranks, which end themselves as their call of this number begins.
Each rank writes what it sees to `OUT/rank.attempt.jsonl`. MODE adds what it does about an error.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from tests.faults.real.cases import Log, die, outcome

OUT = Path(os.environ["OUT"])
MODES = os.environ.get("MODE", "").split()
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
OWN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM")
STEPS = 4


class Calls:
    """torch.distributed, whose calls are counted: at the one that is asked for the rank dies."""

    def __init__(self) -> None:
        self.made = 0
        self.how, self.rank, self.at = (os.environ.get("DIES") or "none -1 -1").split()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            self.made += 1
            if (RANK, self.made, ATTEMPT) == (int(self.rank), int(self.at), 0):
                wait_for_all()
                die(self.how)
            return getattr(dist, name)(*args, **named)

        return call


def wait_for_all() -> None:
    """Wait until all ranks have a group: rank 0 has the store by which the others make theirs."""
    logs = [OUT / f"{rank}.{ATTEMPT}.jsonl" for rank in range(RANKS)]
    while not all(log.exists() and "begins" in log.read_text() for log in logs):
        time.sleep(0.01)


def leave(program: Any) -> None:
    """Run the program of a real rank, and end without what torch does at a process's end.

    gloo's threads are then at times ended in the midst of their work, and the process by SIGABRT.
    """
    code = 0
    try:
        program()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(seen: Log) -> None:
    """Steps of three calls; rank 0 saves after each, and a new start goes on from there."""
    calls, path = Calls(), OUT / "state.pt"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    weights, first = torch.zeros(4), 0
    if path.exists():
        state = torch.load(path)
        weights, first = state["weights"], state["step"]
    seen["begins"] = str(first)
    for step in range(first, STEPS):
        gradient = torch.arange(4.0) * (RANK + 1) + step
        calls.all_reduce(gradient)
        weights += gradient
        calls.broadcast(weights, 0)
        if RANK == 0:
            torch.save({"weights": weights, "step": step + 1}, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        calls.barrier()
        seen[f"step {step}"] = str(weights.tolist())
    dist.destroy_process_group()


def main() -> None:
    """Train, and say what happened."""
    seen = Log(str(OUT / f"{RANK}.{ATTEMPT}.jsonl"))
    own = {name: os.environ[name] for name in os.environ if name.startswith(OWN)}
    seen["environment"] = json.dumps(own, sort_keys=True)
    try:
        train(seen)
    except RuntimeError as error:
        text, trouble = str(error), error

        def again() -> None:
            raise trouble

        seen["error"] = outcome(again)
        if "emergency" in MODES:
            (OUT / f"emergency.{RANK}.{ATTEMPT}").write_text(text[:9])
        if "quiet" in MODES:
            return
        raise


if __name__ == "__main__":
    program = record(main) if "record" in MODES else main
    if "DIES" in os.environ:
        leave(program)
    program()
