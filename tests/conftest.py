"""Settings for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A job that a shell started in the background ignores Ctrl-C, and so do all of its children; tests
# that interrupt a child need one that listens.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a busy machine is slow, not wrong. In CI the same examples every time, so that a
# change is blamed only for what it broke.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session", autouse=True)
def devices_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test process has simulated IPUs of its own, whatever else runs on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path_factory.mktemp("devices")))
        for name in ("GPUSIM_IPUS", "POPTORCH_WAIT_FOR_IPU"):
            patch.delenv(name, raising=False)
        yield
