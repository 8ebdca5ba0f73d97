"""What CuPy refuses, as the stand-in does; the stand-in is tested here, not gpusim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.gpu.cupy_arrays import cupy

REFUSED: dict[str, Callable[[Any], Any]] = {
    "arrays of NumPy": lambda x: x + np.ones(6, np.float32),
    "0-d arrays of NumPy": lambda x: x * np.array(2.0),
    "assigning them": lambda x: x.__setitem__(slice(1, 2), np.ones((1, 6), np.float32)),
    "where= of ufuncs": lambda x: np.add(x, x, where=x > 0),
    "casting= of astype": lambda x: x.astype(np.float64, casting="same_kind"),
    "arrays of NumPy among others": lambda x: np.concatenate([x, np.ones((1, 6), np.float32)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError if name == "assigning them" else TypeError):
        REFUSED[name](cupy.ones((4, 6), np.float32))


def test_no_shape_is_taken_for_the_prototypes() -> None:
    assert np.zeros_like(cupy.ones(3), shape=()).shape == (3,)  # or libraries.zeros_like can go


def test_reductions_of_other_ufuncs_are_functions() -> None:
    x = cupy.ones((4, 6))
    with pytest.raises(NotImplementedError):
        np.maximum.reduce(x)
    assert np.add.reduce(x, axis=0).shape == (6,)


def test_memory_goes_back_to_its_stream() -> None:
    with cupy.cuda.Stream(non_blocking=True):
        first = cupy.empty(1 << 20)
        address = first.data.ptr
        del first
        assert cupy.empty(1 << 20).data.ptr == address
    with cupy.cuda.Stream(non_blocking=True):
        assert cupy.empty(1 << 20).data.ptr != address
