"""Programs that change arrays in place have NumPy's results under every map, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpusim
from gpusim import Mesh, P, lax, trees
from gpusim.maps import MappedArray, per_replica_route
from gpusim.maps.axis_environment import extend_axis_environment, new_axes
from gpusim.maps.mapped_array.array import is_scalar, unpack, wrap, wrap_array
from tests.maps.test_rules import FAMILIES
from tests.oracles.budget import budget, seeds
from tests.oracles.in_place import (
    REPLICAS,
    START,
    random_arguments,
    random_program,
    run_loop,
    run_program,
)
from tests.oracles.replicated import SIZES, bits_of, sizes_of

PROGRAMS = budget(1000, most=60)


def described(values: dict[str, Any]) -> dict[str, Any]:
    """Return the dtypes, shapes and bits of one replica's values, and which are NumPy scalars."""
    return {
        name: (value.dtype.name, value.shape, bits_of(np.asarray(value)))
        for name, value in values.items()
    }


def under(map_: Any, program: str, x: np.ndarray, y: np.ndarray) -> Any:
    """Return each replica's values and errors under a map, and the statements it refused."""
    seen: list[Any] = []

    def f(x: Any, y: Any) -> Any:
        values, *errors = run_program(program, x, y)
        seen.append(errors)
        return values

    results = map_(f)(x, y)
    for name, value in results.items():
        assert value.flags.writeable, name
    return [
        ({name: value[r] for name, value in results.items()}, *seen[r % len(seen)])
        for r in range(REPLICAS)
    ]


def by_shard_map(f: Any) -> Any:
    mesh = Mesh((REPLICAS,), ("i",))

    def sharded(x: Any, y: Any) -> Any:
        return {name: value[None] for name, value in f(x[0], y[0]).items()}

    return gpusim.shard_map(sharded, mesh=mesh, in_specs=P("i"), out_specs=P("i"))


def by_nested(f: Any) -> Any:
    return lambda x, y: {
        name: value[0]
        for name, value in gpusim.vmap(gpusim.vmap(f, axis_name="i"), axis_name="outer")(
            np.stack([x, x[::-1]]), np.stack([y, y[::-1]])
        ).items()
    }


MAPS = {
    "vmap": lambda f: gpusim.vmap(f, axis_name="i"),
    "shard_map": by_shard_map,
    "vmap in vmap": by_nested,
    "last axis": lambda f: (
        lambda x, y: gpusim.vmap(f, in_axes=2, axis_name="i")(
            np.moveaxis(x, 0, 2), np.moveaxis(y, 0, 2)
        )
    ),
    "pmap": lambda f: gpusim.pmap(f, axis_name="i", schedule="one"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAPS)
def test_random_programs(name: str) -> None:
    compared = 0
    for seed in seeds(PROGRAMS):
        rng = np.random.default_rng(seed)
        program, (x, y) = random_program(rng), random_arguments(rng)
        compared += compare(MAPS[name], program, x, y, seed)
    assert compared >= 0.8 * PROGRAMS


KINDS = (  # shape, mapped axes, whether a NumPy scalar, whether in Fortran order
    ((4, 5), "ij", False, False),
    ((4, 5), "ij", False, True),
    ((4, 5), "", False, False),
    ((2, 3, 5), "i", False, False),
    ((5,), "i", False, False),
    ((1, 4), "i", False, False),
    ((1,), "j", False, False),
    ((), "i", False, False),
    ((), "i", True, False),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_rules_return_views_copies_and_scalars_as_numpy_does(name: str) -> None:
    for kind in KINDS:
        if name == "broadcast_arrays" and kind[0] != (4, 5):
            continue
        found, expected = (memory_of(FAMILIES[name], *kind, force=force) for force in (False, True))
        if name == "broadcast_arrays":  # NumPy's may be written, with a DeprecationWarning
            found, expected = (list(each)[:1] for each in (found, expected))
        assert found == expected, (name, kind)


def memory_of(
    call: Any, shape: tuple[int, ...], over: str, scalar: bool, fortran: bool, *, force: bool
) -> Any:
    """Return whether results are NumPy scalars, may be written, and share the operand's memory."""
    entries = new_axes(tuple(SIZES), tuple(SIZES.values()))
    values = np.random.default_rng(0).standard_normal((*sizes_of(over), *shape))
    if fortran:
        values = np.swapaxes(np.ascontiguousarray(np.swapaxes(values, -1, -2)), -1, -2)
    with extend_axis_environment(entries), per_replica_route(force=force):
        make = wrap if scalar else wrap_array
        try:
            result = call(
                make(values, tuple(entry for entry in entries if str(entry.name) in over))
            )
        except Exception as error:
            return [type(error)]
        found: list[Any] = []
        for leaf in trees.flatten(result)[0]:
            if not isinstance(leaf, MappedArray) or is_scalar(leaf):
                found.append(type(leaf))
                shared = isinstance(leaf, MappedArray) and np.shares_memory(unpack(leaf)[0], values)
                assert scalar or not shared
                continue
            data = unpack(leaf)[0]
            shares = not scalar and np.shares_memory(data, values)
            found.append((data.flags.writeable, shares))
        return found


def compare(map_: Any, program: str, x: np.ndarray, y: np.ndarray, seed: Any = None) -> bool:
    """Assert that the map gives what NumPy gives replica by replica; whether it is comparable.

    It is not where an index is out of range on some replicas only, replicas' shapes differ, or the
    map refuses a statement that NumPy takes.
    """
    # Copies: NumPy's ufunc.at ignores that an array is read-only if the index is a tuple.
    expected = run_loop(program, x.copy(), y.copy())
    if any(errors != expected[0][1] for _, errors in expected):
        return False
    shapes = [{name: value.shape for name, value in values.items()} for values, _ in expected]
    if any(other != shapes[0] for other in shapes):
        return False
    lines = (START + program).splitlines()
    text = f"seed {seed}, {x.dtype} {y.dtype}\n{START}{program}"
    mapped = under(map_, program, x.copy(), y.copy())
    for r, (found, right) in enumerate(zip(mapped, expected, strict=True)):
        values, failed, refused = found
        failing = [number for number, _ in right[1]]
        if any(number not in failing for number in refused):
            return False
        assert [n for n, _ in failed] == failing, (
            text,
            [(lines[n], e) for n, e in {*failed} ^ {*right[1]}],
        )
        for one, other in zip(failed, right[1], strict=True):
            assert one == other or one[0] in refused, (text, lines[one[0]], one, other)
        mine, theirs = described(values), described(right[0])
        assert mine.keys() == theirs.keys(), text
        for name in mine:
            assert mine[name] == theirs[name], (
                f"replica {r}, {name}: {values[name]!r} instead of {right[0][name]!r}\n{text}"
            )
    return True


# The programs of the issue.


def test_training_in_place_trains() -> None:
    def train(w: Any, g: Any) -> Any:
        params = [w.copy(), w.copy()]
        for p in params:
            p -= np.float32(0.1) * g
        return params

    w, g = np.ones((2, 3), np.float16), np.full((2, 3), 2, np.float32)
    for map_ in (gpusim.vmap, gpusim.pmap):
        for p in map_(train)(w, g):
            assert p.dtype == np.float16 and (p == np.float16(0.8)).all()


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", ">f8", "c16", ml_dtypes.bfloat16])
def test_conj_of_a_real_array_is_the_array(dtype: Any) -> None:
    def f(x: Any) -> Any:
        x = x.copy()
        conjugates = x.conj(), x.conjugate()
        x[0] = 1
        return x, conjugates, np.conjugate(x)

    x = np.zeros((2, 3), dtype)
    results = (gpusim.tree.leaves(run(f)(x)) for run in (gpusim.vmap, gpusim.pmap))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_0d_views_of_views_at_mapped_indices() -> None:
    def f(x: Any, i: Any) -> Any:
        x = x.copy()
        row = x[i, 0:]
        first, last = np.squeeze(row[:1]), row[2:].reshape(())
        x %= 3
        read = first + 0
        last[...] = 7
        return x, row, first, last, read

    x, i = np.arange(24.0).reshape(2, 4, 3), np.array([[0], [3]])

    def run(map_: Any) -> Any:  # x[i] with a scalar i is a view
        return gpusim.tree.leaves(map_(lambda x, i: f(x, i[0]))(x, i))

    for found, expected in zip(run(gpusim.vmap), run(gpusim.pmap), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_replicated_values_become_mapped_in_all_their_views() -> None:
    def f(x: Any) -> Any:
        table: Any = np.zeros((2, 3), like=x)
        column, turned = table[:, 1], table.T
        other: Any = np.reshape(table, -1)
        whole = lax.psum(x, "i")
        view = whole[1:]
        assert not table.mapped_axes and not view.mapped_axes
        column += x[:2]
        assert turned.mapped_axes == other.mapped_axes == table.mapped_axes == ("i",)
        whole[1] = x[0]
        return table, turned, other, view

    x = np.arange(6.0).reshape(2, 3)
    table, turned, other, view = gpusim.vmap(f, axis_name="i")(x)
    assert table.tolist() == [[[0, 0, 0], [0, 1, 0]], [[0, 3, 0], [0, 4, 0]]]
    assert (turned == np.swapaxes(table, 1, 2)).all() and (other == table.reshape(2, 6)).all()
    assert view.tolist() == [[0, 7], [3, 7]]


def test_memory_follows_once_for_each_axis() -> None:
    def outer(x: Any) -> Any:
        table = np.zeros(3, like=x)
        view = table[::-1]
        view += x[0]

        def inner(y: Any) -> Any:
            own = table.copy()
            turned = own[::-1]
            own += y
            return turned

        return gpusim.vmap(inner)(x), view

    x = np.arange(12.0).reshape(2, 2, 3)
    found, view = gpusim.vmap(outer)(x)
    assert (view == x[:, 0]).all()
    assert (found == view[:, None] + x[:, :, ::-1]).all()


@pytest.mark.parametrize("dtype", [object, [("a", "f4"), ("b", "i4")], "M8[s]", "S3"])
def test_other_dtypes(dtype: Any) -> None:
    stacked = np.zeros((2, 3), dtype)
    if stacked.dtype.names:
        stacked["b"] = [[3, 1, 2], [6, 5, 4]]
    else:
        stacked[...] = np.array([[3, 1, 2], [6, 5, 4]]).astype(stacked.dtype)

    def f(x: Any) -> Any:
        y = x.copy()
        for row in (y[1:], y[::2]):
            row[0] = x[2]
        z = np.zeros_like(y)
        z[...] = y
        if x.dtype.names:
            y["b"] += 1
        return y, z

    found = gpusim.vmap(f)(stacked)
    for r in range(2):
        for mine, right in zip(found, f(stacked[r]), strict=True):
            assert (mine[r] == right).all()


def test_views_of_objects_are_refused_where_they_cannot_follow() -> None:
    def f(x: Any) -> Any:
        table = np.zeros(3, object, like=x)
        view = table[1:]
        table += x
        return view

    with pytest.raises(TypeError, match="copies"):
        gpusim.vmap(f)(np.array([[1, 2, 3], [4, 5, 6]], object))


def test_plain_copies_of_what_is_the_same_everywhere_do_not_follow() -> None:
    def f(x: Any) -> Any:
        total = lax.psum(x, "i")
        plain = np.asarray(total)
        assert not plain.flags.writeable
        total += x
        return plain + 0 * x

    assert gpusim.vmap(f, axis_name="i")(np.array([[1.0], [2.0]])).tolist() == [[3], [3]]


def test_a_callers_array_is_not_written_through_asarray() -> None:
    table = np.arange(3.0)

    def f(x: Any) -> Any:
        own = np.asarray(table, like=x)
        own += x
        return own

    with pytest.raises(ValueError, match="read-only"):
        gpusim.vmap(f)(np.ones((2, 3)))
    assert (table == np.arange(3.0)).all()
