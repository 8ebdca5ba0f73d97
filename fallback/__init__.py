"""The NumPy kernels: fold, ragged copy and round, with the bits of the numerics contract.
Nothing here knows of replicas, axes or collectives."""

from __future__ import annotations

from fallback.fold import fold
from fallback.ragged import ragged_copy
from fallback.rounding import round_to

__all__ = ["fold", "ragged_copy", "round_to"]
