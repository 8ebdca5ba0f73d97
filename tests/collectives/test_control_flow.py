"""gpusim.lax's control flow and dynamic slices have JAX's values and errors under every map."""

from __future__ import annotations

from tests.oracles import jax_oracle  # isort: skip - first: it sets JAX's devices and 64-bit types

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax
from tests.oracles.control_flow import ALONE, NUMPY, REPLICAS, TOGETHER, N, X

jax, jnp = jax_oracle.jax, jax_oracle.jnp
JAX = SimpleNamespace(lax=jax.lax, xp=jnp)


def vmap(program: Any) -> Any:
    return gpusim.vmap(lambda x, n: program(NUMPY, x, n), axis_name="i")(X, N)


def pmap(program: Any) -> Any:
    return gpusim.pmap(lambda x, n: program(NUMPY, x, n), "i")(X, N)


def on_mesh(program: Any, d: Any, mapped: Callable[..., Any], tree: Any, mesh: Any, P: Any) -> Any:
    def shard(x: Any, n: Any) -> Any:
        return tree(lambda y: d.xp.expand_dims(y, 0), program(d, x[0], n[0]))

    return mapped(shard, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"), check_vma=False)


def shard_map(program: Any) -> Any:
    mesh = gpusim.Mesh(REPLICAS, "i")
    return on_mesh(program, NUMPY, gpusim.shard_map, gpusim.tree.map, mesh, gpusim.P)(X, N)


def nested(program: Any) -> Any:
    """vmap in a pmap, in which the axis of the collectives is the vmap's."""
    two = gpusim.vmap(lambda x, n: program(NUMPY, x, n), axis_name="i")
    both = gpusim.pmap(lambda x, n: two(x, n), "j", axis_size=2, in_axes=None)
    return gpusim.tree.map(lambda y: y[1], both(X, N))


def of_jax(program: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:REPLICAS]), ("i",))
    P = jax.sharding.PartitionSpec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.jit(on_mesh(program, JAX, jax.shard_map, jax.tree.map, mesh, P))(X, N)


def equal(found: Any, expected: Any) -> None:
    leaves, structure = jax.tree.flatten(found)
    wanted, other = jax.tree.flatten(expected)
    assert structure == other
    for a, b in zip(leaves, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize("program", ALONE + TOGETHER, ids=lambda p: p.__name__)
def test_values_are_jaxs_under_every_map(program: Any) -> None:
    expected = of_jax(program)
    for run in (vmap, pmap, shard_map, nested):
        with np.errstate(all="raise"):  # replicas that discard a result make no errors
            equal(run(program), expected)


@pytest.mark.parametrize("program", ALONE, ids=lambda p: p.__name__)
def test_without_a_map(program: Any) -> None:
    for x, n in zip(X, N, strict=True):
        equal(
            jax.tree.map(np.asarray, program(NUMPY, x, n)),
            jax.tree.map(np.asarray, program(JAX, jnp.asarray(x), jnp.asarray(n))),
        )


# In vmap, as in JAX's, collectives take all replicas, also where their result is discarded.


def psum_in_one_branch(d: Any, x: Any, n: Any) -> Any:
    return d.lax.cond(n > 2, lambda: d.lax.psum(x, "i"), lambda: -x)


def psum_while_some_run(d: Any, x: Any, n: Any) -> Any:
    return d.lax.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + d.lax.psum(s[1], "i")), (0, x)
    )


DIVERGING = [psum_in_one_branch, psum_while_some_run]


@pytest.mark.parametrize("program", DIVERGING, ids=lambda p: p.__name__)
def test_collectives_in_a_diverging_branch(program: Any) -> None:
    expected = jax.vmap(lambda x, n: program(JAX, x, n), axis_name="i")(X, N)
    equal(vmap(program), expected)
    with pytest.raises(gpusim.GpusimError, match="psum over mesh axis 'i' in a cond, switch or"):
        shard_map(program)
    with pytest.raises(gpusim.GpusimError):  # replicas that do not call it are missing
        pmap(program)


def test_a_branch_may_differ_along_the_other_axis_of_a_mesh() -> None:
    mesh = gpusim.Mesh((2, 4), ("x", "y"))

    def row(v: Any) -> Any:
        odd = lax.axis_index("x") == 1
        return lax.cond(odd, lambda v: lax.psum(v, "y"), lambda v: lax.pmax(v, "y") + 0 * v, v)

    f = gpusim.shard_map(row, mesh=mesh, in_specs=gpusim.P("x", "y"), out_specs=gpusim.P("x", "y"))
    np.testing.assert_array_equal(
        f(np.arange(8).reshape(2, 4)), np.repeat([[3], [4 + 5 + 6 + 7]], 4, axis=1)
    )


def test_draws_in_a_branch_do_not_depend_on_the_map() -> None:
    def f(n: Any, make: Callable[[], Any]) -> Any:
        g = make()
        first = lax.cond(n > 2, lambda: gpusim.rng(1, "i").normal(), lambda: np.float32(0))
        agreed = lax.cond(lax.psum(n, "i") > 2, lambda: g.normal(), lambda: np.float32(0))
        return first, agreed, g.normal()

    def outside(n: Any) -> Any:
        g = gpusim.rng(0, "i")
        return lax.cond(n > 2, lambda: g.normal(), lambda: np.float32(0)), g.normal()

    inside = lambda n: f(n, lambda: gpusim.rng(0, "i"))  # noqa: E731
    equal(gpusim.vmap(inside, axis_name="i")(N), gpusim.pmap(inside, "i")(N))
    with pytest.raises(gpusim.GpusimError, match="a draw in a cond, switch or while_loop"):
        gpusim.vmap(outside, axis_name="i")(N)
    gpusim.pmap(outside, "i")(N)


def test_only_the_branch_taken_runs_where_all_agree() -> None:
    ran = []

    def f(x: Any) -> Any:
        return lax.cond(
            lax.psum(x, "i") > 0, lambda: ran.append(1) or x, lambda: ran.append(2) or x
        )

    gpusim.vmap(f, axis_name="i")(np.ones(3))
    assert ran == [1]


def test_results_and_carries_are_read_only_under_every_map() -> None:
    x = np.ones((2, 3))

    def f(x: Any, y: Any) -> Any:
        y = y + 0
        for kept in (
            lax.cond(True, lambda: y, lambda: y),
            lax.fori_loop(0, 0, lambda i, c: c, y),
            lax.fori_loop(0, 1, lambda i, c: y, x),
        ):
            if isinstance(kept, np.ndarray):
                assert not kept.flags.writeable
        return y

    np.testing.assert_array_equal(gpusim.pmap(f)(x, x), x)

    def changes(i: Any, carry: Any) -> Any:
        carry[0] = 5
        return carry

    with pytest.raises((ValueError, TypeError, gpusim.ReplicaError), match=r"read-only|in place"):
        lax.fori_loop(0, 1, changes, np.ones(3))
    for run in (gpusim.pmap, gpusim.vmap):
        with pytest.raises((ValueError, TypeError, gpusim.ReplicaError), match=r"read-only|place"):
            run(lambda x: lax.fori_loop(0, 1, changes, x + 1))(x)

    def rebinds(x: Any) -> Any:
        for total in (
            lax.cond(x[0] > 1, lambda: x.sum(), lambda: np.asarray(0.5)),
            lax.fori_loop(0, 2, lambda i, s: s + x[i], 0),
            lax.while_loop(lambda s: s < x[0], lambda s: s + 1, np.zeros(())),
        ):
            total += 1  # as a scalar of NumPy's does
        return total

    ends = [run(rebinds)(np.array([[1.0, 3.0], [4.5, 5.0]])) for run in (gpusim.vmap, gpusim.pmap)]
    np.testing.assert_array_equal(ends, [[2.0, 6.0]] * 2)

    def copies(x: Any) -> Any:
        for found in (lax.dynamic_slice(x, (0,), (3,)), lax.select(True, x, x)):
            found += 7
        return x

    for run in (gpusim.vmap, gpusim.pmap, lambda f: f):
        np.testing.assert_array_equal(
            run(copies)(x if run in (gpusim.vmap, gpusim.pmap) else x[0]), 1
        )


ERRORS: dict[str, tuple[type[Exception], Callable[[Any, Any], Any]]] = {
    "carry's dtype": (TypeError, lambda d, x: d.fori_loop(0, 3, lambda i, c: c.astype("f2"), x)),
    "carry's kind": (TypeError, lambda d, x: d.fori_loop(0, 3, lambda i, c: 1, 1.5)),
    "carry's shape": (TypeError, lambda d, x: d.while_loop(lambda c: True, lambda c: c[:2], x)),
    "carry's structure": (TypeError, lambda d, x: d.scan(lambda c, x: ((c, c), x), x, x)),
    "carry's leaf": (TypeError, lambda d, x: d.fori_loop(0, 3, lambda i, c: c, "x")),
    "no pair": (TypeError, lambda d, x: d.scan(lambda c, x: c, x, x)),
    "no length": (ValueError, lambda d, x: d.scan(lambda c, x: (c, x), x, None)),
    "other length": (ValueError, lambda d, x: d.scan(lambda c, x: (c, x), x, x, length=4)),
    "lengths": (ValueError, lambda d, x: d.scan(lambda c, x: (c, c), x, (x, x[:2]))),
    "an int for a bool": (TypeError, lambda d, x: d.while_loop(lambda c: 1, lambda c: c, x)),
    "bools for a bool": (TypeError, lambda d, x: d.while_loop(lambda c: c > 0, lambda c: c, x)),
    "a tree for a bool": (TypeError, lambda d, x: d.while_loop(lambda c: (True,), lambda c: c, x)),
    "pred's shape": (TypeError, lambda d, x: d.cond(x > 0, lambda: 1, lambda: 2)),
    "pred's type": (TypeError, lambda d, x: d.cond("a", lambda: 1, lambda: 2)),
    "no function": (TypeError, lambda d, x: d.cond(True, 3, lambda: 2)),
    "branches' dtypes": (TypeError, lambda d, x: d.cond(x[0] > 0, lambda: x, lambda: x < 0)),
    "branches' structures": (TypeError, lambda d, x: d.cond(x[0] > 0, lambda: x, lambda: (x, x))),
    "branches' shapes": (TypeError, lambda d, x: d.switch(x[0] > 0, [lambda: x, lambda: x[1:]])),
    "index's kind": (TypeError, lambda d, x: d.switch(1.5, [lambda: 2, lambda: 3])),
    "a bool for an index": (TypeError, lambda d, x: d.switch(True, [lambda: 2, lambda: 3])),
    "index's shape": (TypeError, lambda d, x: d.switch(np.arange(3), [lambda: 2, lambda: 3])),
    "no branches": (ValueError, lambda d, x: d.switch(1, [])),
    "bounds' dtypes": (
        TypeError,
        lambda d, x: d.fori_loop(np.int32(0), np.int8(3), lambda i, c: c, 1),
    ),
    "bounds' kinds": (TypeError, lambda d, x: d.fori_loop(0.0, 3, lambda i, c: c, 1)),
    "cases' shapes": (TypeError, lambda d, x: d.select(True, x, x[1:])),
    "cases' dtypes": (TypeError, lambda d, x: d.select(True, x, x.astype("f2"))),
    "select's pred": (TypeError, lambda d, x: d.select(np.array([True]), x, x)),
    "too large a slice": (TypeError, lambda d, x: d.dynamic_slice(x, (0,), (9,))),
    "too many starts": (ValueError, lambda d, x: d.dynamic_slice(x, (0, 1), (3,))),
    "start's kind": (TypeError, lambda d, x: d.dynamic_slice(x, (0.5,), (3,))),
    "starts no sequence": (TypeError, lambda d, x: d.dynamic_slice(x, 3, (3,))),
    "negative start": (
        ValueError,
        lambda d, x: d.dynamic_slice(x, (-2,), (3,), allow_negative_indices=False),
    ),
    "too large an update": (TypeError, lambda d, x: d.dynamic_update_slice(x[:2], x, (0,))),
    "update's axes": (TypeError, lambda d, x: d.dynamic_update_slice(x, x[None], (0,))),
    "update's dtype": (TypeError, lambda d, x: d.dynamic_update_slice(x, x.astype("i4"), (0,))),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_of_jaxs_type(case: str) -> None:
    error, call = ERRORS[case]
    with pytest.raises(error):
        call(jax.lax, jnp.asarray(X[0]))
    if not case.startswith("branches"):  # of which one runs
        with pytest.raises(error):
            call(lax, X[0])
    with pytest.raises(error):
        gpusim.vmap(lambda x: call(lax, x))(X)


def test_messages_name_what_differs() -> None:
    with pytest.raises(TypeError, match=r"took float64\[5\] and returned float16\[5\]"):
        lax.fori_loop(0, 1, lambda i, c: c.astype(np.float16), X[0])
    with pytest.raises(TypeError, match=r"true_fun float64\[5\], false_fun float16\[5\]"):
        gpusim.vmap(lambda x: lax.cond(x[0] > 0, lambda: x, lambda: x.astype(np.float16)))(X)


def test_signatures_are_jaxs() -> None:
    for name in lax.__all__:
        theirs = getattr(jax.lax, name, None)
        if theirs is None or name.startswith(("p", "all_", "axis_", "ragged")):
            continue
        wanted = [n for n in inspect.signature(theirs).parameters if not n.startswith("_")]
        assert list(inspect.signature(getattr(lax, name)).parameters) == wanted, name


def test_names_that_are_not_here_say_what_serves() -> None:
    for name in (*lax.INSTEAD, *lax.AS_IN_NUMPY):
        assert not hasattr(lax, name)
    for name in lax.AS_IN_NUMPY:
        assert hasattr(jax.lax, name), name
        with pytest.raises(AttributeError) as caught:
            getattr(lax, name)
        assert hasattr(np, str(caught.value).rpartition("np.")[2]), name
    with pytest.raises(AttributeError, match="'psend': use ppermute"):
        getattr(lax, "psend")  # noqa: B009
    with pytest.raises(AttributeError, match=r"has no attribute 'nosuch'$"):
        getattr(lax, "nosuch")  # noqa: B009


def test_casts_and_types_of_results_change_no_value() -> None:
    def f(x: Any) -> Any:
        return lax.all_gather(lax.pcast(x, "i", to="varying"), "i", to="invarying")

    found = gpusim.vmap(f, axis_name="i", out_axes=None)(np.arange(3))
    np.testing.assert_array_equal(found, np.arange(3))
    with pytest.raises(ValueError, match="'unreduced'"):
        gpusim.vmap(lambda x: lax.pcast(x, "i", to="unreduced"), axis_name="i")(np.arange(3))
    with pytest.raises(ValueError, match="all_gather to must be"):
        gpusim.vmap(lambda x: lax.all_gather(x, "i", to="i"), axis_name="i")(np.arange(3))
    with pytest.raises(NameError):
        gpusim.vmap(lambda x: lax.pvary(x, "j"), axis_name="i")(np.arange(3))


# Writes in place. The functions of a cond or a loop write into arrays that were made outside: under
# vmap, as under pmap, only the replicas that take the branch change.


def sort_or_add(x: Any, n: Any) -> Any:
    a, counts = x.copy(), np.zeros(4, int, like=x)

    def count() -> int:
        np.add.at(counts, [0, 0, 2], 1)
        return 0

    def double() -> int:
        np.multiply(a, 2, out=a)
        a[-1] += 1
        return 0

    lax.switch(n % 4, [lambda: a.sort() or 0, count, double])
    return a, counts


def through_views(x: Any, n: Any) -> Any:
    a = x.copy()
    view, square = a[::2], a.reshape(2, 2).T

    def ones() -> Any:
        view[:] = 1
        return view.sum()

    def corner() -> Any:
        square[0, 1] = 5
        np.copyto(view, square[1])
        return view.sum()

    total = lax.cond(n > 2, ones, corner)
    return a, view, square, total


def into_picked_rows(x: Any, n: Any) -> Any:
    table = np.stack([x, 2 * x, 3 * x])
    row = table[x.argmax() % 3]

    def change() -> int:
        row[...] += 1
        table[x.argmin() % 3][0] = 7
        return 0

    lax.cond(n > 2, change, lambda: 0)
    return table, row


def by_masks(x: Any, n: Any) -> Any:
    a, b = x.copy(), x.reshape(2, 2) * 1

    def zero() -> int:
        a[a > 0] = 0
        b.flat[1] = 8
        return 0

    def fill() -> int:
        np.putmask(a, a < 0, 5)
        np.fill_diagonal(b, n)
        np.put_along_axis(a, np.argsort(a)[:1], -1, 0)
        return 0

    lax.cond(n > 2, zero, fill)
    return a, b


def two_outputs(x: Any, n: Any) -> Any:
    quotient, remainder = np.zeros_like(x), np.zeros_like(x)

    def divide() -> int:
        np.divmod(x, 2, out=(quotient, remainder))
        return 0

    lax.cond(n > 2, divide, lambda: 0)
    return quotient, remainder


def nested_branches(x: Any, n: Any) -> Any:
    a = x.copy()

    def add(place: int, value: float) -> Any:
        def change() -> int:
            a[place] += value
            return 0

        return change

    def high() -> int:
        a[3] = 1
        lax.cond(n > 3, add(0, 10), add(1, 20))
        a[2] *= 2
        return 0

    lax.cond(n > 1, high, lambda: lax.cond(n > 0, add(0, 30), add(1, 40)))
    return a


def loops_in_loops(x: Any, n: Any) -> Any:
    a, steps = x.copy(), np.zeros(2, int, like=x)

    def inner(j: Any) -> Any:
        steps[0] += 1
        a[0] *= 1.5
        return j + 1

    def outer(i: Any) -> Any:
        lax.while_loop(lambda j: j < i, inner, 0)
        steps[1] += 1
        lax.cond(i % 2 == 0, lambda: a.fill(i) or 0, lambda: 0)
        return i + 1

    lax.while_loop(lambda i: i < n, outer, 0)
    return a, steps


def loop_that_its_writes_end(x: Any, n: Any) -> Any:
    steps = np.zeros(2, int, like=x)

    def step(k: Any) -> Any:
        steps[0] += 1
        return k

    lax.cond(n > 2, lambda: lax.while_loop(lambda k: steps[0] < n, step, 0), lambda: 0)
    return steps


def in_a_scan_and_a_fori_loop(x: Any, n: Any) -> Any:
    table, a = np.zeros((4, 2), like=x), x.copy()

    def row(carry: Any, v: Any) -> Any:
        carry = carry.copy()
        carry[0] += v
        lax.cond(v > 0, lambda: table.__setitem__((0, 1), v) or 0, lambda: 0)
        return carry, carry[0]

    def step(i: Any, total: Any) -> Any:
        a[i % 4] = i
        return total + i

    return lax.scan(row, np.zeros(2), x), lax.fori_loop(0, n, step, 0), table, a


def with_what_belongs_to_gpusim(x: Any, n: Any) -> Any:
    """per_replica, stochastic rounding, a result of a collective, and gpusim.at."""
    a, whole, low = x.copy(), lax.psum(x, "i"), np.zeros(4, np.float16, like=x)

    def change() -> Any:
        a[:] = gpusim.per_replica(np.sort)(a)
        whole[0] = 1
        low[:] = gpusim.round_to(x, np.float16, rounding="stochastic", axis_name="i")
        return x

    return a, whole, low, lax.cond(n > 2, change, lambda: gpusim.at(x)[0].set(9))


def by_functions_that_run_once_per_replica(x: Any, n: Any) -> Any:
    a = x.copy()

    def write(first: Any, second: Any) -> int:
        first[0] = np.nan
        second[1] = first[2]
        return 0

    def change() -> int:
        gpusim.per_replica(write)(a, a[::-1])
        np.nan_to_num(a, copy=False)
        return 0

    lax.cond(n > 2, change, lambda: 0)
    return a


def results_are_values(x: Any, n: Any) -> Any:
    """Writes into an operand change no result, though cond may return the operand."""
    a = x.copy()
    kept = [
        lax.cond(n > 2, lambda: a, lambda: -a),
        lax.cond(True, lambda: a[1:], lambda: -a[1:]),
        lax.switch(n, [lambda: a, lambda: a]),
        lax.fori_loop(0, n, lambda i, c: c, a),
        lax.fori_loop(0, 2, lambda i, c: c, a),
        lax.scan(lambda c, v: (c, v), a, x)[0],
    ]
    a += 100

    def step(i: Any, c: Any) -> Any:
        a[0] += 1
        return c

    return a, kept, lax.fori_loop(0, n, step, a), lax.fori_loop(0, 3, step, a), a


def results_keep_their_layout(x: Any, n: Any) -> Any:
    """The order in memory is that in which np.sum adds."""
    turned = np.outer(np.exp(x), np.arange(40.0) / 3).astype(np.float32).T
    kept = lax.cond(n > 2, lambda: turned, lambda: 2 * turned)
    return kept.sum(), lax.fori_loop(0, 2, lambda i, c: c, turned).sum()


WRITING = [
    sort_or_add,
    through_views,
    into_picked_rows,
    by_masks,
    two_outputs,
    nested_branches,
    loops_in_loops,
    loop_that_its_writes_end,
    in_a_scan_and_a_fori_loop,
    with_what_belongs_to_gpusim,
    by_functions_that_run_once_per_replica,
    results_are_values,
    results_keep_their_layout,
]


@pytest.mark.parametrize("program", WRITING, ids=lambda p: p.__name__)
def test_writes_change_the_replicas_that_take_the_branch(program: Any) -> None:
    def in_numpy(d: Any, x: Any, n: Any) -> Any:
        return program(x[:4], n)

    expected, structure = gpusim.tree.flatten(pmap(in_numpy))
    for run in (vmap, shard_map, nested):
        found, other = gpusim.tree.flatten(run(in_numpy))
        assert other == structure
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_a_function_that_cannot_change_some_replicas_only_is_refused() -> None:
    def f(n: Any) -> Any:
        shared = np.zeros(3, like=n)  # one array for all replicas
        write = gpusim.per_replica(lambda a: a.fill(1) or 0)
        lax.cond(n > 2, lambda: write(shared), lambda: 0)
        return shared

    with pytest.raises(ValueError, match="read-only"):
        gpusim.vmap(f)(N)
