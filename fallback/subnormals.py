"""A check that the processor does not flush subnormal numbers to zero, as the contract requires.
Libraries built with -ffast-math switch flushing on for every thread that loads them."""

from __future__ import annotations

import sys

# Variables of the module, so that no compiler folds the arithmetic below away.
_smallest_normal = sys.float_info.min
_smallest_subnormal = 5e-324
_half = 0.5


def require_subnormals() -> None:
    """Raise RuntimeError if this thread flushes subnormal results or operands to zero."""
    if _smallest_normal * _half == 0.0 or _smallest_subnormal == 0.0:
        raise RuntimeError(
            "this thread flushes subnormal numbers to zero (a library built with -ffast-math may "
            "have switched that on), so sums would differ in their bits; switch it off first, for "
            "example torch.set_flush_denormal(False)"
        )
