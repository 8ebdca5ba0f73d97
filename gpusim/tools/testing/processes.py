"""Ranks that are processes: each runs the test with a pytest of its own, under poprun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpusim.runtime import environment
from gpusim.tools.testing.failures import names
from gpusim.tools.testing.mark import count_of, mark_of

__all__ = ["REPORTS", "InstanceReports", "run_in_processes"]

REPORTS = "GPUSIM_TEST_REPORTS"
"""The variable that names the folder of reports, in the processes of `processes=True`."""

GRACE = 20.0
"""Seconds in which a process may report why it has failed, after others have noticed."""


def run_in_processes(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with processes=True, each with a pytest of its own, by poprun.

    None for another test, and in these processes.
    """
    if REPORTS in os.environ or type(item) is not pytest.Function:
        return None
    try:
        mark = mark_of(item)
    except pytest.fail.Exception:
        return None  # the test's setup raises it
    if mark is None or not mark.processes:
        return None
    count, config = count_of(item, mark), item.config
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with tempfile.TemporaryDirectory(prefix="gpusim-tests-") as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST_")}
        environ.pop("PYTEST_CURRENT_TEST", None)
        done = subprocess.run(
            command_line(item, count),
            cwd=config.invocation_params.dir,
            env=environ | {REPORTS: folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        reports = [read_reports(config, Path(folder, str(i))) for i in range(count)]
    # The fixtures of wider scopes, of which the test itself needs none here, end as after any test.
    teardown = pytest.CallInfo.from_call(
        lambda: item.session._setupstate.teardown_exact(nextitem), "teardown"
    )
    found = combine(item, reports, done)
    if teardown.excinfo is not None:
        found = [*(each for each in found if each.when != "teardown")]
        found.append(pytest.TestReport.from_item_and_call(item, teardown))
    for report in found:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def command_line(item: pytest.Function, count: int) -> list[str]:
    """poprun with a pytest that runs one test."""
    config = item.config
    option = config.option
    plugins = [word for name in ["pytest_gpusim", *option.plugins] for word in ("-p", name)]
    words = [sys.executable, "-m", "gpusim.tools.launch", "--num-instances", str(count)]
    words += [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "--quiet"]
    words += [f"--rootdir={config.rootpath}", f"--import-mode={config.getoption('importmode')}"]
    if config.inipath is not None:
        words.append(f"--config-file={config.inipath}")
    words += [f"--override-ini={each}" for each in option.override_ini or ()]
    words += [f"--pythonwarnings={each}" for each in option.pythonwarnings or ()]
    if config.pluginmanager.hasplugin("xdist"):
        words += ["-n", "0"]
    return [*words, f"{item.path}::{item.nodeid.partition('::')[2]}"]


class InstanceReports:
    """A plugin of the processes: writes reports for the pytest that has started them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        launch = environment.read()
        self.paths = [Path(os.environ[REPORTS], str(i)) for i in range(launch.instances)]
        self.own = self.paths[launch.instance]
        self.consequence = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with self.own.open("a") as file:
            file.write(json.dumps(data) + "\n")
        self.consequence = self.consequence or is_consequence(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End a process whose test has failed at once: others may wait for it in MPI.

        mpirun then ends the others, so one that has failed because of another lets that one report.
        """
        if exitstatus:
            until = time.monotonic() + GRACE
            while self.consequence and not self.all_ended() and time.monotonic() < until:
                time.sleep(0.05)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exitstatus)

    def all_ended(self) -> bool:
        """Whether the test has ended in all processes."""
        return all(
            any(report.when == "teardown" for report in read_reports(self.config, path))
            for path in self.paths
        )


def is_consequence(report: pytest.TestReport) -> bool:
    """Whether a test may have failed because of what another process has to report.

    That one has failed, in a World of both; or as expected, which XPASS(strict) misses here.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return report.failed and text.startswith(("gpusim.errors.InstanceError", "[XPASS(strict)]"))


def read_reports(config: pytest.Config, path: Path) -> list[pytest.TestReport]:
    """The output of one process; less if it was killed."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            data = json.loads(line)
            hook = config.hook.pytest_report_from_serializable
            found.append(hook(config=config, data=data))
    return found


def combine(
    item: pytest.Function,
    instances: Sequence[list[pytest.TestReport]],
    done: subprocess.CompletedProcess[str],
) -> list[pytest.TestReport]:
    """One test's reports from those of its processes."""
    xfailed = [own for own in instances if any(hasattr(report, "wasxfail") for report in own)]
    failed = [i for i, own in enumerate(instances) if any(report.failed for report in own)]
    if xfailed and not any(r.failed and not is_consequence(r) for own in instances for r in own):
        return xfailed[0]
    skipped = [i for i, own in enumerate(instances) if any(report.skipped for report in own)]
    if failed:
        failed.sort(key=lambda i: any(map(is_consequence, instances[i])))
        found = instances[failed[0]]
        for report in found:
            report.sections = [(f"{title} (rank {failed[0]})", s) for title, s in report.sections]
            if report.failed:
                text = f"{names(sorted(failed))} of {len(instances)} failed\n{done.stderr}".rstrip()
                report.sections.append(("processes", text))
        return found
    problem = ""
    if done.returncode or not all(instances):
        problem = f"the processes ended with code {done.returncode}\n{done.stdout}{done.stderr}"
    elif len(skipped) not in (0, len(instances)):
        others = [i for i in range(len(instances)) if i not in skipped]
        problem = (
            f"{names(skipped)} skipped the test, {names(others)} did not: expected all "
            f"{len(instances)} ranks to skip it, or none"
        )
    if not problem:
        return instances[0]
    return [
        pytest.TestReport(
            item.nodeid, item.location, dict(item.keywords), "failed", problem.rstrip(), "call"
        )
    ]
