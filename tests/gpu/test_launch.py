"""Launches through CuPy: nothing flushes subnormal numbers, and cached plans serve any array."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import fallback, lax
from gpusim.cuda import cache, folding, launch
from gpusim.cuda import compile as compiling
from tests.contract.test_schedules import FOLDS, schedule
from tests.cuda.host_cuda.values import moderate, same
from tests.gpu.cupy_arrays import GPUS, cupy, to_device, to_host

ALL_CACHES = (launch._function, launch._device, launch._checked, compiling.machine_code)
SMALLEST = {  # the smallest subnormal number
    np.dtype(np.float16): 2.0**-24,
    np.dtype(np.float32): 2.0**-149,
    np.dtype(np.float64): 2.0**-1074,
    np.dtype(ml_dtypes.bfloat16): 2.0**-133,
    np.dtype(ml_dtypes.float8_e4m3fn): 2.0**-9,
    np.dtype(ml_dtypes.float8_e5m2): 2.0**-16,
    np.dtype(ml_dtypes.float8_e4m3fnuz): 2.0**-10,
    np.dtype(ml_dtypes.float8_e5m2fnuz): 2.0**-17,
}


def subnormals(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of the smallest one, of both signs."""
    factors = np.random.default_rng(1).integers(-3, 4, shape)
    return (factors * SMALLEST[dtype]).astype(dtype)


@pytest.mark.parametrize("dtype", SMALLEST, ids=str)
@pytest.mark.parametrize("order", ["linear", "tree"])
def test_subnormal_numbers_are_added(dtype: np.dtype[Any], order: str) -> None:
    x = subnormals(dtype, (5, 300))
    assert np.count_nonzero(x.astype(np.float64)) > 1000
    for options in ({}, {"op": "max"}, {"divisor": 3}, {"rounding": "stochastic", "seed": 2}):
        options["accumulate"] = dtype if options.get("rounding") else None
        expected = fallback.fold(x, order=order, **options)
        assert expected.astype(np.float64).any()
        same(to_host(launch.fold(to_device(x), order=order, **options)), expected)


@pytest.mark.parametrize("source", SMALLEST, ids=str)
@pytest.mark.parametrize("target", SMALLEST, ids=str)
def test_subnormal_numbers_are_rounded(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    larger = max(SMALLEST[source], SMALLEST[target])
    x = (np.arange(-40, 40) * larger / 4).astype(source)
    same(to_host(launch.round_to(to_device(x), target)), fallback.round_to(x, target))


def test_kernels_that_flush_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = to_device(np.ones((2, 3), np.float32))
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path))
    monkeypatch.setattr(compiling, "OPTIONS", (*compiling.OPTIONS, "-ftz=true"))
    for cached in ALL_CACHES:
        cached.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="GPU 0 flush subnormal numbers to zero"):
            launch.fold(x)
    finally:
        for cached in ALL_CACHES:
            cached.cache_clear()


def test_machine_code_from_disk_runs_and_damaged_files_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = moderate((4, 50), np.float16)
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    for damage in (False, False, True):
        for cached in ALL_CACHES:
            cached.cache_clear()
        for path in (tmp_path / "cache").glob("*"):
            if damage:
                path.write_bytes(path.read_bytes()[:-100])
        same(to_host(launch.fold(to_device(x))), fallback.fold(x))
    assert len(list((tmp_path / "cache").iterdir())) == 3  # the check's two, and this fold's


def test_equal_launches_are_planned_once() -> None:
    x, y = (moderate((6, 77), np.float32, seed) for seed in (1, 2))
    given = to_device(x), to_device(y)
    launch.fold(given[0])
    planned = folding.plan_launch.cache_info().misses
    same(to_host(launch.fold(given[1])), fallback.fold(y))
    assert folding.plan_launch.cache_info().misses == planned


def test_views_and_counters_of_interleaved_calls_keep_apart() -> None:
    memory = moderate((7, 200), np.float16)
    on_gpu = to_device(memory)
    options = {"rounding": "stochastic", "accumulate": np.float16, "batch_ndim": 1}
    for _ in range(2):
        for start in (0, 1, 3, 8):
            for seed, call, places in ((0, 0, 0), (1, 0, 0), (0, 5, 0), (0, 0, 9), (0, 0, [1, 2])):
                count = 2 if isinstance(places, list) else 64
                window = slice(start, start + count)
                how = {**options, "seed": seed, "call": call, "places": places}
                expected = fallback.fold(memory[:, window], **how)
                same(to_host(launch.fold(on_gpu[:, window], **how)), expected)
                rows = [row[window] for row in on_gpu]
                same(to_host(launch.fold(rows, **how)), expected)


def test_tables_are_shared_by_no_two_streams() -> None:
    order = schedule(next(iter(FOLDS.values())))
    x = moderate((5, 2000), np.float32)
    given, expected = to_device(x), fallback.fold(x, order=order)
    cupy.cuda.Device(0).synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for _ in range(3):
        found = []
        for stream in streams:
            with stream:
                found.append(launch.fold(given, order=order))
        for stream, result in zip(streams, found, strict=True):
            stream.synchronize()
            same(to_host(result), expected)


def test_threads_launch_at_once_on_all_gpus() -> None:
    x = moderate((9, 3000), np.float32)
    expected = {order: fallback.fold(x, order=order) for order in ("linear", "tree", "ring")}

    def run(number: int) -> None:
        with cupy.cuda.Device(number % GPUS), cupy.cuda.Stream(non_blocking=True) as stream:
            given = to_device(x)
            members = [to_device(row) for row in x]
            for order in expected:
                for form in (given, members):
                    found = launch.fold(form, order=order)
                    assert found.device.id == number % GPUS
                    stream.synchronize()
                    same(to_host(found), expected[order])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(16)))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_an_array_is_folded_where_it_is() -> None:
    x = moderate((4, 100), np.float32)
    with cupy.cuda.Device(1):
        given = to_device(x)
    found = launch.fold(given)
    assert found.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    same(to_host(found), fallback.fold(x))


@pytest.mark.parametrize("run", [gpusim.vmap, gpusim.pmap])
def test_each_replica_rounds_with_bits_of_its_own(run: Any) -> None:
    def f(v: Any) -> Any:
        return gpusim.round_to(v, np.float16, rounding="stochastic", seed=5)

    def seeded(v: Any) -> Any:
        seed = 3 * lax.axis_index("i")
        return gpusim.quantise_fpx(v, 3, 2, seed=seed)

    x = np.random.default_rng(2).normal(size=(4, 3, 50)).astype(np.float32)
    expected = gpusim.vmap(gpusim.vmap(f))(x)
    same(to_host(run(gpusim.vmap(f))(to_device(x))), expected)
    same(to_host(gpusim.vmap(run(f))(to_device(x))), expected)
    expected = gpusim.vmap(seeded, axis_name="i")(x)
    same(to_host(run(seeded, axis_name="i")(to_device(x))), expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.float8_e5m2])
def test_nans_win_in_pargmax_and_pargmin(dtype: Any) -> None:
    rng = np.random.default_rng(3)
    x = rng.choice([np.nan, -0.0, 0.0, 1.0, -2.0], size=(5, 200)).astype(dtype)
    for ours, theirs in ((lax.pargmax, np.argmax), (lax.pargmin, np.argmin)):
        found = gpusim.vmap(lambda v, ours=ours: ours(v, "i"), axis_name="i")(to_device(x))
        same(to_host(found), np.tile(theirs(x.astype("f8"), axis=0).astype("i4"), (5, 1)))
