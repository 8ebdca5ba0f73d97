"""The steps of `make gpu`, in the order in which they run.

A step returns whether it has passed (None: it could not run here), and a line about it. Each goes
on where an earlier run of the same key was cut.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from tests.gpu import needs, results
from tests.gpu.process import Done

__all__ = ["STEPS", "Context", "Step"]

ROOT = Path(__file__).parents[2]
NO_TESTS = 5  # pytest's exit code
TORCH = re.compile(r"test_(torch\w*|streams|pea)\.py")
NEED_TORCH = re.compile(r"test_(torch\w*|pea|poptorch|popxl_ops)\.py")
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
    """The surroundings of a step: its commands, results and device.

    **Attributes**:

    - `command`: runs a command: the words, the most seconds (None: those of the step), and
      variables of its environment. It raises TimeoutError where the step's time is over.
    - `out`: the folder of the results.
    - `file`, `key`: the results, and the key of this run's lines in them.
    - `began`: how many lines the file had when the step began.
    - `device`: the GPU's name, for files.
    - `fake`: whether the GPU is the fake one.
    - `again`: whether what has passed runs again.
    - `without_torch`: why files that need PyTorch are left out; None if they are not.
    """

    command: Callable[..., Done]
    out: Path
    file: Path
    key: str
    began: int
    device: str
    fake: bool
    again: bool
    without_torch: str | None = None

    def module(self, *words: str, **variables: str) -> Done:
        """Run a module and its arguments, as `python -m` does."""
        fake = [FAKE] if self.fake else []
        return self.command([sys.executable, "-m", *fake, *words], **variables)

    def lines(self, step: str) -> list[dict[str, Any]]:
        """The lines that were recorded since this step began."""
        found = results.records(self.file, self.key)[self.began :]
        return [line for line in found if line["step"] == step]

    def passed(self, step: str, kind: str, verdict: str, good: Any) -> set[str]:
        """The names, under `kind`, of what an earlier run has passed: whose last `verdict` is
        `good`."""
        lines = [] if self.again else results.records(self.file, self.key)
        last = {x[kind]: x.get(verdict) for x in lines if x["step"] == step and kind in x}
        return {name for name, found in last.items() if found == good}


@dataclass(frozen=True)
class Step:
    """A step, the seconds that it is expected to take (on an H200, with compiled kernels), and
    those in which it finds something new."""

    run: Callable[[Context], Verdict]
    expected: float
    least: float


def smoke(context: Context) -> Verdict:
    """The bits of each kind of kernel, maps, tensors, and a first look at the speed."""
    small = ["--shift=14"] if context.fake else []
    before = context.passed("smoke", "check", "ok", True) - {"versions"}
    done = context.module("tests.gpu.smoke", *small, *(f"--skip={name}" for name in sorted(before)))
    lines = context.lines("smoke")
    wrong = [str(line["check"]) for line in lines if line.get("ok") is False]
    if wrong:
        return False, f"{len(wrong)} of {len(lines)} checks failed: {', '.join(wrong)}"
    said = f"{len(lines)} checks"
    return _ended(done, f"{said}, and {len(before)} passed before" if before else said)


def files() -> list[str]:
    return sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))


def torch(context: Context) -> Verdict:
    """Tensors, torch.distributed and its wrappers, streams."""
    chosen = list(filter(TORCH.fullmatch, files()))
    verdict, said = _pytest(context, "torch", chosen, processes=6)  # each imports PyTorch
    if not context.without_torch:
        return verdict, said
    absent = context.without_torch == needs.NO_TORCH  # a broken one is a failure
    return None if absent and verdict else False, f"{context.without_torch}; {said}"


def tests(context: Context) -> Verdict:
    """All of tests/gpu but for the other steps."""
    others = {*filter(TORCH.fullmatch, files()), *SUITES, *WORLDS}
    return _pytest(context, "tests", [name for name in files() if name not in others])


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
    processes: int = MOST_PROCESSES,
    **variables: str,
) -> Verdict:
    """Run tests that have not passed yet. Each outcome is recorded by `recorder` as it comes."""
    passed = context.passed(step, "test", "outcome", "passed")
    left_out = set(filter(NEED_TORCH.fullmatch, files)) if context.without_torch else set()
    number = min(processes, machine.cores())
    timeout = 400 if context.fake else timeout  # the fake compiles and runs on a few cores
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"]
    command += ["-p", "no:cacheprovider"]
    command += ["-p", "xdist.plugin", "-p", "_hypothesis_pytestplugin", "-p", RECORDER]
    command += [f"-n{number}", f"--maxprocesses={number}", "-o", f"faulthandler_timeout={timeout}"]
    command += [f"tests/gpu/{name}" for name in files if name not in left_out]
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
    if left_out:
        said += f"; without {', '.join(sorted(left_out))}"
    if done.code in (0, NO_TESTS) and not (passed or counts["passed"]):
        # Worlds need NCCL and mpirun, which a machine may lack.
        return None if step == "worlds" else False, f"no test ran: {said or 'none was found'}"
    if done.code == NO_TESTS:
        done = Done(0, done.seconds)
    return _ended(done, said)


def _ended(done: Done, said: str) -> Verdict:
    if done.code is None:
        return False, f"cut after {done.seconds:.0f} s: {said}"
    return done.code == 0, said if done.code == 0 else f"exit code {done.code}: {said}"


def speed(context: Context) -> Verdict:
    """bench.gpu, which writes a file of its own after every case, and goes on with its own."""
    path = context.out / f"gpu-{context.device}.json"
    small = ["--shift=14", "--seconds=0"] if context.fake else []
    if context.again:
        path.unlink(missing_ok=True)
    done = context.module("bench.gpu", f"--json={path}", f"--key={context.key}", *small)
    found = json.loads(path.read_text()) if path.exists() else {"cases": [], "targets": []}
    wrong = [case["case"] for case in found["cases"] if case["bits"] != "equal"]
    met = Counter(target["met"] for target in found["targets"])
    said = f"{len(found['cases'])} cases; {met[True]} of {met[True] + met[False]} targets met"
    return _ended(done, said + (f"; failed: {', '.join(wrong)}" if wrong else ""))


def sanitizer(context: Context) -> Verdict:
    """compute-sanitizer over some sixty launches: memory, races, uninitialised reads."""
    launches, tools = ["tests.gpu.launches"], ("memcheck", "racecheck", "initcheck")
    if context.fake:  # which finds accesses outside an allocation when it is freed
        launches, tools = [FAKE, *launches], ("launches",)
    elif not shutil.which("compute-sanitizer"):
        return None, "compute-sanitizer: not on the path"
    clean = context.passed("sanitizer", "tool", "code", 0)
    passed, said = True, []
    for tool in tools:
        if tool in clean:
            said.append(f"{tool} clean before")
            continue
        words = [] if context.fake else _sanitizing(tool)
        done = context.command([*words, sys.executable, "-m", *launches], 170)
        passed &= done.code == 0
        said.append(f"{tool} {'clean' if done.code == 0 else f'exit code {done.code}'}")
        results.append(context.file, step="sanitizer", key=context.key, tool=tool, code=done.code)
    return passed, ", ".join(said)


def _sanitizing(tool: str) -> list[str]:
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", "--print-limit=20"]
    # CuPy and PyTorch ask the driver for functions that it may lack, and go on without them.
    command += ["--report-api-errors=no"] if tool == "memcheck" else []
    known = subprocess.run(["compute-sanitizer", "--help"], capture_output=True, text=True)
    if tool == "memcheck" and "--ignore-getprocaddress-notfound" in known.stdout:
        command += ["--ignore-getprocaddress-notfound"]
    # CuPy's own kernels fill arrays in ways that initcheck cannot follow.
    return command + ["--kernel-name-exclude=kernel_substring=cupy"] * (tool == "initcheck")


def profile(context: Context) -> Verdict:
    """ncu over six folds: memory throughput, warps, reasons of stalls."""
    if context.fake or not shutil.which("ncu"):
        return None, f"ncu: not on the {'fake' if context.fake else 'path'}"
    table = context.out / "gpu-ncu.csv"  # all columns: what they are called may change
    table.unlink(missing_ok=True)
    command = ["ncu", "--clock-control", "none", "--set", "basic", "--section", "WarpStateStats"]
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


#: In the order of what is to be known first: wrong bits end the run; PyTorch on a GPU is what the
#: fake cannot show, then speed.
STEPS = {
    "smoke": Step(smoke, 60, 30),
    "torch": Step(torch, 60, 20),
    "speed": Step(speed, 100, 30),
    "tests": Step(tests, 75, 25),
    "sanitizer": Step(sanitizer, 120, 25),
    "profile": Step(profile, 40, 10),
    "suites": Step(suites, 240, 25),
    "worlds": Step(worlds, 120, 15),
}
