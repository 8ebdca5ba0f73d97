"""vmap: axes in and out, nesting, what results are, and which mistakes are named."""

from __future__ import annotations

import functools
import math
from collections import namedtuple

import numpy as np
import pytest

import gpusim
from gpusim import lax

Pair = namedtuple("Pair", "first second")


def test_arguments_are_seen_without_their_mapped_axis():
    def f(x, y, z):
        assert (x.shape, y.shape, z.shape) == ((3,), (2, 5), (7,))
        assert x.dtype == np.float32 and z.mapped_axes == () and x.mapped_axes == ("i",)
        return x.sum() + y.sum() + z.sum()

    x, y, z = np.ones((4, 3), "f4"), np.ones((2, 5, 4)), np.ones(7)
    result = gpusim.vmap(f, in_axes=(0, -1, None), axis_name="i")(x, y, z)
    assert result.tolist() == [20.0] * 4


def test_in_axes_and_out_axes_are_tree_prefixes():
    def f(tree, pair):
        return Pair(tree["a"] + tree["b"][0], {"x": pair.first, "none": None})

    tree = {"a": np.arange(6).reshape(3, 2), "b": [np.arange(2), np.arange(9)]}
    pair = Pair(np.arange(6).reshape(2, 3), np.zeros(1))
    result = gpusim.vmap(
        f, in_axes=({"a": 0, "b": None}, Pair(1, None)), out_axes=Pair(-1, {"x": 0, "none": None})
    )(tree, pair)
    assert (result.first == (tree["a"] + np.arange(2)).T).all()
    assert (result.second["x"] == pair.first.T).all() and result.second["none"] is None


def test_keyword_arguments_are_mapped_along_axis_0():
    f = gpusim.vmap(lambda x, scale: x * scale, in_axes=0)
    assert f(np.arange(3), scale=np.array([1, 10, 100])).tolist() == [0, 10, 200]


def test_axis_size_serves_where_nothing_is_mapped():
    f = gpusim.vmap(lambda: lax.axis_index("i") ** 2, axis_name="i", axis_size=4)
    assert f().tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_vmaps_nest_over_one_stacked_array(size):
    x = np.random.default_rng(size).normal(size=(size, 3, 2))

    def inner(x):
        assert x.shape == (2,) and x.mapped_axes == ("i", "j")
        return lax.psum(x, "i"), lax.psum(x, "j"), x - lax.pmean(x, ("i", "j"))

    over_i, over_j, centred = gpusim.vmap(gpusim.vmap(inner, axis_name="j"), axis_name="i")(x)
    np.testing.assert_allclose(over_i, np.broadcast_to(x.sum(0), x.shape))
    np.testing.assert_allclose(over_j, np.broadcast_to(x.sum(1)[:, None], x.shape))
    np.testing.assert_allclose(centred, x - x.mean((0, 1)))


def test_values_that_do_not_differ_carry_no_axis_and_convert_freely():
    def f(x):
        rounds = 0
        error = lax.pmax(abs(x), "i")
        while error > 0.1:  # a branch on a value that is the same everywhere
            x = x / 2
            error = lax.pmax(abs(x), "i")
            rounds += 1
        assert type(float(error)) is float and f"{error:.3f}" == "0.078"
        assert list(range(lax.psum(np.int64(1), "i"))) == [0, 1, 2]
        assert np.asarray(error).shape == () and math.sin(error) > 0
        return x + rounds

    assert (gpusim.vmap(f, axis_name="i")(np.array([1.0, 5.0, 2.0])) > 6).all()


@pytest.mark.parametrize(
    "convert",
    [
        bool,
        int,
        float,
        complex,
        math.sin,
        range,
        np.asarray,
        lambda x: [1, 2][x],
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: f"{float(x)}",
        lambda x: 1 if x else 2,
        lambda x: np.arange(3)[x],
    ],
)
def test_converting_a_mapped_value_names_the_two_ways_out(convert):
    with pytest.raises(TypeError) as caught:
        gpusim.vmap(convert, axis_name="i")(np.arange(3))
    assert "np.where" in str(caught.value) and "pmap" in str(caught.value)
    assert "'i'" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.__setitem__(0, 1),
        lambda x: np.add(x, 1, out=x),
        lambda x: np.add(x, 1, out=np.zeros(3)),
        lambda x: np.sum(x, out=np.zeros(())),
        lambda x: np.add.at(x, 0, 1),
        lambda x: np.add.at(np.zeros(3), 0, x),
        lambda x: np.copyto(x, 1),
        lambda x: np.copyto(np.zeros(3), x),
        lambda x: np.put(x, 0, 1),
        lambda x: np.place(x, x > 0, 1),
        lambda x: np.putmask(x, x > 0, 1),
        lambda x: np.fill_diagonal(np.outer(x, x), 1),
        lambda x: x.sort(),
        lambda x: x.fill(0),
        lambda x: np.zeros(3).__iadd__(x),
    ],
)
def test_mapped_arrays_do_not_change_in_place(change):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(TypeError):
        gpusim.vmap(change)(x)
    assert (x == np.arange(6.0).reshape(2, 3)).all()


def test_a_mapped_value_does_not_fit_into_a_plain_array():
    # NumPy turns the TypeError of the conversion into a ValueError and keeps it as the cause
    with pytest.raises((TypeError, ValueError)) as caught:
        gpusim.vmap(lambda x: np.zeros(3).__setitem__(0, x[0]))(np.ones((2, 3)))
    assert "np.where" in f"{caught.value} {caught.value.__cause__}"


def test_augmented_assignment_rebinds():
    def f(x):
        y = x
        y += 1
        y *= 2
        y @= np.eye(3)
        return x, y

    x = np.zeros((2, 3))
    same, changed = gpusim.vmap(f)(x)
    assert (same == 0).all() and (changed == 2).all()


def test_use_after_the_map_has_ended_is_an_error():
    kept = []
    gpusim.vmap(kept.append, axis_name="i", out_axes=None)(np.arange(3))
    for use in (
        lambda: kept[0] + 1,
        lambda: np.sum(kept[0]),
        lambda: kept[0][..., None],
        lambda: bool(kept[0]),
    ):
        with pytest.raises(gpusim.GpusimError, match="'i'"):
            use()


def test_fresh_results_are_writable_and_views_are_not():
    x = np.arange(6.0).reshape(2, 3)
    fresh = gpusim.vmap(lambda x: x * 2)(x)
    fresh[0] = 7
    same, gathered, shared, shared_too = gpusim.vmap(
        lambda x: (lambda y: (x, lax.all_gather(x, "i"), y, y[::-1]))(x + 1), axis_name="i"
    )(x)
    for result in (same, gathered, shared, shared_too):
        assert not result.flags.writeable
    assert np.shares_memory(same, x) and np.shares_memory(gathered, x)
    assert x.flags.writeable and (x == np.arange(6.0).reshape(2, 3)).all()


def test_unmapped_results_are_broadcast_or_returned_once():
    x = np.arange(3.0)
    every, once, number = gpusim.vmap(
        lambda x: (lax.psum(x, "i"), lax.psum(x, "i"), 5), axis_name="i", out_axes=(0, None, 0)
    )(x)
    assert every.tolist() == [3.0] * 3 and every.strides == (0,) and not every.flags.writeable
    assert once.shape == () and once == 3 and number.tolist() == [5, 5, 5]


def test_closed_over_arrays_are_constants():
    table = np.arange(12.0).reshape(4, 3)
    f = gpusim.vmap(
        lambda i, x: gpusim.at(table)[i].get() * x + lax.psum(table[0], "r"), axis_name="r"
    )
    result = f(np.array([3, 0]), np.array([1.0, 2.0]))
    assert (result == np.stack([table[3], table[0] * 2]) + 2 * table[0]).all()


def test_python_scalars_stay_weak_and_count_replicas():
    def f(x):
        assert (x * 2.5).dtype == np.float32 and (2 + x).dtype == np.float32
        assert lax.psum(1, "i") == 3 and type(lax.psum(1, "i")) is int
        assert lax.psum(0.5, "i") == 1.5 and lax.pmean(2, "i") == 2.0 and lax.pmax(4, "i") == 4
        assert lax.psum(1, "i", axis_index_groups=[[0, 1, 2]]) == 3
        return lax.psum(1, "i", axis_index_groups=[[0], [1, 2]])

    assert gpusim.vmap(f, axis_name="i")(np.ones((3, 2), "f4")).tolist() == [1, 2, 2]


def test_positional_axes_join_the_group():
    x = np.arange(24).reshape(4, 3, 2)
    both = gpusim.vmap(lambda x: lax.psum(x, ("i", 0)), axis_name="i", out_axes=None)(x)
    assert (both == x.sum((0, 1))).all()
    own = gpusim.vmap(lambda x: lax.psum(x, (1,)), axis_name="i")(x)
    assert (own == x.sum(2)).all()
    most = gpusim.vmap(lambda x: lax.pmax(x, ("i", 1)), axis_name="i", out_axes=None)(x)
    assert (most == x.max((0, 2))).all()
    for axis in (-1, 2):  # JAX counts no positional axis of psum from the end
        with pytest.raises(ValueError, match=rf"positional axis {axis}.*axes 0 to 1"):
            gpusim.vmap(lambda x, axis=axis: lax.psum(x, ("i", axis)), axis_name="i")(x)


def test_partials_and_callables_are_mapped_too():
    class Scale:
        def __call__(self, x):
            return x * 3

    assert gpusim.vmap(Scale())(np.arange(2)).tolist() == [0, 3]
    assert gpusim.vmap(functools.partial(np.add, 1))(np.arange(2)).tolist() == [1, 2]
    assert gpusim.vmap(np.sin)(np.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "function", lambda x: gpusim.vmap(5)),
        (TypeError, "in_axes.*'a'", lambda x: gpusim.vmap(abs, in_axes="a")),
        (TypeError, "in_axes", lambda x: gpusim.vmap(abs, in_axes=(1.0,))),
        (TypeError, "in_axes", lambda x: gpusim.vmap(abs, in_axes=True)),
        (ValueError, "len\\(in_axes\\)=2", lambda x: gpusim.vmap(abs, in_axes=(0, 0))(x)),
        (ValueError, "prefix", lambda x: gpusim.vmap(lambda t: t, in_axes=({"b": 0},))({"a": x})),
        (ValueError, "axis 5.*at least 6.*\\(3, 2\\)", lambda x: gpusim.vmap(abs, in_axes=5)(x)),
        (ValueError, "axis -3", lambda x: gpusim.vmap(abs, in_axes=-3)(x)),
        (ValueError, "rank", lambda x: gpusim.vmap(abs)(3.0)),
        (ValueError, "3.*2", lambda x: gpusim.vmap(np.add)(x, x[:2])),
        (ValueError, "4.*3", lambda x: gpusim.vmap(abs, axis_size=4)(x)),
        (ValueError, "axis_size", lambda x: gpusim.vmap(abs, in_axes=None)(x)),
        (ValueError, "axis_size", lambda x: gpusim.vmap(lambda: 1)()),
        (TypeError, "axis_size", lambda x: gpusim.vmap(abs, axis_size=2.0)(x)),
        (TypeError, "str", lambda x: gpusim.vmap(lambda x: "text")(x)),
        (TypeError, "str", lambda x: gpusim.vmap(lambda t: 1)("text")),
        (ValueError, "out_axes is None", lambda x: gpusim.vmap(abs, out_axes=None)(x)),
        (np.exceptions.AxisError, "axis 2", lambda x: gpusim.vmap(abs, out_axes=2)(x)),
        (ValueError, "out_axes", lambda x: gpusim.vmap(abs, out_axes=(0, 0))(x)),
        (TypeError, "out_axes", lambda x: gpusim.vmap(abs, out_axes="x")(x)),
        (ValueError, "size 0", lambda x: gpusim.vmap(abs)(x[:0])),
    ],
)
def test_bad_axes_are_named(error, words, call):
    with pytest.raises(error, match=words):
        call(np.ones((3, 2)))


def test_shapes_in_messages_are_one_replicas():
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        gpusim.vmap(lambda x, y: x + y)(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(
        np.exceptions.AxisError, match="axis 1 is out of bounds for array of dimension 1"
    ):
        gpusim.vmap(lambda x: np.sum(x, axis=1))(np.ones((2, 3)))


def test_the_debug_flag_names_functions_that_ran_once_per_replica(caplog):
    with gpusim.per_replica_route(report=True):
        gpusim.vmap(lambda x: np.polyfit(np.arange(4.0), x, 1))(np.ones((3, 4)))
        gpusim.vmap(lambda x: np.sin(x) + x.sum())(np.ones((3, 4)))
    (record,) = caplog.records
    assert "polyfit" in record.getMessage() and "3 calls" in record.getMessage()
    assert "test_vmap.py" in record.getMessage()


def test_mapped_arrays_are_not_made_copied_or_pickled_by_users():
    import copy
    import pickle

    with pytest.raises(TypeError):
        gpusim.MappedArray()

    def f(x):
        assert copy.copy(x) is x and copy.deepcopy([x])[0] is x
        with pytest.raises(TypeError):
            pickle.dumps(x)
        with pytest.raises(TypeError):
            hash(x)
        assert "mapped over 'i': 3" in repr(x)
        return x

    gpusim.vmap(f, axis_name="i")(np.arange(3))
