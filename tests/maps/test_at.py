"""x.at[index] and gpusim.at(x)[index]: changed copies, as one replica after the other makes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusim
from tests.maps.test_indexing import MAPPED_INDICES, PLAIN_INDICES, equally_true, indexed, places
from tests.oracles.replicated import OVER, Operand, check, normal, sizes_of

ANY_OVER = (*OVER, None)
UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.true_divide,
    "power": np.power,
    "min": np.minimum,
    "max": np.maximum,
}
METHODS = ("set", *UFUNCS)


class Recorded:
    """Notes the index that it is given."""

    def __getitem__(self, index: Any) -> Any:
        return index


@pytest.mark.parametrize("method", METHODS)
def test_plain_arrays_are_changed_as_by_assignment_and_ufunc_at(method):
    rng = np.random.default_rng(0)
    for index in PLAIN_INDICES:
        x = np.abs(rng.standard_normal((3, 5, 4))) + 0.5
        value = np.abs(rng.standard_normal(x[index].shape)) + 0.5
        before, expected = x.copy(), x.copy()
        x.flags.writeable = False
        if method == "set":
            expected[index] = value
        else:
            UFUNCS[method].at(expected, index, value)
        result = getattr(gpusim.at(x)[index], method)(value)
        assert type(result) is np.ndarray and result.flags.writeable
        assert result.tobytes() == expected.tobytes() and x.tobytes() == before.tobytes()
        np.testing.assert_array_equal(gpusim.at(x)[index].get(), x[index])


@pytest.mark.parametrize("index", [0, [0, 0], slice(None)])
def test_results_that_do_not_fit_the_dtype_are_refused_at_any_index(index):
    for x, method in ((np.array([6, 5]), "divide"), (np.array([True, False]), "subtract")):
        with pytest.raises(TypeError):
            getattr(gpusim.at(x)[index], method)(3)
        with pytest.raises(TypeError):
            gpusim.vmap(lambda x, method=method: getattr(x.at[index], method)(3))(x[None])
    with pytest.raises(TypeError, match="same_kind"):
        gpusim.at(np.array([6, 5]))[index].apply(np.sqrt)


@pytest.mark.parametrize("method", METHODS)
def test_repeated_elements_take_the_last_value_or_all_of_them(method):
    x, index, values = np.array([2.0, 3.0, 5.0]), [0, 2, 0, 0], np.array([7.0, 11.0, 0.5, 1.5])
    expected = x.copy()
    for place, value in zip(index, values, strict=True):
        one = value if method == "set" else UFUNCS[method](expected[place], value)
        expected[place] = one
    assert getattr(gpusim.at(x)[index], method)(values).tolist() == expected.tolist()
    mapped = gpusim.vmap(lambda x, i, v: getattr(x.at[i], method)(v))(
        np.stack([x, x]), np.array([index, index[::-1]]), np.stack([values, values[::-1]])
    )
    assert mapped[0].tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_plain_indices_are_changed_as_one_replica_changes_them(method):
    rng = np.random.default_rng(1)
    for index in PLAIN_INDICES:
        shape = np.zeros((3, 5, 4))[index].shape
        for over in OVER:
            x = Operand(np.abs(normal(rng, (3, 5, 4), over).data) + 0.5, over)
            for value in ((*shape,), shape[1:], (*shape[:-1], 1) if shape else ()):
                v = normal(rng, tuple(value), str(rng.choice(OVER)), np.float32)
                check(
                    lambda x, v, index=index: getattr(x.at[index], method)(v),
                    x,
                    Operand(np.abs(v.data), v.over),
                )


@pytest.mark.parametrize("name", MAPPED_INDICES)
def test_mapped_indices_are_changed_as_one_replica_changes_them(name):
    rng = np.random.default_rng(2)
    read = MAPPED_INDICES[name]
    for over in OVER:
        x = Operand(rng.integers(1, 9, (*sizes_of(over), 4, 4, 4)), over)
        for other in ANY_OVER:
            for shape in ((), (3,), (2, 3), (0,)):
                i = Operand(places(rng, shape, other, 3).data % 4, other)
                third = str(rng.choice(OVER))
                method = METHODS[rng.integers(len(METHODS) - 4)]
                check(
                    lambda x, i, v, method=method: getattr(x.at[read(Recorded(), i)], method)(v),
                    x,
                    i,
                    Operand(rng.integers(1, 9, sizes_of(third)), third),
                )


def test_masks_may_differ_where_they_select_equally_many():
    rng = np.random.default_rng(3)
    for over in OVER:
        x = normal(rng, (4, 6), over)
        for other in OVER:
            check(lambda x, m: x.at[m].set(7), x, equally_true(rng, (4, 6), other))
            check(lambda x, m: x.at[:, m].add(x[:, m]), x, equally_true(rng, (6,), other))
            check(lambda x, m: x.at[m, [0, 1]].max([0.1, 0.2]), x, equally_true(rng, (4,), other))
    unequal = Operand(np.array([[True, False, False], [True, True, False]]), "i")
    check(lambda x, m: x.at[m].set(7), normal(rng, (3,), "i"), unequal, batched=False)
    check(lambda x, m: x.at[m].set([7, 8]), normal(rng, (3,), "i"), unequal)


def test_values_take_the_dtype_of_the_array_as_in_assignment():
    x = np.zeros(3, np.int32)
    assert gpusim.at(x)[0].set(1.9).tolist() == [1, 0, 0]
    assert gpusim.at(x)[0].add(np.array(1.9)).tolist() == [1, 0, 0]
    assert gpusim.at(x)[0].add(1.9).dtype == np.int32
    for bad, error in ((1j, TypeError), (2**40, OverflowError), ("a", ValueError)):
        for function in (lambda x, bad=bad: gpusim.at(x)[0].set(bad),):
            with pytest.raises(error):
                function(x)
            with pytest.raises(error):
                gpusim.vmap(function)(np.stack([x, x]))
    half = gpusim.at(np.zeros(2, ml_dtypes.bfloat16))[[0, 0]].add(np.float64(1 / 3))
    assert half.dtype == ml_dtypes.bfloat16 and float(half[0]) == 0.66796875
    with pytest.raises(TypeError):
        gpusim.at(np.ones(2, int))[0].divide(2)
    with pytest.raises(ValueError, match="negative integer powers"):
        gpusim.at(np.ones(2, int))[0].power(-1)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16])
def test_every_dtype_is_changed_as_one_replica_changes_it(dtype):
    rng = np.random.default_rng(4)
    for over, other, third in (("i", "j", ""), ("", "ij", "i"), ("ij", "i", "j")):
        x = Operand(rng.integers(0, 2, (*sizes_of(over), 3, 4)).astype(dtype), over)
        v = Operand(rng.integers(0, 2, (*sizes_of(third), 5)).astype(dtype), third)
        for method in ("set", "add", "multiply", "max"):
            index = places(rng, (5,), other, 4)
            check(lambda x, i, v, method=method: getattr(x.at[1, i], method)(v), x, index, v)


def test_bad_updates_raise_what_numpy_raises_and_change_nothing():
    x, i = np.zeros((2, 3)), np.array([0, 3])
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        gpusim.vmap(lambda x, i: x.at[i].set(1))(x, i)
    with pytest.raises(IndexError, match="index 3 is out of bounds for axis 0 with size 3"):
        gpusim.at(x[0])[[0, 3]].add(1)
    for value in (np.zeros(2), np.zeros((2, 3)), np.zeros((1, 2))):
        with pytest.raises(ValueError, match="broadcast"):
            gpusim.at(x[0])[:].set(value)
        with pytest.raises(ValueError, match="broadcast"):
            gpusim.vmap(lambda x, value=value: x.at[[0, 1, 2]].add(value))(x)
    with pytest.raises(TypeError, match=r"i \+ np\.arange\(n\)"):
        gpusim.vmap(lambda x, i: x.at[i:].set(1))(x, i)
    assert not x.any() and i.tolist() == [0, 3]


def test_surplus_axes_of_length_one_are_dropped_by_set_alone():
    x = normal(np.random.default_rng(5), (3,), "i")
    for other in OVER:
        v = normal(np.random.default_rng(6), (1, 1, 3), other)
        for index in (slice(None), [2, 1, 0]):
            assert check(lambda x, v, index=index: x.at[index].set(v), x, v).error is None
            added = check(lambda x, v, index=index: x.at[index].add(v), x, v)
            assert isinstance(added.error, ValueError)


def test_plain_arrays_become_mapped_by_mapped_indices_and_values():
    table = np.arange(4)
    table.flags.writeable = False

    def f(i, v):
        changed = gpusim.at(table)[i].set(v)
        assert isinstance(changed, gpusim.MappedArray)
        assert isinstance(gpusim.at([1.0, 2, 3, 4])[i].add(v), gpusim.MappedArray)
        return changed, gpusim.at(table)[i].get(), gpusim.at(table)[0].set(9) + i

    changed, got, plain = gpusim.vmap(f)(np.array([0, 3]), np.array([7, 8]))
    assert changed.tolist() == [[7, 1, 2, 3], [0, 1, 2, 8]]
    assert got.tolist() == [0, 3] and plain.tolist() == [[9, 1, 2, 3], [12, 4, 5, 6]]


def test_lists_of_mapped_values_are_one_value():
    result = gpusim.vmap(lambda x, v: x.at[:2].set([v, v + 1]))(
        np.zeros((2, 3)), np.array([1.0, 5.0])
    )
    assert result.tolist() == [[1, 2, 0], [5, 6, 0]]


def test_apply_puts_functions_of_the_part_in_its_place():
    x = np.array([1.0, 16.0, 81.0])
    assert gpusim.at(x)[[1, 1]].apply(np.sqrt).tolist() == [1.0, 2.0, 81.0]
    assert gpusim.at(x)[[1, 1]].apply(lambda part: part / 2).tolist() == [1.0, 8.0, 81.0]
    assert gpusim.at(x)[1:].apply(np.negative).tolist() == [1.0, -16.0, -81.0]
    rng = np.random.default_rng(7)
    for over in OVER:
        for other in OVER:
            index = places(rng, (2,), other, 4)
            check(lambda x, i: x.at[i].apply(np.exp), normal(rng, (4, 3), over), index)
            check(lambda x, i: x.at[i].apply(np.cos), normal(rng, (4, 3), over), index)
            check(lambda x, i: x.at[i, 1].apply(lambda v: v * 2), normal(rng, (4, 3), over), index)
            check(lambda x, i: x.at[i].get(), normal(rng, (4, 3), over), index)


def test_an_unmapped_array_stays_unmapped():
    def f(x):
        total = gpusim.lax.psum(x, "i").at[0].set(0)
        assert total.mapped_axes == ()
        return x + total

    assert gpusim.vmap(f, axis_name="i")(np.ones((2, 2))).tolist() == [[1, 3], [1, 3]]


def test_updates_say_what_they_are():
    assert repr(gpusim.at([1, 2])) == "at([1, 2])"
    assert repr(gpusim.at([1, 2])[1:]) == "at([1, 2])[slice(1, None, None)]"


@given(indexed(), st.integers(0, 2**32 - 1))
def test_any_update_is_what_one_replica_makes_of_it(case: Any, seed: int):
    x, entries, operands = case
    rng = np.random.default_rng(seed)
    part = normal(rng, (), str(rng.choice(OVER)))
    method = METHODS[rng.integers(len(METHODS))]
    whole = bool(rng.integers(2))

    def f(x, v, *values):
        given_values = iter(values)
        index = tuple(next(given_values) if isinstance(e, Operand) else e for e in entries)
        if whole:  # a value for every element: reversed along the last axis, and one axis more
            v = v * x[index][..., None, ::-1][..., 0, :] if x[index].ndim else v * x[index]
        return getattr(x.at[index], method)(np.abs(v) + 0.5)

    check(f, Operand(np.abs(x.data), x.over), part, *operands, batched=None)
