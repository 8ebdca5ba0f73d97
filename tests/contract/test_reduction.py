"""Reduction and its context: validation, nesting, counting, threads."""

from __future__ import annotations

import contextvars
import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.reduction import Reduction, current, entered, forked, reduction
from tests.oracles.machine_time import PATIENCE


def test_the_default_is_the_sum_in_linear_order() -> None:
    assert Reduction() == Reduction("sum", "linear", None, "nearest", 0)


@pytest.mark.parametrize("given", ["float16", np.float16, np.dtype("float16")])
def test_accumulators_compare_as_dtypes(given: Any) -> None:
    assert Reduction(accumulate=given).accumulate == np.dtype(np.float16)
    assert {Reduction(accumulate=given)} == {Reduction(accumulate=np.float16)}


def test_float64_is_another_accumulator_than_none() -> None:
    """NumPy has np.dtype("float64") == None."""
    assert Reduction(accumulate="float64") != Reduction()
    assert len({Reduction(accumulate="float64"), Reduction()}) == 2
    assert repr(Reduction(accumulate="float64")).endswith("accumulate='float64')")


def test_every_sort_of_accumulator_is_taken() -> None:
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fnuz, np.int32, np.complex64):
        assert Reduction(accumulate=dtype).accumulate == np.dtype(dtype)


@pytest.mark.parametrize(
    "given",
    [
        Reduction(),
        Reduction("prod", "ring", ml_dtypes.float8_e5m2, "stochastic", 2**64 - 1),
        Reduction(op="logical_or"),
        Reduction(accumulate="float64"),
    ],
)
def test_a_reduction_survives_repr_pickle_and_copy(given: Reduction) -> None:
    assert eval(repr(given)) == given
    assert pickle.loads(pickle.dumps(given)) == given
    assert copy.deepcopy(given) == given


def test_an_equal_reduction_of_another_process_has_the_same_hash() -> None:
    """Hashes of strings differ between processes, so that of a Reduction is not sent along."""
    text = (
        "import pickle; from gpusim import Reduction; x = Reduction(order='ring'); hash(x)\n"
        "print(pickle.dumps(x).hex())"
    )
    for seed in ("1", "2"):
        sent = subprocess.run(
            [sys.executable, "-c", text],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
        assert pickle.loads(bytes.fromhex(sent.stdout)) in {Reduction(order="ring")}


def test_repr_shows_what_differs_from_the_default() -> None:
    shown = repr(Reduction(order="tree", accumulate=ml_dtypes.bfloat16, seed=3))
    assert shown == "Reduction(op='sum', order='tree', accumulate='bfloat16', seed=3)"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"op": "mean"}, ValueError, "op='mean': expected one of 'sum', 'prod'"),
        ({"op": ["sum"]}, ValueError, "op="),
        ({"order": "butterfly"}, ValueError, "order='butterfly': expected one of 'linear'"),
        ({"rounding": "up"}, ValueError, "rounding='up': expected one of 'nearest', 'stochastic'"),
        ({"seed": -1}, ValueError, "seed=-1: expected an integer from 0"),
        ({"seed": 2**64}, ValueError, "seed="),
        ({"seed": 1.5}, TypeError, "seed=1.5: expected an integer"),
        ({"accumulate": "half precision"}, TypeError, "accumulate='half precision'"),
        ({"accumulate": bool}, TypeError, "accumulate=bool"),
        ({"accumulate": "S3"}, TypeError, "accumulate='S3'"),
    ],
)
def test_fields_outside_their_range_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reduction(**options)
    with pytest.raises(error, match=message), reduction(**options):
        raise AssertionError("entered")


def test_numpy_integers_are_seeds() -> None:
    assert type(Reduction(seed=np.uint64(5)).seed) is int


def test_without_a_context_every_leaf_is_call_0() -> None:
    assert current().reduction == Reduction()
    assert [current().next_calls(3), current().next_calls(1)] == [0, 0]
    assert current().calls == 0


def test_a_context_counts_leaves() -> None:
    with reduction(order="ring") as state:
        assert current() is state
        assert [current().next_calls(3), current().next_calls(0), current().next_calls(2)] == [
            0,
            3,
            3,
        ]
        assert state.calls == 5
        assert repr(state) == "State(Reduction(op='sum', order='ring'), calls=5)"


def test_the_counter_can_be_set_to_resume_a_run() -> None:
    with reduction() as state:
        state.calls = 12
        assert state.next_calls(1) == 12
        with pytest.raises(ValueError, match="calls=-1"):
            state.calls = -1
        with pytest.raises(TypeError, match="calls='x'"):
            state.calls = "x"


def test_contexts_nest_and_the_inner_one_holds_alone() -> None:
    with reduction(order="ring", seed=1) as outer:
        outer.next_calls(4)
        with reduction(rounding="stochastic") as inner:
            assert inner.reduction == Reduction(rounding="stochastic")
            assert inner.next_calls(1) == 0
        assert current() is outer and outer.next_calls(1) == 4
    assert current().reduction == Reduction()


def test_a_context_ends_when_its_block_raises() -> None:
    with pytest.raises(KeyError), reduction(order="tree"):
        raise KeyError
    assert current().reduction == Reduction()


def test_a_context_takes_a_reduction_and_changes_to_it() -> None:
    base = Reduction(order="tree", seed=3)
    with reduction(base) as state:
        assert state.reduction is base or state.reduction == base
    with reduction(base, seed=4) as state:
        assert state.reduction == Reduction(order="tree", seed=4)
    with reduction("tree seed=3", seed=4) as state:
        assert state.reduction == Reduction(order="tree", seed=4)
    other: Any = 3
    with pytest.raises(TypeError, match=r"expected a gpusim\.Reduction"), reduction(other):
        raise AssertionError("entered")


def test_threads_see_a_context_only_in_a_copy_of_it() -> None:
    with reduction(order="ring") as state, ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result().reduction == Reduction()
        context = contextvars.copy_context()
        assert pool.submit(context.run, current).result() is state


def test_a_fork_counts_on_its_own_from_where_its_parent_stands() -> None:
    with reduction(seed=2) as state:
        state.next_calls(5)
        child = forked(state)
        with entered(child):
            assert current() is child and current().next_calls(2) == 5
        assert (state.calls, child.calls) == (5, 7)
        assert child.reduction == state.reduction
    assert forked(current()).next_calls(1) == forked(current()).next_calls(1) == 0
