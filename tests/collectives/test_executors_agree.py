"""vmap, pmap (both schedules) and shard_map give the same bits, in every nesting.

This holds for every order, accumulator and rounding, from the context and as an argument.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gpusim
from tests.oracles.budget import budget
from tests.oracles.programs import (
    AXES,
    CUBE,
    FLOATS,
    MAPS,
    SHAPES,
    SUMS,
    Body,
    Program,
    Step,
    assert_same_bits,
    executors,
    nest,
    outcome,
    programs,
    values,
)

AGREEMENT = settings(
    max_examples=budget(40),
    deadline=None,
    database=None,
    # Shrinking a failure runs it hundreds of times more: add Phase.shrink when there is one.
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
ORDERS = ("linear", "reverse", "tree", "ring")
ACCUMULATORS = (
    None,
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float32),
    np.dtype(np.float64),
    np.dtype(ml_dtypes.float8_e4m3fn),
)
reductions = st.builds(
    dict,
    order=st.sampled_from(ORDERS),
    accumulate=st.sampled_from(ACCUMULATORS),
    rounding=st.sampled_from(("nearest", "stochastic")),
    seed=st.sampled_from((0, 1, 2**64 - 1)),
)


def assert_agree(program: Any, x: Any, runs: dict[str, Any]) -> Any:
    """Assert that all executors return the same results or raise the same type; return them."""
    (first, reference), *others = (
        (who, outcome(lambda run=run: run(program, x))) for who, run in runs.items()
    )
    for who, ours in others:
        where = f"{who}, compared with {first}"
        if reference.error is not None or ours.error is not None:
            assert type(reference.error) is type(ours.error), (where, reference.error, ours.error)
        else:
            assert_same_bits(ours.results, reference.results, where)
    return reference.results


@pytest.mark.parametrize("first", tuple(SHAPES))
def test_random_programs_give_the_same_bits_in_every_executor(first: str) -> None:
    @AGREEMENT
    @given(programs((first,)))
    def agree(program: Program) -> None:
        assert_agree(program, program.argument(), executors(program))

    agree()


def test_random_programs_over_three_axes_give_the_same_bits_in_every_executor() -> None:
    @AGREEMENT
    @given(programs(axes=(CUBE,)), reductions)
    def agree(program: Program, reduction: dict[str, Any]) -> None:
        runs = executors(program, mixed=False)
        mixed = (MAPS["vmap"], MAPS["pmap"], MAPS["pmap-one"])
        for order in itertools.permutations(mixed):
            runs[f"mixed {len(runs)}"] = nest(order)
        with gpusim.reduction(order=reduction["order"], accumulate=reduction["accumulate"]):
            assert_agree(program, program.argument(), runs)

    agree()


class Chosen(SimpleNamespace):
    """A program that passes `reduction=` to its sums."""

    def __call__(self, dialect: Any, tree: Any) -> Any:
        lax = SimpleNamespace(**{name: getattr(dialect.lax, name) for name in dialect.lax.__all__})
        for name in SUMS:
            setattr(lax, name, self._with_reduction(getattr(dialect.lax, name)))
        return self.program(
            SimpleNamespace(lax=lax, xp=dialect.xp, tree_map=dialect.tree_map), tree
        )

    def _with_reduction(self, collective: Any) -> Any:
        return lambda x, *args, **options: collective(x, *args, reduction=self.reduction, **options)


@pytest.mark.parametrize("first", SUMS)
@pytest.mark.parametrize("way", ["context", "argument"])
def test_every_reduction_gives_the_same_bits_in_every_executor(first: str, way: str) -> None:
    @AGREEMENT
    @given(programs((first,), faults=False), reductions)
    def agree(program: Program, reduction: dict[str, Any]) -> None:
        x = program.argument()
        if way == "argument":
            chosen = Chosen(
                program=program,
                reduction=gpusim.Reduction(**reduction),
                axes=program.axes,
                mapped=program.mapped,
                sizes=program.sizes,
            )
            assert_agree(chosen, x, executors(program))
            return

        def within(run: Any) -> Any:
            def entered(program: Program, x: Any) -> Any:
                with gpusim.reduction(**reduction):
                    return run(program, x)

            return entered

        assert_agree(program, x, {who: within(run) for who, run in executors(program).items()})

    agree()


# --- nesting -----------------------------------------------------------------------------------

TWO_AXES = (("x", 2), ("y", 3))
NAMES = ("x", "y", ("x", "y"), ("y", "x"))
SIZES = {"x": 2, "y": 3, ("x", "y"): 6, ("y", "x"): 6}


def calls(names: Any) -> list[Step]:
    """Return one call of every collective over the names, on a leaf of shape (6, 6)."""
    size = SIZES[names]
    named = names if isinstance(names, tuple) else (names,)
    halves = [list(range(size))[::-1][k::2] for k in range(2)] if size % 2 == 0 else None
    tiled = (("tiled", True),)
    found = [
        Step("psum", (names,)),
        Step("psum", ((*named, 1),)),
        Step("psum", ((0, *named),)),
        Step("pmean", (names,)),
        Step("pmax", (names,)),
        Step("pmin", ((*named, 0),)),
        Step("pbroadcast", (names, size - 1)),
        Step("ppermute", (names, [(k, (k + 1) % size) for k in range(size)])),
        Step("ppermute", (names, [(0, size - 1)])),
        Step("pshuffle", (names, list(range(size))[::-1])),
        Step("all_gather", (names,), (("axis", -1),)),
        Step("all_gather", (names,), (("axis", 1), *tiled)),
        Step("all_to_all", (names, 0, 1), tiled),
        Step("psum_scatter", (names,), (("scatter_dimension", 1), *tiled)),
        Step("number", (names,)),
        Step("constants", (names,)),
        Step("size", (names,)),
    ]
    if size == 6:
        found += [Step("pswapaxes", (names, -1)), Step("psum_scatter", (names,))]
    if halves:
        grouped = (("axis_index_groups", halves),)
        found += [
            Step("psum", (names,), grouped),
            Step("pmax", (names,), grouped),
            Step("all_gather", (names,), grouped),
            Step("psum_scatter", (names,), (*tiled, *grouped)),
            Step("all_to_all", (names, 1, 0), (*tiled, *grouped)),
        ]
    return found


@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_collectives_of_nested_maps_agree(names: Any, order: str) -> None:
    tree = {"f16": ((6, 6), "float16"), "i8": ((6, 6), "int8"), "same": ((6, 6), "float32")}
    mapped = {"f16": True, "i8": True, "same": False}
    for step in calls(names):
        program = Program(TWO_AXES, tree, mapped, (step,), seed=11)
        x = program.argument()
        with gpusim.reduction(order=order):
            assert_agree(program, x, executors(program))


def test_sums_over_the_inner_the_outer_and_both_axes_are_the_folds_of_their_members() -> None:
    x = values(np.random.default_rng(0), (2, 3, 5), "float32")

    def body(lax: Any, x: Any) -> Any:
        return [lax.psum(x, names) for names in NAMES]

    def fold(members: Any) -> np.ndarray:
        total = members[0]
        for member in members[1:]:
            total = total + member
        return total

    expected = [
        np.broadcast_to(fold(x), x.shape),
        np.stack([np.broadcast_to(fold(row), (3, 5)) for row in x]),
        np.broadcast_to(fold(x.reshape(6, 5)), x.shape),
        np.broadcast_to(fold(x.swapaxes(0, 1).reshape(6, 5)), x.shape),
    ]
    program = Body(body, TWO_AXES)
    for who, run in executors(program).items():
        assert_same_bits(run(program, x), expected, who)


@pytest.mark.parametrize("outer", MAPS)
@pytest.mark.parametrize("inner", MAPS)
def test_a_tuple_of_names_counts_row_major_in_its_own_order(outer: str, inner: str) -> None:
    def body(lax: Any, x: Any) -> Any:
        return [
            (lax.axis_index(names), lax.all_gather(lax.axis_index(names), names))
            for names in NAMES[2:]
        ]

    program = Body(body, TWO_AXES)
    run = nest((MAPS[outer], MAPS[inner]))
    (xy, all_xy), (yx, all_yx) = run(program, np.zeros((2, 3)))
    np.testing.assert_array_equal(xy, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(yx, np.arange(6).reshape(3, 2).T)
    for gathered in (all_xy, all_yx):
        np.testing.assert_array_equal(gathered, np.broadcast_to(np.arange(6), (2, 3, 6)))


# --- stochastic rounding: one seed, one result -------------------------------------------------


def stochastic(program: Any, x: Any, *, seed: int = 7, **options: Any) -> Any:
    def within(run: Any) -> Any:
        def entered(program: Any, x: Any) -> Any:
            with gpusim.reduction(rounding="stochastic", seed=seed, **options):
                return run(program, x)

        return entered

    return assert_agree(program, x, {who: within(r) for who, r in executors(program).items()})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_stochastic_sums_of_nested_maps_agree(names: Any, order: str) -> None:
    def body(lax: Any, x: Any) -> Any:
        first = lax.psum(x, names)
        tree = lax.psum({"a": x, "b": (first, x * 2)}, names)
        return first, tree, lax.pmean(x, names), lax.psum_scatter(x, names, tiled=True)

    x = values(np.random.default_rng(1), (2, 3, 6, 5), "float16")
    program = Body(body, TWO_AXES)
    assert stochastic(program, x, order=order) is not None


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_an_operand_that_does_not_vary_is_rounded_at_every_batch_offset(dtype: str) -> None:
    # The inner sum does not vary over x, but its rounding does: each x has its own batch offset.
    def body(lax: Any, x: Any) -> Any:
        outer = lax.psum(x, "x")
        return lax.psum(outer, "y"), lax.psum(lax.psum(x, "y"), "x"), lax.psum_scatter(outer, "y")

    x = values(np.random.default_rng(2), (2, 3, 3, 64), dtype)
    both, _, _ = stochastic(Body(body, TWO_AXES), x)
    assert not np.array_equal(both[0], both[1])
    for row in both:
        np.testing.assert_array_equal(row, np.broadcast_to(row[0], row.shape))


@pytest.mark.parametrize("groups", [[[0, 2], [3, 1]], [[3, 0, 1, 2]], [[0], [1, 2, 3]]], ids=str)
def test_stochastic_sums_in_groups_agree(groups: Any) -> None:
    def body(lax: Any, x: Any) -> Any:
        return lax.psum(x, "i", axis_index_groups=groups), lax.psum(x[::-1], "i")

    x = values(np.random.default_rng(3), (4, 33), "float16")
    stochastic(Body(body, (("i", 4),)), x)


def test_every_call_and_every_leaf_draws_its_own_roundings() -> None:
    def body(lax: Any, x: Any) -> Any:
        return lax.psum((x, x), "i"), lax.psum(x, "i")

    x = np.random.default_rng(4).random((4, 4096)).astype(np.float16)
    (a, b), c = stochastic(Body(body, (("i", 4),)), x)
    assert not any(np.array_equal(*pair) for pair in itertools.combinations((a, b, c), 2))


def test_another_seed_gives_other_bits() -> None:
    def body(lax: Any, x: Any) -> Any:
        return lax.psum(x, "i")

    x = np.random.default_rng(5).random((4, 4096)).astype(np.float16)
    program = Body(body, (("i", 4),))
    assert not np.array_equal(stochastic(program, x, seed=1), stochastic(program, x, seed=2))


def test_a_reduction_given_as_argument_counts_its_leaves_from_zero() -> None:
    reduction = gpusim.Reduction(rounding="stochastic", seed=9)

    def body(lax: Any, x: Any) -> Any:
        first = lax.psum((x, x), "i", reduction=reduction)
        return first, lax.psum((x, x), "i", reduction=reduction)

    x = np.random.default_rng(6).random((4, 4096)).astype(np.float16)
    program = Body(body, (("i", 4),))
    (a, b), (c, d) = assert_agree(program, x, executors(program))
    np.testing.assert_array_equal((a, b), (c, d))
    assert not np.array_equal(a, b)


# --- ragged exchanges --------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, [[0, 1, 2, 3]], [[2, 0], [1, 3]]], ids=str)
def test_ragged_all_to_all_agrees(groups: Any) -> None:
    size = len(groups[0]) if groups else 4
    rng = np.random.default_rng(8)
    members = groups or [[0, 1, 2, 3]]
    sizes = rng.integers(0, 4, (4, size)).astype(np.int32)  # by replica and receiving member
    received = np.zeros_like(sizes)
    landing = np.zeros_like(sizes)
    for group in members:
        block = sizes[group]
        received[group] = block.T
        starts = np.cumsum(block, axis=0) - block  # where a sender's rows start at its receiver
        landing[group] = starts
    operand = rng.standard_normal((4, 16, 2)).astype(np.float32)
    output = np.full((4, 16, 2), -1, np.float32)
    offsets = (np.cumsum(sizes, axis=1) - sizes).astype(np.int32)
    tree = (operand, output, offsets, sizes, landing, received)

    def body(lax: Any, tree: Any) -> Any:
        return lax.ragged_all_to_all(*tree, axis_name="i", axis_index_groups=groups)

    expected = output.copy()
    for group in members:
        for source, (place, replica) in itertools.product(group, enumerate(group)):
            rows, start = sizes[source, place], landing[source, place]
            first = offsets[source, place]
            expected[replica, start : start + rows] = operand[source, first : first + rows]
    program = Body(body, (("i", 4),), mapped=(True,) * 6)
    assert_same_bits(assert_agree(program, tree, executors(program)), expected, "ragged")


def test_the_axes_of_the_programs_cover_every_size() -> None:
    assert {np.prod([size for _, size in axes]) for axes in AXES} == {1, 2, 3, 4, 6, 8}
