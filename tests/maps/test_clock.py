"""Which replicas lose their slot in a block of `outside`: those that do nothing."""

from __future__ import annotations

import pytest

from gpusim.maps.clock import LOOK, LOOKS, Watched, Work


@pytest.mark.parametrize(
    ("share", "runs", "idle"),
    [
        (0.0, [False], True),  # it waits
        (0.2, [True, False, False, False, False], True),  # it polls
        (1.0, [True], False),  # it computes
        (0.0, [True], False),  # it waits for a core: the system adds that when it has one
        (0.9, [False], False),  # it works between the looks
    ],
)
def test_work_is_seen_by_seconds_and_by_looks(share: float, runs: list[bool], idle: bool) -> None:
    watched, found = Watched((0, 0)), []
    for look in range(2 * LOOKS + 1):  # the first one has none before it
        work = Work(look * share * LOOK, runs[look % len(runs)], look * LOOK)
        watched.add(work)
        watched.add(work)  # no news: another machine has not answered yet
        if watched.looks == LOOKS:
            found.append(watched.is_idle())
    assert found == [idle, idle]
