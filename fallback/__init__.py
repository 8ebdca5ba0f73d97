"""The NumPy kernels: fold, copies and rounding, with the bits of the numerics contract.
They are independent of replicas, axes and collectives."""

from __future__ import annotations

from fallback.arithmetic import partial_dtype
from fallback.copies import copy
from fallback.fold import fold, run_fold, stacked_fold
from fallback.memory import empty
from fallback.ragged import ragged_copy
from fallback.rounding import round_to
from fallback.spec import FoldPart, FoldSpec

__all__ = [
    "FoldPart",
    "FoldSpec",
    "copy",
    "empty",
    "fold",
    "partial_dtype",
    "ragged_copy",
    "round_to",
    "run_fold",
    "stacked_fold",
]
