"""Collectives on stacked arrays and lists, against plain Python that loops over the replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim import collectives
from gpusim.collectives import Result
from gpusim.errors import ReplicaIndexError
from gpusim.fallback import fold
from gpusim.reduction import Reduction
from gpusim.reduction import reduction as reducing
from tests.collectives.forms import (
    EVEN,
    FORMS,
    Array,
    every_replica,
    programs,
    property_test,
)

UNEVEN = [[[0], [1, 2, 3, 4, 5]], [[5, 1, 0], [2, 4], [3]]]


def by_entry(reference: Callable[[list[Array]], list[Array]], x: Array, batch_ndim: int) -> Array:
    """A reference for R values, applied to each batch entry of (R, *batch, *s)."""
    batch = x.shape[1 : 1 + batch_ndim]
    entries = [reference([x[(r, *b)] for r in range(len(x))]) for b in np.ndindex(*batch)]
    stacked = np.stack([np.stack(entry) for entry in entries], axis=1)
    return stacked.reshape(len(x), *batch, *stacked.shape[2:])


def group_of(replica: int, groups: list[list[int]] | None, size: int) -> list[int]:
    return next(g for g in groups or [list(range(size))] if replica in g)


def agree(call: Callable[..., Result], reference, x: Array, form: str, batch_ndim: int) -> Result:
    given_in = FORMS[form](x)
    before = x.copy()
    result = call(given_in, batch_ndim=batch_ndim)
    actual, expected = every_replica(result, len(x)), by_entry(reference, x, batch_ndim)
    np.testing.assert_array_equal(actual, expected, strict=True)
    np.testing.assert_array_equal(np.stack(list(given_in)), before)
    assert isinstance(result.value, list) == (isinstance(given_in, list) and result.mapped)
    return result


# Folds


@property_test
@given(programs(EVEN + UNEVEN))
def test_psum_is_the_sum_over_each_replicas_group(program):
    x, form, batch_ndim, groups = program

    def reference(values):
        return [reduce(operator.add, [values[m] for m in group_of(r, groups, 6)]) for r in range(6)]

    result = agree(
        lambda v, **k: collectives.psum(v, groups=groups, **k), reference, x, form, batch_ndim
    )
    assert result.mapped == (groups is not None)


@property_test
@given(programs(EVEN + UNEVEN), st.sampled_from(["pmax", "pmin"]))
def test_pmax_and_pmin_are_the_extremes_of_each_replicas_group(program, name):
    x, form, batch_ndim, groups = program
    x = x.real
    extreme = np.maximum if name == "pmax" else np.minimum

    def reference(values):
        return [reduce(extreme, [values[m] for m in group_of(r, groups, 6)]) for r in range(6)]

    call = getattr(collectives, name)
    agree(lambda v, **k: call(v, groups=groups, **k), reference, x, form, batch_ndim)


@property_test
@given(programs(EVEN + UNEVEN))
def test_pmean_divides_by_the_size_of_each_replicas_own_group(program):
    x, form, batch_ndim, groups = program
    x = x.real.astype(np.float64)

    def reference(values):
        of = [group_of(r, groups, 6) for r in range(6)]
        return [reduce(operator.add, [values[m] for m in g]) / len(g) for g in of]

    agree(lambda v, **k: collectives.pmean(v, groups=groups, **k), reference, x, form, batch_ndim)


@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize("form", ["stacked", "list"])
def test_odd_numbers_of_replicas_sum(size, form):
    x = np.arange(float(size * 4)).reshape(size, 4)
    result = collectives.psum(FORMS[form](x))
    np.testing.assert_array_equal(result.value, x.sum(axis=0))
    assert not result.mapped


DTYPES_OF_SUMS = {
    np.bool_: (np.int32, np.float32),
    np.int8: (np.int8, np.float32),
    np.int16: (np.int16, np.float32),
    np.int32: (np.int32, np.float32),
    np.int64: (np.int64, np.float64),
    np.uint8: (np.uint8, np.float32),
    np.uint16: (np.uint16, np.float32),
    np.uint32: (np.uint32, np.float32),
    np.uint64: (np.uint64, np.float64),
    np.float16: (np.float16, np.float16),
    ml_dtypes.bfloat16: (ml_dtypes.bfloat16,) * 2,
    ml_dtypes.float8_e4m3fn: (ml_dtypes.float8_e4m3fn,) * 2,
    ml_dtypes.float8_e5m2: (ml_dtypes.float8_e5m2,) * 2,
    np.float32: (np.float32, np.float32),
    np.float64: (np.float64, np.float64),
    np.complex64: (np.complex64, np.complex64),
    np.complex128: (np.complex128, np.complex128),
}


@pytest.mark.parametrize("dtype", DTYPES_OF_SUMS, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]], ids=["all", "groups"])
def test_sums_and_means_have_jaxs_dtypes(dtype, form, groups):
    x = FORMS[form](np.array([1, 1, 0, 1]).astype(dtype))
    total, mean = (f(x, groups=groups) for f in (collectives.psum, collectives.pmean))
    sums, means = ([3] * 4, [0.75] * 4) if groups is None else ([2, 2, 1, 1], [1, 1, 0.5, 0.5])
    assert every_replica(total, 4).dtype == DTYPES_OF_SUMS[dtype][0]
    assert every_replica(mean, 4).dtype == DTYPES_OF_SUMS[dtype][1]
    assert every_replica(total, 4).astype(complex).tolist() == sums
    assert every_replica(mean, 4).astype(complex).tolist() == means


def test_integers_wrap_before_the_mean_divides():
    assert collectives.pmean(np.full(4, 100, np.int8)).value == -28.0


def test_pmax_of_bool_is_any_and_pmin_is_all():
    x = np.array([[True, False, True], [False, False, True]])
    assert collectives.pmax(x).value.tolist() == [True, False, True]
    assert collectives.pmin(x).value.tolist() == [False, False, True]
    assert collectives.pmax(x).value.dtype == np.bool_


@pytest.mark.parametrize("name", ["pmax", "pmin", "pargmax", "pargmin"])
@pytest.mark.parametrize("same", [True, False])
def test_complex_numbers_have_no_extremes(name, same):
    x = np.broadcast_to(np.complex64(1), (3,)) if same else np.arange(3, dtype=np.complex64)
    with pytest.raises(TypeError, match=f"{name}: complex numbers have no order, got complex64"):
        getattr(collectives, name)(x)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [10, 7]),
        ("prod", [24, 0]),
        ("max", [4, 5]),
        ("min", [1, 0]),
        ("logical_and", [1, 0]),
        ("logical_or", [1, 1]),
    ],
)
def test_all_reduce_takes_every_operator(op, expected):
    x = np.array([[1, 0], [2, 0], [3, 5], [4, 2]])
    assert collectives.all_reduce(x, reduction=Reduction(op=op)).value.tolist() == expected
    grouped = collectives.all_reduce(x, reduction=Reduction(op=op), groups=[[3, 2], [1, 0]])
    alone = collectives.all_reduce(x[:2], reduction=Reduction(op=op)).value
    np.testing.assert_array_equal(grouped.value[:2], [alone, alone])


def test_bool_is_multiplied_as_int32():
    result = collectives.all_reduce(np.array([True, True]), reduction=Reduction(op="prod"))
    assert result.value == 1 and result.value.dtype == np.int32


@pytest.mark.parametrize("name", ["psum", "pmean", "psum_scatter"])
def test_sums_refuse_reductions_of_other_operators(name):
    with pytest.raises(ValueError, match=f"{name} needs a Reduction with op='sum', got op='max'"):
        getattr(collectives, name)(np.ones((2, 2)), reduction=Reduction(op="max"))
    with pytest.raises(TypeError, match=f"{name}: reduction: expected a gpusim.Reduction"):
        getattr(collectives, name)(np.ones((2, 2)), reduction=3)
    with pytest.raises(ValueError, match=f"{name}: reduction='rang': .* did you mean 'ring'"):
        getattr(collectives, name)(np.ones((2, 2)), reduction="rang")


# The reduction reaches the kernel


ROUGH = (np.random.default_rng(0).standard_normal((6, 3, 12)) * 7).astype(np.float16)


@pytest.mark.parametrize("order", ["linear", "reverse", "tree", "ring"])
@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("groups", EVEN + UNEVEN, ids=str)
def test_groups_are_folded_in_their_own_order(order, form, groups):
    result = collectives.psum(FORMS[form](ROUGH), groups=groups, reduction=Reduction(order=order))
    for replica, value in enumerate(every_replica(result, 6)):
        members = [ROUGH[m] for m in group_of(replica, groups, 6)]
        np.testing.assert_array_equal(value, fold(members, order=order))


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("groups", [None, [[4, 1, 0], [2, 5, 3]]], ids=["all", "groups"])
def test_in_ring_order_psum_scatters_slice_b_starts_at_member_b(form, tiled, groups):
    count = 6 if groups is None else 3
    x = ROUGH.reshape(6, 3, 2, 6)[..., :count] if not tiled else ROUGH
    result = collectives.psum_scatter(
        FORMS[form](x),
        scatter_dimension=-1,
        tiled=tiled,
        groups=groups,
        reduction=Reduction(order="ring"),
    )
    for replica, value in enumerate(every_replica(result, 6)):
        members = group_of(replica, groups, 6)
        b = members.index(replica)
        around = members[b:] + members[:b]
        slices = np.split(x, count, axis=-1)[b]
        expected = fold([slices[m] for m in around])
        np.testing.assert_array_equal(value, expected if tiled else expected[..., 0])


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("groups", EVEN + UNEVEN, ids=str)
def test_random_numbers_are_drawn_at_place_times_groups_plus_group(form, groups):
    reduction = Reduction(rounding="stochastic", seed=5)
    result = collectives.psum(
        FORMS[form](ROUGH), groups=groups, reduction=reduction, batch_ndim=1, call=9
    )
    for replica, value in enumerate(every_replica(result, 6)):
        members = group_of(replica, groups, 6)
        count, g = (1, 0) if groups is None else (len(groups), groups.index(members))
        for place in range(3):
            expected = fold(
                [ROUGH[m, place] for m in members],
                rounding="stochastic",
                seed=5,
                call=9,
                places=place * count + g,
            )
            np.testing.assert_array_equal(value[place], expected)


def test_places_can_be_those_of_a_larger_map():
    reduction = Reduction(rounding="stochastic", seed=5)
    whole = collectives.psum(ROUGH, reduction=reduction, batch_ndim=1).value
    part = collectives.psum(ROUGH[:, 1:], reduction=reduction, batch_ndim=1, places=[1, 2]).value
    np.testing.assert_array_equal(part, whole[1:])


def test_without_a_reduction_the_surrounding_context_says_it_and_counts():
    stochastic = Reduction(rounding="stochastic", seed=1)
    with reducing(stochastic) as state:
        first, second = collectives.psum(ROUGH).value, collectives.pmean(ROUGH).value
        collectives.psum_scatter(ROUGH[..., :6], scatter_dimension=1)
        collectives.psum(ROUGH, reduction=stochastic)  # one given is none of the context's
        assert state.calls == 3
    again = [collectives.psum(ROUGH, reduction=stochastic, call=call).value for call in (0, 1)]
    np.testing.assert_array_equal(first, again[0])
    assert (first != again[1]).any()
    mean = collectives.pmean(ROUGH, reduction=stochastic, call=1).value
    np.testing.assert_array_equal(second, mean)


def test_a_call_that_fails_is_not_counted():
    with reducing() as state:
        with pytest.raises(ValueError, match="exactly once"):
            collectives.psum(ROUGH, groups=[[0, 1]])
        assert state.calls == 0


# psum_scatter


@property_test
@given(programs(min_ndim=1), st.data())
def test_psum_scatter_is_a_slice_of_the_sum(program, data):
    x, form, batch_ndim, groups = program
    count = 6 if groups is None else len(groups[0])
    ndim = x.ndim - 1 - batch_ndim
    axis, tiled = data.draw(st.integers(-ndim, ndim - 1)), data.draw(st.booleans())
    at = axis % ndim + 1 + batch_ndim
    x = (
        np.concatenate([x] * count, axis=at)
        if tiled
        else np.resize(x, (*x.shape[:at], count, *x.shape[at + 1 :]))
    )

    def reference(values):
        out = []
        for r in range(6):
            members = group_of(r, groups, 6)
            total = reduce(operator.add, [values[m] for m in members])
            piece = np.split(total, count, axis=axis)[members.index(r)]
            out.append(piece if tiled else piece.squeeze(axis))
        return out

    def call(v, **k):
        return collectives.psum_scatter(v, scatter_dimension=axis, tiled=tiled, groups=groups, **k)

    assert agree(call, reference, x, form, batch_ndim).mapped


def test_psum_scatter_of_bool_is_jaxs_type_error():
    with pytest.raises(TypeError, match="psum_scatter: bool cannot be added"):
        collectives.psum_scatter(np.ones((2, 2), bool))


def test_psum_scatter_cuts_one_fold_into_views():
    slices = collectives.psum_scatter(list(np.ones((4, 4, 1000)))).value
    assert all(part.base is not None and part.base is slices[0].base for part in slices)


# all_gather


@property_test
@given(programs(), st.data())
def test_all_gather_stacks_or_concatenates_the_group(program, data):
    x, form, batch_ndim, groups = program
    ndim = x.ndim - 1 - batch_ndim
    tiled = data.draw(st.booleans()) if ndim else False
    axes = ndim if tiled else ndim + 1
    axis = data.draw(st.integers(-axes, axes - 1))
    join = np.concatenate if tiled else np.stack

    def reference(values):
        return [join([values[m] for m in group_of(r, groups, 6)], axis=axis) for r in range(6)]

    def call(v, **k):
        return collectives.all_gather(v, axis=axis, tiled=tiled, groups=groups, **k)

    assert agree(call, reference, x, form, batch_ndim).mapped == (groups is not None)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_all_gather_is_a_read_only_view(axis, batch_ndim):
    x = np.arange(4 * 5 * 2 * 3).reshape((4, 10, 3) if batch_ndim == 0 else (4, 5, 2, 3))
    value = collectives.all_gather(x, axis=axis, batch_ndim=batch_ndim).value
    assert np.shares_memory(value, x) and not value.flags.writeable and x.flags.writeable


def test_tiled_all_gather_on_axis_zero_is_a_view_where_memory_allows():
    x = np.arange(12).reshape(4, 3)
    value = collectives.all_gather(x, tiled=True).value
    assert np.shares_memory(value, x) and not value.flags.writeable
    copied = collectives.all_gather(x, tiled=True, groups=[[1, 0], [2, 3]])
    assert not np.shares_memory(copied.value, x)


# all_to_all


@property_test
@given(programs(min_ndim=1), st.data())
def test_all_to_all_sends_piece_p_to_the_member_at_position_p(program, data):
    x, form, batch_ndim, groups = program
    count = 6 if groups is None else len(groups[0])
    ndim = x.ndim - 1 - batch_ndim
    split, concat = (data.draw(st.integers(-ndim, ndim - 1)) for _ in range(2))
    tiled = data.draw(st.booleans())
    at = split % ndim + 1 + batch_ndim
    x = (
        np.concatenate([x] * count, axis=at)
        if tiled
        else np.resize(x, (*x.shape[:at], count, *x.shape[at + 1 :]))
    )

    def reference(values):
        out = []
        for r in range(6):
            members = group_of(r, groups, 6)
            p = members.index(r)
            pieces = [np.split(values[m], count, axis=split)[p] for m in members]
            if tiled:
                out.append(np.concatenate(pieces, axis=concat))
            else:
                out.append(np.stack([piece.squeeze(split) for piece in pieces], axis=concat))
        return out

    def call(v, **k):
        return collectives.all_to_all(v, split, concat, tiled=tiled, groups=groups, **k)

    assert agree(call, reference, x, form, batch_ndim).mapped


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("groups", [None, [[1, 0], [3, 2]]], ids=["all", "groups"])
def test_pswapaxes_is_all_to_all_on_one_axis(form, groups):
    count = 4 if groups is None else 2
    x = FORMS[form](np.arange(4 * 3 * count).reshape(4, 3, count))
    swapped = collectives.pswapaxes(x, 1, groups=groups)
    same = collectives.all_to_all(x, 1, 1, groups=groups)
    np.testing.assert_array_equal(np.stack(swapped.value), np.stack(same.value))


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (2, -1), (-1, 0)])
def test_all_to_all_is_a_read_only_view(split, concat):
    x = np.arange(3**4).reshape(3, 3, 3, 3)
    value = collectives.all_to_all(x, split, concat).value
    assert np.shares_memory(value, x) and not value.flags.writeable and x.flags.writeable


# ppermute, pshuffle, pbroadcast


@property_test
@given(programs([None]), st.data())
def test_ppermute_moves_values_and_leaves_zeros(program, data):
    x, form, batch_ndim, _ = program
    count = data.draw(st.integers(0, 6))
    sources, destinations = (data.draw(st.permutations(range(6)))[:count] for _ in range(2))
    signs = data.draw(st.lists(st.sampled_from([0, 6]), min_size=count, max_size=count))
    perm = [(s - sign, d) for s, d, sign in zip(sources, destinations, signs, strict=True)]

    def reference(values):
        out = [np.zeros_like(values[0]) for _ in range(6)]
        for source, destination in perm:
            out[destination] = values[source]
        return out

    def call(v, **k):
        return collectives.ppermute(v, iter(perm), **k)

    mapped = agree(call, reference, x, form, batch_ndim).mapped
    assert mapped or not x.size  # empty values do not differ between replicas


@property_test
@given(programs([None]), st.permutations(range(6)))
def test_pshuffle_gives_replica_i_the_value_of_perm_i(program, perm):
    x, form, batch_ndim, _ = program
    agree(
        lambda v, **k: collectives.pshuffle(v, perm, **k),
        lambda values: [values[source] for source in perm],
        x,
        form,
        batch_ndim,
    )


@property_test
@given(programs([None]), st.integers(0, 5))
def test_pbroadcast_is_a_read_only_view_of_the_source(program, source):
    x, form, batch_ndim, _ = program
    given_in = FORMS[form](x)
    value, mapped = collectives.pbroadcast(given_in, source, batch_ndim=batch_ndim)
    np.testing.assert_array_equal(value, x[source], strict=True)
    assert not mapped and not value.flags.writeable
    assert np.shares_memory(value, given_in[source]) or not value.size or not value.ndim


def test_pbroadcast_of_scalars_is_a_view_too():
    x = np.arange(3.0)
    value = collectives.pbroadcast(x, 1).value
    assert value.shape == () and np.shares_memory(value, x) and not value.flags.writeable


@pytest.mark.parametrize("perm", [[0, 1, 2], [2, 1, 0]])
def test_permutations_that_are_slices_are_read_only_views(perm):
    x = np.arange(6.0).reshape(3, 2)
    value = collectives.pshuffle(x, perm).value
    assert np.shares_memory(value, x) and not value.flags.writeable
    assert value.tolist() == x[perm].tolist()


def test_a_list_is_permuted_by_reference():
    x = [np.full(3, float(r)) for r in range(4)]
    value = collectives.ppermute(x, [(0, 1), (1, 2)]).value
    assert np.shares_memory(value[1], x[0]) and np.shares_memory(value[2], x[1])
    assert not any(array.flags.writeable for array in value)
    assert all(array.flags.writeable for array in x)


@pytest.mark.parametrize(
    ("perm", "error", "message"),
    [
        ([(0, 1), (0, 2)], ValueError, r"\[0\] are sources more than once in \[\(0, 1\), \(0, 2\)"),
        ([(0, 1), (2, 1)], ValueError, "replica 1 is a destination twice"),
        ([(-1, 0), (3, 1)], ValueError, r"\[3\] are sources more than once"),
        ([(0, 4)], ReplicaIndexError, r"destination of \(0, 4\).* from 0 to 3, got 4"),
        ([(-5, 0)], ReplicaIndexError, r"source of \(-5, 0\).* got -5"),
        ([(0,)], ValueError, r"pairs \(source, destination\), got \(0,\)"),
        ([(0, 1, 2)], ValueError, "pairs"),
        ([0, 1], TypeError, "pairs"),
        ([(0.0, 1)], TypeError, r"source of \(0.0, 1\)"),
        ([("a", 1)], TypeError, "source"),
        (None, TypeError, "iterable"),
    ],
)
@pytest.mark.parametrize("transpose", [False, True])
def test_malformed_permutations_are_errors_of_jaxs_types(perm, error, message, transpose):
    call = collectives.ppermute.transpose if transpose else collectives.ppermute
    with pytest.raises(error, match=message):
        call(np.arange(4.0), perm)


@pytest.mark.parametrize(
    ("perm", "error", "message"),
    [
        ([0, 0, 1, 2], ValueError, r"permutation of the replicas 0..3, got \[0, 0, 1, 2\]"),
        ([0, 1, 2], ValueError, "permutation of the replicas"),
        ([0, 1, 2, 3, 4], ReplicaIndexError, "got 4"),
        ([0, 1, 2, -1], ReplicaIndexError, "got -1"),
        ([0, 1, 2, 3.0], TypeError, "integer"),
    ],
)
def test_pshuffle_wants_a_permutation_of_all_replicas(perm, error, message):
    with pytest.raises(error, match=message):
        collectives.pshuffle(np.arange(4.0), perm)


@pytest.mark.parametrize(
    ("source", "error"),
    [(4, ReplicaIndexError), (-1, ReplicaIndexError), (1.0, TypeError), (None, TypeError)],
)
def test_pbroadcasts_source_is_a_replica(source, error):
    for call in (collectives.pbroadcast, collectives.pbroadcast.transpose):
        with pytest.raises(error, match="pbroadcast: source"):
            call(np.arange(4.0), source)


def test_replica_index_errors_are_jaxs_and_argument_errors():
    assert issubclass(ReplicaIndexError, IndexError) and issubclass(ReplicaIndexError, ValueError)


# Values that are the same on all replicas


UNMAPPED = np.arange(6.0).reshape(2, 3)
SAME = {
    "broadcast": np.broadcast_to(UNMAPPED, (4, 2, 3)),
    "list": [UNMAPPED] * 4,
}
FULL = [(0, 3), (3, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize(
    "call",
    [
        collectives.pmax,
        collectives.pmin,
        lambda x: collectives.pbroadcast(x, 2),
        lambda x: collectives.ppermute(x, FULL),
        lambda x: collectives.ppermute.transpose(x, FULL),
        lambda x: collectives.pshuffle(x, [3, 1, 2, 0]),
    ],
    ids=["pmax", "pmin", "pbroadcast", "ppermute", "ppermute.transpose", "pshuffle"],
)
def test_what_is_the_same_everywhere_is_returned_as_it_is(form, call):
    value, mapped = call(SAME[form])
    assert not mapped and np.shares_memory(value, UNMAPPED) and not value.flags.writeable
    np.testing.assert_array_equal(value, UNMAPPED)


@pytest.mark.parametrize("form", SAME)
def test_all_gather_of_one_value_for_all_is_a_broadcast(form):
    value, mapped = collectives.all_gather(SAME[form], axis=1)
    assert not mapped and np.shares_memory(value, UNMAPPED) and value.shape == (2, 4, 3)
    np.testing.assert_array_equal(value, np.stack([UNMAPPED] * 4, axis=1))


@pytest.mark.parametrize("form", SAME)
def test_psum_adds_one_value_for_all_as_often_as_there_are_replicas(form):
    third = np.float32(1) / np.float32(3)
    x = np.broadcast_to(third, (7,)) if form == "broadcast" else [third] * 7
    value, mapped = collectives.psum(x)
    assert not mapped and value == reduce(operator.add, [third] * 7) != np.float32(7) * third
    np.testing.assert_array_equal(collectives.psum(SAME[form]).value, 4 * UNMAPPED)
    boolean = (
        np.broadcast_to([True, False], (3, 2)) if form == "broadcast" else [np.ones(2, bool)] * 3
    )
    assert collectives.psum(boolean).value[0] == 3


@pytest.mark.parametrize("form", SAME)
def test_other_collectives_map_one_value_for_all(form):
    for result, expected in (
        (collectives.ppermute(SAME[form], [(0, 1)]), [0, 1, 0, 0]),
        (collectives.pmax(SAME[form], groups=[[0, 1], [2, 3]]), [1, 1, 1, 1]),
        (collectives.psum(SAME[form], groups=[[0], [1, 2, 3]]), [1, 3, 3, 3]),
    ):
        assert result.mapped
        for value, times in zip(result.value, expected, strict=True):
            np.testing.assert_array_equal(value, times * UNMAPPED)
    square = np.arange(16.0).reshape(4, 4)
    same = np.broadcast_to(square, (4, 4, 4)) if form == "broadcast" else [square] * 4
    np.testing.assert_array_equal(
        np.stack(collectives.all_to_all(same, 0, 0).value)[1], square[[1] * 4]
    )
    np.testing.assert_array_equal(np.stack(collectives.psum_scatter(same).value), 4 * square)


def test_one_group_of_all_replicas_is_mapped_but_stored_once():
    x = np.arange(8.0).reshape(4, 2)
    for call in (collectives.psum, collectives.pmax, collectives.all_gather):
        value, mapped = call(x, groups=[[2, 0, 1, 3]])
        assert mapped and value.shape[0] == 4 and value.strides[0] == 0
        assert not value.flags.writeable


def test_lists_share_one_read_only_array_per_group():
    x = list(np.arange(8.0).reshape(4, 2))
    for call in (collectives.psum, collectives.pmin, collectives.all_gather):
        value = call(x, groups=[[0, 3], [1, 2]]).value
        assert value[0] is value[3] and value[1] is value[2] and value[0] is not value[1]
        assert not any(array.flags.writeable for array in value)
