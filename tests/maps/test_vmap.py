"""vmap: axes in and out, nesting, what results are, and which mistakes are named."""

from __future__ import annotations

import copy
import functools
import math
from collections import namedtuple

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.maps import per_replica_route

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


IN_PLACE = (
    lambda x: x.__setitem__(0, 1),
    lambda x: x.__iadd__(1),
    lambda x: x.__imatmul__(np.eye(3)),
    lambda x: np.add(x, 1, out=x),
    lambda x: np.sum(x, out=x[0, ...]),
    lambda x: np.add.at(x, 0, 1),
    lambda x: np.copyto(x, 1),
    lambda x: np.put(x, 0, 1),
    lambda x: np.place(x, x > 0, 1),
    lambda x: np.putmask(x, x > 0, 1),
    lambda x: np.fill_diagonal(x[None], 1),
    lambda x: np.put_along_axis(x, np.array([0]), 1, 0),
    lambda x: np.nan_to_num(x, copy=False),
    lambda x: x.sort(),
    lambda x: x.partition(1),
    lambda x: x.fill(0),
    lambda x: x.put(0, 1),
    lambda x: setattr(x, "real", 1),
    lambda x: x.flat.__setitem__(0, 1),
)
#: Writes into a plain array.
INTO_PLAIN = (
    lambda x: np.add(x, 1, out=np.zeros(3)),
    lambda x: np.sum(x, out=np.zeros(())),
    lambda x: np.add.at(np.zeros(3), 0, x),
    lambda x: np.copyto(np.zeros(3), x),
    lambda x: np.put_along_axis(np.zeros(3), np.array([0]), x[:1], 0),
    lambda x: np.zeros(3).__iadd__(x),
)


@pytest.mark.parametrize("change", IN_PLACE)
def test_arguments_are_read_only(change):
    x = np.arange(6.0).reshape(2, 3)
    for force in (False, True):
        with pytest.raises(ValueError, match="read-only"), per_replica_route(force=force):
            gpusim.vmap(change)(x)
    assert (x == np.arange(6.0).reshape(2, 3)).all()
    for cured in (lambda x: change(x.copy()), lambda x: change(np.copy(x))):
        gpusim.vmap(lambda x, cured=cured: (cured(x), x)[1])(x)
    assert (x == np.arange(6.0).reshape(2, 3)).all()


@pytest.mark.parametrize("change", INTO_PLAIN)
def test_writing_into_a_plain_array_names_both_cures(change):
    with pytest.raises(TypeError) as caught:
        gpusim.vmap(change)(np.arange(6.0).reshape(2, 3))
    message = str(caught.value)
    assert "np.zeros(3, like=x)" in message and "acc = acc + x" in message


def test_both_cures_work():
    def like(x):
        acc = np.zeros(3, like=x)
        acc += x
        acc[0] = x[1]
        return acc

    x = np.arange(6.0).reshape(2, 3)
    assert gpusim.vmap(like)(x).tolist() == [[1, 1, 2], [4, 4, 5]]
    assert (gpusim.vmap(lambda x: np.zeros(3) + x)(x) == x).all()


def test_a_mapped_value_does_not_fit_into_a_plain_array():
    def store(x):
        out = np.zeros(3)
        out[0] = x[0]

    def store_row(x):
        out = np.zeros((2, 3))
        out[0] = x

    # NumPy turns the TypeError of the conversion into a ValueError and keeps it as the cause
    with pytest.raises((TypeError, ValueError)) as caught:
        gpusim.vmap(store)(np.ones((2, 3)))
    assert "np.zeros(3, like=x)" in f"{caught.value} {caught.value.__cause__}"
    with pytest.raises(TypeError, match=r"np\.zeros\(3, like=x\)"):
        gpusim.vmap(store_row)(np.ones((2, 3)))


def test_augmented_assignment_changes_the_array():
    def f(x):
        y = x.copy()
        view = y[::-1]
        y += 1
        assert (view == y[::-1]).mapped_axes == (None,)
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


def maps_of_rows():
    """Yield each map of a function over the two rows of an argument."""
    mesh = gpusim.Mesh((2,), ("i",))
    rows, whole = gpusim.P("i"), gpusim.P()
    yield lambda f, out=0: gpusim.vmap(f, axis_name="i", out_axes=out)
    yield lambda f, out=0: gpusim.pmap(f, "i", out_axes=out)
    yield lambda f, out=0: gpusim.shard_map(
        f, mesh=mesh, in_specs=rows, out_specs=whole if out is None else rows
    )
    yield (
        lambda f, out=0: (
            lambda x: gpusim.vmap(lambda x: gpusim.vmap(f, axis_name="i", out_axes=out)(x))(x[None])
        )
    )
    yield (
        lambda f, out=0: (
            lambda x: gpusim.pmap(lambda x: gpusim.vmap(f, axis_name="i", out_axes=out)(x))(x[None])
        )
    )


@pytest.mark.parametrize("map_", [*maps_of_rows()])
def test_the_caller_owns_the_results(map_):
    def f(x):
        fresh = x + 1
        return x, x[..., ::-1], lax.psum(x, "i"), fresh, fresh, fresh[..., 1:], np.real(x), 5.0 + x

    x = np.arange(6.0).reshape(2, 3)
    kept = x.copy()
    results = map_(f)(x)
    for number, result in enumerate(results):
        assert result.flags.writeable and not np.shares_memory(result, x)
        others = [np.copy(other) for other in results]
        result += 100
        for place, (other, before) in enumerate(zip(results, others, strict=True)):
            assert (other == before).all() == (place != number)
    assert (x == kept).all()


@pytest.mark.parametrize("map_", [*maps_of_rows()])
def test_values_returned_once_are_the_callers_too(map_):
    table = np.arange(3.0)
    x = np.ones((2, 3))
    total, closed = map_(lambda x: (lax.psum(x, "i"), table), out=None)(x)
    total += 1
    closed += 1
    assert (x == 1).all() and (table == np.arange(3.0)).all() and (total != 2).all()


def test_a_nested_maps_results_are_writable_inside_the_outer_one():
    def outer(x):
        y = x.copy()
        inner = gpusim.vmap(lambda row: row)(y)
        inner += 1
        return y, inner

    x = np.arange(6.0).reshape(1, 2, 3)
    same, changed = gpusim.vmap(outer)(x)
    assert (same == x).all() and (changed == x + 1).all()


def test_unmapped_results_are_repeated_or_returned_once():
    x = np.arange(3.0)
    every, once, number = gpusim.vmap(
        lambda x: (lax.psum(x, "i"), lax.psum(x, "i"), 5), axis_name="i", out_axes=(0, None, 0)
    )(x)
    assert every.tolist() == [3.0] * 3 and every.flags.writeable
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
    import pickle

    with pytest.raises(TypeError):
        gpusim.MappedArray()

    def f(x):
        own = copy.copy(x), copy.deepcopy([x])[0]
        assert all(type(y) is type(x) and y is not x for y in own)
        with pytest.raises(TypeError):
            pickle.dumps(x)
        with pytest.raises(TypeError):
            hash(x)
        assert "mapped over 'i': 3" in repr(x)
        return x

    gpusim.vmap(f, axis_name="i")(np.arange(3))
