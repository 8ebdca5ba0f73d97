"""shard_map over some axes of a mesh, and shard_map in shard_map."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, needs, program, put, values

GRID = ((4, 2), ("x", "y"))
CUBE = ((2, 2, 2), ("x", "y", "z"))


def grid(*shape: int, spec: Any = ("x", "y"), explicit: bool = False) -> Any:
    """An array on a mesh of 4 by 2."""
    return put(values(shape), mesh(*GRID, explicit=explicit), *spec)


@program
def manual_sums_and_automatic_ones() -> Any:
    over = mesh(*GRID)

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    def f(x: Any) -> Any:
        # The first sum is the program's, the second the partitioner's.
        return x * lax.psum(x, "x") + x.sum(1, keepdims=True)

    x = grid(8, 6)
    return jax.jit(lambda x: (f(x), f(x).sum(0), x.mean()))(x)


@program
def collectives_over_a_manual_axis() -> Any:
    over = mesh(*GRID)
    maps = partial(jax.shard_map, mesh=over, axis_names={"x"}, check_vma=False)
    ring = [(k, (k + 1) % 4) for k in range(4)]
    found = []
    for f, out in (
        (lambda x: lax.psum(x, "x"), P()),
        (lambda x: lax.pmean(x, "x"), P()),
        (lambda x: lax.pmax(x, "x"), P()),
        (lambda x: lax.ppermute(x, "x", ring), P("x")),
        (lambda x: x * lax.axis_index("x") + lax.axis_size("x"), P("x")),
    ):
        g = maps(f, in_specs=P("x"), out_specs=out)
        found.append(jax.jit(lambda x, g=g: (g(x), g(x).sum(), x.sum(0)))(grid(8, 6)))
    return found


@program
def constraints_inside() -> Any:
    over = mesh(*GRID)

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    def f(x: Any) -> Any:
        x = lax.with_sharding_constraint(x, P(None, "y"))
        return x @ x.T @ x - lax.pmean(x, "x")

    @jax.jit
    def whole(x: Any) -> Any:
        y = lax.with_sharding_constraint(f(x), NamedSharding(over, P("x", "y")))
        return y, y.sum(0), y.max()

    return whole(grid(8, 6)), whole(grid(8, 6, spec=()))


@program
def products_over_automatic_axes() -> Any:
    over = mesh(*CUBE)

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    def f(a: Any, w: Any) -> Any:
        return jax.nn.relu(a @ w) + lax.psum(a @ w, "x").mean()

    a, w = put(values((8, 6)), over, "x", "y"), put(values((6, 4), seed=1), over, "y", "z")
    loss = lambda a, w: (f(a, w) ** 2).sum()  # noqa: E731
    return jax.jit(lambda a, w: (f(a, w), f(a, w).sum(0)))(a, w), jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1))
    )(a, w)


@program
def two_manual_axes_of_three() -> Any:
    over = mesh(*CUBE)

    @partial(
        jax.shard_map, mesh=over, in_specs=P("x", "z"), out_specs=P("x", "z"), axis_names={"x", "z"}
    )
    def f(a: Any) -> Any:
        return a - lax.pmean(a, "x") + lax.psum(a.sum(), ("x", "z")) * lax.axis_index("z")

    a = put(values((4, 4, 6)), over, "x", "z", "y")
    return jax.jit(lambda a: (f(a), f(a).sum((0, 1)), f(a).sum(2)))(a)


@program
def gradients_through_manual_axes() -> Any:
    over = mesh(*GRID)
    found = []
    for check in (True, False):

        @partial(
            jax.shard_map, mesh=over, in_specs=(P(), P("x")), out_specs=P("x"),
            axis_names={"x"}, check_vma=check,
        )  # fmt: skip
        def f(w: Any, x: Any) -> Any:
            return jnp.tanh(x @ w) * lax.pmean(x.sum(1, keepdims=True), "x")

        w = put(values((6, 6), seed=1), over, "y")
        loss = lambda w, x, f=f: (f(w, x) ** 2).mean()  # noqa: E731
        found.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, grid(8, 6)))
    return found


@program
def loops_over_manual_sums() -> Any:
    over = mesh(*GRID)

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    def f(x: Any) -> Any:
        step = lambda c, _: (c - lax.pmean(c, "x") / 2 + c.mean(1, keepdims=True), c.sum())  # noqa: E731
        x, sums = lax.scan(step, x, length=3)
        return x * sums.max()

    return jax.jit(lambda x: lax.fori_loop(0, 2, lambda _, x: f(x) / 8 + x.sum(0) / 64, x))(
        grid(8, 6)
    )


@program
def explicit_axes_beside_manual_ones() -> Any:
    needs("jax.set_mesh")
    over = mesh(*GRID, explicit=True)
    with jax.set_mesh(over):
        f = jax.shard_map(lambda x: x * x, out_specs=P("x"), axis_names={"x"})
        g = jax.shard_map(lambda x: x.T, out_specs=P(None, "x"), axis_names={"x"})
        x = grid(8, 6, explicit=True)
        loss = lambda x: jnp.sin(f(x)).sum()  # noqa: E731
        return (
            jax.jit(lambda x: (f(x), f(x).sum(0), g(x).sum()))(x),
            jax.jit(jax.value_and_grad(loss))(x),
            str(jax.jit(f)(x).sharding.spec),
        )


@program
def explicit_axes_beside_manual_sums() -> Any:
    needs("jax.set_mesh")
    over = mesh(*GRID, explicit=True)
    with jax.set_mesh(over):
        f = jax.shard_map(lambda x: lax.psum(x * x, "x"), out_specs=P(), axis_names={"x"})
        g = jax.shard_map(lambda x: x * lax.pmax(x, "y"), out_specs=P(None, "y"), axis_names={"y"})
        x = grid(8, 6, explicit=True)
        loss = lambda x: jnp.sin(f(x)).sum()  # noqa: E731
        found = jax.jit(lambda x: (f(x), f(x).sum(1), g(x), g(x).sum()))(x)
        return found, jax.jit(jax.value_and_grad(loss))(x)


@program
def nested_over_different_axes() -> Any:
    needs("jax.set_mesh")
    over = mesh(*CUBE)

    def inner(x: Any) -> Any:
        return x * 2 + lax.psum(x, "y")

    def outer(x: Any) -> Any:
        f = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(None, "y"), axis_names={"y"})
        return f(x) - lax.pmean(x, "x") + x.sum()

    f = jax.shard_map(outer, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    x = put(values((4, 8)), over, "x", ("y", "z"))
    with jax.set_mesh(over):
        return jax.jit(lambda x: (f(x), f(x).sum(0)))(x)


@program
def gradients_through_nested_maps() -> Any:
    needs("jax.set_mesh")
    over = mesh(*GRID)

    def outer(x: Any) -> Any:
        cube = jax.shard_map(lambda x: x**3, in_specs=P(None, "y"), out_specs=P(None, "y"))
        return cube(x)

    f = jax.shard_map(outer, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False)
    with jax.set_mesh(over):
        loss = lambda x: jnp.tanh(f(x)).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(grid(8, 6))


@program
def nested_to_the_last_axis() -> Any:
    needs("jax.set_mesh")
    over = mesh(*CUBE)

    def third(x: Any) -> Any:
        return x + lax.psum(x, "z")

    def second(x: Any) -> Any:
        return jax.shard_map(third, in_specs=P("z"), out_specs=P("z"))(x) + lax.psum(x, "y")

    def first(x: Any) -> Any:
        f = jax.shard_map(second, in_specs=P("y"), out_specs=P("y"), axis_names={"y"})
        return f(x) * lax.pmax(x, "x").max()

    f = jax.shard_map(first, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    x = put(values((16, 3)), over, ("x", "y", "z"))
    with jax.set_mesh(over):
        return jax.jit(lambda x: (f(x), f(x).sum(0)))(x)


@program
def maps_by_axis_name() -> Any:
    needs("jax.smap", "jax.set_mesh")
    over = mesh(*GRID)

    @partial(jax.smap, axis_name="x", in_axes=0, out_axes=0)
    def f(x: Any) -> Any:
        g = jax.smap(lambda x: lax.psum(x, "y"), axis_name="y", in_axes=0, out_axes=None)
        return g(jnp.sin(x)) * lax.psum(x.sum(), "x")

    x = put(values((16, 3)), over, ("x", "y"))
    with jax.set_mesh(over):
        return jax.jit(lambda x: (f(x), f(x).sum(0), x.sum()))(x)


@program
def sums_inside_jit_inside() -> Any:
    over = mesh(*GRID)
    inner = jax.jit(lambda x: x - lax.pmean(x, "x") + x.sum(1, keepdims=True))

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    def f(x: Any) -> Any:
        return inner(x) + inner(x * 2)

    return jax.jit(lambda x: (f(x), f(x).sum(0)))(grid(8, 6))


@program
def a_replicated_result() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda x, w: (lax.psum(x @ w, "x"), w * 2), mesh=over,
        in_specs=(P("x"), P()), out_specs=(P(), P()), axis_names={"x"},
    )  # fmt: skip
    w = put(values((6, 4), seed=1), over, "y")
    found = jax.jit(lambda x, w: (f(x, w), (x @ w).sum(0)))(grid(8, 6), w)
    return found, [str(each.sharding) for each in jax.tree.leaves(found)]


@program
def vmap_over_a_partly_manual_map() -> Any:
    over = mesh(*CUBE)
    f = jax.shard_map(
        lambda x: x - lax.pmean(x, "y"), mesh=over,
        in_specs=P("y"), out_specs=P("y"), axis_names={"y"},
    )  # fmt: skip
    x = put(values((4, 8, 2)), over, "x", "y")
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    return (
        jax.jit(jax.vmap(f))(x),
        jax.jit(lambda x: jax.vmap(jax.value_and_grad(loss))(x))(x),
    )


@program
def random_keys_and_places() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda k: jax.random.uniform(jax.random.fold_in(k[0], lax.axis_index("x")), (2, 6)),
        mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False,
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 4)
    return jax.jit(lambda k: (f(k), f(k).sum(0)))(keys)


@program
def refused_partly_manual_maps() -> Any:
    over = mesh(*GRID)
    x = values((8, 6))
    square = lambda x: x * x  # noqa: E731
    by = partial(jax.shard_map, mesh=over, axis_names={"x"}, check_vma=False)

    def constrained(x: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(over, P("x", "y")))

    nested = by(
        jax.shard_map(square, mesh=over, in_specs=P(None, "y"), out_specs=P(None, "y")),
        in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip
    return [
        error(jax.jit(by(square, in_specs=P("x", "y"), out_specs=P("x"))), x),
        error(jax.jit(by(square, in_specs=P("x"), out_specs=P("x", "y"))), x),
        error(jax.jit(by(lambda x: lax.psum(x, "y"), in_specs=P("x"), out_specs=P("x"))), x),
        error(jax.jit(by(constrained, in_specs=P("x"), out_specs=P("x"))), x),
        error(jax.jit(nested), x),
    ]
