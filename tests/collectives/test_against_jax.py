"""The same programs in JAX, on eight simulated CPU devices, and in gpusim.

Trees, shapes, dtypes and bits are equal (zeros by value), and gpusim raises where JAX does.
"""

from __future__ import annotations

from tests.oracles import jax_oracle  # isort: skip - first: it sets JAX's devices and 64-bit types

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.oracles.budget import budget
from tests.oracles.programs import (
    AXES,
    CUBE,
    DTYPES,
    FLOATS,
    SHAPES,
    Body,
    Outcome,
    Program,
    Step,
    assert_near,
    assert_same_values,
    executors,
    outcome,
    programs,
    values,
)

# Enough programs for every collective, dtype and number of replicas; each compiles in JAX.
DIFFERENTIAL = settings(
    max_examples=budget(40),
    deadline=None,
    database=None,
    # Shrinking a failure runs it hundreds of times more: add Phase.shrink when there is one.
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def through_jax(program: Program | Body, x: Any) -> Outcome:
    def body(tree: Any) -> Any:
        return program(jax_oracle.DIALECT, tree)

    single = len(program.axes) == 1
    run = jax_oracle.pmap if program.has_groups and single else jax_oracle.shard_map
    return outcome(lambda: run(body, program.axes, program.mapped, x))


def is_refusal(error: BaseException | None) -> bool:
    """Return whether JAX rejects the program; its compiler also fails on empty arrays."""
    return isinstance(error, (ValueError, TypeError)) and "cannot be zero" not in str(error)


def assert_agrees(program: Program | Body, theirs: Outcome, ours: Outcome, who: str) -> None:
    if is_refusal(theirs.error):
        kind = ValueError if isinstance(theirs.error, ValueError) else TypeError
        assert isinstance(ours.error, kind), (
            f"{who}: JAX raises {theirs.error!r}, gpusim {ours.error!r}"
        )
    elif theirs.error is not None:
        # JAX fails by accident (an IndexError, XLA's own errors), so it is no oracle here.
        assert not isinstance(theirs.error, NotImplementedError), theirs.error
    elif ours.error is not None:
        raise AssertionError(f"{who} raises where JAX does not") from ours.error
    else:
        compare = assert_near if program.has_mean else assert_same_values
        compare(ours.results, theirs.results, who)


def check(program: Program | Body) -> None:
    x = program.argument()
    theirs = through_jax(program, x)
    for who, run in executors(program, mixed=False).items():
        assert_agrees(program, theirs, outcome(lambda run=run: run(program, x)), who)


@pytest.mark.parametrize("first", tuple(SHAPES))
def test_random_programs_give_the_bits_of_jax(first: str) -> None:
    @DIFFERENTIAL
    @given(programs((first,)))
    def agrees(program: Program) -> None:
        check(program)

    agrees()


def test_random_programs_over_three_axes_give_the_bits_of_jax() -> None:
    @DIFFERENTIAL
    @given(programs(axes=(CUBE,)))
    def agrees(program: Program) -> None:
        check(program)

    agrees()


def every_dtype(
    function: str, axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], *args: Any, **kw: Any
) -> Program:
    """Return a program that calls one collective on a leaf of every dtype that JAX supports."""
    without = {
        "psum_scatter": ("bool",),
        "pmax": ("complex64",),
        "pmin": ("complex64",),
    }.get(function, ())
    tree = {dtype: (shape, dtype) for dtype in DTYPES if dtype not in without}
    step = Step(function, args, tuple(kw.items()))
    return Program(axes, tree, dict.fromkeys(tree, True), (step,), seed=len(function))


SINGLE_AXES = [axes for axes in AXES if len(axes) == 1]


@pytest.mark.parametrize("axes", SINGLE_AXES, ids=lambda axes: f"R={axes[0][1]}")
@pytest.mark.parametrize(
    "function", ["psum", "pmean", "pmax", "pmin", "all_gather", "ppermute", "pbroadcast"]
)
def test_every_dtype_gives_the_bits_of_jax(function: str, axes: Any) -> None:
    size = axes[0][1]
    arguments: dict[str, tuple[Any, ...]] = {
        "ppermute": ([(k, (k + 1) % size) for k in range(size - 1)],),
        "pbroadcast": (size - 1,),
    }
    check(every_dtype(function, axes, (5, 3), "i", *arguments.get(function, ())))


@pytest.mark.parametrize("axes", SINGLE_AXES, ids=lambda axes: f"R={axes[0][1]}")
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("function", ["all_to_all", "psum_scatter"])
def test_every_dtype_is_split_as_in_jax(function: str, tiled: bool, axes: Any) -> None:
    size = axes[0][1]
    shape = (3, size * (2 if tiled else 1), 2)
    if function == "all_to_all":
        check(every_dtype(function, axes, shape, "i", 1, 2, tiled=tiled))
    else:
        check(every_dtype(function, axes, shape, "i", scatter_dimension=1, tiled=tiled))


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 2], [3, 1], [7, 4], [6, 5]],
        [[5, 1, 3, 7], [0, 2, 4, 6]],
        [[4], [2], [0], [6], [1], [3], [5], [7]],
        [[7, 6, 5, 4, 3, 2, 1, 0]],
        [[3], [0, 7, 5, 1, 2], [6, 4]],
    ],
    ids=str,
)
def test_sums_in_groups_add_in_the_listed_order(groups: list[list[int]]) -> None:
    axes = (("i", 8),)
    check(every_dtype("psum", axes, (17,), "i", axis_index_groups=groups))
    if len({len(group) for group in groups}) == 1:
        n = len(groups[0])
        check(
            every_dtype("psum_scatter", axes, (2 * n, 3), "i", axis_index_groups=groups, tiled=True)
        )


@pytest.mark.parametrize("names", [("x", "y"), ("y", "x"), "x", "y", ("y",)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 3), (4, 2)], ids=str)
def test_sums_over_two_axes_add_in_the_order_of_the_names(names: Any, sizes: Any) -> None:
    axes = tuple(zip("xy", sizes, strict=True))
    n = math.prod(dict(axes)[name] for name in names)
    check(every_dtype("psum", axes, (11,), names))
    check(every_dtype("psum_scatter", axes, (2, n), names, scatter_dimension=1))
    check(every_dtype("all_gather", axes, (2,), names, axis=1))
    check(every_dtype("all_to_all", axes, (n, 2), names, 0, 1))
    check(every_dtype("ppermute", axes, (2,), names, [(k, n - 1 - k) for k in range(1, n)]))


@pytest.mark.parametrize("names", ["i", ("i",)], ids=str)
@pytest.mark.parametrize("function", ["psum", "pmean", "pmax", "pmin"])
def test_constants_have_the_dtypes_of_jax(function: str, names: Any) -> None:
    def body(lax: Any, x: Any) -> Any:
        constants = (3, 1.5, 2j, True, np.float32(0.5), np.int8(7), np.arange(3), np.True_)
        # Complex numbers have no order, and the mean of a numpy integer is a float64 in JAX, as
        # numpy divides it there, where the mean of an array of its dtype is a float32.
        without = {"pmax": complex, "pmin": complex, "pmean": np.int8}.get(function, ())
        constants = tuple(c for c in constants if not isinstance(c, without))
        return x, getattr(lax, function)(constants, names), lax.axis_size(names)

    check(Body(body, (("i", 3),)))


@pytest.mark.parametrize("function", ["all_gather", "ppermute", "psum_scatter", "all_to_all"])
def test_constant_arrays_are_sent_as_in_jax(function: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {"ppermute": ([(0, 1)],), "all_to_all": (0, 0)}

    def body(lax: Any, x: Any) -> Any:
        constant = np.arange(3, dtype=np.int16)
        return x, getattr(lax, function)(constant, "i", *arguments.get(function, ()))

    check(Body(body, (("i", 3),)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_unmapped_leaf_is_folded_not_multiplied(dtype: str) -> None:
    # Three times 0.1 is not 0.1 + 0.1 + 0.1: an unmapped array stands for R equal values.
    tree = [((), dtype), ((9,), dtype)]
    check(Program((("i", 6),), tree, [True, False], (Step("psum", ("i",)),), seed=1))


def by_definition(function: str, per_replica: list[np.ndarray]) -> np.ndarray:
    """pargmax, pargmin: the first replica that holds the extreme, element by element."""
    stacked = np.stack(per_replica)
    extreme = stacked.argmax if function == "pargmax" else stacked.argmin
    return extreme(axis=0).astype(np.int32)


@pytest.mark.parametrize("function", ["pargmax", "pargmin"])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "complex64"])
def test_the_arg_extremes_are_their_definition(function: str, dtype: str) -> None:
    x = values(np.random.default_rng(3), (6, 4, 5), dtype)
    expected = by_definition(function, list(x))
    program = Program((("i", 6),), ((4, 5), dtype), True, (Step(function, ("i",)),), seed=0)
    for who, run in executors(program).items():
        result = run(program, x)
        assert_same_values(result, np.broadcast_to(expected, (6, 4, 5)), who)


@pytest.mark.parametrize("index", [2, [0, 3, 3], [[1, 2], [0, 1]], np.zeros((0,), int)], ids=str)
def test_pgather_takes_replicas_by_index(index: Any) -> None:
    x = values(np.random.default_rng(4), (4, 2, 3), "float32")
    idx = np.asarray(index, np.int32)
    program = Body(lambda lax, x: lax.pgather(x, idx, "i"), (("i", 4),))
    for who, run in executors(program).items():
        result = run(program, x)
        assert_same_values(result, np.broadcast_to(x[idx], (4, *x[idx].shape)), who)


def test_the_mean_of_an_uneven_group_divides_by_its_own_size() -> None:
    # JAX divides by the size of the first group for every group, so it is no oracle here.
    x = values(np.random.default_rng(6), (4, 7), "float64")
    groups = [[2], [3, 0, 1]]
    three = (x[3] + x[0] + x[1]) / 3
    program = Body(lambda lax, x: lax.pmean(x, "i", axis_index_groups=groups), (("i", 4),))
    for who, run in executors(program).items():
        assert_same_values(run(program, x), np.stack([three, three, x[2], three]), who)


def test_sums_over_an_empty_positional_axis_are_zero_as_in_jax() -> None:
    check(Program((("i", 3),), ((0, 2), "float32"), True, (Step("psum", (("i", 0),)),), seed=0))


@pytest.mark.parametrize("source", [0, 2])
def test_pbroadcast_is_the_masked_sum(source: int) -> None:
    x = values(np.random.default_rng(5), (3, 4), "float32")
    program = Program((("i", 3),), ((4,), "float32"), True, (Step("pbroadcast", ("i", source)),), 0)
    for who, run in executors(program).items():
        assert_same_values(run(program, x), np.broadcast_to(x[source], (3, 4)), who)
