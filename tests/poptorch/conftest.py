"""Fixtures of several files of tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(params=["lockstep", "threads"])
def execution(request: pytest.FixtureRequest) -> str:
    """How the replicas of a model run."""
    way: str = request.param
    return way


@pytest.fixture
def ended() -> Iterator[None]:
    """Devices are free afterwards, whatever a test leaves behind."""
    from gpusim.poptorch.executor import context

    yield
    for executor in list(context.living):
        executor.destroy()


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables that options read."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "POPTORCH_", "POPLAR_")):
            monkeypatch.delenv(name)
    yield


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """The levels and texts logged so far."""
    caplog.set_level(logging.DEBUG, "poptorch::python")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]
