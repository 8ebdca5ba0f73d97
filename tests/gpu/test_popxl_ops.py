"""PopXL's ops with CuPy: values and gradients are PyTorch's there too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.popxl import popxl_cases, test_popxl_on_device
from tests.popxl.popxl_cases import HALF, SINGLE, Case

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
pytestmark = pytest.mark.skipif(not cupy.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize("case", test_popxl_on_device.CASES, ids=str)
def test_values_and_gradients_are_pytorchs(case: Case, dtype: object) -> None:
    if dtype is HALF and case.name == "onehot":
        return  # its values are constants of float32
    popxl_cases.check(case, dtype, arrays="cupy")


def test_random_numbers_are_those_of_the_host() -> None:
    program = test_popxl_on_device.random_program
    for there, here in zip(program("cupy"), program("numpy"), strict=True):
        np.testing.assert_allclose(there, here, 1e-6)
