"""Where the program called, as people look for it: in the script before the packages."""

from __future__ import annotations

import sys
from types import FrameType

from gpusim.maps.call_site import is_users

__all__ = ["site"]

OWN = "gpusim."


def site() -> str:
    """file:line of the nearest frame of the user's own code, else of a package's."""
    frame: FrameType | None = sys._getframe(1)
    of_package = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_users(frame) and not name.startswith(OWN):
            text = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if "site-packages" not in text:
                return text
            of_package = of_package or text
        frame = frame.f_back
    return of_package
