"""Partitions of replicas: each notation, its errors, and the properties of groups."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.groups import CommGroupType, Groups


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def strided(draw: st.DrawFn) -> tuple[int, int, int]:
    size = draw(st.integers(1, 48))
    stride = draw(st.sampled_from(divisors(size)))
    return size, stride, draw(st.sampled_from(divisors(size // stride)))


@st.composite
def partitions(draw: st.DrawFn, *, uneven: bool = True) -> list[list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    if not uneven:
        sizes = [sizes[0]] * len(sizes)
    order = draw(st.permutations(range(sum(sizes))))
    ends = np.cumsum(sizes)
    return [list(order[end - n : end]) for end, n in zip(ends, sizes, strict=True)]


# Strides


@pytest.mark.parametrize(
    ("size", "stride", "group_size", "assignment"),
    [
        (8, 1, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (8, 1, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (8, 2, 4, [0, 1, 0, 1, 0, 1, 0, 1]),
        (8, 4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
        (8, 2, 2, [0, 1, 0, 1, 2, 3, 2, 3]),
        (8, 1, None, [0] * 8),
        (8, 2, None, [0, 1] * 4),
        (7, 1, 1, list(range(7))),
        (1, 1, None, [0]),
    ],
)
def test_stride_and_size_give_the_assignment_of_popxl(size, stride, group_size, assignment):
    groups = Groups.from_stride(size, stride, group_size)
    assert groups.assignment == tuple(assignment)
    assert groups == Groups.from_assignment(assignment)


def test_groups_of_one_replica_have_stride_one():
    assert Groups.from_stride(8, 4, 1).stride == 1
    assert Groups.from_stride(8, 8).members == tuple((r,) for r in range(8))


@given(strided())
def test_members_lie_one_stride_apart_and_groups_are_numbered_by_appearance(numbers):
    size, stride, group_size = numbers
    groups = Groups.from_stride(size, stride, group_size)
    assert groups.strided and groups.stride == (stride if group_size > 1 else 1)
    steps = {b - a for group in groups.members for a, b in pairwise(group)}
    assert steps <= {groups.stride}
    assert [group[0] for group in groups.members] == sorted(group[0] for group in groups.members)
    assert groups == Groups.from_assignment(groups.assignment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3), "stride 3 for 8 replicas"),
        ((8, 0), "stride 0 for 8 replicas"),
        ((8, 16), "stride 16 for 8 replicas"),
        ((8, -2), "stride -2 for 8 replicas"),
        ((8, 1, 3), "group_size 3 for 8 replicas"),
        ((8, 1, 0), "group_size 0 for 8 replicas"),
        ((8, 4, 4), "4 \\* 4 = 16 for 8 replicas"),
        ((0, 1), "at least 1, got 0"),
    ],
)
def test_strides_that_do_not_divide_the_replicas_are_errors_with_the_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        Groups.from_stride(*arguments)


# Assignments


def test_an_assignment_need_not_have_a_constant_stride():
    groups = Groups.from_assignment([0, 1, 0, 0, 1, 1])
    assert groups.members == ((0, 2, 3), (1, 4, 5))
    assert groups.stride is None and not groups.strided


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ([0, 0, 1], r"\{0: 2, 1: 1\}"),
        ([0, 2, 0, 2], r"\[0, 2\]"),
        ([1, 0, 1, 0], r"\[1, 0\]"),
        ([1, 1], r"\[1\]"),
        ([-1, -1], r"\[-1\]"),
        ([], "at least 1, got 0"),
    ],
)
def test_assignments_must_be_even_and_numbered_by_first_appearance(assignment, message):
    with pytest.raises(ValueError, match=message):
        Groups.from_assignment(assignment)


# axis_index_groups


@given(partitions(uneven=False))
def test_axis_index_groups_keep_their_order_and_their_members_order(lists):
    size = sum(map(len, lists))
    groups = Groups.from_axis_index_groups(lists, size)
    assert groups.members == tuple(map(tuple, lists))
    assert all(replica in lists[g] for replica, g in enumerate(groups.assignment))
    assert groups.matrix.tolist() == lists
    assert groups.size == size and groups.group_count == len(lists)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 1]], r"0\.\.3 exactly once; missing: \[2, 3\]"),
        ([[0, 1], [1, 2, 3]], r"more than once: \[1\]"),
        ([[0, 1], [2, 4]], r"missing: \[3\]; out of range: \[4\]"),
        ([[0, -1], [2, 3]], r"missing: \[1\]; out of range: \[-1\]"),
        ([[0, 1, 2, 3], []], r"empty: \[1\]"),
        ([], "at least one group"),
    ],
)
def test_groups_that_are_no_partition_are_errors_with_the_numbers(lists, message):
    with pytest.raises(ValueError, match=message):
        Groups.from_axis_index_groups(lists, 4, uneven=True)


def test_long_lists_of_faults_are_cut_short():
    with pytest.raises(ValueError, match="and 4087 more"):
        Groups.from_axis_index_groups([[0]], 4096)


@pytest.mark.parametrize("lists", [[0, 1], [[0.0, 1]], [["a"]], 3, None, "01"])
def test_groups_that_are_not_lists_of_integers_are_type_errors(lists):
    with pytest.raises(TypeError, match="axis_index_groups must be a list of lists of integers"):
        Groups.from_axis_index_groups(lists, 2)


def test_uneven_groups_are_an_error_unless_allowed():
    with pytest.raises(ValueError, match=r"sizes \[1, 3\]"):
        Groups.from_axis_index_groups([[0], [1, 2, 3]], 4)
    groups = Groups.from_axis_index_groups([[0], [1, 2, 3]], 4, uneven=True)
    assert not groups.even and groups.group_sizes == (1, 3) and groups.stride is None
    for of_even_groups in (
        lambda: groups.group_size,
        lambda: groups.matrix,
        groups.transpose,
    ):
        with pytest.raises(ValueError, match=r"differ in size: \[1, 3\]"):
            of_even_groups()


# CommGroupType


def test_comm_group_types_have_poptorchs_numbers():
    assert [(kind.name, kind.value) for kind in CommGroupType] == [
        ("All", 0),
        ("Consecutive", 1),
        ("Orthogonal", 2),
        ("NoGrouping", 3),
    ]


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (CommGroupType.All, ((0, 1, 2, 3, 4, 5),)),
        (CommGroupType.Consecutive, ((0, 1, 2), (3, 4, 5))),
        (CommGroupType.Orthogonal, ((0, 2, 4), (1, 3, 5))),
        (CommGroupType.NoGrouping, ((0,), (1,), (2,), (3,), (4,), (5,))),
    ],
)
def test_comm_groups_of_three_among_six(kind, members):
    assert Groups.from_comm_group(kind, 6, group_size=3).members == members


@pytest.mark.parametrize("kind", [CommGroupType.Consecutive, CommGroupType.Orthogonal])
@pytest.mark.parametrize(
    ("group_size", "message"),
    [(None, "needs a group_size"), (4, "group_size 4 for 6"), (0, "group_size 0"), (7, "7 for 6")],
)
def test_comm_groups_need_a_size_that_divides_the_replicas(kind, group_size, message):
    with pytest.raises(ValueError, match=message):
        Groups.from_comm_group(kind, 6, group_size)


def test_an_unknown_comm_group_type_is_a_value_error():
    with pytest.raises(ValueError, match="7 is not a valid CommGroupType"):
        Groups.from_comm_group(7, 6, 3)


# What all groups do


def test_the_transpose_groups_equal_positions():
    assert Groups.from_stride(8, 1, 2).transpose() == Groups.from_stride(8, 2, 4)
    assert Groups.all(4).transpose() == Groups.from_stride(4, 1, 1)
    assert Groups([[3, 1], [0, 2]]).transpose().members == ((3, 0), (1, 2))


@given(partitions(uneven=False))
def test_transposing_twice_is_the_original(lists):
    groups = Groups(lists)
    assert groups.transpose().transpose() == groups


@given(partitions())
def test_groups_are_values(lists):
    groups, equal = Groups(lists), Groups(tuple(map(tuple, lists)))
    assert groups == equal and hash(groups) == hash(equal)
    assert pickle.loads(pickle.dumps(groups)) == groups
    assert eval(repr(groups)) == groups
    assert (groups == Groups([*lists, [groups.size]])) is False


def test_groups_do_not_change():
    groups = Groups.from_stride(4, 1, 2)
    with pytest.raises(AttributeError):
        groups.members = ()
    with pytest.raises(ValueError, match="read-only"):
        groups.matrix[0, 0] = 3


def test_the_order_of_groups_and_of_members_counts():
    assert Groups([[0, 1], [2, 3]]) != Groups([[2, 3], [0, 1]])
    assert Groups([[0, 1], [2, 3]]) != Groups([[1, 0], [2, 3]])


def test_one_group_of_all_replicas_is_made_once() -> None:
    assert Groups.all(300) is Groups.all(np.int64(300))


def test_groups_are_read_anew_though_their_check_is_cached() -> None:
    lists = [[0, 1], [2, 3]]
    first = Groups.from_axis_index_groups(lists, 4)
    assert Groups.from_axis_index_groups([np.array([0, 1]), (2, 3)], 4) is first
    lists[0].reverse()
    assert Groups.from_axis_index_groups(lists, 4).members == ((1, 0), (2, 3))
    lists[0][0] = 3
    for _ in range(2):  # a refusal is not cached
        with pytest.raises(ValueError, match="exactly once"):
            Groups.from_axis_index_groups(lists, 4)
    with pytest.raises(ValueError, match=r"0\.\.7 exactly once"):
        Groups.from_axis_index_groups([[0, 1], [2, 3]], 8)
    with pytest.raises(TypeError, match="list of lists of integers"):
        Groups.from_axis_index_groups([[0.0, 1.0], [2.0, 3.0]], 4)  # equal to the cached ones
    with pytest.raises(ValueError, match="same size"):
        Groups.from_axis_index_groups([[0], [1, 2, 3]], 4)
    assert Groups.from_axis_index_groups([[0], [1, 2, 3]], 4, uneven=True).group_sizes == (1, 3)
    with pytest.raises(ValueError, match="same size"):
        Groups.from_axis_index_groups([[0], [1, 2, 3]], 4)
