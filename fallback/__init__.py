"""The NumPy kernels: fold, copies and rounding, with the bits of the numerics contract.
They are independent of replicas, axes and collectives.

The package's name is `gpusim.fallback`: `gpusim/fallback` is a link to this folder, and the wheel
has a copy. So a `fallback.py` of a user's hides nothing. Where this folder can be imported by its
own name, in a checkout, that name gives the same modules.
"""

from __future__ import annotations

if __name__ == "fallback":
    from gpusim.module_alias import share

    share("gpusim.fallback", "fallback")

from .arithmetic import partial_dtype
from .copies import copy
from .fold import fold_members
from .memory import empty
from .ragged import ragged_copy
from .rounding import round_to
from .run import fold, run_fold, stacked_fold
from .spec import FoldPart, FoldSpec

__all__ = [
    "FoldPart",
    "FoldSpec",
    "copy",
    "empty",
    "fold",
    "fold_members",
    "partial_dtype",
    "ragged_copy",
    "round_to",
    "run_fold",
    "stacked_fold",
]
