"""Settings for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.oracles import progress
from tests.oracles.budget import FULL, LANE, PART, ROOT, SEED, forks, sample

# A job that a shell started in the background ignores Ctrl-C, and so do all of its children. Tests
# that interrupt a child need one that reacts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# There is no deadline: a busy machine is slow, not wrong. The run's seed draws the examples.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, print_blob=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before hypothesis reads its option: all examples are of the run's seed."""
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(SEED)
    config.pluginmanager.register(Parts(config))


class Parts:
    """Leaves out files of the other part: a plugin, as a conftest sees its own folder only."""

    def __init__(self, config: pytest.Config) -> None:
        words = (word.split("::")[0] for word in config.invocation_params.args)
        paths = (config.invocation_params.dir / word for word in words)
        self.named = any(forks(path) for path in paths if path.exists())

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """A pytest that is called by hand takes what forks only where that is named."""
        if collection_path.suffix != ".py":
            return None
        if collection_path.is_relative_to(ROOT / "tests"):
            if not collection_path.name.startswith("test_"):
                return True  # pytest would import it to look for doctests
        its = forks(collection_path)
        if PART:
            return its != (PART == "forks") or None
        return (its and not self.named) or None


def pytest_report_header(config: pytest.Config) -> str:
    part = f", part {PART}" if PART else ""
    return f"lane: {LANE.name}{part}; repeat with SEED={SEED}"


def pytest_xdist_auto_num_workers() -> int:
    """Three for two cores: tests wait for other processes, those that fork longest."""
    from gpusim.tools.info import usable_cores

    return ((4 if PART == "forks" else 3) * usable_cores() + 1) // 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the lane leaves out, unless tests are selected by id or by marker.

    Rules for all sources are never left out: the change that breaks one is not in its area.
    """
    if FULL or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    quick = [item for item in items if not item.get_closest_marker("slow")]
    rules = {item.nodeid for item in quick if item.get_closest_marker("rule")}
    taken = rules | set(sample([item.nodeid for item in quick if item.nodeid not in rules]))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in quick if item.nodeid in taken]


# A fork copies memory and locks, and none of the threads that would release them. XLA and OpenMP
# keep threads that Python does not know: a child of such a process may wait for ever.


def foreign_threads() -> list[str]:
    """Return the names of this process's threads, if there are others than Python's."""
    tasks = os.listdir("/proc/self/task")
    python = len(sys._current_frames())  # those of xdist too, which `threading` does not know
    return [_name_of(task) for task in tasks] if len(tasks) > python else []


def _name_of(task: str) -> str:
    try:
        return Path("/proc/self/task", task, "comm").read_text().strip()
    except OSError:
        return "one that has just ended"


def fork_is_safe() -> None:
    """Python reports what this raises as unraisable, and pytest as a failure of the test.

    A thread of Python's that starts or ends is foreign for a moment.
    """
    assert "jaxlib" not in sys.modules, "a process that has imported JAX forks: see FORKS"
    looks = 0
    while PART and (foreign := foreign_threads()):
        looks += 1
        assert looks < LOOKS, f"a process forks that has other threads than Python's: {foreign}"
        time.sleep(0.01)


LOOKS = 3000  # every 10 ms; a busy machine starts and ends threads slowly
OWN = "GPUSIM_TESTS_OWN_PROCESS"
if hasattr(os, "register_at_fork") and OWN not in os.environ:
    os.register_at_fork(before=fork_is_safe)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked own_process in a pytest of its own, which may keep threads of C."""
    if not pyfuncitem.get_closest_marker("own_process") or OWN in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, pyfuncitem.nodeid],
        cwd=ROOT,
        env={**os.environ, OWN: "1", "GPUSIM_TESTS_NOW": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


# What the tests cost, and which is running: `python -m tests` reads the latter.


def spent() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    progress.begins(item.nodeid)
    item.stash[BEGUN] = spent()
    try:
        return (yield)
    finally:
        progress.ends()


BEGUN = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "teardown" and BEGUN in item.stash:
        report.user_properties.append(("cpu", spent() - item.stash[BEGUN]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """CPU seconds by area; the longest tests are pytest's --durations."""
    areas: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            folder, _, rest = getattr(report, "nodeid", "").partition("/")
            area = rest.partition("/")[0] if folder == "tests" else "doctests"
            areas[area] += dict(getattr(report, "user_properties", ())).get("cpu", 0.0)
    listed = (f"{area} {seconds:.0f}" for area, seconds in areas.most_common() if seconds >= 1)
    terminalreporter.write_line("CPU seconds: " + (", ".join(listed) or "none"))


@pytest.fixture(scope="session", autouse=True)
def own_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each test process simulated IPUs of its own, whatever else runs on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path_factory.mktemp("devices")))
        for name in ("GPUSIM_IPUS", "POPTORCH_WAIT_FOR_IPU"):
            patch.delenv(name, raising=False)
        yield
