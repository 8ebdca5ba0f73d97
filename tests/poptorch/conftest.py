"""Fixtures of several files of tests."""

from __future__ import annotations

from collections.abc import Iterator

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
