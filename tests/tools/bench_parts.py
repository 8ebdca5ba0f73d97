"""Peers and results for the tests of the bench."""

from __future__ import annotations

from collections.abc import Callable

from bench.cases import (
    VARIANTS,
    Case,
    select,
)
from bench.peers import Peer, roster
from bench.peers.base import Samples
from bench.peers.limit import Limit
from bench.results import (
    Entry,
    Exchange,
    Outcome,
    Results,
)
from bench.timing import Timing

TINY = list(select(variants=VARIANTS, sizes=[(4, 16)]))
COPY_BYTES = 2**16


class Stand(Peer):
    """A peer that does as it is told."""

    def __init__(self, name: str, run: Callable[[], float], wrong: float = 0.0) -> None:
        self.name, self._run, self._wrong = name, run, wrong
        self.released = 0

    def prepare(self, case: Case) -> None:
        self.case = case

    def run(self, repeats: int) -> list[float]:
        return [self._run() for _ in range(repeats)]

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        expected = self.case.expected() + self._wrong
        return dict(zip(replicas, expected.tolist(), strict=True))

    def release(self) -> None:
        self.released += 1


def fail(error: BaseException) -> Callable[..., float]:
    def run(*given: object) -> float:
        raise error

    return run


def local() -> list[Peer]:
    """The peers of this process."""
    peers = [peer for peer in roster(["numpy"]) if not peer.elsewhere]
    return [*peers, Limit(COPY_BYTES)]


def results(outcomes: list[Outcome]) -> Results:
    machine = {"cpu": "c", "cores": 2, "memory_bytes": 1, "system": "s", "python": "3"}
    return Results(machine | {"packages": {}, "commit": None}, "today", outcomes=outcomes)


def outcome(case: Case, **seconds: float) -> Outcome:
    entries = {name: Entry(name, Timing(s, s, 3)) for name, s in seconds.items()}
    return Outcome(case, entries, 0.0)


def exchange(order: str, ratio: float, held: int = 1, elements: int = 2**22) -> Exchange:
    ours, raw = Timing(ratio, 2 * ratio, 3), Timing(1.0, 1.0, 3)
    return Exchange("psum", order, 2, held, elements, ours, raw)
