"""python -m tests.gpu.everything: all that a machine with a GPU can check, in one command.

The tests on CuPy, compute-sanitizer over some of them, the kernels compiled for this GPU, and the
speed. What each found goes to a JSON file in bench/results. Where something is missing it says
what, and goes on with the rest; without a GPU it fails at once.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import gpu, machine
from gpusim.cuda import compile as compiling

ROOT = Path(__file__).parents[2]
# Every kernel, at sizes that a hundredfold slower GPU ends with.
SANITIZED = "accumulators or operator or round or segments or stream"
TOOLS = ("memcheck", "racecheck", "initcheck")
LIMIT = 3600.0  # seconds for one step


@dataclass(frozen=True)
class Step:
    """What a step did: whether it passed (None: it could not run), and a line about it."""

    name: str
    passed: bool | None
    seconds: float
    said: str


Run = Callable[[Sequence[str]], tuple[int, str]]


def run(command: Sequence[str]) -> tuple[int, str]:
    """A command's exit code and what it printed, which is shown too, as it comes."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        end = time.monotonic() + LIMIT
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if time.monotonic() > end:
                process.kill()
                return 124, "took too long"
        return process.wait(), "".join(lines)


def suites(run: Run) -> tuple[bool | None, str]:
    """The suites on CuPy arrays, streams and NCCL."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "tests/gpu", f"--junitxml={report}"]
        code, said = run(command)
        if not report.exists():
            return False, (said.strip().splitlines() or [f"exit code {code}"])[-1]
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        ran = counts["tests"] - counts["skipped"]
        passed = code == 0 and ran > 0
        return passed, ", ".join(f"{number} {name}" for name, number in counts.items())


def sanitizer(run: Run) -> tuple[bool | None, str]:
    """compute-sanitizer over the kernels' tests: memory, races, uninitialised reads."""
    if shutil.which("compute-sanitizer") is None:
        return None, "compute-sanitizer is not on the path (it comes with the CUDA toolkit)"
    found = []
    for tool in TOOLS:
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
        command += ["--kernel-name-exclude=kernel_substring=cupy"] if tool == "initcheck" else []
        tests = ["-m", "pytest", "-n0", "-q", "tests/gpu/test_kernels.py", "-k", SANITIZED]
        code, said = run([*command, sys.executable, *tests])
        summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", said)
        found.append((code == 0, f"{tool}: {summary[-1] if summary else f'exit code {code}'}"))
    return all(passed for passed, _ in found), "; ".join(line for _, line in found)


def report(run: Run) -> tuple[bool | None, str]:
    """Registers and spills of every kernel, for the architectures that gpusim names."""
    if compiling.compiler() is None:
        return None, "neither nvcc nor NVRTC is installed"
    code, said = run([sys.executable, "-m", "gpusim.cuda.report"])
    rows = [line.split() for line in said.splitlines() if line.startswith("sm_")]
    spilling = [row for row in rows if row[3] != "0" or row[4] != "0"]
    return code == 0 and bool(rows), f"{len(rows)} kernels, {len(spilling)} of them spill"


def speed(run: Run) -> tuple[bool | None, str]:
    """bench.gpu, which writes a file of its own."""
    code, said = run([sys.executable, "-m", "bench.gpu"])
    verdicts = [line for line in said.splitlines() if re.match(r"\s*(met|MISSED)\b", line)]
    met = sum(line.split()[0] == "met" for line in verdicts)
    return code == 0, f"{met} of {len(verdicts)} targets met"


STEPS: dict[str, Callable[[Run], tuple[bool | None, str]]] = {
    "tests": suites,
    "sanitizer": sanitizer,
    "report": report,
    "speed": speed,
}


def main(arguments: Sequence[str] | None = None, run: Run = run) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.everything", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(STEPS), help="this step")
    parser.add_argument("--json", type=Path, help="default: bench/results/gpu-NAME-checks.json")
    given = parser.parse_args(arguments)
    cupy = gpu.gpu_or_reason()
    if isinstance(cupy, str):
        print(f"make gpu: {cupy}", file=sys.stderr)
        return 1
    about = gpu.describe(cupy)
    path = given.json or gpu.FOLDER / f"gpu-{gpu.slug(about['name'])}-checks.json"
    content: dict[str, Any] = {
        "schema": 1,
        "machine": machine.survey(),
        "gpu": about,
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    steps: list[Step] = []
    for name in given.only or STEPS:
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        passed, said = STEPS[name](run)
        steps.append(Step(name, passed, round(time.monotonic() - start, 1), said))
        content["steps"] = [asdict(step) for step in steps]
        path.write_text(json.dumps(content, indent=1) + "\n")
    print("---")
    words = {True: "passed", False: "FAILED", None: "not run"}
    for step in steps:
        print(f"{step.name:10} {words[step.passed]:8} {step.seconds:8.1f} s  {step.said}")
    return 0 if all(step.passed is not False for step in steps) else 1


if __name__ == "__main__":
    raise SystemExit(main())
