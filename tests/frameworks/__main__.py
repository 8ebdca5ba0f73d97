"""python -m tests.frameworks: run programs of frameworks, compare them with gloo, write the table.

Each program runs under torchrun, on processes over gloo, and under gpusim torchrun. Both write
digests of all parameters and gradients after every optimizer step on every rank, and what the
program evaluates; these must be equal. Programs for GPUs run under gpusim torchrun --device cpu.
A run with the versions and the processor of the last one compares its digests too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.frameworks.rows import BOTH, PRELOAD, ROWS, Row
from tests.frameworks.running import ROOT, Run, difference, run
from tests.frameworks.table import GOOD, Case, page, read, table, write

JSON = ROOT / "bench" / "results" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
ROUNDING = 2e-6  # relative: sums in float32 in another order


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all is equal that should be."""
    options = _options(arguments)
    cases = [
        (row, ranks)
        for row in ROWS
        for ranks in (row.scale if options.many else row.ranks)
        if not options.ranks or ranks in options.ranks
        if options.only.lower() in f"{row.family} {row.what} {row.program}".lower()
    ]
    if not cases:
        print("python -m tests.frameworks: no case is so; --list shows all", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{row.family:<16} {ranks:>4} {row.program}" for row, ranks in cases))
        return 0
    machine = _machine()
    known = read(options.json)[1]
    order = [(row.program, ranks) for row in ROWS for ranks in (*row.ranks, *row.scale)]
    bad, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="frameworks-", ignore_cleanup_errors=True) as folder:
        comparison = Comparison(Path(folder), machine, options.output)
        for number, (row, ranks) in enumerate(cases, 1):
            case = comparison.case(row, ranks)
            changed = has_changed(known.get(case.key), case)
            bad += changed or case.outcome not in GOOD
            if not changed or options.accept:  # else the next run would find nothing
                known[case.key] = case
            minutes = (time.monotonic() - begin) / 60
            print(
                f"[{number}/{len(cases)}, {minutes:.0f} min] {case.program} on {ranks}: "
                f"{case.outcome}{f': {case.cause}' if case.cause else ''}"
                f"{' (NOT THE DIGESTS OF THE LAST RUN)' if changed else ''}"
                f" ({case.steps} steps, {case.seconds[1]:.0f} s)",
                flush=True,
            )
            if not options.dry:
                write(options.json, machine, [known[key] for key in order if key in known])
    minutes = (time.monotonic() - begin) / 60
    if options.dry:
        print(table(ROWS, known))
    else:
        page(options.page, table(ROWS, known))
    print(f"{len(cases)} cases in {minutes:.0f} minutes, {bad} not as they should be")
    return 1 if bad else 0


def has_changed(last: Case | None, case: Case) -> bool:
    """Whether a good case has other digests than the last good one of such a machine."""
    return (
        last is not None
        and (last.machine, last.outcome in GOOD, case.outcome in GOOD) == (case.machine, True, True)
        and last.digest != case.digest
    )


class Comparison:
    """Runs cases in folders of their own. `ones` has the runs on one rank, by program."""

    def __init__(self, folder: Path, machine: Mapping[str, object], show: bool = False) -> None:
        self.folder, self.show = folder, show
        bits = json.dumps([machine[name] for name in ("processor", "versions")])
        self.machine = hashlib.sha256(bits.encode()).hexdigest()[:8]
        self.ones: dict[str, Run] = {}
        self.count = 0

    def case(self, row: Row, ranks: int) -> Case:
        """Run a row on a number of ranks under both launchers, where gloo can run it."""
        real = None
        if not row.gpu and ranks not in row.scale:
            real = self._run("gloo", row.program, ranks)
        many = ranks in row.scale
        preload = PRELOAD.get(row.family, ()) if many else ()
        ours = self._run("gpusim", row.program, ranks, gpu=row.gpu, preload=preload)
        outcome, cause = self._outcome(row, real, ours, compared=not many)
        return Case(
            row.family,
            row.package,
            metadata.version(row.package),
            row.what,
            row.program,
            ranks,
            outcome,
            cause,
            ours.steps,
            self.machine,
            ours.digest,
            (round(real.seconds, 1) if real else None, round(ours.seconds, 1)),
            (round(real.megabytes) if real else None, round(ours.megabytes)),
        )

    def _outcome(self, row: Row, real: Run | None, ours: Run, *, compared: bool) -> tuple[str, str]:
        if real and real.error:
            both = " (as on gpusim)" if ours.error else ""
            return "failed", f"over gloo{both}: {real.error}"
        if ours.error:
            return "failed", ours.error
        if real:
            where = difference(real, ours)
            return ("differs", where) if where else ("equal", "")
        if row.reference and compared:
            if row.reference not in self.ones:
                self.ones[row.reference] = self._run("gpusim", row.reference, 1, gpu=row.gpu)
            one = self.ones[row.reference]
            if one.error:
                return "failed", f"on one rank: {one.error}"
            error = _distance(one.values(), ours.values())
            if error > ROUNDING:
                return "differs", f"from one rank's values by {error:.0e}"
            return "as one rank", f"to {error:.0e}"
        return "ran", ""

    def _run(self, launcher: str, program: str, ranks: int, **how: Any) -> Run:
        self.count += 1
        result = run(launcher, program, ranks, self.folder / str(self.count), **how)
        if self.show or result.error:
            print(f"== {launcher}: {program} on {ranks}\n{result.output}", flush=True)
        return result


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two lists of numbers.

    >>> _distance([1.0, 2.0], [1.0, 2.5])
    0.2
    >>> _distance([1.0], []), _distance([math.nan], [math.nan])
    (inf, inf)
    """
    if len(one) != len(other) or not one or not all(map(math.isfinite, (*one, *other))):
        return math.inf
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(one, other, strict=True))


def _machine() -> dict[str, object]:
    """Return the processor and versions, on which digests may depend, and the commit."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(": ")[2] for line in text.splitlines() if "model name" in line]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    packages = sorted({row.package for row in ROWS} | {"numpy", "torch"})
    return {
        "processor": models[0] if models else "unknown",
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "versions": {name: metadata.version(name) for name in packages},
        "commit": commit.stdout.strip(),
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.frameworks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "only rows whose framework, words or program contain this"
    parser.add_argument("--only", default="", metavar="TEXT", help=text)
    text = f"only on so many ranks; may be repeated (both launchers: {BOTH})"
    parser.add_argument("--ranks", type=int, action="append", metavar="N", help=text)
    text = "run on the many ranks that are simulated alone, and compare nothing with gloo"
    parser.add_argument("--many", action="store_true", help=text)
    parser.add_argument("--list", action="store_true", help="list the cases, and run none")
    text = "take digests that differ from the last run's, with the same versions and processor"
    parser.add_argument("--accept", action="store_true", help=text)
    parser.add_argument("--output", action="store_true", help="show what the programs print")
    parser.add_argument(
        "--json", type=Path, default=JSON, help=f"default: {JSON.relative_to(ROOT)}"
    )
    parser.add_argument(
        "--page", type=Path, default=PAGE, help=f"default: {PAGE.relative_to(ROOT)}"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing; print the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
