"""Collectives, maps and their rules on arrays of a GPU's library: the suites' cases, on a strict
stand-in for CuPy, whose kernels are the .cu sources compiled by g++. tests/gpu takes CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax, trees
from gpusim.maps import MappedArray
from tests.collectives import test_collectives, test_ragged_all_to_all, test_transposes_stacked
from tests.cuda import device_arrays, device_cases
from tests.cuda.on_device import Library, cases_of, excused, on_the_device, standing_in
from tests.maps import test_at, test_indexing, test_linalg_fft, test_rules, test_ufuncs
from tests.oracles import programs
from tests.oracles.replicated import names_on_the_route


@pytest.fixture
def library() -> Iterator[Library]:
    yield from standing_in()


MAPPING = (test_at, test_indexing, test_linalg_fft, test_rules, test_ufuncs)
COLLECTIVES = (test_collectives, test_ragged_all_to_all, test_transposes_stacked)


@pytest.fixture(autouse=True)
def by_way_of_the_device(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    """The suites' functions check and call collectives on the device."""
    if "library" in request.fixturenames:
        on_the_device(monkeypatch, request.getfixturevalue("library"), MAPPING, COLLECTIVES)


pytestmark = pytest.mark.usefixtures("library")


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
    "all_to_all in pairs": lambda x: lax.all_to_all(
        x, "i", 1, 1, axis_index_groups=pairs(), tiled=True
    ),
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
    """The device's work for a vmap of the call."""
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


# The suites' own cases, without the slowest; all run in tests/gpu.

NOT_HERE = (
    "test_functions_of_one_array",
    "test_functions_of_two_arrays",
    "test_reductions_have_the_bits_of_one_replica",
    "test_long_reductions",
    "test_any_",
    "interleaved",
)
globals().update(cases_of(MAPPING, leave_out=NOT_HERE))
globals().update(cases_of(COLLECTIVES, leave_out=NOT_HERE))
globals().update(device_cases.TESTS)
