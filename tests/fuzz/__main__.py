"""python -m tests.fuzz [READER...] gives each reader of what others wrote broken inputs.

Each reader runs in a process of its own with a limit of address space. A case fails where the
reader raises another error than it documents, or one without a place; takes more memory than its
bound; writes outside of its folder; unpickles, connects or starts something; hangs or crashes.
--seed and --case repeat a case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.readers import READERS

ROOT = Path(__file__).parents[2]
MOST = 20
"""Crashes of one reader, after which it is left."""


@dataclass
class Outcome:
    """The result of a reader's cases."""

    name: str
    cases: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    problems: list[tuple[int, str]] = field(default_factory=list)


def fuzz(
    name: str,
    seed: int,
    first: int,
    count: int,
    step: Callable[[], object] = lambda: None,
    rounds: int = MOST,
) -> Outcome:
    """Give a reader cases first..first+count-1 of a seed."""
    found, at, stop = Outcome(name), first, first + count
    while at < stop and rounds:
        rounds -= 1
        with tempfile.TemporaryDirectory(prefix="gpusim-fuzz-") as folder:
            command = [sys.executable, "-m", "tests.fuzz.child", name, str(seed), str(at)]
            running = subprocess.Popen(
                [*command, str(stop - at), folder],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert running.stdout is not None and running.stderr is not None
            last, done = at - 1, False
            for text in running.stdout:
                line = json.loads(text)
                if "at" in line:
                    last = line["at"]
                    found.cases += 1
                    step()
                elif "number" in line:
                    found.problems.append((line["number"], line["problem"]))
                else:
                    done, found.peak = True, max(found.peak, line["peak"])
                    for end, times in line["ends"].items():
                        found.ends[end] = found.ends.get(end, 0) + times
            said = running.stderr.read()
            if running.wait() == 0 and done:
                return found
            found.problems.append(
                (last, f"the process ends with {running.returncode}: {said.strip()[-400:]}")
            )
        at = last + 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("reader", nargs="*", help=f"of {', '.join(READERS)}; default: all")
    parser.add_argument("--cases", type=int, default=10_000, help="of each (default: 10,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="this one alone")
    given = parser.parse_args()
    if unknown := {*given.reader} - {*READERS}:
        parser.error(f"unknown readers: {', '.join(sorted(unknown))}")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    from rich.table import Table

    names = given.reader or [*READERS]
    first, count = (0, given.cases) if given.case is None else (given.case, 1)
    outcomes = []
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name in names:
            task = progress.add_task(name, total=count)
            found = fuzz(name, given.seed, first, count, lambda task=task: progress.advance(task))
            outcomes.append(found)
            for number, problem in found.problems[:10]:
                progress.console.print(f"{name} case {number}: {problem}", markup=False)
    table = Table("reader", "cases", "read", "refused", "failed", "peak, MiB", "bound, MiB")
    for found in outcomes:
        counts = (found.ends.get(end, 0) for end in ("read", "refused"))
        row = (found.cases, *counts, len(found.problems), f"{found.peak / 2**20:.1f}")
        table.add_row(found.name, *map(str, row), str(READERS[found.name].memory >> 20))
    Console(width=100).print(table)
    return any(found.problems for found in outcomes)


if __name__ == "__main__":
    raise SystemExit(main())
