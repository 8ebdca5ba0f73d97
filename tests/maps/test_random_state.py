"""gpusim.rng: shapes and dtypes, counting of calls, saved states, errors."""

from __future__ import annotations

import contextvars
import copy
import itertools
import json
import pickle
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optree
import pytest

import gpusim
from gpusim import lax
from tests.maps.draws import (
    MAPS,
    WORD,
    assert_same_bits,
    nested,
    per_replica,
)
from tests.oracles.machine_time import PATIENCE

# --- shapes, dtypes, parameters -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), 0, 1, 3, (5,), [7, 1], (3, 0, 2), np.int64(4), (1, 3, 5)])
def test_shapes_are_one_replicas(shape: Any) -> None:
    expected = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)

    def f() -> Any:
        g = gpusim.rng(0, "i")
        return (
            g.uniform(shape),
            g.normal(shape),
            g.integers(9, shape=shape),
            g.bernoulli(0.5, shape),
        )

    for kind in MAPS:
        for drawn in nested((kind,), (("i", 3),))(f):
            assert drawn.shape == (3, *expected)


def test_defaults_are_one_number_of_float32_and_int64() -> None:
    def f() -> Any:
        g = gpusim.rng(0, "i")
        return g.uniform(), g.normal(), g.integers(5), g.bernoulli(), g.permutation(0)

    drawn = nested(("pmap",), (("i", 2),))(f)
    assert [d.dtype.name for d in drawn] == ["float32", "float32", "int64", "bool", "int64"]
    assert [d.shape for d in drawn] == [(2,)] * 4 + [(2, 0)]


def test_without_a_shape_parameters_give_it() -> None:
    def f(p: Any, low: Any) -> Any:
        g = gpusim.rng(0, "i")
        return g.bernoulli(p), g.uniform(low=low, high=[[2], [3]]), g.normal(mean=low)

    p, low = np.full((3, 4), 0.5), np.zeros((3, 5))
    for kind in MAPS:
        drawn = MAPS[kind](f, axis_name="i")(p, low)
        assert [d.shape for d in drawn] == [(3, 4), (3, 2, 5), (3, 5)]


def test_parameters_may_be_mapped_over_any_axis() -> None:
    width = np.arange(1, 7).reshape(2, 3) * 1000

    def f(width: Any) -> Any:
        g = gpusim.rng(0, "x")
        return (
            g.integers(-width, width, 4, np.int32),
            g.integers(
                0, np.uint64(2**62) * width.astype(np.uint64) // 1000 + np.uint64(1), 3, "u8"
            ),
            g.uniform(4, high=width),
            g.normal((4, 2), mean=width, std=width / 7, dtype="float64"),
            g.bernoulli(width / 6000, 4),
        )

    width[:, 2] = 3000  # 2**62 * 3 at most
    width[1] = width[0]
    reference = gpusim.pmap(gpusim.pmap(f, "y"), "x")(width)
    for outer, inner in itertools.product(MAPS.values(), repeat=2):
        drawn = outer(inner(f, axis_name="y"), axis_name="x")(width)
        for ours, theirs in zip(drawn, reference, strict=True):
            assert_same_bits(ours, theirs)


def test_draws_go_on_through_collectives() -> None:
    def f() -> Any:
        g = gpusim.rng(0, "i")
        return lax.psum(g.normal(3), "i"), lax.all_gather(g.integers(10), "i"), g.calls

    reference = nested(("vmap",), (("i", 5),))(f)
    for kind in MAPS:
        for ours, theirs in zip(nested((kind,), (("i", 5),))(f), reference, strict=True):
            assert_same_bits(ours, theirs)


# --- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAPS)
def test_a_generator_goes_on_from_map_to_map(kind: str) -> None:
    generator = gpusim.rng(0, "i")
    run = nested((kind,), (("i", 3),))
    first, second = (run(lambda: generator.integers(2**60, shape=3)) for _ in range(2))
    assert generator.calls == 2
    assert (first != second).all()
    fresh = gpusim.rng(0, "i", calls=1)
    assert_same_bits(run(lambda: fresh.integers(2**60, shape=3)), second)


@pytest.mark.parametrize("kind", MAPS)
def test_a_generator_goes_on_from_nest_to_nest(kind: str) -> None:
    def program(kinds: tuple[str, str]) -> Any:
        g = gpusim.rng(0, ("x", "y"))
        draw = partial(g.integers, 2**60)

        def f() -> Any:
            gx = gpusim.rng(1, "x", calls=4)
            inner = [MAPS[kinds[1]](lambda: draw(), axis_name="y", axis_size=3)() for _ in range(2)]
            return inner, gx.integers(2**60), gx.integers(2**60), g.calls, gx.calls

        maps = [MAPS[kinds[0]](f, axis_name="x", axis_size=2)() for _ in range(2)]
        assert g.calls == 4
        return maps

    reference = optree.tree_leaves(program(("vmap", "vmap")))
    for other in MAPS:
        for ours, theirs in zip(optree.tree_leaves(program((kind, other))), reference, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("schedule", ["cores", "one"])
def test_pmaps_replicas_count_for_themselves_and_the_largest_count_goes_on(schedule: str) -> None:
    generator = gpusim.rng(0, "i", calls=10)

    def f(times: Any) -> Any:
        before = generator.calls
        for _ in range(int(times)):
            generator.uniform()
        return before, generator.calls

    mapped = gpusim.pmap(f, "i", schedule=schedule)
    before, after = mapped(np.array([0, 3, 1, 7, 2, 0, 5]))
    assert before.tolist() == [10] * 7 and after.tolist() == [10, 13, 11, 17, 12, 10, 15]
    assert generator.calls == 17
    before, after = mapped(np.array([1, 0]))
    assert before.tolist() == [17, 17] and after.tolist() == [18, 17]
    assert generator.calls == 18


@pytest.mark.parametrize("kind", MAPS)
def test_calls_can_be_set_inside_a_map(kind: str) -> None:
    generator = gpusim.rng(0, "i", calls=40)

    def f() -> Any:
        first = generator.integers(2**60)
        generator.calls = 40
        again = generator.integers(2**60)
        generator.calls = 5
        return first, again, generator.calls

    first, again, calls = nested((kind,), (("i", 3),))(f)
    assert np.array_equal(first, again) and calls.tolist() == [5, 5, 5]
    assert generator.calls == 5


def test_a_pmap_that_fails_leaves_a_usable_generator() -> None:
    generator = gpusim.rng(0, "i")

    def f(x: Any) -> Any:
        generator.normal()
        if x == 1:
            raise RuntimeError("broken")
        return lax.psum(x, "i")

    with pytest.raises(gpusim.ReplicaError):
        gpusim.pmap(f, "i")(np.arange(3))
    assert generator.calls == 1
    gpusim.pmap(f, "i")(np.arange(4) + 2)
    assert generator.calls == 2


def test_maps_in_several_threads_start_from_the_same_count() -> None:
    generator = gpusim.rng(0, "i")
    together = threading.Barrier(2, timeout=PATIENCE)
    results: list[Any] = []

    def job() -> None:
        def f() -> Any:
            first = generator.integers(2**60)
            together.wait() if lax.axis_index("i") == 0 else None
            return first, generator.integers(2**60)

        results.append(gpusim.pmap(f, "i", axis_size=3)())

    threads = [threading.Thread(target=job) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)
    assert generator.calls == 2


def test_threads_of_a_replicas_own_are_refused() -> None:
    generator = gpusim.rng(0, "i")
    seen: list[str] = []

    def draw() -> None:
        try:
            generator.uniform()
        except RuntimeError as error:
            seen.append(str(error))

    def f() -> Any:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(draw,))
        thread.start()
        thread.join()
        return generator.uniform()

    gpusim.pmap(f, "i", axis_size=2)()
    assert len(seen) == 2 and "the replica's own thread" in seen[0]


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis_name", ["i", ("i",), 7.5])
@pytest.mark.parametrize("kind", MAPS)
def test_a_saved_state_resumes_exactly(kind: str, axis_name: Any) -> None:
    bound = axis_name[0] if isinstance(axis_name, tuple) else axis_name
    run = nested((kind,), ((bound, 3),))

    def session(generator: gpusim.rng) -> Any:
        return [run(lambda: generator.normal(5)), run(lambda: generator.permutation(5))]

    generator = gpusim.rng(WORD - 1, axis_name)
    session(generator)
    saved = json.dumps(generator.state)
    expected = session(generator)
    for restored in (
        gpusim.rng.from_state(json.loads(saved)),
        pickle.loads(pickle.dumps(gpusim.rng.from_state(json.loads(saved)))),
        copy.deepcopy(gpusim.rng.from_state(json.loads(saved))),
        eval(repr(gpusim.rng.from_state(json.loads(saved))), {"rng": gpusim.rng}),
    ):
        assert json.dumps(restored.state) == saved
        for ours, theirs in zip(session(restored), expected, strict=True):
            assert_same_bits(ours, theirs)


def test_a_copy_counts_for_itself() -> None:
    generator = gpusim.rng(0, "i", calls=2)
    twin = copy.copy(generator)
    per_replica(lambda: twin.uniform(), 2)
    assert (generator.calls, twin.calls) == (2, 3)


def test_repr_and_state_show_what_there_is() -> None:
    generator = gpusim.rng(np.uint64(3), ["x", "y"], calls=4)
    assert repr(generator) == "rng(seed=3, axis_name=('x', 'y'), calls=4)"
    assert generator.state == {"seed": 3, "axis_name": ["x", "y"], "calls": 4}
    assert (generator.seed, generator.axis_name) == (3, ("x", "y"))


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "axis_name", "calls", "error", "message"),
    [
        (-1, "i", 0, ValueError, "seed=-1: expected an integer from 0 to 2**64 - 1"),
        (WORD, "i", 0, ValueError, "seed="),
        (0.5, "i", 0, TypeError, "seed=0.5: expected an integer"),
        ("0", "i", 0, TypeError, "seed='0': expected an integer"),
        (None, "i", 0, TypeError, "seed=None"),
        (0, "i", -1, ValueError, "calls=-1"),
        (0, "i", 1.0, TypeError, "calls=1.0"),
        (0, None, 0, ValueError, "axis_name=None: expected an axis name"),
        (0, (), 0, ValueError, "axis_name=()"),
        (0, ("i", "i"), 0, ValueError, "twice"),
        (0, ("i", 0), 0, ValueError, "not positions"),
        (0, {"i": 1}, 0, TypeError, "hashable"),
    ],
)
def test_bad_generators_are_refused(
    seed: Any, axis_name: Any, calls: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gpusim.rng(seed, axis_name, calls=calls)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ([0, "i", 0], TypeError, "must be a mapping"),
        ({"seed": 0, "axis_name": "i"}, ValueError, "must have the keys ['axis_name', 'calls'"),
        ({"seed": 0, "axis_name": "i", "calls": 0, "key": 1}, ValueError, "must have the keys"),
        ({"seed": 0, "axis_name": "i", "calls": -3}, ValueError, "calls=-3"),
    ],
)
def test_bad_states_are_refused(state: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        gpusim.rng.from_state(state)


BAD_DRAWS: list[tuple[Callable[[gpusim.rng], Any], type[Exception], str]] = [
    (lambda g: g.uniform(-1), ValueError, "uniform shape -1"),
    (lambda g: g.uniform((2, 1.5)), TypeError, "uniform shape 1.5: expected an integer"),
    (lambda g: g.normal("3"), TypeError, "normal shape '3'"),
    (lambda g: g.normal(True), TypeError, "normal shape True"),
    (lambda g: g.uniform(3, [0, 0], 1), ValueError, "cannot be broadcast to shape=(3,)"),
    (lambda g: g.uniform(None, [0, 0], [1, 1, 1]), ValueError, "do not broadcast"),
    (lambda g: g.uniform((), 1, 1), ValueError, "uniform low must be less than high in float32"),
    (lambda g: g.uniform((), 1, 1 + 1e-9), ValueError, "low must be less than high in float32"),
    (lambda g: g.uniform((), [0, 2], [1, 1]), ValueError, "low must be less than high"),
    (lambda g: g.uniform((), 0, np.nan), ValueError, "uniform high=nan: expected finite numbers"),
    (lambda g: g.uniform((), 0, 1e5, "float16"), ValueError, "finite numbers of float16"),
    (lambda g: g.uniform((), -1e308, 1e308, float), ValueError, "range too large"),
    (lambda g: g.uniform((), 0, 1j), TypeError, "uniform high=1j: expected real numbers"),
    (lambda g: g.uniform((), "a"), TypeError, "uniform low='a': expected real numbers"),
    (lambda g: g.uniform(dtype=np.int32), TypeError, "expected one of float16, bfloat16"),
    (lambda g: g.normal(dtype="floaty"), TypeError, "normal dtype='floaty': expected one of"),
    (lambda g: g.normal(dtype=None), TypeError, "normal dtype=None"),
    (lambda g: g.normal(dtype=np.complex64), TypeError, "normal dtype="),
    (lambda g: g.normal(std=-1), ValueError, "normal std must not be negative, but got -1"),
    (lambda g: g.normal(mean=np.inf), ValueError, "normal mean=inf: expected finite numbers"),
    (lambda g: g.integers(0), ValueError, "integers low must be less than high, but got low=0"),
    (lambda g: g.integers(5, 5), ValueError, "integers low must be less than high"),
    (lambda g: g.integers(np.array([1, 9]), 5), ValueError, "low must be less than high"),
    (lambda g: g.integers(0, 257, dtype="uint8"), ValueError, "expected integers from 1 to 256"),
    (lambda g: g.integers(-1, 5, dtype="uint8"), ValueError, "expected integers from 0 to 255"),
    (lambda g: g.integers(2**64, dtype=np.int64), ValueError, "integers high=18446744073709551616"),
    (lambda g: g.integers(1.0, 5), TypeError, "integers low=1.0: expected integers"),
    (lambda g: g.integers(True), TypeError, "integers high=True: expected integers"),
    (lambda g: g.integers(5, dtype=np.float32), TypeError, "integers dtype="),
    (lambda g: g.integers(5, dtype=bool), TypeError, "integers dtype="),
    (lambda g: g.bernoulli(1.5), ValueError, "bernoulli p must be from 0 to 1, but got 1.5"),
    (lambda g: g.bernoulli(-0.1), ValueError, "bernoulli p must be"),
    (lambda g: g.bernoulli([0.5, np.nan]), ValueError, "bernoulli p must be"),
    (lambda g: g.bernoulli(None), TypeError, "bernoulli p=None: expected real numbers"),
    (lambda g: g.permutation(-1), ValueError, "permutation of -1"),
    (lambda g: g.permutation(2.0), TypeError, "permutation of 2.0: expected an integer"),
    (lambda g: g.permutation(3, axis=1), ValueError, "axis 1 is out of bounds"),
    (lambda g: g.permutation(np.zeros((2, 3)), 2), ValueError, "axis 2 is out of bounds"),
    (lambda g: g.permutation(g.integers(5)), TypeError, "is mapped over 'i'"),
]


@pytest.mark.parametrize(("draw", "error", "message"), BAD_DRAWS)
def test_bad_draws_are_refused_and_not_counted(
    draw: Callable[[gpusim.rng], Any], error: type[Exception], message: str
) -> None:
    generator = gpusim.rng(0, "i")
    with pytest.raises(error, match=re.escape(message)):
        per_replica(lambda: draw(generator), 2)
    assert generator.calls == (1 if "is mapped" in message else 0)


@pytest.mark.parametrize("kind", MAPS)
def test_an_axis_that_is_not_bound_is_a_name_error(kind: str) -> None:
    generator = gpusim.rng(0, "j")
    with pytest.raises(NameError, match="unbound axis name: 'j'"):
        nested((kind,), (("i", 2),))(generator.uniform)
    with pytest.raises(NameError, match="no axis is bound here"):
        generator.permutation(3)
    assert generator.calls == 0


def test_calls_out_of_range_are_refused() -> None:
    generator = gpusim.rng(0, "i", calls=WORD - 1)
    with pytest.raises(ValueError, match="calls=-1"):
        generator.calls = -1
    per_replica(generator.uniform, 2)  # the last there is
    with pytest.raises(ValueError, match="calls=18446744073709551616"):
        per_replica(generator.uniform, 2)
