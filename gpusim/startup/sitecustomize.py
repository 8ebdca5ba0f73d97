"""Lets the process join simulated ranks, and then runs the sitecustomize that this one hides."""

import importlib
import os
import sys


def _start() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    own = sys.modules.pop("sitecustomize", None)
    try:
        ranks = importlib.import_module("gpusim_ranks")
    except (SyntaxError, ImportError):  # of an old Python, which is not the command's
        ranks = None
    # The program sees the path that it would see.
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != folder]
    if ranks is not None:
        ranks.install()
    try:
        importlib.import_module("sitecustomize")  # that of the environment
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            raise
    if own is not None:
        sys.modules.setdefault("sitecustomize", own)


_start()
