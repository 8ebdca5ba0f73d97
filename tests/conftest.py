"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: a busy machine is slow, not wrong. In CI the same examples every time, so that a
# change is blamed only for what it broke.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
