"""The numerics contract on CuPy arrays: the cases of tests/contract, with the GPU's kernels.

The folds and the roundings of those modules go to the GPU, in their own layout, and come back.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import fallback
from gpusim.cuda import launch
from gpusim.fallback.formats import SUB_32_BIT
from gpusim.libraries import on_device
from gpusim.maps import MappedArray
from tests.contract import test_fold_contract, test_formats, test_round_to
from tests.gpu.cupy_arrays import cupy, to_device, to_host

MODULES = (test_fold_contract, test_round_to, test_formats)
#: Claims about the host: its blocks, its processor's mode, NumPy's scalars and pickled formats.
NUMPYS_OWN = (
    "test_a_thread_that_flushes_subnormals_is_refused",
    "test_bits_do_not_depend_on_the_blocks",
    "test_lanes_follow_the_generator_as_published",
)
KERNELS = {fallback.fold: launch.fold, fallback.round_to: launch.round_to}


def placed(x: np.ndarray) -> Any:
    """A copy on the GPU in the same layout: strides, and memory that elements share, included."""
    low, high = np.lib.array_utils.byte_bounds(x)
    if x.dtype.hasobject or not x.dtype.isnative:
        pytest.skip(f"CuPy holds no arrays of {x.dtype.str}")
    if x.size == 0:
        return to_device(x)
    content = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
    narrow = x.dtype in SUB_32_BIT and x.dtype != np.float16
    kind = np.dtype(f"u{x.itemsize}") if narrow else x.dtype
    memory = cupy.asarray(content).data + (x.ctypes.data - low)
    return cupy.ndarray(x.shape, kind, memory, x.strides).view(x.dtype)


def on_gpu(kernel: Any) -> Any:
    """The kernel on copies of NumPy arrays, and on a map's values and GPU arrays as they are."""

    def run(value: Any, *arguments: Any, **options: Any) -> Any:
        if on_device(value) or isinstance(value, MappedArray):
            return kernel(value, *arguments, **options)
        if isinstance(value, list):
            there: Any = [placed(np.asarray(part)) for part in value]
        else:
            there = placed(np.asarray(value))
        return to_host(kernel(there, *arguments, **options))

    return run


def map_on_gpu(transform: Any) -> Any:
    """gpusim.vmap or gpusim.pmap, with its NumPy arguments on the GPU and its results back."""

    def mapping(*arguments: Any, **options: Any) -> Any:
        mapped = transform(*arguments, **options)

        def call(*operands: Any) -> Any:
            there = (placed(x) if isinstance(x, np.ndarray) else x for x in operands)
            result = mapped(*there)
            return to_host(result) if on_device(result) else result

        return call

    return mapping


@pytest.fixture(autouse=True)
def by_way_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "").startswith("gpusim.fallback") and value in KERNELS:
                monkeypatch.setattr(module, name, on_gpu(KERNELS[value]))
            elif value in (gpusim.round_to, gpusim.quantise_fpx):
                monkeypatch.setattr(module, name, on_gpu(value))
    for name in ("vmap", "pmap"):
        monkeypatch.setattr(gpusim, name, map_on_gpu(getattr(gpusim, name)))


for _module in MODULES:
    for _name, _value in list(vars(_module).items()):
        if _name.startswith("test_") and callable(_value) and _name not in NUMPYS_OWN:
            _short = _module.__name__.rpartition("test_")[2]
            globals()[f"{_name}_of_{_short}" if _name in globals() else _name] = _value


def test_layouts_are_kept_on_the_way() -> None:
    x = np.arange(24.0).reshape(4, 6)
    for view in (x.T, x[::-1, ::2], np.broadcast_to(x[0], (3, 6)), x[1:, 2:]):
        there = placed(view)
        assert there.strides == view.strides and (to_host(there) == view).all()
