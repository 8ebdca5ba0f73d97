"""Schedules: each is what its definition says, done one number at a time, on every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim import fallback
from gpusim.fallback import fold
from gpusim.fallback.schedules import (
    Balanced,
    Binary,
    Case,
    ChainSchedule,
    Loops,
    ReductionGraph,
    Schedule,
    Segments,
    Tree,
    Walk,
    compile_order,
)
from tests.contract.fold_limits import fold_limits
from tests.contract.test_fold_contract import CUTS, numbers
from tests.cuda.host_cuda.device import HostDevice, has_compiler
from tests.cuda.host_cuda.values import same
from tests.oracles.reference_fold import codes_of, reference_fold

REALS = [np.dtype(t) for t in ("float16", "float32", "float64")] + [np.dtype(ml_dtypes.bfloat16)]
COMPLEX = np.dtype(np.complex64)
Additions = list[tuple[int, int]]

FOLDS: dict[str, Any] = {
    "down": Walk(start=-1, step=-1),
    "from the second": Walk(start=1),
    "gloo's ring": Walk(start=-1, step=-1, cut=Segments(most=16)),
    "a ring the other way": Walk(start=2, step=-1, cut=Balanced()),
    "NCCL's ring": Walk(start=1, cut=Loops(chunk=16, align=4, channels=2)),
    "pairs first": Tree(pairs_first=True),
    "a tree": Tree(),
    "a binary tree": Binary(),
}


def schedule(fold: Any, **how: Any) -> Schedule:
    return Schedule((Case(fold),), **how)


def chain(first: int, step: int, members: int) -> Additions:
    """One member after the other, around."""
    visited = [(first + step * turn) % members for turn in range(members)]
    left, additions = visited[0], []
    for right in visited[1:]:
        additions.append((left, right))
        left = members + len(additions) - 1
    return additions


def gloo_block(i: int, members: int, elements: int, itemsize: int, most: int) -> int:
    """Segments of equal length, as many as all members have in common, two at least for each."""
    number = 2 * members
    most = max(itemsize, most // itemsize * itemsize)
    while number * most < elements * itemsize or number % members:
        number += 1
    length = itemsize
    while length * number < elements * itemsize:
        length += itemsize
    return i * itemsize // (length * (number // members))


def nccl_block(i: int, members: int, elements: int, itemsize: int) -> int:
    """Two channels; in each of them loops over `members` chunks of 16 bytes, or what is left."""
    unit = max(1, 4 // itemsize)
    part = math.ceil(math.ceil(elements / 2) / unit) * unit
    i, left = (i, min(part, elements)) if i < part else (i - part, elements - part)
    whole = max(unit, 16 // itemsize)
    while i >= members * whole:
        i, left = i - members * whole, left - members * whole
    chunk = min(whole, math.ceil(math.ceil(left / members) / unit) * unit)
    return i // chunk


def balanced_block(i: int, members: int, elements: int) -> int:
    lengths = [elements // members + (b < elements % members) for b in range(members)]
    block = 0
    while i >= lengths[block]:
        i, block = i - lengths[block], block + 1
    return block


def halving(members: int, pairs_first: bool) -> Additions:
    level, additions = list(range(members)), []
    if pairs_first:
        while members - len(additions) != 2 ** int(math.log2(members)):
            additions.append((2 * len(additions), 2 * len(additions) + 1))
        done = len(additions)
        level = [members + pair for pair in range(done)] + level[2 * done :]
    while len(level) > 1:
        above = []
        for at in range(0, len(level) - 1, 2):
            additions.append((level[at], level[at + 1]))
            above.append(members + len(additions) - 1)
        level = above + level[len(above) * 2 :]
    return additions


def binary(members: int) -> Additions:
    """Receiving from both children, in turn, from the last rank to the first."""
    node, additions = list(range(members)), []
    for rank in reversed(range(members)):
        level = int(math.log2(rank + 1))
        for child in (rank + 2**level, rank + 2 ** (level + 1)):
            if child < members:
                additions.append((node[child], node[rank]))
                node[rank] = members + len(additions) - 1
    return additions


def by_definition(name: str, members: int, elements: int, itemsize: int) -> Any:
    """The additions of each element, by its index."""
    definitions: dict[str, Callable[[int], Additions]] = {
        "down": lambda i: chain(members - 1, -1, members),
        "from the second": lambda i: chain(1 % members, 1, members),
        "gloo's ring": lambda i: chain(
            gloo_block(i, members, elements, itemsize, 16) - 1, -1, members
        ),
        "a ring the other way": lambda i: chain(
            balanced_block(i, members, elements) + 2, -1, members
        ),
        "NCCL's ring": lambda i: chain(nccl_block(i, members, elements, itemsize) + 1, 1, members),
        "pairs first": lambda i: halving(members, True),
        "a tree": lambda i: halving(members, False),
        "a binary tree": lambda i: binary(members),
    }
    return definitions[name]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, np.ndarray, dict[str, Any]]:
    dtype = draw(st.sampled_from([*REALS, COMPLEX]))
    members = draw(st.integers(1, 13))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    batch_ndim = draw(st.integers(0, len(shape)))
    options = {
        "batch_ndim": batch_ndim,
        "accumulate": draw(st.none() | st.sampled_from(REALS)),
        "rounding": draw(st.sampled_from(["nearest", "stochastic"])),
        "divisor": draw(st.none() | st.integers(1, 9)),
        "op": draw(st.sampled_from(["sum", "sum", "prod"])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "places": draw(st.integers(0, 9)),
    }
    values = numbers(draw(st.integers(0, 2**30)), (members, *shape), dtype)
    return draw(st.sampled_from(list(FOLDS))), values, options


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from(list(CUTS)))
def test_folds_have_the_bits_of_their_definition(case: Any, cut: str) -> None:
    name, values, options = case
    elements = math.prod(values.shape[1 + options["batch_ndim"] :])
    expected = by_definition(name, len(values), elements, values.dtype.itemsize)
    with fold_limits(**CUTS[cut]):
        for members in (values, list(values), np.asfortranarray(values)):
            found = fold(members, order=schedule(FOLDS[name]), **options)
    assert codes_of(found) == reference_fold(list(values), order=expected, **options)


@settings(max_examples=250, deadline=None)
@given(cases(), st.sampled_from([1, 1 << 20]))
def test_cuda_has_the_same_bits(case: Any, busy_threads: int) -> None:
    assert has_compiler(), "this compiles the CUDA sources for the host: install g++, or set CXX"
    name, values, options = case
    device = HostDevice(busy_threads=busy_threads)
    order = schedule(FOLDS[name], from_zero=len(values) % 2 == 0)
    members = values if options["divisor"] else [np.asarray(member) for member in values]
    same(device.fold(members, order=order, **options), fold(values, order=order, **options))


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("members", [1, 2, 3, 8, 33])
def test_large_values_are_cut_where_small_ones_are(name: str, members: int) -> None:
    x = np.random.default_rng(members).normal(size=(members, 5003)).astype(np.float32)
    result = fold(x, order=schedule(FOLDS[name]))
    additions = by_definition(name, members, 5003, 4)
    for i in (0, 1, 700, 2501, 2502, 4000, 5001, 5002):
        nodes = list(x[:, i])
        for left, right in additions(i):
            nodes.append(nodes[left] + nodes[right])
        assert result[i] == nodes[-1]


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_windows_have_the_whole_values_bits(name: str, rounding: str) -> None:
    x = np.random.default_rng(3).normal(size=(6, 2, 301)).astype(np.float16)
    options: dict[str, Any] = {
        "order": schedule(FOLDS[name]),
        "rounding": rounding,
        "batch_ndim": 1,
        "places": np.arange(2),
    }
    whole = fold(x, **options)
    for first, end in ((0, 1), (17, 99), (99, 301), (150, 150)):
        part = fold(x[..., first:end], window=(first, 301), **options)
        assert part.tobytes() == whole[:, first:end].tobytes()


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
@pytest.mark.parametrize("name", FOLDS)
def test_empty_values_and_single_numbers_are_folded(name: str, shape: tuple[int, ...]) -> None:
    result = fold(np.ones((5, *shape), np.float32), order=schedule(FOLDS[name]))
    assert result.shape == shape and (result == 5).all()


def test_what_has_a_name_is_compiled_to_it() -> None:
    """The named orders have faster code paths."""

    def of(fold: Any, members: int = 8, elements: int = 100) -> Any:
        return compile_order(schedule(fold), members=members, elements=elements, itemsize=4)

    assert of(Walk()) == of(Walk(start=8)) == "linear"
    assert of(Walk(start=-1, step=-1)) == "reverse"
    assert of(Walk(cut=Balanced())) == "ring"
    assert of(Tree()) == of(Tree(pairs_first=True)) == "tree"
    assert of(Tree(), members=6) == "tree"
    assert isinstance(of(Tree(pairs_first=True), members=6), ReductionGraph)
    assert isinstance(of(Walk(start=1)), ChainSchedule)
    assert all(of(fold, members=1) in ("linear", "ring", "tree") for fold in FOLDS.values())


def test_the_first_case_that_holds_is_taken() -> None:
    order = Schedule(
        (
            Case(Walk(start=-1, step=-1), fewer_than="power"),
            Case(Walk(cut=Balanced()), members=(2, 3), bytes=(16, 64)),
            Case(Walk(), members=(2, 7)),
        )
    )

    def of(members: int, elements: int) -> Any:
        return compile_order(order, members=members, elements=elements, itemsize=4)

    assert of(7, 3) == "reverse" and of(7, 4) == "linear"
    assert of(3, 3) == "linear" and of(3, 4) == of(3, 15) == "ring" and of(3, 16) == "linear"
    with pytest.raises(ValueError, match=r"8 members of 9 elements of 4 bytes: .* 2 to 7 members"):
        of(8, 9)


def test_a_sum_from_zero_is_never_minus_zero() -> None:
    order = schedule(Walk(), from_zero=True)
    x = np.full((3, 40), -0.0, np.float32)
    assert np.signbit(fold(x, order=schedule(Walk()))).all()
    for members in (x, x[:, :1], np.repeat(x, 9, axis=0), x.astype(np.float16)):
        assert not np.signbit(fold(members, order=order)).any()
    assert np.signbit(fold(x, order=order, op="max")).all()
    assert np.signbit(fold(x[:1], order=order)).all()


def test_hops_may_round_to_the_members_own_type() -> None:
    x = np.ones((300, 3), ml_dtypes.bfloat16)
    own = schedule(Walk(), hops="own", formats=("bfloat16", "float32"))
    assert fold(x, order=own).tolist() == [256] * 3
    assert fold(x, order=own, accumulate=np.float32).tolist() == [300] * 3
    assert fold(x, order=schedule(Walk())).tolist() == [300] * 3
    with pytest.raises(TypeError, match=r"float16 members: .* known for bfloat16, float32"):
        fold(x.astype(np.float16), order=own)
    assert fold(x.astype(np.int8), order=own).tolist() == [44] * 3


def test_schedules_take_all_members_at_once() -> None:
    x, order = np.ones((4, 8), np.float32), schedule(Walk(start=1))
    for kernel in (fallback.fold, HostDevice().fold):
        with pytest.raises(ValueError, match="a Schedule: expected all members at once"):
            kernel(x, order=order, final=False)
        with pytest.raises(ValueError, match="a Schedule: expected all members at once"):
            kernel(x, order=order, partial=x[0], before=1)
        with pytest.raises(ValueError, match="cut_axis=0: expected None"):
            kernel(x, order=order, cut_axis=0)
        with pytest.raises(ValueError, match=r"nodes=.*: expected None"):
            kernel(x, order=order, nodes=(0, 0, 4))
        with pytest.raises(ValueError, match=r"order='up': expected one of .*, or a Schedule"):
            kernel(x, order="up")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Walk(step=2), "Walk: step=2: expected 1 or -1"),
        (lambda: Walk(step=0), "Walk: step=0: expected 1 or -1"),
        (lambda: Walk(start=0.5), "Walk: start=0.5: expected an integer"),
        (lambda: Walk(step=1.0), "Walk: step=1.0: expected an integer"),
        (lambda: Walk(step=True), "Walk: step=True: expected an integer"),
        (lambda: Case(Tree(), members=(True, None)), "members=.*: expected two integers"),
        (lambda: Walk(cut="balanced"), "Walk: cut='balanced': expected Balanced"),
        (lambda: Segments(0), "Segments: most=0: expected at least 1"),
        (lambda: Segments(least=0), "Segments: least=0: expected at least 1"),
        (lambda: Loops(0), "Loops: chunk=0: expected at least 1"),
        (lambda: Loops(16, 0), "Loops: align=0: expected at least 1"),
        (lambda: Loops(16, channels=True), "Loops: channels=True: expected an integer"),
        (lambda: Case("tree"), "Case: fold='tree': expected a Walk, Tree, Binary or Exact"),
        (lambda: Case(Tree(), members=3), "Case: members=3: expected two integers"),
        (lambda: Case(Tree(), members=(0, 4)), r"Case: members=\(0, 4\): expected 1 <= first"),
        (lambda: Case(Tree(), bytes=(8, 4)), r"Case: bytes=\(8, 4\): expected 0 <= first <= last"),
        (lambda: Case(Tree(), fewer_than="x"), "Case: fewer_than='x': expected 'members'"),
        (lambda: Schedule(Case(Tree())), "Schedule: cases=Case.*: expected a tuple of Case"),
        (lambda: Schedule(()), r"Schedule: cases=\(\): expected at least one Case"),
        (lambda: Schedule((Case(Tree()),), hops="bf16"), "Schedule: hops='bf16': expected 'def"),
    ],
)
def test_what_is_no_schedule_is_refused_when_it_is_made(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_integers_of_numpy_are_integers() -> None:
    case = Case(Walk(np.int64(1), np.int8(-1), Segments(np.int64(8))), members=(np.int64(2), None))
    assert case == Case(Walk(1, -1, Segments(8)), members=(2, None))
    assert type(case.members[0]) is int
