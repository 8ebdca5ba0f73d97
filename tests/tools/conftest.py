"""Fixtures of the tests of the pytest plugin."""

from __future__ import annotations

import os

import pytest

from tests.tools.inner_runs import HEAD, OPTIONS, ROOT, Result, Run


@pytest.fixture(scope="module")
def begun() -> None:
    """Import what launches import: the inner runs forget modules that they import first."""

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gpusim.torch.distributed import launch

    def begin(rank: int) -> None:
        dist.init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()

    launch(begin, 2)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner runs take no options from the outer one's environment."""
    for name in os.environ:
        if name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run a file of tests."""

    def run(body: str, *options: str, head: str = HEAD) -> Result:
        pytester.makepyfile(head + body)
        return Result(pytester.runpytest_inprocess(*OPTIONS, "-rA", *options))

    return run
