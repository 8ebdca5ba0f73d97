"""The lanes leave out what they say, runs can be repeated, and a test that hangs is ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.__main__ import PARTS, of_part, select
from tests.oracles import budget, progress
from tests.oracles.budget import AREAS, FORKS, LANES, ROOT, SHARES
from tests.project.test_ipu_wing import WING

NAMES = [f"tests/maps/test_x.py::test_a[{case}]" for case in range(10)]
NAMES += [f"tests/devices/test_y.py::test_b[{case}]" for case in range(5)]


def chosen(monkeypatch: pytest.MonkeyPatch, lane: str, seed: int) -> list[str]:
    monkeypatch.setattr(budget, "LANE", LANES[lane])
    monkeypatch.setattr(budget, "SEED", seed)
    return budget.sample(NAMES)


def test_a_seed_draws_each_areas_share(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [chosen(monkeypatch, "change", seed) for seed in range(20)]
    assert drawn == [chosen(monkeypatch, "change", seed) for seed in range(20)]
    assert set().union(*drawn) == set(NAMES)  # the seeds reach all
    for names in drawn:
        taken = sum("test_a" in name for name in names)
        assert abs(taken - 10 * SHARES["tests/maps"]) < 1
        assert sum("test_b" in name for name in names) == 5  # an area without a share
    for lane in ("area", "all"):
        assert chosen(monkeypatch, lane, 3) == NAMES


def test_a_rule_for_all_sources_is_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "tests/torch/test_private.py::test_nothing_private_is_used_elsewhere"
    monkeypatch.setattr(budget, "LANE", LANES["change"])
    for seed in range(100):
        monkeypatch.setattr(budget, "SEED", seed)
        if not budget.sample([rule]):  # its area's share would leave it out
            break
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", rule.partition("::")[0]],
        cwd=ROOT,
        env={**os.environ, "GPUSIM_TESTS": "change", "GPUSIM_TESTS_SEED": str(seed)},
        capture_output=True,
        text=True,
    )
    assert rule in done.stdout, done.stderr


@pytest.mark.slow
def test_collection_starts_no_threads() -> None:
    """A process that has collected forks safely, and starts quickly."""
    counting = (
        "import os, pytest\n"
        "class Count:\n"
        "    def pytest_sessionfinish(self):\n"
        "        print('threads', len(os.listdir('/proc/self/task')))\n"
        "pytest.main(['--collect-only', '-qq', '-n0'], plugins=[Count()])\n"
    )
    for part, variables in PARTS.items():
        environment = {**os.environ, **variables, "GPUSIM_TESTS_PART": part}
        done = subprocess.run(
            [sys.executable, "-c", counting],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert int(done.stdout.rpartition("threads ")[2].split()[0]) <= 4, part


def test_tables_name_what_exists() -> None:
    patterns = [*FORKS, *SHARES]
    for own, needed in AREAS.values():
        patterns += [*own, *needed]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []


def test_every_test_belongs_to_an_area() -> None:
    listed = {path for own, _ in AREAS.values() for pattern in own for path in files(pattern)}
    assert {*ROOT.glob("tests/*/test_*.py")} <= listed


#: Tests of more than the IPU wing that import it too, and those of the project as a whole.
BESIDE_THE_WING = {
    "tests/cuda/test_device_streams.py",  # pmap on devices of all kinds
    "tests/gpu/test_streams.py",
    "tests/project/test_docs.py",
    "tests/tools/test_options.py",  # of all commands, poprun's among them
    "tests/tools/test_record.py",  # records of all kinds of programs
    "tests/worlds/test_world_scale.py",
}
WING_COMMANDS = "launch|schedule"
OF_THE_WING = re.compile(
    rf"^(from|import) gpusim\.({'|'.join(WING)}|tools\.({WING_COMMANDS}))\b"
    rf"|^from gpusim import .*\b({'|'.join(WING)})\b"
    rf"|^import ({'|'.join(WING)})\b",
    re.MULTILINE,
)


def test_tests_of_the_ipu_wing_are_in_its_lane() -> None:
    lane = {file for pattern in AREAS["ipu"][0] for file in files(pattern)}
    tests = {*ROOT.glob("tests/*/test_*.py")}
    import_it = {file for file in tests if OF_THE_WING.search(file.read_text())}
    named = {file for file in tests if re.search("pop|pea|gc_|alias", file.name)}
    assert len(import_it) > 60 and len(named) > 60
    assert relative((import_it | named) - lane) == BESIDE_THE_WING
    doctests = {file for name in WING for file in ROOT.glob(f"gpusim/{name}/**/*.py")}
    doctests -= {*ROOT.glob("gpusim/standins/*.py")}  # nothing is in them but imports
    assert relative(doctests - lane) == set()


def relative(found: set[Path]) -> set[str]:
    return {str(file.relative_to(ROOT)) for file in found}


def files(pattern: str) -> set[Path]:
    return {
        file
        for path in ROOT.glob(pattern)
        for file in (path.rglob("*.py") if path.is_dir() else [path])
    }


def test_a_part_takes_the_paths_that_have_its_tests() -> None:
    assert select(("tests/torch", "tests/maps"), "forks") == ["tests/torch"]
    assert select(("tests/torch", "tests/maps"), "plain") == ["tests/maps"]
    assert all(select(("tests/contract",), part) == ["tests/contract"] for part in PARTS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_that_is_named_runs_in_its_part() -> None:
    plain, forking = "tests/maps/test_at.py::test_a", "tests/torch/test_distributed_device.py"
    words = ["-q", plain, forking, "tests/tools", "-k", "some"]
    assert of_part(words, "plain") == ["-q", plain, "tests/tools", "-k", "some"]
    assert of_part(words, "forks") == ["-q", forking, "tests/tools", "-k", "some"]


@pytest.mark.parametrize("how", ["threading.Event().wait()", "while True: time.sleep(0.02)"])
def test_a_test_that_hangs_is_shown_and_its_processes_are_ended(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process beside it, of another test that is idle too, is left alone."""
    child = f"import threading, time\ndef waits():\n {how}\nwaits()"
    program = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}]); print('on', flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, text=True, **pipes) as hangs,
        subprocess.Popen(command, text=True, **pipes) as idle,
    ):
        (tmp_path / str(hangs.pid)).write_text("test_that_hangs")
        (tmp_path / str(idle.pid)).write_text("")
        monkeypatch.setattr(progress, "QUIET", 8)
        watch = progress.Watch(tmp_path)
        while not watch.stopped:
            watch.look()
            time.sleep(0.5)
        assert watch.stopped == ["test_that_hangs"]
        assert hangs.stdout.readline() == "on\n"  # its own process goes on, and says why it fails
        assert len(progress.descendants(idle.pid, progress.processes())) == 1
        for pid in progress.descendants(idle.pid, progress.processes()):
            progress.os.kill(pid, 9)
        hangs.communicate("\n")
        idle.communicate("\n")
    printed = capsys.readouterr().out
    assert "test_that_hangs hangs; its processes:" in printed
    assert printed.count("-- process ") == 2 and "waits" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_waits_for_a_core_makes_progress() -> None:
    core = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        while min(progress.waited(each.pid) for each in both) < 0.2:
            time.sleep(0.1)
        assert all(progress.processes()[each.pid].seconds > 0 for each in both)
    finally:
        for each in both:
            each.kill()
            each.wait()
    assert not any(progress.waited(each.pid) for each in both)  # ended: nothing to read


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_with_foreign_threads_forks() -> None:
    program = (
        "from tests import conftest\nconftest.LOOKS = 9\nfork_is_safe = conftest.fork_is_safe\n"
        "fork_is_safe()\n"
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "fork_is_safe()\n"
        "import faulthandler; faulthandler.dump_traceback_later(1000)  # a thread of C\n"
        "try: fork_is_safe()\n"
        "except AssertionError as error: print(error)\n"
    )
    environment = {**progress.os.environ, "OPENBLAS_NUM_THREADS": "1", "GPUSIM_TESTS_PART": "forks"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert "other threads than Python's" in done.stdout, done.stderr


def test_random_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    for lane, expected in (("change", [100, 20, 5]), ("all", [1000, 1000, 20])):
        monkeypatch.setattr(budget, "LANE", LANES[lane])
        monkeypatch.setattr(budget, "FULL", LANES[lane].slow)
        found = [budget.budget(1000), budget.budget(1000, most=20), budget.budget(20, least=5)]
        assert found == expected
    assert budget.seeds(2, first=[7])[0] == 7 and len({*budget.seeds(50)}) == 50
