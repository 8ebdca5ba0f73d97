"""Collectives in shard_map, and sums of the partitioner's before and behind them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax.ground import P, mesh, program, put, shards, values

CUBE = ((2, 2, 2), ("x", "y", "z"))


def both(f: Any, x: Any) -> Any:
    """The results of a shard_map in jit, with sums of its argument and its results beside it."""
    return jax.jit(lambda x: (f(x), jax.tree.map(jnp.sum, f(jnp.abs(x) - x.mean(0)))))(x)


@program
def all_gather_along_axes() -> Any:
    over = mesh(*CUBE)
    spec = P("z", ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=spec, out_specs=spec)
    def f(a: Any) -> Any:
        rows = lax.all_gather(a, "z", axis=0, tiled=True)
        columns = lax.all_gather(a, ("x", "y"), axis=-1, tiled=True)
        return rows, columns

    x = put(values((8, 8)), over, "z", ("x", "y"))
    gathered, sums = both(f, x)
    return gathered, sums, shards(gathered[0]), shards(gathered[1])


@program
def all_gather_in_groups_and_untiled() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def f(a: Any) -> Any:
        groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
        return (
            lax.all_gather(a, "x", axis_index_groups=groups, tiled=True),
            lax.all_gather(a, "x")[:, 0],
            lax.all_gather(a, "x", axis=1, axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]])[0],
        )

    return both(f, put(values((8, 3)), over, "x"))


@program
def all_gather_that_varies_no_more() -> Any:
    over = mesh(4, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P())
    def f(a: Any) -> Any:
        return lax.all_gather(a, "x", tiled=True, to="invarying")

    x = put(values((8, 3)), over, "x")
    return both(f, x), jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)


@program
def all_to_all_forms() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=P(("x", "y")), out_specs=P(None, ("x", "y")))
    def whole(a: Any) -> Any:
        return lax.all_to_all(a, ("x", "y"), split_axis=1, concat_axis=0, tiled=True)

    @partial(jax.shard_map, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y"))
    def part(a: Any) -> Any:
        groups = [[0, 1], [2, 3]]
        tiled = lax.all_to_all(a, "x", 0, 0, axis_index_groups=groups, tiled=True)
        return tiled + lax.all_to_all(a.reshape(4, -1, a.shape[1]), "x", 0, 0).reshape(a.shape)

    x = values((16, 8))
    return both(whole, put(x, over, ("x", "y"))), both(part, put(x, over, "x", "y"))


@program
def permutations() -> Any:
    over = mesh(*CUBE)
    spec = P("x", ("y", "z"))

    @partial(jax.shard_map, mesh=over, in_specs=spec, out_specs=spec)
    def f(a: Any) -> Any:
        ring = [(k, (k + 1) % 4) for k in range(4)]
        some = [(0, 3), (3, 0)]
        return (
            lax.ppermute(a, ("x", "y"), ring),
            lax.ppermute(a, ("y", "z"), ring) + lax.psum(a, "x"),
            lax.ppermute(a, ("y", "z"), some),  # zeros elsewhere
            lax.pshuffle(a, "x", [1, 0]),
        )

    return both(f, put(values((4, 16)), over, "x", ("y", "z")))


@program
def sums_along_each_set_of_axes() -> Any:
    over = mesh(*CUBE)
    spec = P("x", "y", "z")
    sets = ("x", "y", "z", ("x", "y"), ("z", "x"), ("y", "z"), ("x", "y", "z"))

    @partial(jax.shard_map, mesh=over, in_specs=spec, out_specs=spec)
    def f(a: Any) -> Any:
        return [lax.psum(a, axes) * 1.5 for axes in sets] + [lax.pmean(a, axes) for axes in sets]

    return both(f, put(values((4, 2, 6)), over, "x", "y", "z"))


@program
def sums_of_trees_of_types() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P())
    def f(tree: Any) -> Any:
        return lax.psum(tree, "x"), lax.pmax(tree["f"], "x"), lax.pmin(tree["f"], "x")

    dtypes = {"f": "float32", "h": "float16", "b": "bfloat16", "i": "int32", "c": "complex64"}
    tree = {name: put(values((8, 3), jnp.dtype(t)), over, "x") for name, t in dtypes.items()}
    return jax.jit(lambda t: (f(t), t["f"].sum(), t["i"].sum(), t["c"].sum(0)))(tree)


@program
def sums_of_constants_and_counts() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y"))
    def f(a: Any) -> Any:
        count = lax.psum(1, "x") * lax.psum(1.0, ("x", "y")) + lax.axis_size("y")
        place = lax.axis_index(("x", "y")) * 10 + lax.axis_index("y")
        return a * count + place + lax.psum(place, "x")

    return both(f, put(values((8, 4)), over, "x", "y"))


@program
def sums_in_groups() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def f(a: Any) -> Any:
        pairs = [[k, k + 4] for k in range(4)]
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        return (
            lax.psum(a, "x", axis_index_groups=pairs),
            lax.pmean(a, "x", axis_index_groups=halves),
            lax.pmax(a, "x", axis_index_groups=halves),
            lax.psum(a, "x", axis_index_groups=[[7, 0, 3, 5], [1, 2, 4, 6]]),
        )

    return both(f, put(values((8, 5)), over, "x"))


@program
def scattered_sums() -> Any:
    over = mesh(*CUBE)

    @partial(jax.shard_map, mesh=over, in_specs=(P("z", "y"), P("y")), out_specs=P(("z", "y")))
    def f(a: Any, b: Any) -> Any:
        c = a @ b
        return (
            lax.psum_scatter(c, "y", scatter_dimension=0, tiled=True),
            lax.psum_scatter(c, ("z", "y"), scatter_dimension=0, tiled=True),
            lax.psum_scatter(c[:2], "y", scatter_dimension=0)[None],
        )

    a, b = put(values((8, 8)), over, "z", "y"), put(values((8, 6), seed=1), over, "y")
    return jax.jit(lambda a, b: (f(a, b), (a @ b).sum(), jax.tree.map(jnp.sum, f(a, b))))(a, b)


@program
def scattered_sums_in_groups() -> Any:
    over = mesh(*CUBE)
    spec = P(None, ("x", "y", "z"))

    @partial(jax.shard_map, mesh=over, in_specs=spec, out_specs=spec)
    def f(a: Any) -> Any:
        groups = ((0, 2, 4, 6), (1, 3, 5, 7))
        return lax.psum_scatter(a, ("x", "y", "z"), axis_index_groups=groups, tiled=True)

    return both(f, put(values((8, 8)), over, None, ("x", "y", "z")))


@program
def broadcasts() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P())
    def from_one(a: Any) -> Any:
        mine = jnp.where(lax.axis_index("x") == 2, a, jnp.zeros_like(a))
        return lax.psum(mine, "x")

    return both(from_one, put(values((8, 4)), over, "x"))


@program
def cumulative_sums_over_devices() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"))
    def f(a: Any) -> Any:
        totals = lax.all_gather(a.sum(0), "x")
        before = jnp.where(jnp.arange(8) < lax.axis_index("x"), 1.0, 0.0) @ totals
        return jnp.cumsum(a, 0) + before

    return both(f, put(values((16, 3)), over, "x"))


@program
def a_ring_of_products() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P(None, "x")), out_specs=P("x"))
    def f(a: Any, b: Any) -> Any:
        # The collective matmul: blocks of b go round while a stays.
        place, width = lax.axis_index("x"), b.shape[1]

        def step(k: Any, state: Any) -> Any:
            out, b = state
            column = (place + k) % 8 * width
            out = lax.dynamic_update_slice(out, a @ b, (jnp.zeros_like(column), column))
            return out, lax.ppermute(b, "x", [(k, (k - 1) % 8) for k in range(8)])

        zeros = lax.pcast(jnp.zeros((a.shape[0], 8 * width), a.dtype), "x", to="varying")
        return lax.fori_loop(0, 8, step, (zeros, b))[0]

    a, b = put(values((8, 4)), over, "x"), put(values((4, 16), seed=1), over, None, "x")
    return jax.jit(lambda a, b: (f(a, b), f(a, b).sum(0), (a @ b).sum(0)))(a, b)


@program
def two_meshes_of_names_in_one_program() -> Any:
    first, second = mesh((4, 2), ("a", "b")), mesh((2, 4), ("c", "d"))

    @jax.jit
    def f(x: Any) -> Any:
        one = jax.shard_map(
            lambda a: lax.psum(a, "a"), mesh=first, in_specs=P("a", "b"), out_specs=P(None, "b")
        )(x)
        two = jax.shard_map(
            lambda a: lax.psum(a, "d"), mesh=second, in_specs=P("c", "d"), out_specs=P("c")
        )(x)
        return one, two, x.sum(0), two.sum()

    return f(values((8, 8)))


@program
def meshes_in_another_order_of_devices() -> Any:
    over = mesh((4, 2), ("x", "y"), order=[6, 1, 3, 0, 7, 2, 5, 4])

    @partial(jax.shard_map, mesh=over, in_specs=P("x", "y"), out_specs=(P(None, "y"), P("x", "y")))
    def f(a: Any) -> Any:
        return lax.psum(a, "x"), lax.psum_scatter(a, "x", tiled=True)

    x = put(values((16, 4)), over, "x", "y")
    found = jax.jit(lambda x: (*f(x), x.sum(0), f(x)[1].sum()))(x)
    return found, [shards(each) for each in found]


@program
def a_mesh_of_some_devices() -> Any:
    over = mesh((2, 2), ("x", "y"), order=[5, 2, 7, 0])

    @partial(jax.shard_map, mesh=over, in_specs=P("x", "y"), out_specs=P())
    def f(a: Any) -> Any:
        return lax.psum(a, ("x", "y"))

    return both(f, put(values((4, 6)), over, "x", "y"))


@program
def axes_of_size_one() -> Any:
    over = mesh((1, 4, 1), ("x", "y", "z"))

    @partial(jax.shard_map, mesh=over, in_specs=P("x", "y"), out_specs=P())
    def f(a: Any) -> Any:
        return lax.psum(a, ("x", "y")), lax.pmax(lax.psum(lax.pmean(a, "y"), "z"), "x")

    return both(f, put(values((4, 8)), over, "x", "y"))


@program
def empty_and_scalar_operands() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P()), out_specs=P())
    def f(a: Any, s: Any) -> Any:
        return lax.psum(a[:0], "x"), lax.psum(a.sum() * s, "x"), lax.psum(s, "x")

    x = put(values((8, 3)), over, "x")
    return jax.jit(lambda x, s: (f(x, s), x.sum() * s, x[:, :0].sum(0)))(x, np.float32(1.5))


@program
def results_that_are_unused() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=(P(), P("x")))
    def f(a: Any) -> Any:
        lax.psum(a * 2, "x")
        return lax.psum(a, "x"), a + lax.pmax(a, "x")

    x = put(values((8, 3)), over, "x")
    return jax.jit(lambda x: f(x)[1])(x), jax.jit(lambda x: (f(x)[0], x.max(0)))(x)
