"""The kernels on CuPy arrays have the bits of fallback on the same values."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import fallback
from gpusim.collectives.fold import fold_spec
from gpusim.collectives.kernels import kernels
from tests.contract.test_fold_passed_on import passed_on, subtrees
from tests.contract.test_ragged_copy import random_segments, row_by_row
from tests.contract.test_schedules import FOLDS, schedule
from tests.cuda.host_cuda.values import moderate, same
from tests.gpu.cupy_arrays import to_device, to_host

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
try:
    COUNT = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    COUNT = 0
pytestmark = pytest.mark.skipif(not COUNT, reason="needs a GPU")

ORDERS = ["linear", "reverse", "tree", "ring", "exact"]
ROUNDINGS = ["nearest", "stochastic"]
DTYPES = ["float16", "float32", "float64", "complex64", "complex128", "int8", "uint16", "int64"]
DTYPES += ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


def check(x: np.ndarray, on_gpu: Any = None, **options: Any) -> None:
    given = to_device(x) if on_gpu is None else on_gpu
    found = kernels(cupy.zeros(1)).fold(given, **options)
    same(to_host(found), fallback.fold(x, **options))


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("complex"):
        parts = np.dtype(f"f{np.dtype(dtype).itemsize // 2}")
        return moderate((*shape, 2), parts).view(dtype)[..., 0]
    return moderate(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_fold_has_the_bits_of_fallback(dtype: str, order: str) -> None:
    for members, length in ((1, 5), (3, 4096), (8, 100_003), (65, 777), (1000, 31)):
        x = values((members, length), dtype)
        for rounding in ROUNDINGS:
            check(x, order=order, rounding=rounding, seed=3)
        check(x[:, ::3], to_device(x)[:, ::3], order=order)
        check(x, [to_device(member) for member in x], order=order)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", FOLDS)
def test_schedules_have_the_bits_of_fallback(name: str, dtype: str) -> None:
    order = schedule(FOLDS[name], from_zero=True)
    for members, length in ((2, 5), (3, 4096), (7, 100_003), (65, 777)):
        x = values((members, length), dtype)
        for rounding in ROUNDINGS:
            check(x, order=order, rounding=rounding, accumulate="float16", seed=3)
        check(x, [to_device(member) for member in x], order=order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_accumulators_batches_and_windows(order: str, rounding: str) -> None:
    x = values((9, 4, 6, 37), "float32")
    for accumulate in (None, "float16", "float64"):
        options: dict[str, Any] = {"order": order, "rounding": rounding, "accumulate": accumulate}
        check(x, batch_ndim=2, places=np.arange(24).reshape(4, 6), divisor=9, **options)
        check(x, out_dtype="float16", **options)
        check(x[:, 0, 0, 5:30], to_device(x)[:, 0, 0, 5:30], window=(5, 37), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_folds_in_parts_have_the_bits_of_the_whole(dtype: str, rounding: str) -> None:
    x, kernel = values((12, 3, 4099), dtype), kernels(cupy.zeros(1)).fold
    options: dict[str, Any] = {"rounding": rounding, "seed": 5, "batch_ndim": 1}
    for given in (to_device(x), [to_device(member) for member in x]):
        for order in ("linear", "reverse"):
            found = passed_on(given, [2, 7], order, kernel, **options)
            same(to_host(found), fallback.fold(x, order=order, **options))
        found = subtrees(given, 4, kernel, **options)
        same(to_host(found), fallback.fold(x, order="tree", **options))


@pytest.mark.parametrize("op", ["prod", "max", "min", "logical_and", "logical_or"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_every_operator(op: str, dtype: str) -> None:
    check(values((11, 1234), dtype), op=op)


def test_as_many_members_as_promised() -> None:
    for order in ORDERS:
        x = np.broadcast_to(values((1, 64), "float16"), (65536, 64))
        check(x, order=order, rounding="stochastic")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_round_has_the_bits_of_fallback(rounding: str) -> None:
    for source, target in product(("float16", "float32", "float64"), ("float16", "float32")):
        x = values((70_001,), source)
        found = kernels(cupy.zeros(1)).round_to(to_device(x), target, rounding=rounding, seed=4)
        same(to_host(found), fallback.round_to(x, target, rounding=rounding, seed=4))


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale", [None, "amax", "floor", "even"])
def test_wires_and_levels_have_the_bits_of_fallback(order: str, rounding: str, scale: Any) -> None:
    for dtype, length in (("float32", 100_003), ("bfloat16", 777), ("float64", 4096)):
        x = values((5, 2, length), dtype)
        for block, at in product((None, 32, 1000) if scale else (None,), ("hops", "ends")):
            wire = gpusim.Wire("float8_e4m3fn", scale, block, rounding, at)
            how = gpusim.Reduction(order=order, wire=wire, rounding=rounding, seed=3)
            for each in (how, dataclasses.replace(how, groups_of=2, across=how)):
                spec = fold_spec(each)
                found = kernels(cupy.zeros(1)).run_fold(spec, to_device(x), batch_ndim=1)
                same(to_host(found), fallback.run_fold(spec, x, batch_ndim=1))
            sent = gpusim.round_to(to_device(x), wire)
            same(to_host(sent), gpusim.round_to(x, wire))


@pytest.mark.parametrize("row", [(), (3,), (16,), (1024,)])
@pytest.mark.parametrize("most", [2, 300])
def test_segments_arrive_where_they_are_sent(row: tuple[int, ...], most: int) -> None:
    random = np.random.default_rng(most)
    sources = random.integers(0, 100, (3, 400, *row)).astype(np.float32)
    output = np.zeros_like(sources)
    segments = random_segments(random, 3, 400, most)
    expected, on_gpu = output.copy(), to_device(output)
    row_by_row(sources, expected, segments)
    kernels(on_gpu).ragged_copy(to_device(sources), on_gpu, segments)
    assert np.array_equal(to_host(on_gpu), expected)


def test_segments_are_checked_before_anything_is_written() -> None:
    output = cupy.zeros((2, 10))
    with pytest.raises(ValueError, match="leaves its arrays"):
        kernels(output).ragged_copy(cupy.ones((2, 10)), output, np.array([[0, 8, 1, 0, 3]]))
    assert not output.any()


def test_the_current_stream_orders_the_work() -> None:
    x = values((64, 100_000), "float32")
    expected = fallback.fold(x)
    with cupy.cuda.Stream(non_blocking=True):
        given = to_device(x)
        found = kernels(given).fold(given)
        same(to_host(found), expected)
