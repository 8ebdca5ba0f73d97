"""Collectives that select replicas, bad arguments and empty values."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim import collectives
from gpusim.errors import GpusimError, ReplicaError, ReplicaIndexError
from gpusim.groups import Groups
from tests.collectives.forms import (
    FORMS,
    every_replica,
    programs,
    property_test,
)

# pargmax, pargmin, pgather, axis_index


@property_test
@given(programs([None]), st.sampled_from(["pargmax", "pargmin"]))
def test_pargmax_is_the_first_replica_that_holds_the_extreme(program, name):
    x, form, batch_ndim, _ = program
    x = x.real
    expected = (np.argmax if name == "pargmax" else np.argmin)(x, axis=0).astype(np.int32)
    value, mapped = getattr(collectives, name)(FORMS[form](x), batch_ndim=batch_ndim)
    np.testing.assert_array_equal(value, expected, strict=True)
    assert not mapped


@pytest.mark.parametrize("form", ["stacked", "list"])
def test_the_first_nan_is_the_extreme_and_zero_holds_minus_zero(form):
    x = np.array([[-0.0, np.nan, 1.0, np.nan], [0.0, 2.0, np.nan, np.nan]])
    assert collectives.pargmax(FORMS[form](x)).value.tolist() == [0, 0, 1, 0]
    assert collectives.pargmin(FORMS[form](x)).value.tolist() == [0, 0, 1, 0]


def test_of_one_value_for_all_replica_zero_is_the_first_to_hold_it():
    assert collectives.pargmax(np.broadcast_to([1.0, 2.0], (5, 2))).value.tolist() == [0, 0]


@property_test
@given(programs([None]), st.lists(st.integers(0, 3), max_size=2), st.booleans(), st.data())
def test_pgather_indexes_into_the_replicas(program, index_shape, mapped, data):
    x, form, batch_ndim, _ = program
    batch = x.shape[1 : 1 + batch_ndim]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    idx = rng.integers(0, 6, (6 if mapped else 1, *batch, *index_shape))
    idx = idx if mapped else np.broadcast_to(idx[0], (6, *batch, *index_shape))
    index_form = data.draw(st.sampled_from(["stacked", "list"]))
    given_idx = idx if index_form == "stacked" else (list(idx) if mapped else [idx[0]] * 6)
    result = collectives.pgather(FORMS[form](x), given_idx, batch_ndim=batch_ndim)
    assert result.mapped == mapped or not idx.size  # empty ones do not differ
    for r, value in enumerate(every_replica(result, 6)):
        for b in np.ndindex(*batch):
            for k in np.ndindex(*index_shape):
                np.testing.assert_array_equal(value[b + k], x[(idx[(r, *b, *k)], *b)])
        assert value.shape == (*batch, *index_shape, *x.shape[1 + batch_ndim :])


@pytest.mark.parametrize(
    ("idx", "error", "message"),
    [
        ([0, 4], ReplicaIndexError, "from 0 to 3, got 4"),
        ([-1, 0], ReplicaIndexError, "from 0 to 3, got -1"),
        ([0.0], TypeError, "idx must be integers, got float64"),
        ([True], TypeError, "idx must be integers, got bool"),
    ],
)
def test_pgathers_indices_are_replica_numbers(idx, error, message):
    with pytest.raises(error, match=message):
        collectives.pgather(np.arange(4), np.broadcast_to(idx, (4, len(idx))))
    with pytest.raises(error, match=message):
        collectives.pgather(np.arange(4), [np.array(idx)] * 4)


def test_scalars_come_out_as_arrays():
    x, index = np.arange(4.0), np.broadcast_to(2, (4,))
    same = np.broadcast_to(1.0, (4,))
    for value in (
        collectives.psum(x).value,
        collectives.pmax(same).value,
        collectives.pargmax(same).value,
        collectives.pbroadcast(x, 1).value,
        collectives.pshuffle(same, range(4)).value,
        collectives.pgather(x, index).value,
        collectives.pgather(list(x), index).value,
        collectives.pmean(np.arange(4)).value,
        *collectives.pmean([1, 2], groups=[[0], [1]]).value,
        *collectives.psum([1, 2], groups=[[0], [1]]).value,
        *collectives.psum_scatter([np.arange(2.0)] * 2).value,
        *collectives.psum_scatter([np.arange(1.0)] * 2, groups=[[0], [1]]).value,
        *collectives.pgather([1, 2], [0, 1]).value,
        *collectives.ppermute(list(x), [(0, 1)]).value,
    ):
        assert type(value) is np.ndarray and value.shape == ()


@pytest.mark.parametrize("form", ["stacked", "list"])
def test_pgather_of_one_index_is_a_read_only_view(form):
    x = np.arange(12.0).reshape(4, 3)
    value, mapped = collectives.pgather(FORMS[form](x), np.broadcast_to(2, (4,)))
    assert np.shares_memory(value, x) and not value.flags.writeable and not mapped
    assert value.tolist() == [6.0, 7.0, 8.0]


def test_pgathers_operands_have_the_same_replicas():
    with pytest.raises(ValueError, match=r"axes \(4,\), idx has \(3,\)"):
        collectives.pgather(np.arange(4), np.zeros((3, 2), int))


def test_axis_index_is_int32():
    value, mapped = collectives.axis_index(5)
    assert value.tolist() == [0, 1, 2, 3, 4] and value.dtype == np.int32 and mapped


# What is refused


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: collectives.all_gather(x, axis=3), np.exceptions.AxisError, "axis: axis 3"),
        (lambda x: collectives.all_gather(x, axis=-4), np.exceptions.AxisError, "axis: axis -4"),
        (lambda x: collectives.all_gather(x, axis=2, tiled=True), np.exceptions.AxisError, "2 is"),
        (lambda x: collectives.all_gather(x, axis=0.0), TypeError, "axis must be an integer"),
        (
            lambda x: collectives.psum_scatter(x, scatter_dimension=2),
            np.exceptions.AxisError,
            "scatter_dimension: axis 2",
        ),
        (
            lambda x: collectives.psum_scatter(x),
            ValueError,
            r"needs 4 elements, .* scatter_dimension 0, got shape \(2, 6\)",
        ),
        (
            lambda x: collectives.psum_scatter(x, scatter_dimension=1, tiled=True),
            ValueError,
            r"needs a multiple of 4 elements.* got shape \(2, 6\)",
        ),
        (
            lambda x: collectives.psum_scatter(x, groups=[[0], [1, 2, 3]]),
            ValueError,
            r"same size here, got sizes \[1, 3\]",
        ),
        (
            lambda x: collectives.psum_scatter(x, groups=Groups([[0], [1, 2, 3]])),
            ValueError,
            r"psum_scatter needs groups of one size, got sizes \[1, 3\]",
        ),
        (lambda x: collectives.psum(x, groups=Groups.all(6)), ValueError, "6 replicas, got 4"),
        (lambda x: collectives.psum(x, groups=[[0, 1], [1, 2]]), ValueError, "more than once"),
        (lambda x: collectives.psum(x, groups=[0, 1, 2, 3]), TypeError, "list of lists"),
        (lambda x: collectives.all_to_all(x, 0, 0), ValueError, "needs 4 elements.* split_axis 0"),
        (
            lambda x: collectives.all_to_all(x, 1, 0, tiled=True),
            ValueError,
            r"all_to_all \(tiled=True\) needs a multiple of 4",
        ),
        (lambda x: collectives.all_to_all(x, 2, 0), np.exceptions.AxisError, "split_axis: axis 2"),
        (lambda x: collectives.all_to_all(x, 0, 2), np.exceptions.AxisError, "concat_axis"),
        (lambda x: collectives.all_to_all(x, 0.0, 0), TypeError, "split_axis must be an integer"),
        (lambda x: collectives.all_to_all(x, 0, "0"), TypeError, "concat_axis must be an integer"),
        (lambda x: collectives.pswapaxes(x, 1), ValueError, "pswapaxes .* needs 4 elements"),
        (lambda x: collectives.psum(x, batch_ndim=3), ValueError, "batch_ndim must be 0 to 2"),
        (lambda x: collectives.psum(x, batch_ndim=-1), ValueError, "batch_ndim must be 0 to 2"),
        (lambda x: collectives.psum(x[:0]), ValueError, "at least one replica"),
    ],
)
@pytest.mark.parametrize("form", ["stacked", "list"])
def test_bad_arguments_are_errors_with_the_numbers_and_change_nothing(call, error, message, form):
    x = np.arange(48.0).reshape(4, 2, 6)
    with pytest.raises(error, match=message):
        call(FORMS[form](x))
    np.testing.assert_array_equal(x, np.arange(48.0).reshape(4, 2, 6))


def test_scalars_have_no_axis_to_split():
    for call in (
        collectives.psum_scatter,
        lambda x: collectives.all_to_all(x, 0, 0),
        lambda x: collectives.all_gather(x, tiled=True),
    ):
        with pytest.raises(np.exceptions.AxisError):
            call(np.arange(4.0))


def test_a_stacked_array_has_replicas():
    with pytest.raises(ValueError, match=r"\(replicas, ...\).* got shape \(\)"):
        collectives.psum(np.float64(3))


@pytest.mark.parametrize("odd", [np.zeros(3), np.zeros(2, np.float32)])
def test_a_lists_arrays_must_be_alike(odd):
    with pytest.raises(ValueError, match=r"float64\[2\] on replica 0 and .* on replica 2"):
        collectives.psum([np.zeros(2), np.zeros(2), odd])


def test_lists_of_python_numbers_are_values_too():
    assert collectives.psum([1, 2, 3]).value == 6
    assert [int(v) for v in collectives.ppermute([1, 2, 3], [(0, 1)]).value] == [0, 1, 0]


# Empty values


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize(("shape", "batch_ndim"), [((4, 0), 0), ((4, 0, 3), 1), ((4, 2, 4, 0), 1)])
@pytest.mark.parametrize("groups", [None, [[0, 2], [1, 3]]], ids=["all", "groups"])
def test_empty_values_and_empty_batches_keep_their_shapes(form, shape, batch_ndim, groups):
    x = FORMS[form](np.zeros(shape))
    inner = shape[1:]
    calls = [collectives.psum, collectives.pmean, collectives.pmax]
    for call in calls:
        result = call(x, groups=groups, batch_ndim=batch_ndim)
        assert every_replica(result, 4).shape == shape
    gathered = collectives.all_gather(x, groups=groups, batch_ndim=batch_ndim)
    count = 4 if groups is None else 2
    assert every_replica(gathered, 4).shape == (4, *inner[:batch_ndim], count, *inner[batch_ndim:])
    tiled = collectives.psum_scatter(
        np.zeros((4, *inner[:batch_ndim], 0)), tiled=True, groups=groups, batch_ndim=batch_ndim
    )
    assert tiled.value.shape == (4, *inner[:batch_ndim], 0)


def test_replica_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ReplicaError(3, "replica 3 failed")))
    assert isinstance(error, GpusimError) and error.index == 3 and str(error) == "replica 3 failed"


def test_linear_collectives_look_like_the_functions_they_are():
    assert "sum over the replicas" in (collectives.psum.__doc__ or "")
    assert collectives.psum.__name__ == "psum" and "psum" in repr(collectives.psum)
