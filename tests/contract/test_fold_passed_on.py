"""A fold that is passed on from one share of its members to the next has the bits of the whole."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.fallback import fold, partial_dtype
from gpusim.fallback.formats import FormatInfo
from tests.contract.fold_limits import fold_limits
from tests.contract.test_fold_contract import (
    COMPLEXES,
    CUTS,
    INTS,
    LAYOUTS,
    REALS,
    arranged,
    numbers,
    place_somewhere,
)
from tests.cuda.host_cuda.values import moderate, same
from tests.oracles.budget import budget
from tests.oracles.reference_fold import codes_of, reference_fold

BOOL = np.dtype(bool)
E3M2 = FormatInfo(2, -2, 2.0**-4, 28.0, -28.0, False, True, True)
NO_SUBNORMALS = FormatInfo(3, -6, 2.0**-6, 240.0, -240.0, True, True, True)
WIDE = FormatInfo(20, -254, 2.0**-274, 2.0**255, -(2.0**255), True, True, True)  # float64 holds it
GRIDS = [E3M2, NO_SUBNORMALS, WIDE]


def passed_on(
    members: Any, cuts: list[int], order: str = "linear", kernel: Any = fold, **options: Any
) -> Any:
    """The members cut into consecutive shares, each folded onto the result of those before."""
    shares = list(pairwise([0, *cuts, len(members)]))
    if order == "reverse":
        shares.reverse()
    partial, before = None, 0
    for share, (low, high) in enumerate(shares, 1):
        final = share == len(shares)
        partial = kernel(
            members[low:high],
            order=order,
            partial=partial,
            before=before,
            final=final,
            **options,
        )
        before += high - low
    return partial


def subtrees(
    members: Any, size: int, kernel: Any = fold, *, named: bool = True, **options: Any
) -> Any:
    """A tree over the results of the trees over `size` members each, a power of two.

    `named`: whether the kernel gets the nodes of the whole tree.
    """
    total, level = len(members), size.bit_length() - 1
    parts = [
        kernel(
            members[low : low + size],
            order="tree",
            final=False,
            nodes=(0, low, total) if named else None,
            **options,
        )
        for low in range(0, total, size)
    ]
    out_dtype = options.pop("out_dtype", None) or members[0].dtype
    nodes = (level, 0, total) if named else None
    return kernel(parts, order="tree", out_dtype=out_dtype, nodes=nodes, **options)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, str, list[int], dict[str, Any], str]:
    dtype = draw(st.sampled_from(REALS + REALS + COMPLEXES + INTS + [BOOL]))
    kind = "i" if dtype in INTS else "f" if dtype in REALS else dtype.kind
    members = draw(st.integers(1, 11))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)))
    ops = ["sum", "sum", "prod"] * (kind != "b") + ["max", "min"] * (kind != "c")
    accumulators = {"i": INTS, "f": REALS + GRIDS, "c": REALS + COMPLEXES, "b": REALS}[kind]
    options: dict[str, Any] = {
        "op": draw(st.sampled_from([*ops, "logical_and", "logical_or"])),
        "accumulate": draw(st.none() | st.sampled_from(accumulators)),
        "out_dtype": draw(
            st.none()
            | st.sampled_from({"i": INTS, "f": REALS, "c": COMPLEXES, "b": [BOOL, *INTS]}[kind])
        ),
        "batch_ndim": draw(st.integers(0, len(shape))),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "call": draw(st.integers(0, 2**64 - 1)),
    }
    if kind in "fc" and not options["op"].startswith("logical"):
        options["divisor"] = draw(st.none() | st.integers(1, 300))
    place_somewhere(draw, options, shape)
    size = math.prod(shape[options["batch_ndim"] :])
    if draw(st.booleans()):
        first = draw(st.sampled_from([0, 1, 13, 2**33 - 3]))
        options["window"] = first, first + size + draw(st.integers(0, 9))
    seed = draw(st.integers(0, 2**30))
    if kind in "ib":
        values = np.random.default_rng(seed).integers(0, 2**64, (members, *shape), np.uint64)
        values = (values % 2 if kind == "b" else values).astype(dtype)
    else:
        values = numbers(seed, (members, *shape), dtype)
    cuts = sorted(draw(st.sets(st.integers(1, members - 1)))) if members > 1 else []
    return values, draw(st.sampled_from(LAYOUTS)), cuts, options, draw(st.sampled_from(list(CUTS)))


@settings(max_examples=budget(500), deadline=None)
@given(cases(), st.sampled_from(["linear", "reverse"]))
def test_a_fold_passed_on_has_the_bits_of_the_whole(case: Any, order: str) -> None:
    values, layout, cuts, options, cut = case
    with fold_limits(**CUTS[cut]):
        members = arranged(values, layout)
        same(passed_on(members, cuts, order, **options), fold(values, order=order, **options))


@settings(max_examples=250, deadline=None)
@given(cases(), st.integers(0, 3), st.booleans())
def test_a_tree_over_subtrees_has_the_bits_of_the_whole(case: Any, level: int, named: bool) -> None:
    values, layout, _, options, cut = case
    if not named:
        options["rounding"] = "nearest"
    with fold_limits(**CUTS[cut]):
        found = subtrees(arranged(values, layout), 1 << level, named=named, **options)
    same(found, fold(values, order="tree", **options))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_rings_block_is_a_linear_fold_that_starts_at_its_member(case: Any) -> None:
    """In its window, and passed on at any member: what instances do with a ring."""
    values, layout, cuts, options, _ = case
    members, batch = len(values), options["batch_ndim"]
    options.pop("window", None)
    total = math.prod(values.shape[batch + 1 :])
    flat = values.reshape(*values.shape[: batch + 1], total)
    expected = fold(flat, order="ring", **options)
    length, longer = divmod(total, members)
    for block in range(members):
        low = block * length + min(block, longer)
        high = low + length + (block < longer)
        turned = np.roll(flat, -block, axis=0)[..., low:high]
        found = passed_on(arranged(turned, layout), cuts, window=(low, total), **options)
        same(found, expected[..., low:high])


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["linear", "reverse"]))
def test_a_fold_passed_on_has_the_bits_of_the_contract(case: Any, order: str) -> None:
    values, layout, cuts, options, cut = case
    logical, grid = (
        options["op"].startswith("logical"),
        isinstance(options["accumulate"], FormatInfo),
    )
    if values.dtype in INTS or values.dtype == BOOL or logical or grid:
        return  # the reference knows floating-point dtypes only
    options.pop("window", None)
    with fold_limits(**CUTS[cut]):
        found = passed_on(arranged(values, layout), cuts, order, **options)
    assert codes_of(found) == reference_fold(list(values), order=order, **options)


@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_accumulator_and_input_is_carried_exactly(
    dtype: np.dtype[Any], rounding: str
) -> None:
    x = numbers(9, (5, 12), dtype)
    for accumulate, cuts in product([*REALS, *GRIDS], ([1], [4], [1, 2, 3, 4])):
        options: dict[str, Any] = {"accumulate": accumulate, "rounding": rounding, "seed": 5}
        assert fold(x[:1], final=False, **options).dtype == partial_dtype(dtype, accumulate)
        for order in ("linear", "reverse"):
            same(passed_on(x, cuts, order, **options), fold(x, order=order, **options))
        for size in (1, 2, 4):
            same(subtrees(x, size, **options), fold(x, order="tree", **options))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, "float8_e5m2"])
def test_many_and_large_members_are_passed_on(dtype: Any, rounding: str) -> None:
    """By rows, by member, and with several threads, as shipped."""
    for members, elements, cuts in ((300, 701, [1, 8, 150]), (9, 600_011, [2, 8])):
        x = moderate((members, elements), dtype)
        for order in ("linear", "reverse"):
            options: dict[str, Any] = {"order": order, "rounding": rounding, "seed": 7}
            for given_members in (x, list(x)):
                same(passed_on(given_members, cuts, **options), fold(x, **options))
        options = {"rounding": rounding, "seed": 7}
        same(subtrees(x, 8, **options), fold(x, order="tree", **options))


@pytest.mark.parametrize("order", ["linear", "reverse"])
def test_batches_have_windows_of_their_own(order: str) -> None:
    """Every batch entry's value is cut at the same places, and drawn as if it were whole."""
    x = moderate((6, 3, 2, 29), np.float16)
    places = np.arange(6).reshape(3, 2) + 8
    options: dict[str, Any] = {"rounding": "stochastic", "batch_ndim": 2, "places": places}
    whole = fold(x, order=order, **options)
    for low, high in ((0, 29), (3, 17), (16, 29)):
        found = passed_on(x[..., low:high], [2, 3], order, window=(low, 29), **options)
        same(found, whole[..., low:high])


def test_the_partial_result_may_lie_anywhere() -> None:
    x = moderate((5, 4, 6, 3), np.float16)
    partial = fold(x[:2], final=False)
    expected = fold(x)
    wide = np.repeat(partial[..., None], 2, -1)[..., 1]
    frozen = partial.copy()
    frozen.flags.writeable = False
    for given_partial in (np.asfortranarray(partial), wide, partial[::-1].copy()[::-1], frozen):
        same(fold(x[2:], partial=given_partial, before=2), expected)
        same(fold(list(x[2:]), partial=given_partial, before=2), expected)
    kept = partial.copy()
    fold(x[2:], partial=partial, before=2)[...] = 0
    same(partial, kept)


def test_additions_are_numbered_through() -> None:
    """Where every step draws, the second share's additions are steps `before` and on."""
    ones = np.ones((1, 4096), np.float16)
    little = np.full((3, 4096), 2.0**-11, np.float16)
    partial = fold(ones, final=False, rounding="stochastic")
    found = fold(little, partial=partial, before=1, rounding="stochastic")
    same(found, fold(np.concatenate([ones, little]), rounding="stochastic"))
    other = fold(little, partial=partial, before=2, rounding="stochastic")
    assert not np.array_equal(found, other)


def test_a_share_that_is_not_the_last_is_neither_divided_nor_converted() -> None:
    x = np.full((4, 3), 2.0**-24, np.float16)
    partial = fold(x, accumulate=np.float32, divisor=3, out_dtype=np.float16, final=False)
    assert partial.dtype == np.float32 and partial.tolist() == [2.0**-22] * 3
    assert fold(np.array([7], np.int8), accumulate=np.int64, final=False).dtype == np.int64
    truth = fold(np.array([[2.0, 0.0]]), op="logical_or", final=False)
    assert truth.dtype == np.bool_ and truth.tolist() == [True, False]


@pytest.mark.parametrize(
    ("members", "accumulate", "op", "expected"),
    [
        ("float64", None, "sum", "float64"),
        ("float64", np.float16, "sum", "float64"),
        ("float32", np.float64, "sum", "float64"),
        ("float32", np.float16, "sum", "float32"),  # the first member is not rounded
        ("bfloat16", None, "sum", "float32"),
        ("bfloat16", np.float16, "sum", "float32"),  # neither holds the other
        ("float16", "float8_e5m2", "sum", "float16"),
        ("float8_e4m3fn", None, "sum", "float16"),
        ("float8_e4m3fn", "float8_e5m2", "sum", "float16"),
        ("float8_e4m3fn", "float8_e4m3fn", "prod", "float8_e4m3fn"),
        ("float8_e4m3fn", None, "max", "float8_e4m3fn"),
        ("float16", E3M2, "sum", "float32"),
        ("float16", WIDE, "sum", "float64"),
        ("float16", WIDE, "min", "float16"),
        ("complex64", np.float16, "sum", "complex64"),
        ("complex64", np.complex128, "prod", "complex128"),
        ("complex128", None, "logical_and", "bool"),
        ("int8", np.int32, "sum", "int32"),
        ("int64", np.int8, "sum", "int8"),
        ("uint8", np.float16, "sum", "uint8"),
        ("int8", np.int32, "max", "int8"),
        ("bool", None, "min", "bool"),
    ],
)
def test_the_dtype_of_partial_results_is_known_beforehand(
    members: str, accumulate: Any, op: str, expected: str
) -> None:
    found = partial_dtype(members, accumulate, op)
    assert found == np.dtype(expected)
    result = fold(np.zeros((1, 2), members), accumulate=accumulate, op=op, final=False)
    assert result.dtype == found


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"before": -1}, ValueError, "before=-1: expected the number of members"),
        ({"before": 2**64 - 1}, ValueError, "before=18446744073709551615"),
        ({"before": 1}, ValueError, "partial, beside before=1: none is given"),
        ({"partial": np.zeros(3)}, ValueError, "partial, beside before=0: one is given"),
        ({"partial": np.zeros(4), "before": 1}, ValueError, r"partial has shape \(4,\): expected"),
        ({"partial": np.zeros(3, "f4"), "before": 1}, TypeError, "partial has dtype float32: exp"),
        ({"partial": np.zeros(3), "before": 1, "order": "tree"}, ValueError, "expected no partial"),
        ({"partial": np.zeros(3), "before": 1, "order": "ring"}, ValueError, "all members at once"),
        ({"final": False, "order": "ring"}, ValueError, "all members at once"),
        (
            {"final": False, "order": "tree", "rounding": "stochastic", "accumulate": np.float16},
            ValueError,
            "final=False: expected nodes",
        ),
        (
            {"final": False, "order": "tree", "rounding": "stochastic", "out_dtype": np.float16},
            ValueError,
            "to number its random numbers",
        ),
        ({"nodes": (0, 0, 2)}, ValueError, r"nodes=\(0, 0, 2\): expected None for order='linear'"),
        (
            {"nodes": (0, 1, 3), "order": "tree"},
            ValueError,
            "2 members from 1 on are not a subtree",
        ),
        ({"nodes": (1, 0, 8), "order": "tree"}, ValueError, "2 of 4 nodes given; expected final"),
        ({"nodes": (1, 2, 5), "order": "tree"}, ValueError, "there are 3 nodes of that level"),
        ({"nodes": (-1, 0, 2), "order": "tree"}, ValueError, "expected .level, first, total."),
        ({"nodes": (0, 0, 0), "order": "tree"}, ValueError, "expected .level, first, total."),
        ({"final": False, "divisor": 0}, ValueError, "divisor=0"),
        ({"final": False, "out_dtype": np.int32}, TypeError, "out_dtype=int32"),
    ],
)
def test_what_cannot_be_passed_on_is_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fold(np.zeros((2, 3)), **options)


def test_a_subtree_that_draws_nothing_may_be_asked_to_round_stochastically() -> None:
    x = moderate((8, 5), np.float32)
    found = subtrees(x, 2, named=False, rounding="stochastic")
    same(found, fold(x, order="tree", rounding="stochastic"))


@pytest.mark.parametrize("members", [1, 2, 3, 7, 12, 13, 64, 100])
def test_trees_are_folded_level_by_level_in_parts(members: int) -> None:
    """Parts of parts: every node is numbered by its place in the whole tree."""
    x = np.random.default_rng(members).normal(size=(members, 24)).astype(np.float16)
    options: dict[str, Any] = {"order": "tree", "rounding": "stochastic", "seed": 2**60}
    expected = fold(x, out_dtype="float8_e5m2", divisor=3, **options)
    level, values = 0, list(x)
    while len(values) > 4:
        values = [
            fold(values[low : low + 4], final=False, nodes=(level, low, members), **options)
            for low in range(0, len(values), 4)
        ]
        level += 2
    options |= {"out_dtype": "float8_e5m2", "divisor": 3}
    same(fold(values, nodes=(level, 0, members), **options), expected)
