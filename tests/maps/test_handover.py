"""Hand-overs between threads: none is lost, and a thread's cores stay its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from gpusim import lax, pmap
from gpusim.maps import handover
from gpusim.maps.handover import HandOver
from tests.oracles.machine_time import PATIENCE

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux masks cores")
ONE_AT_A_TIME = {"axis_name": "i", "schedule": "one"}


@pytest.fixture(params=["masks", "no masks"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: with the system's calls, and as where there are none."""
    if request.param == "no masks":
        monkeypatch.setattr(handover, "_system", lambda: None)


@pytest.mark.parametrize("here", [False, True])
def test_two_threads_in_turns(here: bool) -> None:
    turns = [HandOver(), HandOver()]
    seen: list[int] = []

    def run(own: int) -> None:
        for _ in range(200):
            turns[own].wait()
            seen.append(own)
            turns[1 - own].wake(here)

    threads = [threading.Thread(target=run, args=(own,), daemon=True) for own in range(2)]
    for thread in threads:
        thread.start()
    turns[0].wake(here)
    for thread in threads:
        thread.join(PATIENCE)
    assert seen == [0, 1] * 200


@linux
def test_cores_are_those_that_the_replica_has_chosen() -> None:
    cores = os.sched_getaffinity(0)
    chosen = {min(cores)}
    found: dict[int, list[set[int]]] = {}

    def replica(x: np.ndarray) -> np.ndarray:
        index = int(x)
        for step in range(6):
            if step == 3 and index == 1:
                os.sched_setaffinity(0, chosen)
            lax.psum(x, "i")
            found.setdefault(index, []).append(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores)  # the thread is used again
        return x

    pmap(replica, **ONE_AT_A_TIME)(np.arange(3))
    assert found[0] == found[2] == [cores] * 6
    assert found[1] == [cores] * 3 + [chosen] * 3
    assert os.sched_getaffinity(0) == cores


@linux
def test_what_a_replica_starts_has_all_cores() -> None:
    program = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    found: list[bytes] = []

    def replica(x: np.ndarray) -> np.ndarray:
        x = lax.psum(x, "i")
        found.append(subprocess.check_output(program))
        return lax.psum(x, "i")

    pmap(replica, **ONE_AT_A_TIME)(np.arange(3))
    assert found == [f"{sorted(os.sched_getaffinity(0))}\n".encode()] * 3


def test_to_wake_a_thread_that_has_ended_is_no_error() -> None:
    turn = HandOver()
    thread = threading.Thread(target=turn.wait)
    thread.start()
    turn.wake()
    thread.join(PATIENCE)
    turn.wake(here=True)
    turn.wait()


def test_only_a_thread_that_ran_elsewhere_is_kept_on_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, masks = 0, 0

    class System:
        def sched_getcpu(self) -> int:
            return core

        def sched_getaffinity(self, *_: object) -> int:
            return 0

        def sched_setaffinity(self, *_: object) -> int:
            nonlocal masks
            masks += 1
            return 0

    monkeypatch.setattr(handover, "_system", System)
    turn = HandOver()
    turn.wake()
    turn.wait()

    def hand_over(runs_on: int) -> int:
        """The number of masks that are set, for the turn and back."""
        nonlocal core, masks
        core = masks = 0
        turn.wake(here=True)
        core = runs_on
        turn.wait()
        return masks

    assert [hand_over(0) for _ in range(3)] == [0] * 3
    assert hand_over(1) == 0
    kept = handover.KEPT
    assert [hand_over(0) for _ in range(kept + 2)] == [2] * kept + [0, 0]
