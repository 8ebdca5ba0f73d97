"""Small leaves of a pytree are folded as one value, with the bits of each leaf's own fold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Reduction, collectives, lax
from gpusim.collectives import dispatch, joining
from tests.oracles.budget import budget

DTYPES = (np.float16, np.float32, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16)
REDUCTIONS = (
    Reduction(),
    Reduction(order="tree", accumulate="float32"),
    Reduction(order="reverse"),
    Reduction(order="exact"),
    Reduction(order="kahan"),
    Reduction(order="ring"),
    Reduction(order="gloo-ring"),
    Reduction(rounding="stochastic", seed=3),
    Reduction(wire="bfloat16"),
)
GROUPS = (None, [[0, 2, 4], [1, 3, 5]], [[5, 0], [1, 2, 3, 4]])
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
leaves = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=7)


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values of each fold that is made."""
    made: list[int] = []
    run_leaf = dispatch.run_leaf

    def counted(call: Any, leaf: Any, number: int) -> Any:
        made.append(leaf.operands[0].size)
        return run_leaf(call, leaf, number)

    monkeypatch.setattr("gpusim.maps.lockstep.run_leaf", counted)
    return made


@settings(max_examples=budget(600), deadline=None)
@given(leaves, st.sampled_from(REDUCTIONS), st.sampled_from(GROUPS), st.integers(0, 2**32 - 1))
def test_leaves_have_the_bits_of_their_own_folds(
    described: list[Any], reduction: Reduction, groups: Any, seed: int
) -> None:
    if reduction.order == "gloo-ring" or reduction.wire is not None:  # not for complex numbers
        assume(np.complex64 not in [dtype for _, dtype, _ in described])
    rng = np.random.default_rng(seed)
    tree = []
    for shape, dtype, mapped in described:
        values = rng.normal(size=(6, *shape) if mapped else shape) * 10
        tree.append((values.astype(dtype), mapped))
    axes = tuple(0 if mapped else None for _, mapped in tree)

    def total(*xs: Any) -> Any:
        with gpusim.reduction(reduction):
            return lax.psum([*xs, 3], "i", axis_index_groups=groups)

    *found, number = gpusim.vmap(total, axes, axis_name="i", axis_size=6)(*[x for x, _ in tree])
    even = groups is None or len({len(group) for group in groups}) == 1
    if even:
        assert number.tolist() == [18 if groups is None else 9] * 6
    for place, ((x, mapped), own) in enumerate(zip(tree, found, strict=True)):
        stacked = x if mapped else np.broadcast_to(x, (6, *x.shape))
        expected = collectives.psum(stacked, groups=groups, reduction=reduction, call=place)
        value = np.broadcast_to(expected.value, own.shape)
        assert own.dtype == value.dtype
        assert own.tobytes() == value.tobytes(), place


def test_small_leaves_of_one_dtype_are_one_fold(folds: list[int]) -> None:
    large = np.ones((4, joining.SMALL), np.float32)
    tree = {"a": np.ones((4, 2, 3)), "b": np.ones(4), "c": np.ones(4, np.int8), "large": large}
    found = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(tree)
    assert len(folds) == 3
    assert {name: x.shape for name, x in found.items()} == {n: x.shape for n, x in tree.items()}
    assert all((x == 4).all() and x.flags.writeable for x in found.values())


@pytest.mark.parametrize("reduction", REDUCTIONS[5:])
def test_orders_that_depend_on_the_place_are_not_joined(
    reduction: Reduction, folds: list[int]
) -> None:
    with gpusim.reduction(reduction):
        gpusim.vmap(lambda x: lax.psum([x, x], "i"), axis_name="i")(np.ones((4, 5), np.float32))
    assert len(folds) == 2


def test_joined_leaves_count_as_calls_and_are_recorded_one_by_one(
    folds: list[int], tmp_path: Path
) -> None:
    both = gpusim.vmap(lambda x: lax.psum([x, x], "i"), axis_name="i")
    with gpusim.reduction(order="tree") as state:
        both(np.ones(4))
        assert (state.calls, len(folds)) == (2, 1)
    with gpusim.record(tmp_path / "run"):
        both(np.ones(4))
    assert len(folds) == 3


def test_axes_within_a_map_are_joined_for_each_of_its_replicas(folds: list[int]) -> None:
    x, y = np.arange(24.0).reshape(2, 3, 4), np.arange(6.0).reshape(2, 3)
    inner = gpusim.vmap(lambda *xs: lax.psum(xs, "i"), axis_name="i", out_axes=None)
    found = gpusim.vmap(inner)(x, y)
    assert len(folds) == 1
    for own, given_ in zip(found, (x, y), strict=True):
        np.testing.assert_array_equal(own, given_.sum(1))
        assert own.flags.c_contiguous
