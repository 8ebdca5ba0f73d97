"""The two sets of kernels, which have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpusim.fallback import kernels
from tests.oracles.reference_fold import codes_of

kernels.provide("gpusim.compiled")  # as gpusim does

SETS = ("numpy", "compiled")

#: Marks tests that run the sets themselves, by `on_every_set`: those whose expected values take
#: longer than what they test.
runs_every_set = pytest.mark.runs_every_set


def on_every_set(compute: Callable[[], Any]) -> np.ndarray:
    """Return the result of `compute`, and assert that all sets of kernels give its codes."""
    found = []
    for name in SETS:
        with kernels.chosen(name):
            found.append(np.asarray(compute()))
    one, *others = found
    for other in others:
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        # NaNs may differ. Codes are read one by one, which takes long where there are millions.
        assert other.tobytes() == one.tobytes() or codes_of(other) == codes_of(one), (one, other)
    return one
