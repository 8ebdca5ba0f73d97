"""The NumPy kernels: fold, copies and rounding, with the bits of the numerics contract.
Nothing here knows of replicas, axes or collectives."""

from __future__ import annotations

from fallback.arithmetic import partial_dtype
from fallback.copies import copy
from fallback.fold import fold
from fallback.memory import empty
from fallback.ragged import ragged_copy
from fallback.rounding import round_to

__all__ = ["copy", "empty", "fold", "partial_dtype", "ragged_copy", "round_to"]
