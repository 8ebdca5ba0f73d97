"""Run cases on simulated ranks that may die."""

from __future__ import annotations

import datetime
import tempfile
import time
from typing import Any

import torch.distributed as dist

from gpusim.torch.distributed.faults.plans import Fault
from gpusim.torch.distributed.launching import run_ranks

from .cases import PRELUDE, TIMEOUT, Case, read, watch

__all__ = ["run"]


BEFORE_THE_AGENT = 0.05
"""Simulated seconds: fewer than the agent takes to notice that a rank has failed."""


def wait_for_death() -> None:
    """Call when the dead is gone, as the real ranks do: all others sleep, and it goes on."""
    time.sleep(BEFORE_THE_AGENT)


def begin() -> None:
    """Make the group, by the environment."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))


def run(case: Case) -> dict[str, Any]:
    """All ranks of a case: what each saw, and the exit codes."""
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(case.ranks),
            "LOCAL_WORLD_SIZE": str(case.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        for rank in range(case.ranks)
    ]
    code = 3 if case.how == "exit" else None
    waits = [rank != case.dead and case.how != "hang" for rank in range(case.ranks)]
    fault = Fault(case.how, case.dead, call=PRELUDE + 1, code=code)
    with tempfile.TemporaryDirectory() as folder:
        endings = run_ranks(
            lambda rank: watch(
                rank.index,
                case,
                folder,
                begin,
                wait_for_death if waits[rank.index] else lambda: None,
            ),
            environments,
            None,
            "turns",
            processes=True,
            faults=(fault,),
        )
        seen = {str(rank): read(folder, rank) for rank in range(case.ranks)}
    assert endings.happened == (fault,), (endings.happened, endings.left)
    return {
        "seen": seen,
        "codes": [each.code for each in endings.ranks],
        "by_agent": [each.by_agent for each in endings.ranks],
        "error": endings.error and str(endings.error),
    }
