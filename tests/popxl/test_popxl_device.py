"""popxl on arrays of a GPU's library: a strict stand-in for CuPy. tests/gpu takes CuPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.cuda import device_arrays
from tests.popxl.popxl_device import CLAIMS, on_the_gpu
from tests.popxl.popxl_digits import WAYS, Way, digest, train

MADE_THERE = ("ones", "full", "eye", "linspace")


class Package(ModuleType):
    """The stand-in, with CuPy's other functions: NumPy's, which its arrays take in hand."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__dict__.update(vars(sys.modules["cupy"]))

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name not in MADE_THERE:
            return function
        return lambda *args, **kwargs: self.asarray(function(*args, **kwargs))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[device_arrays.Counted]:
    with device_arrays.installed() as counts:
        sys.modules["cupy"] = Package()
        on_the_gpu(monkeypatch)
        yield counts


@pytest.mark.parametrize("claim", CLAIMS)
def test_on_the_device(claim: str, counts: device_arrays.Counted) -> None:
    CLAIMS[claim]()
    assert counts.uploads and counts.downloads and not counts.lacking


@pytest.mark.parametrize("way", WAYS)
def test_training_on_the_device_gives_the_hosts_bits(
    way: Way, request: pytest.FixtureRequest
) -> None:
    host = digest(train(way))
    counts = request.getfixturevalue("counts")
    assert digest(train(way)) == host and counts.uploads and not counts.lacking
