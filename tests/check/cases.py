"""The planted programs: what each one says of itself in its comments, and how it is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["KNOWN_MISSES", "PLANTED", "POPTORCH", "Case", "Said", "cases", "run"]

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).parent / "planted"
POPTORCH = Path(__file__).parent / "planted_poptorch"
"""Programs for `gpusim run --check`; they name replicas in place of ranks."""
KNOWN_MISSES = {
    "device_refused_2.py": "the device of a generator's state is not known",
    "public_checkpoint_removed.py": "to remove a file is not to write it",
    "public_final_norm.py": "which gradients are parts follows from the layout of activations",
    "public_ignored_parameters.py": "what FSDP is told to ignore may be a rank's own",
    "public_model_group_seed.py": "the parts may be those of the data",
}
"""Programs whose fault is not found, each with the reason."""
MARKER = re.compile(r"#\s*finds: ([\w-]+) on ([\d, ]+|all)")
ALSO = re.compile(r"#.*\bor here\b")


@dataclass
class Said:
    """What the check said of a run: its exit code, its findings, and the output."""

    code: int
    findings: list[dict[str, Any]]
    output: str


@dataclass(frozen=True)
class Case:
    """A planted program.

    **Attributes**: `kind` is the finding's, `lines` are those that are right as its site, `ranks`
    those that it has to name, None for all.
    """

    path: Path
    options: list[str]
    kind: str
    lines: frozenset[int]
    ranks: frozenset[int] = field(default=frozenset())

    @cached_property
    def size(self) -> int:
        return int(self.options[self.options.index("--ranks") + 1])

    def found(self, findings: Sequence[dict[str, Any]]) -> str:
        """ "named" with its line and ranks, "line" without the ranks, "kind" or "missed"."""
        best = "missed"
        for each in findings:
            if each["kind"] != self.kind:
                continue
            path, _, line = each["site"].rpartition(":")
            lines = [int(line)] if path == str(self.path) and line.isdigit() else []
            if not self.lines & {*lines}:
                best = best if best == "line" else "kind"
                continue
            if {*each["ranks"]} >= self.ranks:
                return "named"
            best = "line"
        return best


def read(path: Path) -> Case:
    """A program by its comments. **Raises**: ValueError for one without them."""
    text = path.read_text().splitlines()
    if not text or not text[0].startswith("# run: "):
        raise ValueError(f"{path.name}: expected '# run: OPTIONS' in its first line")
    options = shlex.split(text[0].removeprefix("# run: "))
    kind, ranks, lines = "", "all", set()
    for number, line in enumerate(text, 1):
        if match := MARKER.search(line):
            kind, ranks = match[1], match[2]
            lines.add(number)
        elif ALSO.search(line):
            lines.add(number)
    if not kind:
        raise ValueError(f"{path.name}: expected a line with '# finds: KIND on RANKS'")
    if ranks.strip() == "all":
        named = [*range(int(options[options.index("--ranks") + 1]))]
    else:
        named = [*map(int, ranks.split(","))]
    return Case(path, options, kind, frozenset(lines), frozenset(named))


def cases(only: str = "") -> list[Case]:
    """The programs whose names contain a text."""
    paths = [*sorted(PLANTED.glob("*.py")), *sorted(POPTORCH.glob("*.py"))]
    return [read(path) for path in paths if only in path.name]


def run(options: Sequence[str], program: Path, *arguments: str) -> Said:
    """Run `gpusim torchrun` on a program, in a fork of this process that has torch imported.

    PopTorch's programs run in a process of `gpusim run`.
    """
    from gpusim.tools import torchrun
    from gpusim.tools.forked import run_in_fork

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report, output = folder / "report.json", folder / "output"
        here = Path.cwd()

        def command() -> int:
            # Programs have fixed names for files there, and may run in several workers.
            os.environ["SCRATCH"] = tempfile.tempdir = scratch
            return torchrun.run(torchrun.options_of(words))

        os.chdir(scratch)
        try:
            words = ["--check-report", str(report), *options, str(program), *arguments]
            if program.parent == POPTORCH:
                process = [sys.executable, "-m", "gpusim", "run", *words]
                with output.open("w") as file:
                    code = subprocess.run(process, stdout=file, stderr=file).returncode
            else:
                code = run_in_fork(command, output)
        finally:
            os.chdir(here)
        findings = json.loads(report.read_text()) if report.exists() else []
        return Said(code, findings, output.read_text(errors="replace"))
