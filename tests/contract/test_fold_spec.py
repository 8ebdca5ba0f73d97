"""FoldSpec, FoldPart and run_fold: one specification, checked and planned once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from gpusim.fallback import FoldPart, FoldSpec, fold, run_fold, threads
from gpusim.fallback.blocks import plan_blocks
from gpusim.fallback.schedules import Case, Schedule, Walk
from gpusim.fallback.spec import run_arguments
from tests.cuda.host_cuda.device import HostDevice
from tests.oracles.python_calls import python_calls

ORDERS = ["linear", "reverse", "tree", "ring", Schedule((Case(Walk(start=1)),))]


def test_equal_specs_are_one_key() -> None:
    spec = FoldSpec(accumulate="float16", out_dtype=np.float32, order=ORDERS[-1])
    same = FoldSpec(accumulate=np.float16, out_dtype="f4", order=Schedule((Case(Walk(start=1)),)))
    assert spec == same and hash(spec) == hash(same)
    assert spec != FoldSpec(accumulate="float16", out_dtype=np.float32)
    assert {spec: 1}[same] == 1


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_spec_gives_what_the_keywords_give_on_every_device(order: Any) -> None:
    x = np.random.default_rng(1).normal(size=(6, 2, 30)).astype(np.float32)
    how: dict[str, Any] = {"order": order, "accumulate": np.float16, "rounding": "stochastic"}
    spec, offset = FoldSpec(seed=3, **how), np.array([5, 9])
    expected = fold(x, seed=3, batch_ndim=1, call=2, places=offset, **how)
    for run in (run_fold, HostDevice().run_fold):
        found = run(spec, x, batch_ndim=1, call=2, batch_offset=offset)
        assert found.tobytes() == expected.tobytes()


def test_a_part_gives_what_the_keywords_give() -> None:
    x = np.random.default_rng(1).normal(size=(6, 30)).astype(np.float16)
    spec = FoldSpec(rounding="stochastic")
    for run in (run_fold, HostDevice().run_fold):
        first = run(spec, x[:2, 4:], part=FoldPart(window=(4, 30), final=False))
        part = FoldPart(window=(4, 30), partial=first, before=2)
        found = run(spec, x[2:, 4:], part=part)
        assert found.tobytes() == fold(x, rounding="stochastic")[4:].tobytes()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FoldSpec(op="mean"), ValueError, "op='mean': expected one of"),
        (lambda: FoldSpec(order="random"), ValueError, "order='random'"),
        (lambda: FoldSpec(rounding="up"), ValueError, "rounding='up'"),
        (lambda: FoldSpec(seed=2**64), ValueError, "seed="),
        (lambda: FoldSpec(order=ORDERS[-1], cut_axis=0), ValueError, "cut_axis=0: expected None"),
        (lambda: FoldPart(before=1), ValueError, "partial, beside before=1: none is given"),
        (lambda: FoldPart(before=-1), ValueError, "before=-1"),
        (lambda: fold(np.ones(2), axis=0), TypeError, "unexpected keyword argument 'axis'"),
    ],
)
def test_specs_and_parts_are_checked_when_they_are_made(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_equal_keywords_are_checked_once() -> None:
    def spec(**keywords: Any) -> FoldSpec:
        found: FoldSpec = run_arguments(**keywords)["spec"]
        return found

    assert spec(order="tree", accumulate=np.float16) is spec(order="tree", accumulate=np.float16)
    assert spec(divisor=1) is not spec(divisor=True)  # which are equal, but of two types
    fields = [("a", "f4")]  # a dtype, and no key
    assert spec(accumulate=fields) == FoldSpec(accumulate=fields)
    for _ in range(2):  # errors are not kept
        with pytest.raises(ValueError, match="seed=-1"):
            spec(seed=-1)
        with pytest.raises(TypeError, match=r"not understood|data type"):
            spec(accumulate="no dtype")


def test_a_small_fold_with_a_plan_makes_few_python_calls() -> None:
    x, spec = np.ones((8, 16), np.float32), FoldSpec()
    plan_blocks.cache_clear()  # a key that is equal, but another object, is compared in Python
    calls = python_calls(lambda: run_fold(spec, x))
    assert len(calls) <= 13, calls


@pytest.mark.parametrize("elements", [16, 1 << 20])  # in one thread, and shared by two
def test_folds_raise_no_floating_point_errors(elements: int) -> None:
    x = np.full((4, elements), 3e38, np.float32)
    x[2:] *= -1
    with threads.limited(2), np.errstate(all="raise"):
        total = run_fold(FoldSpec(), x)
        assert set(np.geterr().values()) == {"raise"}  # the caller's state is as it was
    assert np.isposinf(total).all()


def test_cached_plans_keep_no_array_alive() -> None:
    x = np.ones((4, 50), np.float32)
    partial = run_fold(FoldSpec(), x[:2], part=FoldPart(final=False))
    run_fold(FoldSpec(), x[2:], part=FoldPart(partial=partial, before=2))
    alive = weakref.ref(partial)
    del partial
    gc.collect()
    assert alive() is None
