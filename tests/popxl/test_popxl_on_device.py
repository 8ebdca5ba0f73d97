"""PopXL's ops on arrays of a GPU's library: the suites' cases, on a strict stand-in for CuPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.popxl import ops
from tests.cuda import device_arrays
from tests.cuda.cupy_surface import surface
from tests.popxl import (
    popxl_cases,
    test_popxl_autodiff,
    test_popxl_ops_elementwise,
    test_popxl_ops_networks,
    test_popxl_ops_shapes,
    test_popxl_ops_states,
)
from tests.popxl.popxl_cases import HALF, SINGLE, Case


class Ufunc:
    """cupy.exp and the like: of the device's arrays and of numbers, not of NumPy's arrays."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not any(isinstance(value, device_arrays.DeviceArray) for value in inputs):
            raise TypeError(f"cupy.{self._ufunc.__name__}: Unsupported type {type(inputs[0])}")
        return self._ufunc(*inputs, **options)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._ufunc, method)


class Package:
    """`import cupy` with all functions that CuPy has, and with no others."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._base, name):
            return getattr(self._base, name)
        if name not in surface():
            raise AttributeError(f"module 'cupy' has no attribute {name!r}")
        function = getattr(np, name)
        if isinstance(function, np.ufunc):
            return Ufunc(function)
        return lambda *args, **options: device_arrays.call(name, args, options)


@pytest.fixture
def cupy() -> Iterator[None]:
    with device_arrays.installed() as counts:
        sys.modules["cupy"] = Package(sys.modules["cupy"])
        yield
        assert counts.uploads and counts.downloads and not counts.lacking


CASES = [
    *test_popxl_ops_elementwise.UNARY,
    *test_popxl_ops_elementwise.BINARY,
    *test_popxl_ops_elementwise.TESTS,
    *test_popxl_ops_shapes.REDUCTIONS,
    *test_popxl_ops_shapes.SHAPES,
    *test_popxl_ops_shapes.INDEXING,
    *test_popxl_ops_networks.PRODUCTS,
    *test_popxl_ops_networks.CONVOLUTIONS,
    *test_popxl_ops_networks.POOLS,
    *test_popxl_ops_networks.NORMS,
    *test_popxl_ops_networks.LOSSES,
    *test_popxl_ops_networks.IMAGES,
    *test_popxl_ops_states.IN_PLACE,
    *test_popxl_ops_states.VALUES,
    *test_popxl_ops_states.UPDATES,
    *test_popxl_ops_states.GRAPHS,
    *test_popxl_autodiff.CASES,
]


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_the_same_on_the_device(case: Case) -> None:
    popxl_cases.check(case, SINGLE, arrays="cupy")


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("case", test_popxl_ops_networks.CONVOLUTIONS[:2], ids=str)
def test_float16_is_computed_in_float32_there_too(case: Case) -> None:
    popxl_cases.check(case, HALF, arrays="cupy")


def random_program(arrays: str) -> list[Any]:
    """What a program of random ops makes of the seeds of four replicas."""
    ir = popxl.Ir(replication=4)
    ir._pb_ir.getSessionOptions().arrays = arrays
    with ir.main_graph:
        stream = popxl.h2d_stream((2,), popxl.uint32)
        first, second = ops.split_random_seed(ops.host_load(stream))
        uniform = ops.random_uniform(first, (5, 3), dtype=HALF)
        normal = ops.random_normal(second, (5, 3))
        made = [
            uniform,
            normal,
            ops.dropout(normal, first, 0.5),
            ops.histogram(normal, [0.0], True),
        ]
        streams = [popxl_cases.stored(t) for t in (*made, ops.lamb_square(uniform))]
    with popxl.Session(ir, "ipu_model") as session:
        results = session.run({stream: np.array([[1, 2], [1, 2], [3, 4], [5, 6]], np.uint32)})
    return [results[each] for each in streams]


@pytest.mark.usefixtures("cupy")
def test_random_numbers_are_the_same_on_the_device() -> None:
    for there, here in zip(random_program("cupy"), random_program("numpy"), strict=True):
        np.testing.assert_array_equal(there, here)


@pytest.mark.usefixtures("cupy")
def test_variables_are_changed_in_place_on_the_device() -> None:
    ir = popxl.Ir(replication=2)
    ir._pb_ir.getSessionOptions().arrays = "cupy"
    with ir.main_graph, popxl.in_sequence():
        t, m, v = (popxl.variable(np.full((2, 3), n, np.float32)) for n in (1.0, 2.0, 4.0))
        step = popxl.variable(0.0)
        x = ops.var_updates.adam_updater(m, v, t, step, 0.1, 0.9, 0.99, 1e-3)
        ops.var_updates.adam_var_update(t, x, ops.lamb_square(t), ops.lamb_square(x), 0.1, 5.0)
        ops.relu_(ops.slice_(ops.transpose_(m), start=1))
        ops.add_(v, m)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        found = [session.get_tensor_data(each) for each in (t, v, step)]
    term = 2 / (1 - 0.9) / (np.sqrt(4 / (1 - 0.99)) + 1e-3) + 0.1
    norms = np.sqrt(6), np.sqrt(6) * term
    np.testing.assert_allclose(found[0], 1 - 0.1 * norms[0] / norms[1] * term, 1e-5)
    assert (found[1] == 6).all() and found[2] == 1
