"""A pytest plugin: `@pytest.mark.ranks(8)` runs a test on 8 simulated ranks.

pytest loads it at every start. gpusim, and with it NumPy and torch, is imported when a test that
has the mark is collected or run.
"""

from __future__ import annotations

import os

import pytest

__all__ = ["rank", "world_size"]

MARK = """\
ranks(count, *, order=None, reduction=None, schedule="turns", init=True, axis=None, \
processes=False, equals=None, check=True, device=None): run the test on `count` simulated ranks \
of torch.distributed, in one process. A list of counts makes a test of each. `order` is the order \
of summation, such as "nccl-tree", or `reduction` a gpusim.Reduction. axis="i" runs the test in \
gpusim.pmap instead, without torch; processes=True in as many processes, for a gpusim.World; \
equals=1 on 1 rank too, and the tensors of both are to be the same. check=False leaves out the \
check of programs whose ranks agree; device="cpu" lets the CPU play GPUs. Methods of \
unittest.TestCase have gpusim.testing.ranks."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)
    if "GPUSIM_TEST_REPORTS" in os.environ:  # in a process of processes=True
        from gpusim.tools.testing.processes import InstanceReports

        config.pluginmanager.register(InstanceReports(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("ranks"):
        from gpusim.tools.testing.mark import parametrize

        parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not item.get_closest_marker("ranks"):
        return None
    from gpusim.tools.testing.processes import run_in_processes

    return run_in_processes(item, nextitem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks"):
        from gpusim.tools.testing.mark import prepare

        prepare(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not pyfuncitem.get_closest_marker("ranks"):
        return None
    from gpusim.tools.testing.ranks import call

    call(pyfuncitem)
    return True


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """The number of the rank that runs the test."""
    if not request.node.get_closest_marker("ranks"):
        pytest.fail("the fixture 'rank' is for tests marked with pytest.mark.ranks", pytrace=False)
    pytest.fail(
        "the fixture 'rank' can be an argument of a test only: other fixtures are evaluated once, "
        "for all ranks",
        pytrace=False,
    )


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks that run the test."""
    mark = request.node.get_closest_marker("ranks")
    if mark is None:
        pytest.fail(
            "the fixture 'world_size' is for tests marked with pytest.mark.ranks", pytrace=False
        )
    count: int = mark.args[0] if mark.args else mark.kwargs["count"]
    return count
