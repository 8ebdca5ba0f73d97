"""Simulated ranks of torch.distributed: gpusim's in turns and free, beside PyTorch's own.

PyTorch's are `multi_threaded_pg`, the group of its tests, and LocalTensor. Each participant is a
process of `bench.ranks_program`; they take turns.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from threading import Timer
from typing import Any

from bench import machine
from bench.peers.remote import ROOT, end
from bench.results import RanksCase
from bench.timing import Timing, interleave

#: A case and its number of ranks.
CASES = (("all_reduce", 64), ("ddp", 64), ("fsdp2", 64), ("fsdp2", 256))
QUICK_CASES = CASES[:3]
TURNS, FREE, THREADED, LOCAL = "turns", "free", "threaded", "LocalTensor"
PARTICIPANTS = (TURNS, FREE, THREADED, LOCAL)
CLOSE = 1e-3  # of the absolute sums of the results after a step
PATIENCE = 180.0  # seconds for an answer
STEPS = 5  # between two barriers, whose own time counts as little


class Failure(Exception):
    """A participant cannot run the case; the message says why."""


class Participant:
    """A process that runs steps when it is asked to."""

    elsewhere = True

    def __init__(self, name: str, case: str, ranks: int) -> None:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.ranks_program", name, case, str(ranks)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the bench, which then ends it
        )
        self.result = 0.0

    def begin(self) -> None:
        """Wait until it has made the first step."""
        self.result = self._answer()["result"]

    def run(self, repeats: int) -> list[float]:
        """The mean seconds of some steps."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % (STEPS * repeats))
            self._process.stdin.flush()
        except OSError:
            pass  # it is gone, which `_answer` finds
        return [self._answer()["seconds"]]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").split("\n")
            last = next((text.strip() for text in reversed(said) if text.strip()), "no answer")
            raise Failure(last[:160])
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise Failure(answer["problem"])
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        end(self._process)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def ranks_cases(budget: float, cases: Sequence[tuple[str, int]] = CASES) -> Iterator[RanksCase]:
    """The result of each case; `budget` seconds for each."""
    if find_spec("torch") is None:
        yield RanksCase("", 0, problems={"all": "PyTorch is not installed"})
        return
    for case, ranks in cases:
        yield _measure(case, ranks, budget)


def _measure(case: str, ranks: int, budget: float) -> RanksCase:
    """One case; whose result differs from gpusim's in turns has no time."""
    load, started = machine.load(), time.monotonic()
    ready: dict[str, Participant] = {}
    problems: dict[str, str] = {}
    everyone: list[Participant] = []
    try:
        for name in PARTICIPANTS:
            participant = Participant(name, case, ranks)
            everyone.append(participant)
            try:
                participant.begin()
            except Failure as reason:
                problems[name] = str(reason)
                continue
            ours = next(iter(ready.values()), participant).result
            if math.isclose(participant.result, ours, rel_tol=CLOSE):
                ready[name] = participant
            else:
                problems[name] = f"wrong result: {participant.result}, expected {ours}"
        found = interleave(ready, budget, (Failure,))
    finally:
        for participant in everyone:
            participant.close()
    timings = {name: timing for name, timing in found.items() if isinstance(timing, Timing)}
    problems |= {name: text for name, text in found.items() if isinstance(text, str)}
    print(f"{case} on {ranks} ranks: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return RanksCase(case, ranks, timings, problems, load)
