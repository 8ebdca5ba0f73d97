"""The steps of `make gpu`, in the order in which they run.

A step returns whether it has passed (None: it could not run here), and a line about it.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from tests.gpu import results
from tests.gpu.process import Done

__all__ = ["STEPS", "Context", "Step"]

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
NO_TESTS = 5  # pytest's exit code
SUITES = ("test_suites.py", "test_popxl_ops.py", "test_poptorch.py")
WORLDS = ("test_nccl.py", "test_worlds.py")
RECORDER, FAKE = "tests.gpu.recorder", "tests.cuda.fake_cuda"  # modules
MOST_PROCESSES = 14  # each has a CUDA context, of half a gigabyte
# NCCL between two processes of one GPU, on a machine without a network.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
#: The columns of ncu's table that are kept, besides the stall reasons.
COLUMNS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm %",
    "sm__warps_active.avg.per_cycle_active": "warps",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "launch__registers_per_thread": "registers",
    "launch__grid_size": "blocks",
    "launch__block_size": "threads",
}
STALLED = re.compile(
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)_per_issue_active\.ratio"
)
Verdict = tuple[bool | None, str]


@dataclass(frozen=True)
class Context:
    """What a step runs with.

    **Attributes**:

    - `command`: runs a command: the words, the most seconds (None: those of the step), and
      variables of its environment. It raises TimeoutError where the step's time is over.
    - `out`: the folder of the results.
    - `file`, `key`: the results, and the key of this run's lines in them.
    - `began`: how many lines the file had when the step began.
    - `device`: the GPU's name, for files.
    - `fake`: whether the GPU is the fake one.
    - `again`: whether tests that have passed run again.
    """

    command: Callable[..., Done]
    out: Path
    file: Path
    key: str
    began: int
    device: str
    fake: bool
    again: bool

    def module(self, *words: str, **variables: str) -> Done:
        """Run a module and its arguments, as `python -m` does."""
        fake = [FAKE] if self.fake else []
        return self.command([sys.executable, "-m", *fake, *words], **variables)

    def lines(self, step: str) -> list[dict[str, Any]]:
        """What was recorded since this step began."""
        found = results.records(self.file, self.key)[self.began :]
        return [line for line in found if line["step"] == step]


@dataclass(frozen=True)
class Step:
    """A step, the seconds that it is expected to take, and those it needs at least to be begun.

    Steps of tests go on where they were cut; others begin anew, and need all of their time.
    """

    run: Callable[[Context], Verdict]
    expected: float
    least: float


def smoke(context: Context) -> Verdict:
    """Bits, subnormals, formats, maps, and a first look at the speed."""
    small = ["--shift=14"] if context.fake else []
    done = context.module("tests.gpu.smoke", *small)
    lines = context.lines("smoke")
    wrong = [str(line["check"]) for line in lines if line.get("ok") is False]
    if wrong:
        return False, f"{len(wrong)} of {len(lines)} checks failed: {', '.join(wrong)}"
    return _ended(done, f"{len(lines)} checks")


def tests(context: Context) -> Verdict:
    """All of tests/gpu but for the two steps below."""
    others = {*SUITES, *WORLDS}
    found = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    return _pytest(context, "tests", [name for name in found if name not in others])


def suites(context: Context) -> Verdict:
    """The suites of the maps, collectives and interfaces on CuPy arrays."""
    return _pytest(context, "suites", SUITES)


def worlds(context: Context) -> Verdict:
    """NCCL with two ranks, and worlds of several instances."""
    with tempfile.TemporaryDirectory() as folder:
        said = {**NCCL, "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        verdict = _pytest(context, "worlds", WORLDS, "-n0", timeout=400, **said)
        for path in sorted(Path(folder).iterdir()):
            for line in path.read_text(errors="replace").splitlines()[:50]:
                results.append(context.file, step="worlds", key=context.key, nccl=line)
    return verdict


def _pytest(
    context: Context,
    step: str,
    files: Sequence[str],
    *arguments: str,
    timeout: int = 120,
    **variables: str,
) -> Verdict:
    """Run tests that have not passed yet. Each outcome is recorded by `recorder` as it comes."""
    passed = set() if context.again else _passed(results.records(context.file, context.key), step)
    number = min(MOST_PROCESSES, machine.cores())
    timeout = 400 if context.fake else timeout  # the fake compiles and runs on a few cores
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "xdist.plugin", "-p", "_hypothesis_pytestplugin", "-p", RECORDER]
    command += [f"-n{number}", f"--maxprocesses={number}", "-o", f"faulthandler_timeout={timeout}"]
    command += [
        f"--junitxml={context.out}/gpu-{step}.xml",
        *(f"tests/gpu/{name}" for name in files),
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as before:
        before.write("\n".join(sorted(passed)))
        before.flush()
        variables |= {results.PASSED: before.name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = context.command([*command, *arguments], **variables)
    lines = [line for line in context.lines(step) if "test" in line]
    counts = Counter(line["outcome"] for line in lines)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    if passed:
        said = f"{said or 'none left'}, and {len(passed)} passed before"
    if done.code in (0, NO_TESTS) and not (passed or counts["passed"]):
        # Worlds need NCCL and mpirun, which a machine may lack.
        return None if step == "worlds" else False, f"no test ran: {said or 'none was found'}"
    if done.code == NO_TESTS:
        done = Done(0, done.seconds)
    return _ended(done, said)


def _passed(lines: Sequence[dict[str, Any]], step: str) -> set[str]:
    """The tests whose last outcome is that they passed."""
    last = {
        line["test"]: line["outcome"] for line in lines if line["step"] == step and "test" in line
    }
    return {test for test, outcome in last.items() if outcome == "passed"}


def _ended(done: Done, said: str) -> Verdict:
    if done.code is None:
        return False, f"cut after {done.seconds:.0f} s: {said}"
    return done.code == 0, said if done.code == 0 else f"exit code {done.code}: {said}"


def speed(context: Context) -> Verdict:
    """bench.gpu, which writes a file of its own after every case."""
    path = context.out / f"gpu-{context.device}.json"
    small = ["--shift=14", "--seconds=0"] if context.fake else []
    path.unlink(missing_ok=True)
    done = context.module("bench.gpu", f"--json={path}", *small)
    found = json.loads(path.read_text()) if path.exists() else {"cases": [], "targets": []}
    wrong = [case["case"] for case in found["cases"] if case["bits"] != "equal"]
    met = Counter(target["met"] for target in found["targets"])
    said = f"{len(found['cases'])} cases; {met[True]} of {met[True] + met[False]} targets met"
    return _ended(done, said + (f"; failed: {', '.join(wrong)}" if wrong else ""))


def sanitizer(context: Context) -> Verdict:
    """compute-sanitizer over some fifty launches: memory, races, uninitialised reads."""
    if context.fake:  # which finds accesses outside an allocation when it is freed
        done = context.module("tests.gpu.launches")
        return _ended(done, "the launches alone; compute-sanitizer: not on the fake")
    if not shutil.which("compute-sanitizer"):
        return None, "compute-sanitizer: not on the path"
    passed, said = True, []
    for tool in TOOLS:
        command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=20"]
        # CuPy's own kernels fill arrays in ways that initcheck cannot follow.
        command += ["--kernel-name-exclude=kernel_substring=cupy"] if tool == "initcheck" else []
        done = context.command([*command, sys.executable, "-m", "tests.gpu.launches"], 170)
        passed &= done.code == 0
        said.append(f"{tool} {'clean' if done.code == 0 else f'exit code {done.code}'}")
        results.append(context.file, step="sanitizer", key=context.key, tool=tool, code=done.code)
    return passed, ", ".join(said)


def profile(context: Context) -> Verdict:
    """ncu over six folds: memory throughput, warps, reasons of stalls."""
    if context.fake or not shutil.which("ncu"):
        return None, f"ncu: not on the {'fake' if context.fake else 'path'}"
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "ncu.csv"
        command = [
            "ncu",
            "--clock-control",
            "none",
            "--set",
            "basic",
            "--section",
            "WarpStateStats",
        ]
        command += ["--page", "raw", "--csv", "--log-file", str(table)]
        command += ["--kernel-name", "regex:^fold", sys.executable, "-m", "tests.gpu.launches"]
        done = context.command([*command, "--profile"], 240)
        rows = list(profiled(table.read_text(errors="replace") if table.exists() else ""))
    for row in rows:
        results.append(context.file, step="profile", key=context.key, **row)
    found = [row["dram %"] for row in rows if "dram %" in row]
    return _ended(done, f"{len(rows)} launches, dram {', '.join(f'{x:.0f} %' for x in found)}")


def profiled(text: str) -> Iterator[dict[str, Any]]:
    """The kernels of ncu's raw page as CSV: the columns of COLUMNS, and the largest stalls.

    >>> text = '''==PROF== Connected
    ... "ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread"
    ... "","","us","register/thread"
    ... "0","fold","1,041.50","78"
    ... '''
    >>> list(profiled(text))
    [{'kernel': 'fold', 'time': 1041.5, 'time unit': 'us', 'registers': 78.0}]
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    units: dict[str, str] = {}
    for row in csv.DictReader(lines[start:]):
        if not row["ID"]:
            units = row
            continue
        found: dict[str, Any] = {"kernel": row["Kernel Name"]}
        stalls: dict[str, float] = {}
        for name, value in row.items():
            try:
                number = float((value or "").replace(",", ""))
            except ValueError:
                continue
            stalled = STALLED.fullmatch(name)
            if stalled:
                stalls[stalled[1]] = number
            elif name in COLUMNS:
                found[COLUMNS[name]] = number
                if COLUMNS[name] == "time":
                    found["time unit"] = units.get(name, "")
        if stalls:
            largest = sorted(stalls, key=lambda name: -stalls[name])[:4]
            found["stalls"] = {name: stalls[name] for name in largest}
        yield found


#: In the order of what is to be known first: wrong bits end the run, and speed comes before tools.
STEPS = {
    "smoke": Step(smoke, 90, 30),
    "tests": Step(tests, 300, 60),
    "speed": Step(speed, 240, 240),
    "sanitizer": Step(sanitizer, 180, 180),
    "profile": Step(profile, 60, 60),
    "suites": Step(suites, 400, 60),
    "worlds": Step(worlds, 180, 90),
}
