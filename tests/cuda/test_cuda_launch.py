"""launch.py's calls of CuPy, with a stand-in for CuPy on NumPy arrays and the host build.
The stand-in checks the calls' form; only a GPU can check CuPy itself."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import fallback
from gpusim.collectives.fold import fold_spec
from gpusim.cuda import cache, launch
from gpusim.cuda import compile as compiling
from tests.cuda.host_cuda.driver import driver


class CupyArray(np.ndarray):
    """A NumPy array that passes for CuPy's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)


class Pointed(CupyArray):
    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def pointed(values: Any) -> Any:
    return np.ascontiguousarray(values).view(Pointed)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerMultiprocessor": 228 << 10}

    class Device(nullcontext):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.attributes = attributes
            self.compute_capability = "90"

    stream = SimpleNamespace(ptr=0)
    fake = SimpleNamespace(
        ndarray=CupyArray,
        cuda=SimpleNamespace(
            Device=Device,
            get_current_stream=lambda: stream,
            runtime=SimpleNamespace(getDevice=lambda: 0),
            **driver(),
        ),
        empty=lambda shape, dtype: pointed(np.empty(shape, dtype)).reshape(shape),
        asarray=pointed,
        asnumpy=np.asarray,
        ascontiguousarray=pointed,
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    caches = (launch._function, launch._device, launch._checked, compiling.machine_code)
    for cached in caches:
        cached.cache_clear()
    yield fake
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("order", ["linear", "tree", "ring"])
def test_fold_launches_on_the_arrays_device(cupy: SimpleNamespace, order: str) -> None:
    x = np.random.default_rng(0).normal(size=(9, 100)).astype(np.float16)
    given = pointed(x)
    for members in (given, list(given)):
        found = launch.fold(members, order=order, rounding="stochastic", seed=2)
        expected = fallback.fold(x, order=order, rounding="stochastic", seed=2)
        assert np.array_equal(np.asarray(found), expected)


def test_round_and_ragged_copy_launch_too(cupy: SimpleNamespace) -> None:
    x = np.linspace(-3, 3, 100).reshape(2, 50)
    found = launch.round_to(pointed(x), np.float16, rounding="stochastic")
    expected = fallback.round_to(x, np.float16, rounding="stochastic")
    assert np.array_equal(np.asarray(found), expected)
    output = pointed(np.zeros((2, 50)))
    launch.ragged_copy(pointed(x), output, np.array([[0, 5, 1, 40, 10]]))
    assert np.array_equal(np.asarray(output)[1, 40:], x[0, 5:15]) and not output[0].any()


def test_wires_and_levels_launch_too(cupy: SimpleNamespace) -> None:
    """Windows of groups' sums are slices of the library's arrays."""
    x = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    wire = gpusim.Wire("float8_e5m2", "amax", 48, rounding="stochastic")
    how = gpusim.Reduction(order="ring", wire=wire, seed=3)
    for reduction in (how, dataclasses.replace(how, groups_of=2, across=how)):
        spec = fold_spec(reduction)
        for members in (pointed(x), [pointed(member) for member in x]):
            found = launch.run_fold(spec, members)
            assert np.array_equal(np.asarray(found), fallback.run_fold(spec, x))
    one = np.asarray(launch.round_to(pointed(x), wire.info))
    assert np.array_equal(one, gpusim.round_to(x, wire))


def test_other_arrays_are_refused(cupy: SimpleNamespace) -> None:
    with pytest.raises(TypeError, match="expected CuPy arrays, got ndarray"):
        launch.fold([np.zeros(3)])
    with pytest.raises(ValueError, match="members is empty"):
        launch.fold([])
