"""Trees of additions by ranges of elements: each is what its additions say, on every kernel."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpusim.fallback import fold, kernels
from gpusim.fallback.graphs import Adder, GraphSchedule, ReductionGraph
from gpusim.fallback.schedules import Case, Schedule, Trees, compile_order
from gpusim.fallback.trees import SumTree, compile_trees, trees_of_order
from gpusim.twins import TWINS
from tests.contract.fold_limits import fold_limits
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.order_files import nodes_of, random_tree, random_trees
from tests.contract.test_fold_contract import CUTS, numbers
from tests.cuda.host_cuda.device import HostDevice, has_compiler
from tests.cuda.host_cuda.values import same
from tests.oracles.reference_fold import codes_of, reference_fold

REALS = [np.dtype(t) for t in ("float16", "float32", "float64")] + [np.dtype(ml_dtypes.bfloat16)]
COMPLEX = np.dtype(np.complex64)


def numbered(tree: SumTree, members: int) -> list[tuple[int, int]]:
    """The additions by height, and of one height by the lowest member, by their definition."""

    def height(node: Any) -> int:
        return 0 if isinstance(node, int) else 1 + max(map(height, node))

    def lowest(node: Any) -> int:
        return node if isinstance(node, int) else min(map(lowest, node))

    inner: list[Any] = []

    def collect(node: Any) -> None:
        if not isinstance(node, int):
            inner.append(node)
            for child in node:
                collect(child)

    collect(tree.nested)
    inner.sort(key=lambda node: (height(node), lowest(node)))
    place = {id(node): members + k for k, node in enumerate(inner)}
    return [tuple(place.get(id(c), c) for c in node) for node in inner]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Trees, np.ndarray, dict[str, Any]]:
    dtype = draw(st.sampled_from([*REALS, COMPLEX]))
    members = draw(st.integers(2, 13))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    batch_ndim = draw(st.integers(0, len(shape)))
    options = {
        "batch_ndim": batch_ndim,
        "accumulate": draw(st.none() | st.sampled_from(REALS)),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "divisor": draw(st.none() | st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "places": draw(st.integers(0, 9)),
    }
    random = np.random.default_rng(draw(st.integers(0, 2**30)))
    trees = random_trees(random, members, math.prod(shape[batch_ndim:]))
    values = numbers(draw(st.integers(0, 2**30)), (members, *shape), dtype)
    return trees, values, options


def additions_of(trees: Trees, members: int) -> Any:
    """The additions of each element: those of orders with names are numbered as they are."""
    compiled = compile_trees(trees, members)
    named = isinstance(compiled, str) or not isinstance(compiled, GraphSchedule)

    def of(i: int) -> list[tuple[int, int]]:
        (tree,) = (tree for a, b, tree in trees.ranges if a <= i < b)
        if named and isinstance(compiled, ReductionGraph):
            return list(compiled.additions)
        if isinstance(compiled, GraphSchedule):
            (graph,) = (
                compiled.graphs[k]
                for (a, b), k in zip(pairwise(compiled.edges), compiled.starts, strict=True)
                if a <= i < b
            )
            return list(graph.additions)
        return numbered(tree, members)

    return of


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from(list(CUTS)))
def test_folds_have_the_bits_of_their_trees(case: Any, cut: str) -> None:
    trees, values, options = case
    order = Schedule((Case(trees),))
    with fold_limits(**CUTS[cut]):
        for members in (values, list(values), np.asfortranarray(values)):
            found = fold(members, order=order, **options)
    expected = reference_fold(list(values), order=additions_of(trees, len(values)), **options)
    assert codes_of(found) == expected


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from([1, 1 << 20]))
def test_cuda_has_the_same_bits(case: Any, busy_threads: int) -> None:
    assert has_compiler(), "this compiles the CUDA sources for the host: install g++, or set CXX"
    trees, values, options = case
    device = HostDevice(busy_threads=busy_threads)
    order = Schedule((Case(trees),), from_zero=len(values) % 2 == 0)
    members = values if options["divisor"] else [np.asarray(member) for member in values]
    same(device.fold(members, order=order, **options), fold(values, order=order, **options))


@runs_every_set
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**30), st.integers(2, 40))
def test_graphs_number_additions_by_height(seed: int, members: int) -> None:
    tree = SumTree.of(random_tree(np.random.default_rng(seed), members))
    by_definition = [sorted(pair) for pair in numbered(tree, members)]
    assert [sorted(pair) for pair in tree.graph().additions] == by_definition
    assert tree.graph().depth <= members.bit_length() + 1


@runs_every_set
@pytest.mark.parametrize("members", [2, 3, 8, 33])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_large_values_are_folded_by_every_kernel(members: int, rounding: str, dtype: Any) -> None:
    random = np.random.default_rng(members)
    x = random.normal(size=(members, 2, 5003)).astype(dtype)
    order = Schedule((Case(random_trees(random, members, 5003, kinds=6)),))
    options: dict[str, Any] = {
        "order": order,
        "rounding": rounding,
        "batch_ndim": 1,
        "places": np.arange(2),
    }
    whole = on_every_set(lambda: fold(x, **options))
    for first, end in ((0, 1), (17, 99), (99, 5003), (150, 150)):
        part = on_every_set(lambda a=first, b=end: fold(x[..., a:b], window=(a, 5003), **options))
        assert part.tobytes() == whole[:, first:end].tobytes()
    additions = additions_of(order.cases[0].fold, members)
    if rounding == "nearest" and dtype is np.float32:
        for i in random.integers(0, 5003, size=40).tolist():
            nodes = list(x[:, 0, i])
            nodes = _evaluated(nodes, additions(i))
            assert whole[0, i] == nodes[-1]


def _evaluated(nodes: list[Any], additions: list[tuple[int, int]]) -> list[Any]:
    for left, right in additions:
        nodes.append(nodes[left] + nodes[right])
    return nodes


# Adders of more than two terms


def _rounded(exact: Fraction, dtype: Any) -> Any:
    """An exact number rounded once: to odd in a wider format, and then to the dtype.

    The wider one of bfloat16 is float32: ml_dtypes rounds float64 to that first.
    """
    wide = np.float64 if dtype == np.float32 else np.float32
    value = wide(float(exact))  # one of the two next to it
    off = exact - Fraction(float(value))
    if off and value.view(f"u{value.itemsize}") % 2 == 0:
        value = np.nextafter(value, wide(math.copysign(math.inf, off)))
    return value.astype(dtype)


def _aligned(value: Any, unit: Fraction, rounding: str) -> Fraction:
    number = Fraction(float(value)) / unit
    whole = {
        "toward-zero": math.trunc,
        "down": math.floor,
        "up": math.ceil,
        "nearest-even": round,
        "away": lambda x: math.ceil(abs(x)) * (1 if x > 0 else -1),
        "nearest-away": lambda x: math.floor(abs(x) + Fraction(1, 2)) * (1 if x > 0 else -1),
    }[rounding]
    return whole(number) * unit


def _sum(terms: list[Any], adder: Adder | None, dtype: Any) -> Any:
    numbers = [Fraction(float(term)) for term in terms]
    if adder is not None and adder.kind == "aligned":
        largest = max(abs(n) for n in numbers)
        exponent = math.frexp(float(largest))[1] - 1
        unit = Fraction(2) ** (exponent - adder.bits + 1)
        numbers = [_aligned(term, unit, adder.rounding) for term in terms]
    return _rounded(sum(numbers, Fraction(0)), dtype)


@runs_every_set
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(2, 20),
    st.sampled_from(["exact", "aligned"]),
    st.sampled_from(["toward-zero", "down", "up", "nearest-even", "away", "nearest-away"]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
@example(463757, 18, "exact", "toward-zero", "bfloat16")  # a sum beside the middle of two
def test_wide_adders_are_those_of_rational_arithmetic(
    seed: int, members: int, kind: str, rounding: str, accumulate: str
) -> None:
    random = np.random.default_rng(seed)
    nested = random_tree(random, members, widest=8)
    paths = [path for path, node in nodes_of(nested) if len(node) > 2 or random.random() < 0.3]
    adders = {path: Adder(kind, int(random.integers(3, 30)), rounding) for path in paths}
    tree = SumTree.of(nested, adders)
    scales = 2.0 ** random.integers(-12, 12, size=(members, 7))
    x = (random.normal(size=(members, 7)) * scales).astype(np.float32)
    held = np.dtype(accumulate) if accumulate != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    other = SumTree.of(random_tree(random, members))
    order = Schedule((Case(Trees((0, 5, 7), (0, 1), (tree, other))),))
    found = on_every_set(lambda: fold(x, order=order, accumulate=held))
    for i in range(5):
        total = tree.folded(
            lambda m, i=i: np.float32(x[m, i]),
            lambda terms, adder: np.float32(_sum(terms, adder, held)),
        )
        assert found[i] == total or (np.isnan(found[i]) and np.isnan(total))


@runs_every_set
def test_wide_adders_keep_what_is_not_finite_and_zeros() -> None:
    tree = SumTree.of([[0, 1, 2], 3], {(0,): Adder("aligned", 25)})
    order = Schedule((Case(Trees((0, 6), (0,), (tree,))),))
    inf, nan = np.inf, np.nan
    rows = [[-0.0, 0.0, inf, inf, nan, 1], [-0.0, -0.0, 1, -inf, 1, -1]]
    x = np.array([*rows, [-0.0] * 6, [-0.0] * 6], np.float32)
    with kernels.chosen("numpy"):
        found = fold(x, order=order)
    assert np.signbit(found[0]) and not np.signbit(found[1])
    assert found[2] == inf and np.isnan(found[3]) and np.isnan(found[4]) and found[5] == 0


@runs_every_set
def test_wide_adders_are_refused_where_kernels_lack_them() -> None:
    order = Schedule((Case(Trees((0, 6), (0,), (SumTree.of([[0, 1, 2], 3]),))),))
    x = np.ones((4, 6), np.float32)
    with pytest.raises(ValueError, match="expected sums, rounded to nearest, by adders"):
        fold(x.astype(np.float16), order=order, rounding="stochastic")
    with pytest.raises(ValueError, match="expected sums, rounded to nearest, by adders"):
        fold(x, order=order, op="prod")
    with pytest.raises(ValueError, match="GPUs' kernels add two"):
        HostDevice().fold(x, order=order)


# Trees of orders


@runs_every_set
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_twins_are_compiled_from_their_trees_as_from_their_schedules(members: int) -> None:
    for twin in TWINS.values():
        for elements in (1, 3, 64, 1003):
            try:
                order = compile_order(twin.schedule, members=members, elements=elements, itemsize=4)
            except ValueError:
                continue  # the engine's order is not known for so many
            trees = trees_of_order(order, members, elements)
            again = compile_trees(trees, members)
            assert trees_of_order(again, members, elements) == trees
            if members > 3 and elements > members and order != "linear":
                known = trees_of_order("tree", members, elements)
                assert again == order or (again == "tree" and trees == known)


@runs_every_set
def test_trees_compare_whatever_the_order_of_terms() -> None:
    assert SumTree.of([[3, 1], [2, 0]]) == SumTree.of([[0, 2], [1, 3]])
    assert SumTree.of([[3, 1], [2, 0]]) != SumTree.of([[0, 1], [2, 3]])
    assert SumTree.of([2, 1, 0]).nested == [0, 1, 2]
    assert SumTree.of([2, [0, 1]]).chain() == (0, 1, 2)
    assert SumTree.of([[0, 1], [2, 3]]).chain() is None
    assert SumTree.of([0, 1], {(): Adder("exact")}) == SumTree.of([1, 0])
