"""The collectives, numerics and mapping suites on CuPy arrays, beside NumPy on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import test_at
import test_collectives
import test_indexing
import test_linalg_fft
import test_ragged_all_to_all
import test_rules
import test_transposes_stacked
import test_ufuncs

from tests import device_cases
from tests.gpu import cupy_arrays
from tests.on_device import Library, cases_of, on_the_device

MAPPING = (test_at, test_indexing, test_linalg_fft, test_rules, test_ufuncs)
COLLECTIVES = (test_collectives, test_ragged_all_to_all, test_transposes_stacked)


@pytest.fixture
def library() -> Library:
    return cupy_arrays.library()


@pytest.fixture(autouse=True)
def by_way_of_the_device(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    """The suites' functions check and call collectives on the GPU."""
    on_the_device(monkeypatch, library, MAPPING, COLLECTIVES)


globals().update(cases_of(MAPPING))
globals().update(cases_of(COLLECTIVES))
globals().update(device_cases.TESTS)
