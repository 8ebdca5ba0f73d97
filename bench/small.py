"""Small calls: their Python calls and their time, beside NumPy's and an older checkout's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.results import SmallCall
from bench.timing import Timing, interleave

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("small_program.py")
#: By case: its name in tables, and the case that does the same with NumPy alone.
CASES = {
    "psum": ("psum of 8 x 16 float32 under vmap", "np.add.reduce"),
    "psum of leaves": (
        "tree of 60 leaves, 8 x 64 float32: psum under vmap",
        "np.add.reduce of leaves",
    ),
    "pmap": ("pmap of 64 replicas, five NumPy calls each", "loop"),
    "pmap, psum": ("pmap of 64 replicas that meet in a psum too", "loop, sum"),
    "step": ("PopTorch step of a Linear with SGD, 4 replicas", None),
}
#: Python calls before the collectives had one dispatcher, before small leaves were folded as one,
#: and before pmap kept its threads, by this file's count.
BEFORE = {"psum": 254, "psum of leaves": 2441, "pmap": 1603, "pmap, psum": 1603, "step": 754}


class _Process:
    """`small_program` with the gpusim of a checkout."""

    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # its standard input ends, and so does it

    def ask(self, case: str, repeats: int) -> Any:
        """The program's answer. **Raises**: RuntimeError with the program's error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps({"case": case, "repeats": repeats}), file=self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is then missing, too
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else f"the process ended: {self._process.wait()}"
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


class _Runner:
    elsewhere = True

    def __init__(self, process: _Process, case: str) -> None:
        self._process, self._case = process, case

    def run(self, repeats: int) -> list[float]:
        seconds: list[float] = self._process.ask(self._case, repeats)
        return seconds


def small_calls(budget: float, beside: Path | None = None) -> Iterator[SmallCall]:
    """Measure each case for `budget` seconds, in turns with NumPy and the checkout `beside`."""
    with ExitStack() as stack:
        ours = stack.enter_context(_Process(ROOT))
        old = stack.enter_context(_Process(beside)) if beside else None
        for case, (name, numpy) in CASES.items():
            try:
                yield _measure(ours, old, case, name, numpy, budget)
            except RuntimeError as error:
                yield SmallCall(name, BEFORE[case], problem=str(error))


def _measure(
    ours: _Process, old: _Process | None, case: str, name: str, numpy: str | None, budget: float
) -> SmallCall:
    calls = ours.ask(case, 0)
    before = old.ask(case, 0) if old else BEFORE[case]
    runners = {"ours": _Runner(ours, case)}
    if numpy:
        runners["numpy"] = _Runner(ours, numpy)
    if old:
        runners["old"] = _Runner(old, case)
    found = interleave(runners, budget, (RuntimeError,))
    timing = {key: value for key, value in found.items() if isinstance(value, Timing)}.get
    return SmallCall(name, before, calls, timing("ours"), timing("numpy"), timing("old"))
