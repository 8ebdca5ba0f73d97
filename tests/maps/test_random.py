"""gpusim.rng: the bits of every draw, the same in every executor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import optree
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim.fallback import random as kernels
from tests.maps.draws import (
    FLOATS,
    MAPS,
    WORD,
    Axes,
    assert_same_bits,
    nested,
    per_replica,
    philox_words,
    rounded,
)

INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
few = settings(max_examples=60, deadline=None, database=None)
word = st.one_of(st.integers(0, WORD - 1), st.sampled_from((0, 1, 2**32, 2**63, WORD - 1)))


def integer_of(seed: int, call: int, replica: int, element: int, low: int, high: int) -> int:
    n = high - low
    for candidate in itertools.count():
        drawn = philox_words(seed, call, replica, element + 1, candidate)[-1]
        if drawn * n % WORD >= WORD % n:
            return low + drawn * n // WORD
    raise AssertionError


def on_mesh(axes: Axes) -> Callable[[Callable[[], Any]], Any]:
    names, sizes = zip(*axes, strict=True)

    def run(f: Callable[[], Any]) -> Any:
        def shard() -> Any:
            ahead = tuple(range(len(axes)))
            return optree.tree_map(lambda leaf: np.expand_dims(leaf, ahead), f())

        return gpusim.shard_map(shard, gpusim.Mesh(sizes, names), (), gpusim.P(*names))()

    return run


def executors(axes: Axes) -> dict[str, Callable[[Callable[[], Any]], Any]]:
    kinds = itertools.product(MAPS, repeat=len(axes))
    return {"shard_map": on_mesh(axes), **{" in ".join(k[::-1]): nested(k, axes) for k in kinds}}


DRAWS: dict[str, Callable[[gpusim.rng], Any]] = {
    "uniform": lambda g: g.uniform((3, 5), -2, 7),
    "uniform float64": lambda g: g.uniform(7, dtype="float64"),
    "uniform bfloat16": lambda g: g.uniform(7, dtype=ml_dtypes.bfloat16),
    "normal": lambda g: g.normal((5,)),
    "normal float64": lambda g: g.normal((), 3, 2, np.float64),
    "normal float16": lambda g: g.normal((1, 3), dtype=np.float16),
    "integers": lambda g: g.integers(-3, 11, (7,)),
    "integers of many": lambda g: g.integers(0, 2**63 + 1, (5,), np.uint64),
    "bernoulli": lambda g: g.bernoulli(0.3, (3, 3)),
    "permutation": lambda g: g.permutation(7),
    "permutation of an array": lambda g: g.permutation(np.arange(12).reshape(2, 6), axis=1),
    "empty": lambda g: g.normal((0, 3)),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("axis_name", ["x", "y", ("x", "y"), ("y", "x")])
def test_every_executor_and_nesting_draws_the_same_bits(draw: str, axis_name: Any) -> None:
    axes = (("x", 2), ("y", 3))
    inside = gpusim.rng(5, axis_name).state

    def program(generator: gpusim.rng | None = None) -> Any:
        generator = generator or gpusim.rng.from_state(inside)
        return [DRAWS[draw](generator), DRAWS[draw](generator)]

    first, *others = executors(axes).items()
    reference = first[1](program)
    for name, run in others:
        for result, expected in zip(run(program), reference, strict=True):
            assert_same_bits(np.asarray(result), np.asarray(expected), name)
        outside = gpusim.rng(5, axis_name)
        for result, expected in zip(run(lambda g=outside: program(g)), reference, strict=True):
            assert_same_bits(np.asarray(result), np.asarray(expected), f"{name}, made outside")
        assert outside.calls == 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_a_replica_draws_the_same_however_many_there_are(size: int) -> None:
    all_seven = per_replica(lambda: gpusim.rng(1, "i").uniform(5), 7)
    assert_same_bits(per_replica(lambda: gpusim.rng(1, "i").uniform(5), size), all_seven[:size])


def test_replicas_are_counted_in_the_order_of_the_names() -> None:
    axes = (("x", 2), ("y", 3))
    draw = {
        names: nested(("vmap", "pmap"), axes)(lambda n=names: gpusim.rng(0, n).integers(2**62))
        for names in (("x", "y"), ("y", "x"))
    }
    flat = per_replica(lambda: gpusim.rng(0, "i").integers(2**62), 6)
    assert np.array_equal(draw["x", "y"], flat.reshape(2, 3))
    assert np.array_equal(draw["y", "x"], flat.reshape(3, 2).T)


def test_replicas_along_other_axes_draw_the_same() -> None:
    drawn = nested(("pmap", "vmap"), (("x", 2), ("y", 3)))(lambda: gpusim.rng(0, "x").normal(4))
    assert (drawn == drawn[:, :1]).all() and not (drawn[0] == drawn[1]).any()


def test_what_is_the_same_on_all_replicas_around_converts_freely() -> None:
    def f() -> Any:
        drawn = gpusim.rng(0, "x").uniform()
        assert isinstance(drawn, gpusim.MappedArray) and drawn.mapped_axes == ()
        return drawn if float(drawn) < 2 else -drawn

    nested(("pmap", "vmap"), (("x", 2), ("y", 3)))(f)


def test_draws_under_vmap_are_mapped_and_under_pmap_plain() -> None:
    def f(kind: type) -> Any:
        drawn = gpusim.rng(0, "i").normal((2, 3))
        assert type(drawn) is kind and drawn.shape == (2, 3)
        return drawn

    gpusim.vmap(lambda: f(gpusim.MappedArray), axis_name="i", axis_size=2)()
    gpusim.pmap(lambda: f(np.ndarray), "i", axis_size=2)()


# --- the bits -----------------------------------------------------------------------------------


@few
@given(word, word, word, st.sampled_from((0, 1, 3, WORD - 1)), st.integers(0, 21))
def test_words_are_those_of_numpys_philox(
    seed: int, call: int, replica: int, candidate: int, count: int
) -> None:
    stream = kernels.Stream(seed, call, np.array([replica], np.uint64))
    expected = philox_words(seed, call, replica, count, candidate)
    assert stream.words(count, candidate).tolist() == [expected]
    many = kernels.Stream(seed, call, np.full(kernels.SETUPS_PER_PHILOX, replica, np.uint64))
    assert many.words(count, candidate).tolist() == [expected] * kernels.SETUPS_PER_PHILOX
    elements = np.arange(count)[::-1]
    backwards = stream.words_at(np.full(count, replica, np.uint64), elements, candidate)
    assert backwards.tolist() == expected[::-1]


def test_many_replicas_are_drawn_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = kernels.Stream(3, 1, np.arange(700, dtype=np.uint64).reshape(7, 100))
    whole = stream.words(11)
    assert whole.shape == (7, 100, 11)
    monkeypatch.setattr(kernels, "PHILOX_BLOCK", 16)
    assert np.array_equal(stream.words(11), whole)
    monkeypatch.setattr(kernels, "BLOCKS_PER_SETUP", 0)
    assert np.array_equal(stream.words(11), whole)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 5), (1000, 1004), (0.1, 0.3)])
def test_uniform_is_one_rounding_of_float64_arithmetic(
    dtype: np.dtype, low: float, high: float
) -> None:
    drawn = per_replica(lambda: gpusim.rng(9, "i").uniform(40, low, high, dtype), 3)
    assert drawn.dtype == dtype
    first, last = (float(rounded(Fraction(bound), dtype)) for bound in (low, high))
    for replica in range(3):
        for ours, drew in zip(drawn[replica], philox_words(9, 0, replica, 40), strict=True):
            exact = first + (drew >> 11) * 2.0**-53 * (last - first)
            expected = rounded(Fraction(exact), dtype)
            if expected >= dtype.type(last):
                expected = np.nextafter(dtype.type(last), dtype.type(-np.inf))
            assert ours == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_uniform_reaches_low_and_never_high(dtype: np.dtype) -> None:
    words = np.array([0, WORD - 1], np.uint64)
    for low, high in ((0, 1), (-1, 0), (16, 17), (-(2.0**-14), 0), (1, 1.0078125)):
        bounds = np.array([low, high]).astype(dtype)
        least, most = kernels.uniform(words, *bounds, dtype)
        assert least == bounds[0] and most < bounds[1]
        if high:  # near zero the numbers are denser than u
            assert most == np.nextafter(bounds[1], dtype.type(-np.inf))


@few
@given(st.integers(-128, 127), st.integers(1, 256), word, st.integers(1, 9))
def test_integers_are_lemires(low: int, width: int, seed: int, count: int) -> None:
    high = min(low + width, 128)
    drawn = per_replica(lambda: gpusim.rng(seed, "i").integers(low, high, count, np.int8), 2)
    expected = [[integer_of(seed, 0, r, e, low, high) for e in range(count)] for r in range(2)]
    assert drawn.tolist() == expected and drawn.dtype == np.int8


@pytest.mark.parametrize(
    "width", [1, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1, WORD // 3 * 2, WORD]
)
def test_integers_of_wide_ranges_are_drawn_again_until_they_fit(width: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(2, "i").integers(0, width, (3, 4), np.uint64), 3)
    expected = [[integer_of(2, 0, r, e, 0, width) for e in range(12)] for r in range(3)]
    assert drawn.reshape(3, 12).tolist() == expected


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_cover_the_whole_dtype(dtype: np.dtype) -> None:
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max) + 1
    drawn = per_replica(lambda: gpusim.rng(4, "i").integers(low, high, 5, dtype), 2)
    expected = [[integer_of(4, 0, r, e, low, high) for e in range(5)] for r in range(2)]
    assert drawn.dtype == dtype and drawn.tolist() == expected
    for edge in (low, high - 1):
        alone = per_replica(lambda e=edge: gpusim.rng(4, "i").integers(e, e + 1, 5, dtype), 2)
        assert (alone == edge).all()


@few
@given(st.floats(0, 1), word)
def test_bernoulli_compares_the_word_with_p(p: float, seed: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(seed, "i").bernoulli(p, 8), 2)
    threshold = math.floor(Fraction(p) * WORD)
    expected = [[drew < threshold for drew in philox_words(seed, 0, r, 8)] for r in range(2)]
    assert drawn.tolist() == expected


def test_bernoulli_of_0_and_1_is_certain() -> None:
    words = np.array([0, 1, WORD - 1], np.uint64)
    assert not kernels.bernoulli(words, np.zeros(1)).any()
    assert kernels.bernoulli(words, np.ones(1)).all()
    assert kernels.bernoulli(words, np.array([2.0**-64])).tolist() == [True, False, False]


@few
@given(st.integers(0, 40), word)
def test_permutations_sort_the_words(n: int, seed: int) -> None:
    drawn = per_replica(lambda: gpusim.rng(seed, "i").permutation(n), 3)
    assert drawn.shape == (3, n) and drawn.dtype == np.int64
    for replica in range(3):
        words = philox_words(seed, 0, replica, n)
        assert drawn[replica].tolist() == sorted(range(n), key=words.__getitem__)


def test_equal_words_are_ordered_by_the_next_candidates() -> None:
    class Tied(kernels.Stream):
        def words(self, count: int, candidate: int = 0) -> np.ndarray:
            assert count == 4
            rows = [[[5, 3, 5, 0], [1, 2, 3, 4]], [[9, 8, 7, 6], [4, 3, 2, 1]]][candidate]
            return np.array(rows, np.uint64)

    order = kernels.permutation(Tied(0, 0, np.zeros(2, np.uint64)), 4)
    assert order.tolist() == [[3, 1, 2, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_permutation_of_an_array_moves_whole_slices(axis: int) -> None:
    table = np.arange(3 * 5 * 7).reshape(3, 5, 7)

    def f(x: Any) -> Any:
        generator = gpusim.rng(0, "i")
        moved = generator.permutation(x, axis=axis)
        generator.calls = 0
        return moved, generator.permutation(x.shape[axis])

    moved, order = gpusim.vmap(f, axis_name="i")(table)
    for replica in range(3):
        assert np.array_equal(moved[replica], table[replica].take(order[replica], axis=axis))
    for ours, theirs in zip(gpusim.pmap(f, "i")(table), (moved, order), strict=True):
        assert_same_bits(ours, theirs)
