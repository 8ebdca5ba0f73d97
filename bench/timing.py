"""Run participants in turns, so that other load on the machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

BURST_SECONDS = 0.01  # calls shorter than this are repeated: the first finds the others' caches
MAX_BURST = 200
MAX_ROUNDS = 60
SETTLE_SECONDS = 0.005  # another process's idle threads spin for a moment before they sleep


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over many."""

    min: float
    median: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """
        >>> Timing.of([3.0, 1.0, 2.0])
        Timing(min=1.0, median=2.0, runs=3)
        """
        return cls(min(seconds), statistics.median(seconds), len(seconds))


class Runner(Protocol):
    """Something that can be timed; the seconds are its own, without communication."""

    @property
    def elsewhere(self) -> bool:
        """Whether it runs in another process."""
        ...

    def run(self, repeats: int) -> list[float]: ...


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each call, without the time to free its result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result
    return seconds


@dataclass
class _Turn:
    runner: Runner
    first: float  # seconds of a call that does not count
    share: float
    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0
    problem: str | None = None

    @property
    def burst(self) -> int:
        """How many calls a turn is: the first may have been slower than all others."""
        fastest = min([self.first, *self.seconds])
        return max(1, min(MAX_BURST, int(BURST_SECONDS / max(fastest, 1e-9))))

    @property
    def wants(self) -> bool:
        least = 1 if self.first > self.share else 3
        return self.problem is None and (len(self.seconds) < least or self.spent < self.share)


def interleave(
    runners: Mapping[str, Runner], budget: float, failures: tuple[type[Exception], ...] = ()
) -> dict[str, Timing | str]:
    """The timing of each runner, or what went wrong with it.

    Every round gives each runner a turn, from another one on each time. Each may take its share of
    `budget` seconds; one whose single call takes longer has one call. A first call, which warms
    caches up, does not count.
    """
    share = budget / max(1, len(runners))
    turns: dict[str, _Turn] = {}
    problems: dict[str, Timing | str] = {}
    for name, runner in runners.items():
        try:
            first = runner.run(1)[0]
        except failures as error:
            problems[name] = str(error)
            continue
        turns[name] = _Turn(runner, first, share)
    for number in range(MAX_ROUNDS):
        order = list(turns.values())
        order = order[number % max(1, len(order)) :] + order[: number % max(1, len(order))]
        waiting = [turn for turn in order if turn.wants]
        if not waiting:
            break
        for turn in waiting:
            _take(turn, failures)
    done = {name: turn.problem or Timing.of(turn.seconds) for name, turn in turns.items()}
    return problems | done


def _take(turn: _Turn, failures: tuple[type[Exception], ...]) -> None:
    start = time.perf_counter()
    try:
        turn.seconds += turn.runner.run(turn.burst)
    except failures as error:
        turn.problem = str(error)
    turn.spent += time.perf_counter() - start
    if turn.runner.elsewhere:
        time.sleep(SETTLE_SECONDS)
