"""How `gpusim equal` finds the relation of parts to a whole: random cuts, and what is none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpusim.tools.equal.relations import (
    LAYOUTS,
    Near,
    Partition,
    Parts,
    Relation,
    Step,
    contains,
    factors,
    follow,
    partitions,
    relate,
    scales_of,
)
from tests.oracles.budget import budget

Array = NDArray[Any]

EXACT = Near(1e-9)
BLOCKS = {"": 1, "striped": 1, "zig-zag": 2, "2 blocks": 2, "3 blocks": 3}
"""By how much more than the number of ranks a dimension's size must divide."""
LARGEST = 20_000

# ---------------------------------------------------------------- an oracle: cutting


@dataclass(frozen=True)
class Cut:
    """One cut over one dimension of the mesh."""

    axis: int
    op: str
    dim: int = 0
    layout: str = ""
    sizes: tuple[int, ...] = ()  # of uneven pieces, in parts of the dimension's size


@dataclass(frozen=True)
class Case:
    """A whole tensor, and what cuts make of it."""

    mesh: tuple[int, ...]
    cuts: tuple[Cut, ...]
    whole: Array
    parts: Parts

    @property
    def meshes(self) -> list[Partition]:
        """The partitions of ranks, when the groups of the mesh's dimensions are known."""
        ranks = np.arange(int(np.prod(self.mesh))).reshape(self.mesh)
        groups = [
            [int(rank) for rank in row]
            for axis, count in enumerate(self.mesh)
            for row in np.moveaxis(ranks, axis, -1).reshape(-1, count)
        ]
        return partitions(len(self.parts), groups)


def pieces(whole: Array, count: int, cut: Cut, draw: np.random.Generator) -> list[Array]:
    """What one cut makes of a tensor, for each of `count` ranks."""
    if cut.op == "R":
        return [whole] * count
    if cut.op == "P":
        parts = [draw.standard_normal(whole.shape) for _ in range(count - 1)]
        return [*parts, whole - np.sum(parts, 0)]
    size = whole.shape[cut.dim]
    if cut.sizes:
        ends = np.cumsum(cut.sizes)
        return np.split(whole, (ends[:-1] * size // ends[-1]).tolist(), cut.dim)
    if cut.layout == "striped":
        return [whole.take(range(rank, size, count), cut.dim) for rank in range(count)]
    if cut.layout == "zig-zag":
        own = np.split(whole, 2 * count, cut.dim)
        return [np.concatenate([own[n], own[-1 - n]], cut.dim) for n in range(count)]
    blocks = np.split(whole, BLOCKS[cut.layout], cut.dim)
    split = [np.split(block, count, cut.dim) for block in blocks]
    return [np.concatenate([own[rank] for own in split], cut.dim) for rank in range(count)]


def parts_of(
    whole: Array, mesh: Sequence[int], cuts: Sequence[Cut], draw: np.random.Generator
) -> Parts:
    """The parts of all ranks, in the row-major order of the mesh."""
    held: dict[tuple[int, ...], Array] = {(): whole}
    for cut in cuts:
        count = mesh[cut.axis]
        held = {
            (*at, n): piece
            for at, part in held.items()
            for n, piece in enumerate(pieces(part, count, cut, draw))
        }
    found: Parts = {}
    for at, part in held.items():
        place = [0] * len(mesh)
        for cut, n in zip(cuts, at, strict=True):
            place[cut.axis] = n
        found[int(np.ravel_multi_index(place, tuple(mesh)))] = part
    return dict(sorted(found.items()))


def meshes_of(ranks: int) -> list[tuple[int, ...]]:
    """All shapes of meshes.

    >>> meshes_of(6)
    [(2, 3), (3, 2), (6,)]
    """
    if ranks == 1:
        return [()]
    return [
        (first, *rest)
        for first in range(2, ranks + 1)
        if ranks % first == 0
        for rest in meshes_of(ranks // first)
    ]


@st.composite
def cases(draw: st.DrawFn, ops: str = "RSP", least: str = "", smallest: int = 1) -> Case:
    """A random tensor, cut over the dimensions of a random mesh; `least` is among the cuts.

    Uneven pieces have at least `smallest` rows.
    """
    mesh = draw(st.sampled_from(meshes_of(draw(st.sampled_from([2, 3, 4, 6, 8])))))
    shape = np.array(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    factor = np.ones_like(shape)
    uneven = draw(st.booleans())
    forced = draw(st.sampled_from(range(len(mesh))))
    cuts = []
    for n, axis in enumerate(draw(st.permutations(range(len(mesh))))):
        op = least if least and n == forced else draw(st.sampled_from(ops))
        if op != "S":
            cuts.append(Cut(axis, op))
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        if uneven:
            size = st.lists(st.integers(smallest, 3), min_size=mesh[axis], max_size=mesh[axis])
            sizes = tuple(draw(size.filter(any)))
            cuts.append(Cut(axis, op, dim, "", sizes))
            factor[dim] *= sum(sizes)
        else:
            layout = draw(st.sampled_from(LAYOUTS))
            cuts.append(Cut(axis, op, dim, layout))
            factor[dim] *= mesh[axis] * BLOCKS[layout]
    if (shape * factor).prod() > LARGEST:
        shape[:] = 1
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = numbers.standard_normal(shape * factor)
    return Case(mesh, tuple(cuts), whole, parts_of(whole, mesh, cuts, numbers))


def changed(case: Case, by: float, data: st.DataObject) -> Parts:
    """The parts with one element of one rank changed."""
    rank = data.draw(st.sampled_from([rank for rank, part in case.parts.items() if part.size]))
    part = case.parts[rank].copy()
    part.reshape(-1)[data.draw(st.integers(0, part.size - 1))] += by
    return {**case.parts, rank: part}


# ---------------------------------------------------------------- relate


@given(cases())
@settings(max_examples=budget(2000, least=150))
def test_any_series_of_cuts_is_found(case: Case) -> None:
    """The relation that is found puts the whole together from the parts."""
    found = relate(case.parts, case.whole, case.meshes, EXACT)
    assert found is not None
    assert found.scale == 1 and not found.permuted
    assert follow(case.parts, found.steps, case.whole, EXACT) == 1
    assert found.trivial == (case.whole.size == 1)


@given(cases(smallest=0))
@settings(max_examples=budget(1000, least=100))
def test_pieces_may_be_empty(case: Case) -> None:
    """As FSDP2's of weights with fewer rows than ranks."""
    found = relate(case.parts, case.whole, case.meshes, EXACT)
    assert found is not None
    assert follow(case.parts, found.steps, case.whole, EXACT) == 1


@given(cases(smallest=0), st.data())
@settings(max_examples=budget(1000, least=100))
def test_a_changed_element_is_not_related(case: Case, data: st.DataObject) -> None:
    parts = changed(case, 1e-3, data)
    assert relate(parts, case.whole, case.meshes, EXACT, permutes=True) is None


@given(cases(), st.data())
@settings(max_examples=budget(500, least=50))
def test_a_rounding_is_not_a_change(case: Case, data: st.DataObject) -> None:
    parts = changed(case, 1e-14, data)
    assert relate(parts, case.whole, case.meshes, EXACT) is not None
    assert relate(changed(case, 1e-3, data), case.whole, case.meshes, Near(1e-9, 0, (), 0.01))


@given(cases(ops="RS"), st.data())
@settings(max_examples=budget(400, least=50))
def test_scales_are_found_when_they_are_allowed(case: Case, data: st.DataObject) -> None:
    scales = scales_of(len(case.parts))
    scale = data.draw(st.sampled_from(scales))
    parts = {rank: part * scale for rank, part in case.parts.items()}
    found = relate(parts, case.whole, case.meshes, Near(1e-9, scales=scales), sums=False)
    assert found is not None and found.scale == scale
    assert str(found).endswith(f", times {scale:.6g}")
    assert relate(parts, case.whole, case.meshes, EXACT, sums=False) is None
    other = Near(1e-9, scales=tuple(each for each in scales if each != scale))
    assert relate(parts, case.whole, case.meshes, other, sums=False) is None


@given(cases(least="P"), st.data())
@settings(max_examples=budget(500, least=50))
def test_scales_of_sums(case: Case, data: st.DataObject) -> None:
    scales = scales_of(len(case.parts))
    scale = data.draw(st.sampled_from(scales))
    parts = {rank: part * scale for rank, part in case.parts.items()}
    found = relate(parts, case.whole, case.meshes, Near(1e-9, scales=scales))
    assert found is not None and found.sums
    assert follow(parts, found.steps, case.whole, Near(1e-9, scales=scales)) == found.scale


@given(cases(least="P"))
@settings(max_examples=budget(1000, least=100))
def test_partial_sums_are_refused_where_they_are_not_allowed(case: Case) -> None:
    found = relate(case.parts, case.whole, case.meshes, EXACT)
    assert found is not None and found.sums
    assert relate(case.parts, case.whole, case.meshes, EXACT, sums=False) is None


@given(cases(ops="RS"))
@settings(max_examples=budget(300, least=30))
def test_hints_come_first(case: Case) -> None:
    """A relation that another tensor had is not searched again."""
    found = relate(case.parts, case.whole, case.meshes, EXACT)
    assert found is not None
    assert relate(case.parts, case.whole, (), EXACT, [(), found.steps]) == found


@given(
    st.sampled_from([2, 4]),
    st.tuples(st.integers(2, 4), st.integers(2, 5), st.integers(2, 4)),
    st.sampled_from(["R", "S"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=budget(500, least=50))
def test_rows_in_another_order_are_found_when_they_are_allowed(
    ranks: int, shape: tuple[int, int, int], op: str, seed: int
) -> None:
    """Over batch and sequence: tokens that experts hand back in another order."""
    numbers = np.random.default_rng(seed)
    whole = numbers.standard_normal((shape[0] * ranks, *shape[1:]))
    rows = whole.reshape(-1, shape[2])
    order = numbers.permutation(len(rows))
    order = np.roll(order, 1) if (order == np.arange(len(rows))).all() else order
    other = rows[order].reshape(whole.shape)
    parts = parts_of(other, (ranks,), [Cut(0, op)], numbers)
    meshes = partitions(ranks)
    found = relate(parts, whole, meshes, EXACT, permutes=True)
    assert found is not None
    strict = relate(parts, whole, meshes, EXACT)
    if found.permuted:
        assert strict is None
        assert found.permuted == 2 and str(found).endswith("rows in another order")
    else:  # the order moved whole rows of one dimension
        assert strict == found


@pytest.mark.parametrize("axis", [0, 1])
def test_samples_in_another_order_may_have_a_factor(axis: int) -> None:
    whole = np.random.default_rng(0).standard_normal((6, 3, 2))
    other = np.roll(whole, 1, axis) * 2
    parts = {0: other[:3], 1: other[3:]}
    near = Near(1e-9, scales=scales_of(2))
    assert relate(parts, whole, partitions(2), near) is None
    found = relate(parts, whole, partitions(2), near, permutes=True)
    assert found is not None and (found.permuted, found.scale) == (1, 2)


def test_pieces_are_rows_of_which_none_is_left_over() -> None:
    """Fused projections of grouped queries: ranks share keys and values."""
    whole = np.random.default_rng(0).standard_normal((6, 5))  # 4 queries, a key, a value
    parts = {rank: whole[[rank, 4, 5]] for rank in range(4)}
    found = relate(parts, whole, partitions(4), EXACT, sums=False)
    assert found is not None and str(found) == "S(0) in pieces over 4"
    assert follow(parts, found.steps, whole, EXACT) == 1
    assert relate({**parts, 3: whole[[2, 4, 5]]}, whole, partitions(4), EXACT, sums=False) is None
    other = {**parts, 3: whole[[3, 4, 5]] + 1e-3}
    assert relate(other, whole, partitions(4), EXACT, sums=False) is None
    columns = {rank: part.T for rank, part in parts.items()}
    found = relate(columns, whole.T, partitions(4), EXACT, sums=False)
    assert found is not None and str(found) == "S(1) in pieces over 4"


@pytest.mark.parametrize("shape", [(6,), (4, 3), (1,), ()])
def test_equal_elements_are_trivial(shape: tuple[int, ...]) -> None:
    whole = np.ones(shape)
    found = relate({0: whole, 1: whole}, whole, partitions(2), EXACT)
    assert found is not None and found.trivial


def test_ranks_without_a_part() -> None:
    """Of a pipeline's stages, one group of ranks has the tensor."""
    whole = np.random.default_rng(0).standard_normal((4, 3))
    for ranks in ((2, 3), (1, 3), (3,)):
        own = np.split(whole, len(ranks))
        found = relate(dict(zip(ranks, own, strict=True)), whole, partitions(4), EXACT)
        assert found is not None
        assert str(found) == (f"S(0) over {len(ranks)}" if len(ranks) > 1 else "the whole")


def test_a_mesh_that_no_group_names_is_of_prime_factors() -> None:
    """Of six ranks, (2, 3) is tried by itself, and (3, 2) if the program has its groups."""
    whole = np.random.default_rng(0).standard_normal((3, 2))
    for mesh, known in (((2, 3), True), ((3, 2), False)):
        cuts = [Cut(0, "S", 0 if mesh[0] == 3 else 1), Cut(1, "S", 0 if mesh[1] == 3 else 1)]
        case = Case(mesh, tuple(cuts), whole, parts_of(whole, mesh, cuts, np.random.default_rng(0)))
        assert relate(case.parts, whole, case.meshes, EXACT) is not None
        found = relate(case.parts, whole, partitions(6), EXACT)
        assert (found is not None) == known


SHAPES = [(), (0,), (1,), (0, 3), (3, 0), (2, 3)]


def strange(shape: tuple[int, ...], value: float) -> Array:
    """A tensor whose last element is a value."""
    found = np.arange(float(np.prod(shape))).reshape(shape)
    found.reshape(-1)[-1:] = value
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_strange_tensors_are_what_they_are(shape: tuple[int, ...], value: float) -> None:
    whole = strange(shape, value)
    near = Near(1e-9, scales=scales_of(2))
    found = relate({0: whole, 1: whole.copy()}, whole, partitions(2), near, permutes=True)
    assert found is not None and found.scale == 1 and found.steps[0].op == "R"
    assert found.trivial == (whole.size < 2)
    for dim in range(whole.ndim):
        parts = dict(enumerate(np.array_split(whole, 2, dim)))
        cut = relate(parts, whole, partitions(2), near, permutes=True)
        assert cut is not None and cut.scale == 1
    assert contains(whole, whole, near) == bool(whole.size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("other", SHAPES, ids=str)
def test_parts_of_another_shape_are_not_related(
    shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Whatever their elements are: nothing fails."""
    if shape == other:
        return
    for value in (0.0, np.nan, np.inf):
        whole, part = strange(shape, 0.0), strange(other, value)
        near = Near(1e-9, scales=scales_of(2))
        assert relate({0: part, 1: part}, whole, partitions(2), near, permutes=True) is None
        relate({0: whole, 1: part}, whole, partitions(2), near, permutes=True)  # (0,) and (1,) fit
        contains(whole, part, near)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_reference_has_a_nan(shape: tuple[int, ...], value: float) -> None:
    """And one rank or both have a number there, or another number elsewhere."""
    whole = strange(shape, value)
    near = Near(1e-9, scales=scales_of(2))
    number = strange(shape, 0.0)
    for parts in ({0: number, 1: number}, {0: whole, 1: number}, {0: number, 1: whole}):
        assert relate(parts, whole, partitions(2), near, sums=False) is None
    if whole.size > 1:
        other = whole.copy()
        other.reshape(-1)[0] += 1
        assert relate({0: whole, 1: other}, whole, partitions(2), near, sums=False) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_one_rank_has_a_nan(value: float) -> None:
    whole = np.random.default_rng(0).standard_normal((4, 3))
    for ranks in (2, 4):
        for parts in (np.split(whole, ranks), [whole.copy() for _ in range(ranks)]):
            parts[-1] = parts[-1].copy()
            parts[-1][0, 0] = value
            given = dict(enumerate(parts))
            near = Near(1e-9, scales=scales_of(ranks))
            assert relate(given, whole, partitions(ranks), near, permutes=True) is None


def test_numbers_of_integers() -> None:
    whole = np.arange(24).reshape(6, 4)
    found = relate({0: whole[:, :2], 1: whole[:, 2:]}, whole, partitions(2), EXACT)
    assert str(found) == "S(1) over 2"


def test_the_text_of_a_relation() -> None:
    pairs = (0, 1), (2, 3)
    steps = Step("S", pairs, 1, "zig-zag"), Step("P", ((0, 2),))
    assert str(Relation(steps, 0.5)) == "S(1, zig-zag) over 2, P over 2, times 0.5"
    assert str(Relation((Step("R", ((3,),)),))) == "the whole"
    assert str(Relation((Step("pieces", ((0, 1),), 0),), permuted=1)) == (
        "S(0) in pieces over 2, rows in another order"
    )


# ---------------------------------------------------------------- meshes, factors, blocks


@given(st.integers(1, 24))
def test_partitions_have_each_rank_once(ranks: int) -> None:
    found = partitions(ranks)
    assert found[0] == (tuple(range(ranks)),)
    assert len(set(found)) == len(found)
    for mesh in found:
        assert sorted(itertools.chain(*mesh)) == list(range(ranks))
        assert len({len(group) for group in mesh}) == 1
        assert len(mesh[0]) > 1 or ranks == 1
    contiguous = {tuple(zip(*[iter(range(ranks))] * n, strict=True)) for n in factors(ranks)[-1:]}
    assert contiguous <= set(found)


def test_known_groups_come_first() -> None:
    pairs = ((0, 1), (2, 3), (4, 5))
    assert partitions(6, pairs)[0] == pairs
    triples = ((0, 2, 4), (1, 3, 5))
    assert partitions(6, [*pairs, *triples])[:2] == [pairs, triples]
    assert partitions(6, [(0, 5), (1, 4), (2, 3), *pairs])[:2] == [((0, 5), (1, 4), (2, 3)), pairs]
    # Groups that do not hold all ranks, or hold one, say nothing of a mesh.
    assert partitions(4, [(0, 1), (3,)]) == partitions(4)
    assert partitions(4, [(0,), (1,), (2,), (3,)]) == partitions(4)
    assert partitions(1) == [((0,),)]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_scales_have_their_inverses(counts: list[int]) -> None:
    found = scales_of(*counts)
    assert found == tuple(sorted(set(found))) and 1 not in found
    assert all(any(abs(other * scale - 1) < 1e-12 for other in found) for scale in found)
    for count in counts:
        for part in range(2, count + 1):
            if count % part == 0:
                assert part in found and 1 / part in found


def test_scales_of_two_counts() -> None:
    assert scales_of(1) == ()
    assert scales_of(3) == pytest.approx((1 / 9, 1 / 3, 3, 9))
    assert scales_of(2, 3) == pytest.approx((1 / 6, 1 / 3, 1 / 2, 2 / 3, 1.5, 2, 3, 6))


@given(st.data(), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=3))
@settings(max_examples=budget(500, least=50))
def test_contains_blocks(data: st.DataObject, dims: list[tuple[int, int]]) -> None:
    """Each block of a grid, and no block that has another element."""
    sizes = tuple(size for size, _ in dims)
    whole = np.random.default_rng(0).standard_normal([size * count for size, count in dims])
    at = [data.draw(st.integers(0, count - 1)) for _, count in dims]
    block = whole[tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, sizes, strict=True))]
    assert contains(whole, block, EXACT)
    assert not contains(whole, block + 1e-3, EXACT)
    assert contains(whole, block * 2, EXACT) is contains(whole, block + block, EXACT) is False
    assert contains(whole, block * 2, Near(1e-9, scales=(2.0,)))


def test_contains_no_part_of_another_shape() -> None:
    whole = np.arange(6.0)
    assert not contains(whole, np.arange(4.0), EXACT)  # does not divide
    assert not contains(whole, np.arange(6.0).reshape(2, 3), EXACT)
    assert not contains(whole, np.arange(12.0), EXACT)
    assert not contains(whole, np.zeros(0), EXACT)
    assert not contains(whole, np.array([1.0, 2.0]), EXACT)  # between two blocks
