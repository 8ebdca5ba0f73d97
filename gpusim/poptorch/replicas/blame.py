"""Whether a model's own code raised an error by itself, or because it was traced."""

from __future__ import annotations

import dis
import os
import sysconfig
from pathlib import Path
from types import FrameType

import gpusim

__all__ = ["raised_by_the_model"]

PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Whose code is not the user's: Python's, what is installed, and this package's.
OTHERS = (
    *(f"{Path(path)}{os.sep}" for name in PATHS if (path := sysconfig.get_path(name))),
    f"{Path(gpusim.__file__).parent}{os.sep}",
    "<frozen",
)


def raised_by_the_model(error: BaseException) -> bool:
    """Whether a raise or an assert of the user's code began it, and no other error came before.

    Functions written in C have no frames: what they refuse of a tensor without values comes out of
    the user's code too, but of no raise in it.
    """
    trace = error.__traceback__
    if trace is None or error.__context__ is not None or error.__cause__ is not None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _is_users(trace.tb_frame) and _raises(trace.tb_frame, trace.tb_lasti)


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(OTHERS)


def _raises(frame: FrameType, instruction: int) -> bool:
    return dis.opname[frame.f_code.co_code[instruction]] == "RAISE_VARARGS"
