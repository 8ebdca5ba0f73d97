"""Call sites for messages: the file and line of the user's code that called gpusim."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import FrameType

GPUSIM_MODULES = (
    "gpusim.collectives",
    "gpusim.fallback",
    "gpusim.formats",
    "gpusim.groups",
    "gpusim.lax",
    "gpusim.libraries",
    "gpusim.maps",
    "gpusim.random",
    "gpusim.reduction",
    "gpusim.rounding",
    "gpusim.tools.equal",
    "gpusim.tools.testing",
    "gpusim.torch",
    "gpusim.trees",
)
"""Modules that call sites are never in, and whose errors are gpusim's own."""

LIBRARIES = ("numpy.", "optree", "ml_dtypes", "torch.", "typing_extensions")
"""Libraries that gpusim calls and users call."""

_NOT_USERS = GPUSIM_MODULES + LIBRARIES


STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs code that is neither gpusim's, nor a library's, nor Python's own."""
    return _is_users(frame.f_globals.get("__name__", ""), frame.f_code.co_filename)


@functools.lru_cache(4096)  # a collective asks for each of its frames
def _is_users(module: str, path: str) -> bool:
    if module.startswith(_NOT_USERS):
        return False
    return "site-packages" in path or not path.startswith((STANDARD_LIBRARY, "<frozen"))


def call_site(outside: str = "gpusim.maps") -> str:
    """file:line of the nearest frame of the user's, in no module that begins with `outside`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame) and not frame.f_globals.get("__name__", "").startswith(outside):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
