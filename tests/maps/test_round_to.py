"""round_to and quantise_fpx inside maps: each replica draws random bits of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.fallback import round_to as round_kernel
from gpusim.maps.axis_environment import Sharding, extend_axis_environment, new_axes
from tests.contract.test_round_to import expected as expected_codes
from tests.oracles.reference_fold import codes_of

RUNS = {"vmap": gpusim.vmap, "pmap": gpusim.pmap}


def rounded(x: Any, seed: Any = 7, **options: Any) -> Any:
    return gpusim.round_to(x, np.float16, rounding="stochastic", seed=seed, **options)


def at_place(x: Any, place: int, seed: int = 7) -> Any:
    return round_kernel(x, np.float16, rounding="stochastic", seed=seed, place=place)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_mean_over_replicas_is_exact(run):
    x = np.full(1024, 1.0003)
    error = abs(run(rounded)(x).mean(dtype=float) - 1.0003)
    assert error < 5 * 2.0**-10 / 2 / 1024**0.5  # half of float16's spacing; five standard errors


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_replicas_index_is_the_last_counter_word(run):
    x = np.random.default_rng(4).normal(size=(5, 11)).astype(np.float32)
    found = run(rounded)(x)
    for replica, row in enumerate(x):
        draws = {"seed": 7, "step": 1, "call": 0, "place": replica}
        assert codes_of(found[replica]) == expected_codes(row, np.dtype("f2"), draws)
    assert (found[0] == rounded(x[0])).all()  # outside of a map the word is 0


def test_all_maps_have_the_same_bits():
    x = np.random.default_rng(5).normal(size=(4, 3, 20)).astype(np.float32)
    expected = np.stack([at_place(v, place) for place, v in enumerate(x.reshape(12, 20))])
    expected = expected.reshape(x.shape)
    for outer in RUNS.values():
        for inner in RUNS.values():
            assert (outer(inner(rounded))(x) == expected).all()
        moved = outer(gpusim.vmap(rounded, axis_name="j"), "i" if outer is gpusim.pmap else 0)
        assert (moved(x) == expected).all()
    crossed = gpusim.vmap(gpusim.vmap(rounded), in_axes=1, out_axes=1)(x)
    index = np.arange(12).reshape(3, 4).T  # the outer axis leads
    assert (crossed == np.vectorize(at_place, signature="(n),()->(n)")(x, index)).all()
    mesh, parts = gpusim.Mesh((4, 3), ("x", "y")), gpusim.P("x", "y")
    sharded = gpusim.shard_map(rounded, mesh=mesh, in_specs=parts, out_specs=parts)
    assert (sharded(x).reshape(x.shape) == expected).all()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_what_is_the_same_on_all_replicas_is_rounded_on_each(run):
    """A constant, an argument that is not mapped, and the result of a psum."""
    w = np.full(50, 0.3)
    expected = np.stack([at_place(w, place) for place in range(6)])
    assert len(np.unique(expected, axis=0)) == 6
    x = np.full((6, 50), 0.05)
    total = x.sum(0)
    assert (run(lambda x: rounded(w), axis_name="i")(x) == expected).all()
    assert (run(rounded, in_axes=None, axis_size=6)(w) == expected).all()
    found = run(lambda x: rounded(lax.psum(x, "i")), axis_name="i")(x)
    assert found.shape == expected.shape and len(np.unique(found, axis=0)) == 6
    assert abs(found - total).max() < 2**-11


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_mapped_seed_is_each_replicas_own(run):
    x = np.random.default_rng(6).normal(size=(4, 9))
    expected = np.stack([at_place(v, place, 3 * place) for place, v in enumerate(x)])
    assert (run(lambda v: rounded(v, 3 * lax.axis_index("i")), axis_name="i")(x) == expected).all()
    seeds = np.array([2**64 - 1, 0, 5, 5], np.uint64)
    expected = np.stack([at_place(v, k, int(seeds[k])) for k, v in enumerate(x)])
    assert (run(rounded)(x, seeds) == expected).all()
    assert (run(lambda s: rounded(x[0], s, axis_name=()))(seeds) == [
        at_place(x[0], 0, int(seed)) for seed in seeds
    ]).all()  # fmt: skip
    nearest = run(lambda v, s: gpusim.round_to(v, np.float16, seed=s))(x, seeds)
    assert (nearest == x.astype(np.float16)).all()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_axis_name_chooses_who_draws(run):
    x = np.random.default_rng(8).normal(size=(2, 3, 8))

    def nested(axis_name: Any) -> Any:
        f = lambda v: rounded(v, axis_name=axis_name)  # noqa: E731
        return run(run(f, axis_name="j"), axis_name="i")(x)

    places = {
        None: [[0, 1, 2], [3, 4, 5]],
        (): [[0, 0, 0], [0, 0, 0]],
        "i": [[0, 0, 0], [1, 1, 1]],
        "j": [[0, 1, 2], [0, 1, 2]],
        ("j", "i"): [[0, 2, 4], [1, 3, 5]],
    }
    for axis_name, numbers in places.items():
        expected = np.vectorize(at_place, signature="(n),()->(n)")(x, numbers)
        assert (nested(axis_name) == expected).all(), axis_name
    with pytest.raises(NameError, match="unbound axis name: 'k'"):
        nested("k")
    same = gpusim.vmap(lambda w: rounded(w, axis_name=()), in_axes=None, out_axes=None, axis_size=3)
    assert (same(x[0, 0]) == rounded(x[0, 0])).all()


def test_rounding_to_nearest_maps_nothing():
    def f(w: Any) -> Any:
        for narrow in (np.float16, gpusim.Format(3, 2)):
            assert gpusim.round_to(w, narrow).mapped_axes == ()
        assert gpusim.round_to(w, np.float32, rounding="stochastic").mapped_axes == ()
        return w

    gpusim.vmap(f, in_axes=None, axis_size=3)(np.ones(2))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_quantise_fpx_has_the_same_random_bits(run):
    x = np.full((3, 400), -1.35, np.float32)
    found = run(lambda v: gpusim.quantise_fpx(v, 3, 2, seed=1))(x)
    assert (found[0] == gpusim.quantise_fpx(x[0], 3, 2, seed=1)).all()
    assert len(np.unique(found, axis=0)) == 3 and found.dtype == np.float32
    shared = run(lambda v: gpusim.quantise_fpx(v, 3, 2, seed=1, axis_name=()))(x)
    assert (shared == found[0]).all()
    seeded = run(lambda v: gpusim.quantise_fpx(v, 3, 2, seed=lax.axis_index("i")), axis_name="i")(x)
    assert len(np.unique(seeded, axis=0)) == 3 and (seeded[2] != found[2]).any()


def test_instances_of_a_world_count_on():
    """The second instance of two holds replicas 3 and 4 of five."""

    class Second:
        instance = 1

    x = np.random.default_rng(9).normal(size=(2, 10))
    (entry,) = new_axes(("i",), (5,), None, Sharding(Second(), (3, 2)))
    with extend_axis_environment((entry,)):
        found = gpusim.maps.mapped_array.array.unpack(rounded(x[0]))[0]
    assert (found == np.stack([at_place(x[0], place) for place in (3, 4)])).all()


def test_large_and_empty_batches():
    x = np.random.default_rng(1).normal(size=(3, 70_001))
    expected = np.stack([at_place(v, place) for place, v in enumerate(x)])
    assert (gpusim.vmap(rounded)(x) == expected).all()
    assert (gpusim.vmap(rounded)(x.T).shape) == (70_001, 3)
    assert gpusim.vmap(rounded)(x[:, :0]).shape == (3, 0)
    assert gpusim.vmap(rounded)(x[:, 0]).shape == (3,)


@pytest.mark.parametrize("seed", [1.5, "1", None, np.array([1, 2])])
def test_a_seed_that_is_not_an_integer_is_an_error(seed):
    with pytest.raises(TypeError, match=r"seed=.*expected an integer"):
        rounded(np.ones(2), seed)


def test_a_mapped_seed_out_of_range_is_an_error():
    with pytest.raises(ValueError, match="expected an integer from 0 to 2"):
        gpusim.vmap(rounded)(np.ones((2, 3)), np.array([1, -1]))
