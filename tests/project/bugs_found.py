"""Writes docs/bugs-found.md: the reduced programs of public reports, and what the commands print.

python -m tests.project.bugs_found [--only TEXT] [--jobs N] [--dry]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.project.reports import KINDS, REPORTS, Report

__all__ = ["PAGE", "ROOT", "Entry", "entries", "excerpt", "printed", "totals"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bugs-found.md"
BEGIN, END = "<!-- python -m tests.project.bugs_found -->\n", "<!-- end -->"
ENTRY = re.compile(
    r"^#### ([\w.-]+/[\w.-]+#\d+)(?:, [^\n]*)?$.*?^```console\n\$ (gpusim [^\n]*)\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LEFT_OUT = "  ..."
LINES = 5


@dataclass(frozen=True)
class Entry:
    """A report as the page shows it: its name, the command, and the output's first lines."""

    report: str
    command: str
    output: str


def entries(text: str) -> list[Entry]:
    """The reports of a page that have a command, in their order."""
    return [Entry(*match.groups()) for match in ENTRY.finditer(text)]


def printed(command: str, code: int) -> str:
    """Return the output of a command of gpusim in the folder of the repository, errors too.

    **Raises**: AssertionError if it ends with another exit code.
    """
    words = shlex.split(command)
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


def excerpt(output: str) -> str:
    """The output of a command as the page has it: from its verdict on, at most a few lines."""
    lines = [line.rstrip() for line in output.splitlines()]
    begins = ("DIFFERENT", "EQUAL", "gpusim torchrun: check", "saved on ")
    first = next((n for n, line in enumerate(lines) if line.startswith(begins)), 0)
    lines = [line for line in lines[first:] if line]
    if lines and lines[0].startswith("saved on  resumed"):
        lines = [line for line in lines if line.startswith("saved on") and ":" in line]
    elif len(lines) > LINES:
        lines = [*lines[:LINES], LEFT_OUT]
    return "\n".join(lines) + "\n"


def totals(reports: Iterable[Report]) -> str:
    """How many reports there are, and how many of them are found, in a sentence."""
    rows = list(reports)
    sources = {row.report for row in rows}
    found = {row.report for row in rows if row.found}
    parts = []
    for tool in ("equal", "check", "resume"):
        own = [row for row in rows if row.tool == tool]
        parts.append(f"{sum(row.found for row in own)} of {len(own)} by `{COMMANDS[tool]}`")
    return (
        f"{len(found)} of {len(sources)} public reports are found, in {len(rows)} reduced "
        f"programs: {', '.join(parts[:-1])} and {parts[-1]}."
    )


COMMANDS = {"equal": "gpusim equal", "check": "torchrun --check", "resume": "gpusim resume"}


def shown(row: Report, output: str) -> str:
    """A report as a section of the page."""
    owner, _, number = row.report.partition("#")
    link = f"https://github.com/{owner}/issues/{number}"  # leads to pull requests too
    text = textwrap.fill(f"{row.says} {row.means}", 120, break_long_words=False)
    title = f"#### {row.report}" + (f", {row.part}" if row.part else "")
    block = f"```console\n$ {row.command}\n{excerpt(output)}```\n"
    return f"{title}\n\n{text}\n[Report]({link})\n\n{block}"


def section(outputs: Sequence[tuple[Report, str]]) -> str:
    """All reports, by kind."""
    lines = [totals(row for row, _ in outputs), ""]
    for kind, says in KINDS.items():
        lines += [f"### {kind}", "", says, ""]
        lines += [shown(row, output) for row, output in outputs if row.kind == kind]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run those whose command contains this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    known = {entry.command: entry.output for entry in entries(PAGE.read_text())}

    def output(row: Report) -> str:
        if options.only not in row.command and row.command in known:
            return known[row.command]
        return printed(row.command, int(row.found))

    with ThreadPoolExecutor(options.jobs) as pool:
        outputs = list(zip(REPORTS, pool.map(output, REPORTS), strict=True))
    if options.dry:
        print(section(outputs))
        return 0
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{section(outputs)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
