"""launch.py's calls of CuPy, with a stand-in for CuPy on NumPy arrays and the host build.
The stand-in checks the calls' form; only a GPU can check CuPy itself."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fallback
from gpusim.collectives.kernels import kernels
from gpusim.cuda import compile as compiling
from gpusim.cuda import launch, templates
from tests.cuda.host_cuda.device import HostDevice


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


class RawModule:
    """Finds the instance by its mangled name and runs the host's."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        assert "--fmad=false" in options and "--ftz=false" in options
        self.code = code

    def get_function(self, name: str) -> Any:
        every = [kernel for unit in templates.units().values() for kernel in unit]
        (kernel,) = [kernel for kernel in every if compiling.mangled(kernel) == name]
        assert kernel.source in self.code
        assert kernel.name in self.code or "<" not in kernel.name

        def run(grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            (given,) = arguments
            assert type(given) is np.ndarray and given.size == 1
            made = launch.Launch(kernel, given, grid[0] * block[0], block[0], shared_mem)
            HostDevice().run(made)

        return run


def pointed(values: Any) -> Any:
    return np.ascontiguousarray(values).view(Pointed)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    attributes = {"MultiProcessorCount": 132}

    class Device(nullcontext):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.attributes = attributes

    fake = SimpleNamespace(
        ndarray=CupyArray,
        RawModule=RawModule,
        cuda=SimpleNamespace(Device=Device),
        empty=lambda shape, dtype: pointed(np.empty(shape, dtype)).reshape(shape),
        asarray=pointed,
        asnumpy=np.asarray,
        ascontiguousarray=pointed,
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    for cached in (launch._function, launch._device):
        cached.cache_clear()
    yield fake
    for cached in (launch._function, launch._device):
        cached.cache_clear()


@pytest.mark.parametrize("order", ["linear", "tree", "ring"])
def test_fold_launches_on_the_arrays_device(cupy: SimpleNamespace, order: str) -> None:
    x = np.random.default_rng(0).normal(size=(9, 100)).astype(np.float16)
    given = pointed(x)
    for members in (given, list(given)):
        found = kernels(given).fold(members, order=order, rounding="stochastic", seed=2)
        expected = fallback.fold(x, order=order, rounding="stochastic", seed=2)
        assert np.array_equal(np.asarray(found), expected)


def test_round_and_ragged_copy_launch_too(cupy: SimpleNamespace) -> None:
    x = np.linspace(-3, 3, 100).reshape(2, 50)
    found = kernels(pointed(x)).round_to(pointed(x), np.float16, rounding="stochastic")
    expected = fallback.round_to(x, np.float16, rounding="stochastic")
    assert np.array_equal(np.asarray(found), expected)
    output = pointed(np.zeros((2, 50)))
    kernels(output).ragged_copy(pointed(x), output, np.array([[0, 5, 1, 40, 10]]))
    assert np.array_equal(np.asarray(output)[1, 40:], x[0, 5:15]) and not output[0].any()


def test_other_arrays_are_refused(cupy: SimpleNamespace) -> None:
    with pytest.raises(TypeError, match="expected CuPy arrays, got ndarray"):
        launch.fold([np.zeros(3)])
    with pytest.raises(ValueError, match="members is empty"):
        launch.fold([])
