"""A pytest plugin of `make gpu`: each test's outcome is written as soon as the test has ended.

Tests that an earlier run of the same sources has passed are left out; their ids are in the file
that the variable GPUSIM_GPU_PASSED names, the same for all of xdist's workers. A third of the rest
comes first, so that a run that is cut says something of every file.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from tests.gpu.results import PASSED, record


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if PASSED in os.environ:
        passed = set(Path(os.environ[PASSED]).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    items.sort(key=lambda item: zlib.crc32(item.nodeid.encode()) % 3 > 0)


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With xdist, only the controller is asked with all reports."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    said = ""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        said = report.longrepr[2]
    elif not report.passed:
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        said = (lines or report.longreprtext.splitlines() or [""])[0].strip()[:300]
    record(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), said=said)
