"""Programs that are right, with the check and without: it says nothing, and changes nothing.

python -m tests.check.alarms [--only TEXT] [--examples | --frameworks] [--write]

Frameworks' programs need the environment of `make frameworks`:
.venv-frameworks/bin/python -m tests.check.alarms --frameworks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.check import figures
from tests.frameworks import running
from tests.frameworks.rows import ROWS

__all__ = ["EXAMPLES", "Right", "main"]

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "char_gpt.py": (),
    "ddp.py": (),
    "fsdp2.py": (),
    "moe.py": (),
    "multigpu_resume.py": ("3", "--snapshot", "snapshot.pt"),
    "tensor_parallel.py": (),
}
RANKS = 4


@dataclass
class Right:
    """A program with the check and without: seconds of both, findings, and what else differs."""

    program: str
    ranks: int
    seconds: float
    seconds_checked: float
    findings: list[str] = field(default_factory=list)
    differs: str = ""

    def __str__(self) -> str:
        ratio = self.seconds_checked / self.seconds if self.seconds else 0.0
        text = f"{ratio:5.2f} of {self.seconds:5.1f} s  {self.program} on {self.ranks}"
        for each in [*self.findings, *([self.differs] if self.differs else [])]:
            text += f"\n    {each}"
        return text


def examples(only: str) -> Iterator[Right]:
    """The examples, on the host and with GPUs that it plays."""
    for name, arguments in EXAMPLES.items():
        for device in ((), ("--device", "cpu")):
            label = " ".join((name, *device))
            if only in label:
                yield example(label, [*device, str(ROOT / "examples/torchrun" / name), *arguments])


def example(label: str, words: list[str]) -> Right:
    outputs, seconds, findings = [], [], []
    for check in (False, True):
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.json"
            more = ["--check", "--check-report", str(report)] if check else []
            command = [sys.executable, "-m", "gpusim", "torchrun", "--ranks", str(RANKS), *more]
            begin = time.monotonic()
            done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=scratch)
            seconds.append(time.monotonic() - begin)
            outputs.append(sorted(done.stdout.splitlines()))
            if report.exists():
                findings = in_words(json.loads(report.read_text()))
            if done.returncode and not findings:
                findings = [f"failed: {done.stderr[-500:]}"]
    differs = "" if outputs[0] == outputs[1] else "the output differs"
    return Right(label, RANKS, seconds[0], seconds[1], findings, differs)


def frameworks(only: str) -> Iterator[Right]:
    """The programs of `make frameworks`, each on its smallest number of ranks."""
    for row in ROWS:
        if only in f"{row.family} {row.what} {row.program}":
            yield framework(row, min(row.ranks))


def framework(row: Any, ranks: int) -> Right:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = folder / "report.json"
        more = ["--check", "--check-report", str(report)]
        plain = running.run("gpusim", row.program, ranks, folder / "plain", gpu=row.gpu)
        checked = running.run(
            "gpusim", row.program, ranks, folder / "checked", gpu=row.gpu, more=more
        )
        found = json.loads(report.read_text()) if report.exists() else None
        findings = in_words(found or [])
        if found is None:
            findings.append(f"failed: {checked.error} {checked.output[-500:]}")
        differs = running.difference(plain, checked)
        return Right(row.program, ranks, plain.seconds, checked.seconds, findings, differs)


def in_words(findings: list[dict[str, Any]]) -> list[str]:
    return [f"{each['kind']} at {each['site']}: {each['text']}" for each in findings]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--examples", action="store_true", help="the examples alone")
    parser.add_argument("--frameworks", action="store_true", help="frameworks' programs alone")
    parser.add_argument("--write", action="store_true", help="write bench/results/check.json")
    options = parser.parse_args()
    found = []
    both = options.examples == options.frameworks
    for chosen, programs in ((options.examples, examples), (options.frameworks, frameworks)):
        if chosen or both:
            for each in programs(options.only):
                print(each, flush=True)
                found.append(each)
    bad = [each for each in found if each.findings or each.differs]
    total, checked = (sum(getattr(each, name) for each in found) for name in TIMES)
    print(f"{len(found)} programs, {len(bad)} with findings or differences; {total:.0f} s")
    print(f"time with the check: {checked / total if total else 0:.2f} of that without")
    if options.write:
        figures.write("right", [asdict(each) for each in found])
    return int(bool(bad))


TIMES = ("seconds", "seconds_checked")


if __name__ == "__main__":
    sys.exit(main())
