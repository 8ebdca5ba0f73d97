"""Launches are planned once, and calls that look alike get their own addresses and counters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import fallback
from gpusim.cuda import folding, rounding
from gpusim.cuda.layout import ALIGNMENT
from tests.contract.test_schedules import FOLDS, schedule
from tests.cuda.host_cuda.device import HostDevice
from tests.cuda.host_cuda.values import moderate, same
from tests.oracles.budget import budget

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
ALL_DTYPES = [*DTYPES, np.int8, np.complex64]
PLANS = (folding.plan_launch, rounding.plan_launch)


def forget() -> None:
    for plan in PLANS:
        plan.cache_clear()


def planned() -> int:
    """How many launches have been planned."""
    return sum(plan.cache_info().misses for plan in PLANS)


def aligned(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that begins `offset` bytes behind a multiple of ALIGNMENT."""
    memory = np.empty(values.nbytes + 2 * ALIGNMENT, np.uint8)
    start = (offset - memory.ctypes.data) % ALIGNMENT
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def listed(values: np.ndarray) -> list[np.ndarray]:
    return [aligned(value) for value in values]


STOCHASTIC: dict[str, Any] = {"rounding": "stochastic", "seed": 5, "accumulate": np.float16}
CALLS: dict[str, Any] = {
    "stacked": lambda d, x: d.fold(aligned(x)),
    "list": lambda d, x: d.fold(listed(x), order="tree"),
    "stochastic": lambda d, x: d.fold(aligned(x), call=3, **STOCHASTIC),
    "one place each": lambda d, x: d.fold(
        aligned(x[..., None]), batch_ndim=1, places=np.arange(x.shape[1]), **STOCHASTIC
    ),
    "schedule": lambda d, x: d.fold(aligned(x), order=schedule(next(iter(FOLDS.values())))),
    "logical": lambda d, x: d.fold(aligned(x), op="logical_or"),
    "in parts": lambda d, x: d.fold(
        aligned(x[2:]), partial=d.fold(aligned(x[:2]), final=False), before=2
    ),
    "round_to": lambda d, x: d.round_to(aligned(x), np.float16, rounding="stochastic", seed=4),
}


@pytest.mark.parametrize("shared_bytes", [64 << 10, 100 << 10, 164 << 10, 228 << 10])
@pytest.mark.parametrize("threads", [256, 8192, 32768, 65536, 98304])
def test_all_blocks_of_stages_fit_into_shared_memory(threads: int, shared_bytes: int) -> None:
    """With the KiB that CUDA keeps for each, on 132 multiprocessors; or a stage has one batch."""
    batches = folding.stage_batches(threads, 4, 65536, 132 * 512, shared_bytes)
    blocks = -(-threads // (32 * 132))
    block = batches * folding.stage_bytes(4) + 1024
    assert blocks * block <= shared_bytes or batches == 1
    assert block + folding.stage_bytes(4) > min(shared_bytes // blocks, 49 << 10)  # no room is left


@pytest.mark.parametrize("name", CALLS)
def test_a_second_equal_call_plans_nothing(name: str) -> None:
    device = HostDevice()
    x, y = (moderate((5, 37), np.float32, seed) for seed in (1, 2))
    CALLS[name](device, x)
    before = planned()
    found = CALLS[name](device, y)
    assert planned() == before
    forget()
    same(found, CALLS[name](device, y))
    assert planned() > 0


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("order", ["linear", "reverse"])
def test_views_at_every_offset_have_the_bits(dtype: Any, order: str) -> None:
    device = HostDevice()
    itemsize = np.dtype(dtype).itemsize
    for length in (64, 61):  # members that are alike, and members that are not
        x = np.zeros((5, length), dtype)
        parts = np.float32 if np.dtype(dtype).kind == "c" else dtype
        x.view(parts)[...] = moderate(x.view(parts).shape, parts)
        for offset in range(0, ALIGNMENT, itemsize):
            given = aligned(x, offset)
            same(device.fold(given, order=order), fallback.fold(x, order=order))
            if length == 64:  # chunks of 16 bytes begin where the memory is aligned
                shift = int(device.launches[-1].arguments["layout"]["shift"][0])
                width = np.dtype(parts).itemsize
                assert (shift * width - offset) % 16 == 0
            if np.dtype(dtype).kind not in "ic":
                same(device.round_to(given, np.float16), fallback.round_to(x, np.float16))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    dtype = draw(st.sampled_from(DTYPES))
    start, step = draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 1, 2]))
    rounding = draw(st.sampled_from(["nearest", "stochastic"]))
    members = draw(st.sampled_from([3, 9]))
    places = draw(st.sampled_from([0, 1, 2**64 - 1, [7], [0, 1]]))
    options = {
        "order": draw(st.sampled_from(["linear", "reverse", "tree", "ring"])),
        "rounding": rounding,
        "seed": draw(st.integers(0, 1)),
        "call": draw(st.sampled_from([0, 1, 2**64 - 1])),
        "batch_ndim": draw(st.integers(0, 1)) if places == 0 else 1,
        "places": places,
        "accumulate": draw(st.sampled_from([None, np.float16])),
    }
    kind = draw(st.sampled_from(["stacked", "list", "strided list", "mixed list"]))
    return dtype, members, start, step, kind, options, draw(st.integers(0, 1 << 20))


def members_of(dtype: Any, members: int, start: int, step: int, kind: str, seed: int) -> Any:
    memory = aligned(moderate((members + 1, 2, 96), dtype, seed))
    x = memory[:members, :, start : start + 33 * step : step]
    if kind == "stacked":
        return x
    arrays = [*x]
    if kind == "mixed list":  # the same shape and strides, but each lies otherwise to 16 bytes
        arrays[1] = memory[members, :, start + 1 : start + 1 + 33 * step : step]
    if kind == "strided list":
        arrays[1] = np.ascontiguousarray(arrays[1])
    return arrays


@settings(max_examples=budget(200))
@given(st.lists(calls(), min_size=2, max_size=5), st.integers(0, 2**32 - 1))
def test_interleaved_calls_have_the_bits_of_calls_without_a_cache(
    drawn: list[Any], order: int
) -> None:
    device, expected, alone = HostDevice(), {}, {}
    for number, (*which, options, seed) in enumerate(drawn):
        forget()
        given = members_of(*which, seed)
        expected[number] = fallback.fold([np.array(member) for member in given], **options)
        alone[number] = device.fold(given, **options)
    forget()
    for number in np.random.default_rng(order).permutation([*range(len(drawn))] * 3).tolist():
        *which, options, seed = drawn[number]
        found = device.fold(members_of(*which, seed), **options)
        same(found, expected[number])
        assert found.tobytes() == alone[number].tobytes()


def test_plans_hold_no_arrays() -> None:
    device = HostDevice()
    x = moderate((4, 33), np.float16)
    given = [np.array(member) for member in x]
    partial = device.fold(given, final=False)
    held = [weakref.ref(array) for array in (*given, partial)]
    found = device.fold(given, partial=partial, before=4, places=np.array(3), **STOCHASTIC)
    held.append(weakref.ref(found))
    device.launches.clear()
    del given, partial, found
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_the_cache_is_bounded() -> None:
    for plan in PLANS:
        assert plan.cache_info().maxsize is not None
