"""Collectives, maps and their rules on arrays of a GPU's library: the suites' cases, with a strict
stand-in for CuPy (device_arrays.py), whose kernels are the .cu sources compiled by g++.

tests/gpu runs the same on CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import programs
import pytest
import test_at
import test_collectives
import test_indexing
import test_linalg_fft
import test_ragged_all_to_all
import test_rules
import test_transposes_stacked
import test_ufuncs
from hypothesis import HealthCheck, Phase, given, settings
from replicated import names_on_the_route

import gpusim
from gpusim import collectives, lax, trees
from gpusim.libraries import on_device
from gpusim.mapping import MappedArray
from tests import device_arrays
from tests.host_cuda.values import same
from tests.on_device import (
    Library,
    cases_of,
    excused,
    on_the_device,
    run_on,
    standing_in,
)


@pytest.fixture
def library() -> Iterator[Library]:
    yield from standing_in()


# The suites' own cases.

MAPPING = (test_at, test_indexing, test_linalg_fft, test_rules, test_ufuncs)
COLLECTIVES = (test_collectives, test_ragged_all_to_all, test_transposes_stacked)


@pytest.fixture(autouse=True)
def by_way_of_the_device(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """The suites' functions check and call collectives on the device."""
    if "library" in request.fixturenames:
        on_the_device(monkeypatch, request.getfixturevalue("library"), MAPPING, COLLECTIVES)


pytestmark = pytest.mark.usefixtures("library")


# Programs of collectives, in every map.

PROGRAMS = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("first", tuple(programs.SHAPES))
def test_programs_have_numpys_bits_in_every_map(library: Library, first: str) -> None:
    @PROGRAMS
    @given(programs.programs((first,)))
    def agree(program: programs.Program) -> None:
        x = program.argument()
        expected, *_ = programs.executors(program).values()
        theirs = programs.outcome(lambda: expected(program, x))
        for who, run in programs.executors(program).items():
            ours = programs.outcome(lambda run=run: run_on(library, run)(program, x))
            assert type(ours.error) is type(theirs.error), (who, ours.error, theirs.error)
            if ours.error is None:
                programs.assert_same_bits(ours.results, theirs.results, who)

    agree()


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_stochastic_sums_have_numpys_bits_in_every_map(
    library: Library, order: str, dtype: str
) -> None:
    x = programs.values(np.random.default_rng(0), (2, 3, 41), dtype)
    sums = programs.Body(lambda lax, x: lax.psum(lax.psum(x, "y") * 2, "x"), (("x", 2), ("y", 3)))
    with gpusim.reduction(order=order, accumulate="float16", rounding="stochastic", seed=5):
        runs = programs.executors(sums)
        expected = runs["vmap of vmap"](sums, x)
    for run in runs.values():
        with gpusim.reduction(order=order, accumulate="float16", rounding="stochastic", seed=5):
            same(run_on(library, run)(sums, x), expected)


# Launches.

COLLECTIVE_CALLS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, "i"),
    "psum in pairs": lambda x: lax.psum(x, "i", axis_index_groups=pairs()),
    "psum in crossed pairs": lambda x: lax.psum(x, "i", axis_index_groups=crossed()),
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pargmax": lambda x: lax.pargmax(x, "i"),
    "all_gather": lambda x: lax.all_gather(x, "i").sum(0),
    "all_gather in crossed pairs": lambda x: lax.all_gather(x, "i", axis_index_groups=crossed()),
    "psum_scatter": lambda x: lax.psum_scatter(
        x, "i", scatter_dimension=1, axis_index_groups=crossed(), tiled=True
    ),
    "all_to_all in pairs": lambda x: lax.all_to_all(x, "i", 1, 1, axis_index_groups=pairs(), tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "i", [(k, (3 * k) % size()) for k in range(size())]),
    "ppermute of some": lambda x: lax.ppermute(x, "i", [(0, 1)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, "i", 1),
    "axis_index": lambda x: x * lax.axis_index("i"),
    "round_to": lambda x: gpusim.round_to(x, np.float16, rounding="stochastic"),
}


def size() -> int:
    return lax.axis_size("i")


def pairs() -> list[list[int]]:
    return [[k, k + 1] for k in range(0, size(), 2)]


def crossed() -> list[list[int]]:
    return [[size() - 1 - k, k] for k in range(size() // 2)]


def work(call: Callable[[Any], Any], x: np.ndarray) -> tuple[int, int, int]:
    """What a vmap of the call asks of the device."""
    there = device_arrays.to_device(x)
    counts = device_arrays.counts
    counts.launches = counts.uploads = counts.downloads = 0
    with names_on_the_route() as names:
        gpusim.vmap(call, axis_name="i", out_axes=0)(there)
    assert not names, names
    return counts.launches, counts.uploads, counts.downloads


@pytest.mark.parametrize("name", COLLECTIVE_CALLS)
def test_4096_replicas_launch_as_many_kernels_as_a_few(name: str) -> None:
    call = COLLECTIVE_CALLS[name]
    x = np.ones((4096, 1, 2), np.float32)
    assert work(call, x) == work(call, x[:8])
    assert work(call, x[:2]) <= work(call, x)  # one group is a view, and so is a swap


RULES = {
    **{name: (call, (4, 5)) for name, call in test_rules.FAMILIES.items()},
    **{f"linalg {name}": (call, (5, 5)) for name, call in test_linalg_fft.OF_SQUARE.items()},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("ignore")
def test_rules_launch_as_many_kernels_for_any_number_of_replicas(name: str) -> None:
    call, shape = RULES[name]
    x = np.abs(np.random.default_rng(0).standard_normal((12, *shape)))
    if shape == (5, 5):
        x = x + x.swapaxes(1, 2) + 9 * np.eye(5)
    few, many = (work_of_rule(call, x[:n]) for n in (2, 12))
    assert few == many


def work_of_rule(call: Callable[[Any], Any], x: np.ndarray) -> Any:
    """The work, or why there is none: CuPy lacks the function, or NumPy takes the route too."""

    def mapped(x: Any) -> list[Any]:
        leaves, _ = trees.flatten(call(x))
        return [leaf for leaf in leaves if isinstance(leaf, MappedArray)]

    with names_on_the_route() as names:
        usual = programs.outcome(lambda: gpusim.vmap(mapped)(x))
    if names or usual.error:
        return "on the route in NumPy"
    try:
        return work(mapped, x)
    except Exception as error:
        excused(error, device_arrays.counts.lacking)
        return type(error)


def test_arrays_of_two_libraries_are_a_type_error() -> None:
    x, table = device_arrays.to_device(np.ones((2, 3))), np.ones(3)
    for mixed in (
        lambda x: x + table,
        lambda x: np.matmul(x, table),
        lambda x: np.concatenate([x, table]),
        lambda x: np.where(x > 0, x, table),
        lambda x: x.at[0].set(1.0) * table,
    ):
        with pytest.raises(TypeError, match=r"two libraries, tests .*\[2, 3\].*numpy .*cupy.asarray"):
            gpusim.vmap(mapped := mixed)(x)
        assert mapped is mixed
    with pytest.raises(TypeError, match="two libraries|expected an array of the device"):
        gpusim.vmap(lambda x, y: x + y)(x, np.ones((2, 3)))


def test_numbers_lists_and_numpys_scalars_go_with_arrays_of_any_library() -> None:
    x = device_arrays.to_device(np.arange(6.0).reshape(2, 3))

    def f(x: Any, number: Any, scalar: Any) -> Any:
        y = x * number + np.float32(1) - scalar + lax.axis_size("i")
        return np.concatenate([np.where(y > 2, y, 0.5), [1.0, 2.0]])

    run = gpusim.vmap(f, in_axes=(0, None, None), axis_name="i")
    found = run(x, 2, np.float64(0.5))
    same(found.get(), run(x.get(), 2, np.float64(0.5)))


def test_the_values_of_a_gpu_come_to_the_host_when_they_are_asked_for() -> None:
    counts = device_arrays.counts

    def f(x: Any) -> Any:
        total = lax.psum(x, "i")
        before = counts.downloads
        assert total[0] > 0 and int(total[0]) == 3 and total[0].item() == 3.0
        assert [0, 1, 2, 3][total[0].astype(int)] == 3
        assert repr(total).startswith("MappedArray([3., 5., 7.]") and f"{total[0]:.2f}" == "3.00"
        assert counts.downloads > before
        with pytest.raises(TypeError, match="Implicit conversion"):
            np.asarray(total)
        return x

    gpusim.vmap(f, axis_name="i")(device_arrays.to_device(np.arange(6.0).reshape(2, 3)))


def test_random_numbers_are_where_the_arguments_are_and_the_same_as_on_the_host() -> None:
    def f(x: Any) -> Any:
        draw = gpusim.rng(3, "i")
        noisy = x + draw.normal(3) * draw.uniform(low=x - 1, high=x + 1)
        return noisy, draw.permutation(x), draw.integers(7, shape=2), draw.bernoulli(0.5, (4,))

    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    for run in (gpusim.vmap(f, axis_name="i"), gpusim.pmap(f, "i")):
        for found, expected in zip(run(device_arrays.to_device(x)), run(x), strict=True):
            assert on_device(found)
            same(found.get(), expected)


def test_views_on_a_gpu_share_its_memory_too() -> None:
    x = device_arrays.to_device(np.arange(24.0).reshape(4, 3, 2))
    for result in (
        collectives.all_gather(x, axis=1).value,
        collectives.pbroadcast(x, 2).value,
        collectives.ppermute(x, [(k, (k + 3) % 4) for k in range(4)][::-1]).value[:0],
        collectives.all_to_all(x[:3], 0, 0).value,
    ):
        assert result.base is x or not result.size
    gathered = gpusim.vmap(lambda x: lax.all_gather(x, "i"), axis_name="i", out_axes=None)(x)
    assert gathered.base is x


def test_what_replicas_of_a_mesh_should_share_is_compared_on_the_device() -> None:
    mesh = gpusim.Mesh((4,), ("x",))
    run = gpusim.shard_map(lambda x: x, mesh=mesh, in_specs=gpusim.P("x"), out_specs=gpusim.P())
    alike = device_arrays.to_device(np.array([1.0, np.nan] * 4))
    same(run(alike).get(), np.array([1.0, np.nan]))
    alike[5] = -0.0
    with pytest.raises(ValueError, match="replicas 0 and 2 hold different values"):
        run(alike)


SLOW_TO_REPEAT = (  # all of them run in tests/gpu
    "test_functions_of_one_array",
    "test_functions_of_two_arrays",
    "test_reductions_have_the_bits_of_one_replica",
    "test_long_reductions",
)
globals().update(cases_of(MAPPING, leave_out=SLOW_TO_REPEAT))
globals().update(cases_of(COLLECTIVES))
