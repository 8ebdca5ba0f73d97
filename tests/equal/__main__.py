"""Runs `gpusim equal` on every bug and on every correct configuration, and writes what it said.

python -m tests.equal [--only TEXT] [--jobs N] [--gloo] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.equal.bug import Bug
from tests.equal.cases import BUGS, CORRECT, LIBRARIES

__all__ = ["PROGRAMS", "ROOT", "judge", "said"]

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
RESULTS = ROOT / "bench" / "results" / "equal.json"
PAGE = ROOT / "docs" / "equal.md"


def said(program: str, ranks: int, *more: str, reference: str = "") -> dict[str, Any]:
    """What `gpusim equal` says of a program with its arguments, as JSON; and how long it took.

    `reference` is another program than `program` on one rank.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "gpusim", "equal", "-q", "--ranks", str(ranks)]
        command += ["--json", str(file), *more]
        if reference:
            command += ["--reference", located(reference), "--candidate", located(program)]
        else:
            command += shlex.split(located(program))
        begin = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=scratch, env=environment()
        )
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        found["code"], found["seconds"] = done.returncode, time.monotonic() - begin
        found["output"] = done.stdout + done.stderr
    return found


def located(program: str) -> str:
    """A program with its path: here, or below `tests`."""
    script, *arguments = shlex.split(program)
    folder = PROGRAMS if (PROGRAMS / script).exists() else ROOT / "tests"
    return shlex.join([str(folder / script), *arguments])


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **own}


def judge(bug: Bug, found: dict[str, Any]) -> str:
    """ "right" if the bug is found at its place or the next, "elsewhere", "not found", "failed"."""
    if found["code"] not in (0, 1) or "equal" not in found:
        return "failed"
    if found["code"] == 0:
        return "not found"
    name = found["first"]["name"]
    return "right" if any(fits(name, place) for place in bug.at) else "elsewhere"


def fits(name: str, place: str) -> bool:
    """Whether a tensor's name is a module's, or that of one of its parameters."""
    place = place.removeprefix("module") if place == "module" else place.removeprefix("module.")
    owner, _, last = name.rpartition(".")
    return name == (place or "loss") or (owner == place and last in ("weight", "bias"))


@dataclass(frozen=True)
class Case:
    """A program on some ranks, with a bug or without."""

    program: str
    ranks: int
    bug: Bug | None = None
    reference: str = ""
    options: tuple[str, ...] = ()

    def said(self) -> dict[str, Any]:
        return said(self.program, self.ranks, *self.options, reference=self.reference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--kind", choices=("bugs", "correct", "libraries"), action="append")
    options = parser.parse_args()
    kinds = options.kind or ["bugs", "correct"]
    cases: list[Case] = []
    if "bugs" in kinds:
        cases += [Case(bug.command, bug.ranks, bug) for bug in BUGS]
    if "correct" in kinds:
        cases += [Case(program, ranks) for program, ranks in CORRECT]
    if "libraries" in kinds:
        cases += [Case(own, ranks, None, first, more) for first, own, ranks, more in LIBRARIES]
    cases = [case for case in cases if options.only in f"{case.program} {case.ranks}"]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for case, found in zip(cases, pool.map(Case.said, cases), strict=True):
            row = row_of(case, found)
            rows.append(row)
            print(
                f"{row['verdict']:10} {row['seconds']:5.1f} s  {row['program']} on {row['ranks']}"
                f"  {row['what']} {row['name']} [{row['reason']}]"
                + (f"  expected {list(case.bug.at)}" if row["verdict"] == "elsewhere" else ""),
                flush=True,
            )
            if row["verdict"] in ("failed", "ALARM"):
                print(found["output"][-3000:], flush=True)
    print(summary(rows))
    if not options.dry and not options.only:
        write(rows)
    return int(any(row["verdict"] in ("failed", "ALARM", "not found") for row in rows))


def row_of(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    bug = case.bug
    first = found.get("first") or {}
    if bug is None:
        verdict = {0: "equal", 1: "ALARM"}.get(found["code"] if "equal" in found else 2, "failed")
    else:
        verdict = judge(bug, found)
    return {
        "program": case.program,
        "ranks": case.ranks,
        "bug": bug is not None,
        "verdict": verdict,
        "tensors": found.get("tensors", 0),
        "related": found.get("related", 0),
        "what": first.get("what", ""),
        "name": first.get("name", ""),
        "step": first.get("step"),
        "reason": first.get("reason", ""),
        "seconds": round(found["seconds"], 1),
    }


def summary(rows: list[dict[str, Any]]) -> str:
    """What was found, in a sentence."""
    bugs = [row for row in rows if row["bug"]]
    right = sum(row["verdict"] == "right" for row in bugs)
    found = right + sum(row["verdict"] == "elsewhere" for row in bugs)
    alarms = sum(row["verdict"] == "ALARM" for row in rows)
    failed = sum(row["verdict"] == "failed" for row in rows)
    text = (
        f"{found} of {len(bugs)} bugs are found, {right} at the right module or the next; "
        f"{alarms} alarms on {len(rows) - len(bugs)} correct configurations; at most "
        f"{max((row['seconds'] for row in rows), default=0):.0f} s for a case."
    )
    return f"{text} {failed} failed." if failed else text


def write(rows: list[dict[str, Any]]) -> None:
    """Put rows in the place of those of the same cases, and write results and page."""
    known = {(row["program"], row["ranks"]): row for row in json.loads(RESULTS.read_text())}
    known |= {(row["program"], row["ranks"]): row for row in rows}
    cases = [
        *((bug.command, bug.ranks) for bug in BUGS),
        *CORRECT,
        *((own, ranks) for _, own, ranks, _ in LIBRARIES),
    ]
    kept = [known[case] for case in cases if case in known]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    begin, end = "<!-- python -m tests.equal -->\n", "<!-- end -->"
    head, _, rest = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{head}{begin}{table(kept)}{end}{rest.partition(end)[2]}")


def table(rows: list[dict[str, Any]]) -> str:
    """The bugs as a table in Markdown, with a sentence before it."""
    lines = [summary(rows), "", "| bug | ranks | found at | reason |", "|---|---|---|---|"]
    told = {(bug.command, bug.ranks): bug for bug in BUGS}
    for row in rows:
        bug = told.get((row["program"], row["ranks"]))
        if bug is None:
            continue
        source = "" if bug.source == "common" else f" ({bug.source})"
        mark = {"right": "", "elsewhere": ", later"}.get(row["verdict"], f" {row['verdict']}")
        place = f"{row['what']} of `{row['name']}`{mark}" if row["name"] else mark.strip()
        says = bug.says.rstrip(".")
        lines.append(f"| {says}{source} | {row['ranks']} | {place} | {row['reason']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
