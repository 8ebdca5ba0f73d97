"""Indexing and its functions: every index form has the result of one replica after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpusim
from tests.oracles.replicated import OVER, Operand, check, normal, outcome, sizes_of

ANY_OVER = (*OVER, None)


def places(
    rng: np.random.Generator, shape: tuple[int, ...], over: str | None, size: int, dtype: Any = int
) -> Operand:
    """Indices of an axis with `size` elements, negative ones too."""
    return Operand(rng.integers(-size, size, sizes_of(over) + shape).astype(dtype), over)


def equally_true(rng: np.random.Generator, shape: tuple[int, ...], over: str | None) -> Operand:
    """A mask with equally many true elements on all replicas, at different places."""
    size = int(np.prod(shape))
    some = rng.permuted(
        np.broadcast_to(np.arange(size) < size // 2, (*sizes_of(over), size)), axis=-1
    )
    return Operand(some.reshape(sizes_of(over) + shape), over)


PLAIN_INDICES: tuple[Any, ...] = (
    0,
    -1,
    np.int8(2),
    slice(1, None),
    slice(None, None, -2),
    slice(-2, 0, -1),
    slice(7, 9),
    ...,
    None,
    (),
    (0, -1),
    (..., 0),
    (0, ..., 1),
    (None, ..., None, 1),
    (1, 2, 3),
    (slice(None), 1, slice(None, None, 2)),
    [0, 2, 2],
    [],
    [[0, 1], [2, -1]],
    np.array([1, 0], np.uint8),
    np.array(1),
    (np.array(1), 0),
    (slice(None), [0, 2, 2]),
    (slice(None), [0, 2], [1, 1]),
    ([0, 2], slice(None), [1, 1]),
    (0, slice(None), [1, 1]),
    (slice(None), 0, [1, 1]),
    ([0, 2], None, [1, 1]),
    (slice(None), [0, 2], ..., [1, 1]),
    (slice(None), [[0], [2]], [1, 1, 0], None),
    (..., [3, 0]),
    (None, [0, 1], [1, 0]),
    True,
    False,
    np.True_,
    (True, 0),
    (slice(None), True, [0, 1]),
    (slice(None), True, slice(None), [0, 1]),
    [True, False, True],
    np.zeros(3, bool),
    (slice(None), [True, False, True, True, False]),
    ([True, False, True], [4, 3]),
    ([False, False, True], slice(None), [0, 3]),
    np.arange(60).reshape(3, 5, 4) % 3 == 0,
    (np.arange(15).reshape(3, 5) % 2 == 0, 1),
    (0, np.arange(20).reshape(5, 4) % 3 == 0),
)


@pytest.mark.parametrize("index", PLAIN_INDICES, ids=lambda index: str(index).replace("\n", ""))
def test_plain_indices_are_read_as_one_replica_reads_them(index):
    rng = np.random.default_rng(0)
    for over in OVER:
        x = normal(rng, (3, 5, 4), over, np.float32)
        check(lambda x: x[index], x)
        check(lambda x: x[..., ::-1][index], x)


@pytest.mark.parametrize(
    "index",
    (
        *(3, -4, (0, 5), (0, 0, 0, 0), [3], (slice(None), [5]), 1.0, "field", [0.5], (..., ...)),
        *(([0, 1], [0, 1, 2]), [True, False], np.ones((3, 4), bool), np.ones(3, complex)),
        *((slice(None),) * 4, slice(0.5, 1), (0, 1, 2, 3, True), object),
    ),
    ids=str,
)
def test_bad_indices_raise_what_numpy_raises(index):
    x = normal(np.random.default_rng(0), (3, 5, 4), "ij")
    assert check(lambda x: x[index], x).error is not None


MAPPED_INDICES: dict[str, Callable[[Any, Any], Any]] = {
    "i": lambda x, i: x[i],
    ":, i": lambda x, i: x[:, i],
    "..., i": lambda x, i: x[..., i],
    "i, :, i": lambda x, i: x[i, :, i],
    ":, i, i": lambda x, i: x[:, i, i],
    ":, i, None, i": lambda x, i: x[:, i, None, i],
    "0, :, i": lambda x, i: x[0, :, i],
    ":, 0, i": lambda x, i: x[:, 0, i],
    "1:, i, ::-1": lambda x, i: x[1:, i, ::-1],
    "i, [0, 1, 1]": lambda x, i: x[i, [0, 1, 1]],
    "None, i, ..., 2": lambda x, i: x[None, i, ..., 2],
    "i % 2, True": lambda x, i: x[i % 2, True],
    "[i, 0]": lambda x, i: x[[i, i * 0]],
    "(i, i + 1)": lambda x, i: x[:, (i, i + 1)],
    "mask, i": lambda x, i: x[:, np.array([True, False, True, False]), i],
    "out of range": lambda x, i: x[:, i + 3],
}


@pytest.mark.parametrize("name", MAPPED_INDICES)
def test_mapped_indices_are_read_as_one_replica_reads_them(name):
    rng = np.random.default_rng(1)
    for over in OVER:
        x = normal(rng, (4, 4, 4), over)
        for other in ANY_OVER:
            for shape in ((), (3,), (2, 1), (2, 3), (1,), (0,)):
                index = places(rng, shape, other, 3, rng.choice([np.int8, np.int64, np.uint16]))
                check(MAPPED_INDICES[name], x, Operand(index.data % 4, other))


def test_masks_that_select_equally_many_elements_may_differ():
    rng = np.random.default_rng(2)
    for over in OVER:
        x = normal(rng, (4, 6), over)
        for other in OVER:
            check(lambda x, m: x[m], x, equally_true(rng, (4, 6), other))
            check(lambda x, m: x[m], x, equally_true(rng, (4,), other))
            check(lambda x, m: x[:, m], x, equally_true(rng, (6,), other))
            check(lambda x, m: x[[0, 1], m], x, equally_true(rng, (6,), other), batched=None)
            check(lambda x, m: x[m, [0, 1]], x, equally_true(rng, (4,), other))
            check(lambda x, m: x[m[0] | True], x, equally_true(rng, (4,), other))
            check(np.nonzero, equally_true(rng, (4, 6), other))
            check(np.flatnonzero, equally_true(rng, (4, 6), other))
            check(np.argwhere, equally_true(rng, (4, 6), other))
            for axis in (None, 0):
                check(
                    lambda m, x, axis=axis: np.compress(m, x, axis),
                    equally_true(rng, (4,), other),
                    x,
                )
            check(np.extract, equally_true(rng, (4, 6), other), x)


def test_a_mask_that_selects_unequally_is_an_error_that_names_where():
    def f(x):
        return x[x > 0]

    with pytest.raises(ValueError, match=r"np\.where"):
        gpusim.vmap(f)(np.array([[1.0, -1.0], [1.0, 2.0]]))
    assert gpusim.vmap(f)(np.array([[1.0, -1.0], [-3.0, 2.0]])).tolist() == [[1.0], [2.0]]
    with pytest.raises(ValueError, match=r"np\.where"):
        gpusim.vmap(np.nonzero)(np.array([[1.0, 0.0], [1.0, 2.0]]))


def test_an_index_out_of_range_is_named_with_one_replica_s_axis_and_size():
    x = np.zeros((2, 3, 5))
    for function in (
        lambda x, i: x[:, i],
        lambda x, i: np.take(x, i, axis=1),
        lambda x, i: x[:, [4, 7]],
        lambda x, i: x[:, 7],
    ):
        with pytest.raises(IndexError, match="index 7 is out of bounds for axis 1 with size 5"):
            gpusim.vmap(function)(x, np.array([0, 7]))


def test_a_mapped_slice_bound_is_an_error_that_names_the_way_out():
    for index in (lambda i: slice(i, i + 2), lambda i: (0, slice(None, i))):
        with pytest.raises(TypeError, match=r"i \+ np\.arange\(n\)"):
            gpusim.vmap(lambda x, i, index=index: x[index(i)])(np.zeros((2, 3, 5)), np.arange(2))
    windows = gpusim.vmap(lambda x, i: x[i + np.arange(2)])(
        np.arange(8).reshape(2, 4), np.arange(2)
    )
    assert windows.tolist() == [[0, 1], [5, 6]]


def test_unmapped_arrays_are_slice_bounds_and_integers():
    rng = np.random.default_rng(3)
    i = Operand(np.array(2), "")
    check(lambda x, i: x[i:, :i, -i], normal(rng, (4, 4, 4), "i"), i)
    check(lambda x, i: x[i, i], normal(rng, (4, 4, 4), ""), i)


def test_one_hot_rows_are_read_from_the_identity_by_at_or_compared():
    labels = np.array([[2, 0], [1, 1]])
    expected = np.eye(3)[labels]
    for one_hot in (
        lambda labels: gpusim.at(np.eye(3))[labels].get(),
        lambda labels: (labels[:, None] == np.arange(3)).astype(float),
    ):
        np.testing.assert_array_equal(gpusim.vmap(one_hot)(labels), expected)
    for plain_table in (lambda label: np.eye(3)[label], lambda label: np.take(np.eye(3), label, 0)):
        with pytest.raises(TypeError, match=r"gpusim\.at\(array\)\[index\]\.get"):
            gpusim.vmap(plain_table)(labels[:, 0])


TAKES: dict[str, Callable[[Any, Any], Any]] = {
    "take": np.take,
    "take 0": lambda x, i: np.take(x, i, 0),
    "take 1": lambda x, i: np.take(x, i, axis=1),
    "take -1": lambda x, i: x.take(i, axis=-1),
    "take 3": lambda x, i: np.take(x, i, axis=3),
    "wrap": lambda x, i: np.take(x, i + 9, axis=1, mode="wrap"),
    "clip": lambda x, i: np.take(x, i * 9, mode="clip"),
    "clip 1": lambda x, i: np.take(x, i * 9, 1, mode="clip"),
    "raise": lambda x, i: np.take(x, i + 9, axis=1, mode="raise"),
    "bools": lambda x, i: np.take(x, i > 0, axis=1),
    "floats": lambda x, i: np.take(x, i * 0.5, axis=1),
}


@pytest.mark.parametrize("name", TAKES)
def test_take_has_the_result_of_one_replica(name):
    rng = np.random.default_rng(4)
    for over in OVER:
        for other in ANY_OVER:
            for shape in ((), (3,), (2, 2), (0,)):
                x, index = normal(rng, (3, 4, 2), over), places(rng, shape, other, 2)
                check(TAKES[name], x, index, batched=None if name == "floats" else True)


def test_take_along_axis_has_the_result_of_one_replica():
    rng = np.random.default_rng(5)
    for over in ANY_OVER:
        for other in OVER:
            x = normal(rng, (3, 4), over)
            for axis, shape in ((0, (2, 4)), (1, (3, 2)), (-1, (1, 2)), (None, (5,)), (0, (2, 1))):
                check(
                    lambda x, i, axis=axis: np.take_along_axis(x, i, axis=axis),
                    x,
                    places(rng, shape, other, 3),
                )
            check(lambda x, i: np.take_along_axis(x, i, axis=0), x, places(rng, (4,), other, 3))
            check(lambda x, i: np.take_along_axis(x, i, axis=2), x, places(rng, (3, 4), other, 3))
            check(
                lambda x, i: np.take_along_axis(x, i + 9, axis=1), x, places(rng, (3, 4), other, 3)
            )
            check(lambda x, i: np.take_along_axis(x, i, axis=1), x, places(rng, (2, 4), other, 3))


def test_choose_and_index_makers_have_the_result_of_one_replica():
    rng = np.random.default_rng(6)
    for over in OVER:
        x = normal(rng, (4, 5), over)
        for other in ANY_OVER:
            which = Operand(places(rng, (5,), other, 4).data % 4, other)
            if other is not None:
                check(np.choose, which, x)
            check(lambda x, w: np.choose(w, [x[0], 2.0, x[1:2], x]), x, which)
            check(lambda x, w: np.choose(w * 9 - 3, x, mode="wrap"), x, which)
            check(lambda x, w: np.choose(w * 9 - 3, x, mode="clip"), x, which)
            check(lambda x, w: np.choose(w + 1, x), x, which, batched=None)
            if over or other:
                check(lambda x, w: x[np.ix_([0, 2], w)], x, which)
                check(lambda x, w: np.ix_(x[:, 0] > -9, w), x, which)
                check(lambda x, w: np.unravel_index(w + x.ndim, (2, 3)), x, which)
                check(lambda x, w: np.unravel_index(w + 9 * x.ndim, (2, 3)), x, which)
                check(lambda x, w: np.ravel_multi_index((w, w[::-1]), (4, 5)), x, which)
                check(lambda x, w: np.ravel_multi_index([w, w * 2], (4, 5), mode="wrap"), x, which)
        for makers in (np.diag_indices_from, np.tril_indices_from, np.triu_indices_from):
            check(makers, normal(rng, (4, 4), over))
            check(lambda x, makers=makers: x[makers(x)], normal(rng, (4, 4), over))
            check(makers, normal(rng, (4,), over), batched=None)
        check(lambda x: np.tril_indices_from(x, 1), normal(rng, (3, 4), over))
        check(np.nonzero, normal(rng, (), over), batched=None)


def test_structured_arrays_are_read_by_field():
    x = np.zeros((2, 3), [("a", "f4"), ("b", "i8", (2,))])
    x["a"] = np.arange(6).reshape(2, 3)
    check(lambda x: x["a"][1:], Operand(x, "i"))
    check(lambda x: x["b"], Operand(x, "i"))


def test_empty_arrays_and_arrays_without_axes_are_indexed():
    rng = np.random.default_rng(7)
    for over in OVER:
        for index in (
            (),
            ...,
            None,
            True,
            np.False_,
            (None, ...),
            np.array(True),
            0,
            [],
            (..., [0]),
        ):
            check(lambda x, index=index: x[index], normal(rng, (), over), batched=None)
            check(lambda x, index=index: x[index], normal(rng, (0,), over), batched=None)
            check(lambda x, index=index: x[index], normal(rng, (1, 0, 2), over), batched=None)
        for other in OVER:
            check(
                lambda x, m: x[m],
                normal(rng, (), over),
                Operand(np.ones(sizes_of(other), bool), other),
            )
            check(lambda x, i: x[:, i], normal(rng, (2, 0), over), places(rng, (0,), other, 2))
            check(lambda x, i: x[i], normal(rng, (0, 2), over), places(rng, (2,), other, 2))
            check(lambda x, i: x[i], normal(rng, (2, 0), over), places(rng, (3,), other, 2))


def test_iterating_unpacking_and_membership_use_indices():
    x = np.arange(12).reshape(2, 2, 3)

    def f(x):
        first, second = x
        return first + sum(second)

    assert gpusim.vmap(f)(x).tolist() == [[12, 13, 14], [36, 37, 38]]


def test_results_of_basic_indices_are_views_and_operands_never_change():
    x = np.arange(12.0).reshape(2, 6)
    views = []

    def f(x):
        views.append(x[1:4]._data)
        taken = x[np.array([0, 1])]
        assert not np.shares_memory(taken._data, x._data)
        return taken

    gpusim.vmap(f)(x)
    assert np.shares_memory(views[0], x)
    assert x.tolist() == np.arange(12.0).reshape(2, 6).tolist()


@st.composite
def indexed(draw: st.DrawFn) -> tuple[Operand, list[Any], list[Operand]]:
    """An array, the entries of an index (numbers stand for operands), and the operands."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(rng.choice((0, 1, 2, 3, 4), rng.integers(0, 5), p=(0.05, 0.15, 0.2, 0.3, 0.3)))
    x = normal(rng, tuple(map(int, shape)), str(rng.choice(OVER)))
    blocks = [(), (2,), (1,), (3, 2), (3, 1), (2,), (0,)]
    block = blocks[rng.integers(len(blocks))]
    entries: list[Any] = []
    operands: list[Operand] = []
    rest = list(map(int, shape))
    dots = bool(rng.integers(2))
    while rest and rng.integers(6):
        kind = rng.integers(8)
        size = rest[0]
        if kind == 0:
            entries.append(None)
            continue
        if kind == 1 and dots:
            dots = False
            entries.append(...)
            for _ in range(rng.integers(len(rest) + 1)):
                rest.pop(0)
            continue
        rest.pop(0)
        over = (*OVER, None)[rng.integers(5)]
        if kind <= 3 or not size:
            bounds = [None if rng.integers(2) else int(rng.integers(-5, 6)) for _ in range(2)]
            step = None if rng.integers(2) else int(rng.choice((-2, -1, 1, 3)))
            entries.append(slice(*bounds, step))
        elif kind == 4:
            entries.append(int(rng.integers(-size - (rng.random() < 0.05), size)))
        elif kind == 5:
            operands.append(equally_true(rng, (size,), over))
            entries.append(operands[-1])
        else:
            smaller = block[rng.integers(len(block) + 1) :]
            operands.append(places(rng, smaller, over, size))
            entries.append(operands[-1])
    if rng.random() < 0.05:
        entries.append(bool(rng.integers(2)))
    return x, entries, operands


@given(indexed())
def test_any_index_is_read_as_one_replica_reads_it(case):
    x, entries, operands = case

    def f(x, *values):
        given_values = iter(values)
        return x[tuple(next(given_values) if isinstance(e, Operand) else e for e in entries)]

    check(f, x, *operands, batched=None)
    if (
        all(op.data.dtype != np.bool_ for op in operands)
        and outcome(f, (x, *operands)).error is None
    ):
        check(f, x, *operands)


@given(st.integers(0, 2**32 - 1))
def test_any_take_has_the_result_of_one_replica(seed):
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(0, 4))
    x = normal(rng, tuple(int(n) for n in rng.integers(1, 5, ndim)), str(rng.choice(OVER)))
    axis = None if not ndim or rng.integers(3) == 0 else int(rng.integers(-ndim, ndim))
    shape = tuple(int(n) for n in rng.integers(0, 4, rng.integers(0, 3)))
    mode = str(rng.choice(("raise", "wrap", "clip")))
    index = places(rng, shape, str(rng.choice(OVER)), 6)
    check(lambda x, i: np.take(x, i, axis=axis, mode=mode), x, index)
