"""The collectives, numerics and mapping suites on CuPy arrays, beside NumPy on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collectives import test_collectives, test_ragged_all_to_all, test_transposes_stacked
from tests.cuda import device_cases
from tests.cuda.on_device import Library, cases_of, on_the_device
from tests.gpu import cupy_arrays
from tests.maps import test_at, test_indexing, test_linalg_fft, test_rules, test_ufuncs

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
