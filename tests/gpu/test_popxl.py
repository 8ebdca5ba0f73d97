"""popxl with CuPy: what it claims on the host holds on a GPU, and training arrives there too."""

from __future__ import annotations

import numpy as np
import pytest

from tests.popxl import popxl_digits
from tests.popxl.popxl_device import CLAIMS, on_the_gpu
from tests.popxl.popxl_digits import WAYS, train

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
pytestmark = pytest.mark.skipif(not cupy.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def sessions_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_gpu(monkeypatch)


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_the_gpu(claim: str) -> None:
    CLAIMS[claim]()


def test_all_ways_of_training_arrive_where_numpy_does() -> None:
    expected = popxl_digits.by_hand()
    for way in WAYS:
        weights = train(way)
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-3, atol=1e-5)
