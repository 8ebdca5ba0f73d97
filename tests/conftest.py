"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.oracles.budget import FULL

# A job that a shell started in the background ignores Ctrl-C, and so do all of its children. Tests
# that interrupt a child need one that reacts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# There is no deadline: a busy machine is slow, not wrong. CI draws the same examples every time, so
# that a failure is due to the change.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_xdist_auto_num_workers() -> int:
    """Three for two cores: for a third of their time tests wait for other processes."""
    from gpusim.tools.info import usable_cores

    return (3 * usable_cores() + 1) // 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests, unless the run is full or selects tests by id or by marker."""
    if FULL or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    quick = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(quick)])
    items[:] = quick


@pytest.fixture(scope="session", autouse=True)
def own_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each test process simulated IPUs of its own, whatever else runs on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path_factory.mktemp("devices")))
        for name in ("GPUSIM_IPUS", "POPTORCH_WAIT_FOR_IPU"):
            patch.delenv(name, raising=False)
        yield
