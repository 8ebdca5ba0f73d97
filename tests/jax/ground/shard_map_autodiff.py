"""Derivatives through shard_map and its collectives, and through maps over its results."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.jax.ground import P, error, mesh, program, put, values

ROWS = P("x")


def rows(f: Any, out: Any = ROWS, **options: Any) -> Any:
    """A shard_map over 8 devices, which have the rows of each argument."""
    return jax.shard_map(f, mesh=mesh(8, "x"), in_specs=ROWS, out_specs=out, **options)


def of_rows(*shape: int, seed: int = 0) -> Any:
    """An array with its rows on 8 devices."""
    return put(values(shape, seed=seed), mesh(8, "x"), "x")


def gradients(f: Any, *arguments: Any) -> Any:
    """The value and the gradients of a sum of squares, in jit."""
    loss = lambda *a: sum((y**2).sum() for y in jax.tree.leaves(f(*a)))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arguments)))))(*arguments)


@program
def through_each_collective() -> Any:
    ring = [(k, (k + 3) % 8) for k in range(8)]
    maps = [
        rows(lambda x: lax.psum(x, "x"), P()),
        rows(lambda x: x * lax.pmean(x, "x")),
        rows(lambda x: lax.psum_scatter(x.T, "x", tiled=True)),
        rows(lambda x: lax.all_gather(x, "x", tiled=True) * lax.axis_index("x")),
        rows(lambda x: lax.all_gather(x, "x", axis=1)[0]),
        rows(lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True)),
        rows(lambda x: lax.ppermute(x, "x", ring) * x),
        rows(lambda x: lax.ppermute(x, "x", ring[:3])),
    ]
    return [gradients(f, of_rows(8, 8)) for f in maps]


@program
def through_each_collective_without_checks() -> Any:
    maps = [
        rows(lambda x: lax.psum(x, "x"), P(), check_vma=False),
        rows(lambda x: x * lax.pmean(x, "x"), check_vma=False),
        rows(lambda x: lax.psum_scatter(x.T, "x", tiled=True), check_vma=False),
        rows(lambda x: lax.all_gather(x, "x", tiled=True) * lax.axis_index("x"), check_vma=False),
        rows(lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), check_vma=False),
    ]
    return [gradients(f, of_rows(8, 8)) for f in maps]


@program
def through_groups() -> Any:
    groups = [[0, 3, 5, 6], [1, 2, 4, 7]]
    maps = [
        rows(lambda x: lax.psum(x, "x", axis_index_groups=groups) * x, check_vma=False),
        rows(lambda x: lax.all_gather(x, "x", axis_index_groups=groups, tiled=True)),
        rows(lambda x: lax.psum_scatter(x.T[:4], "x", axis_index_groups=groups, tiled=True)),
    ]
    return [gradients(f, of_rows(8, 8)) for f in maps]


@program
def data_parallel_layer() -> Any:
    over = mesh(8, "x")
    w, b = put(values((4, 3)), over), put(values(3, seed=1), over)

    @partial(jax.shard_map, mesh=over, in_specs=(P(), P(), P("x")), out_specs=P())
    def loss(w: Any, b: Any, x: Any) -> Any:
        return lax.pmean((jnp.tanh(x @ w + b) ** 2).mean(), "x")

    x = of_rows(32, 4, seed=2)
    outside = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, b, x)

    @partial(jax.shard_map, mesh=over, in_specs=(P(), P(), P("x")), out_specs=(P(), P()))
    def inside(w: Any, b: Any, x: Any) -> Any:
        w, b = (lax.pcast(each, "x", to="varying") for each in (w, b))
        local = lambda w, b: (jnp.tanh(x @ w + b) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(local, argnums=(0, 1))(w, b)
        return lax.pmean(value, "x"), lax.pmean(grads, "x")

    plain = lambda w, b, x: (jnp.tanh(x @ w + b) ** 2).mean()  # noqa: E731
    return outside, jax.jit(inside)(w, b, x), jax.jit(jax.value_and_grad(plain, (0, 1)))(w, b, x)


@program
def tensor_parallel_layers() -> Any:
    over = mesh((2, 4), ("data", "model"))
    x = put(values((8, 6)), over, "data")
    w = put(values((6, 8), seed=1), over, None, "model")
    v = put(values((8, 6), seed=2), over, "model")

    @partial(
        jax.shard_map, mesh=over,
        in_specs=(P("data"), P(None, "model"), P("model")), out_specs=P("data"),
    )  # fmt: skip
    def block(x: Any, w: Any, v: Any) -> Any:
        return x + lax.psum(jax.nn.gelu(x @ w) @ v, "model")

    loss = lambda x, w, v: (block(block(x, w, v), w, v) ** 2).mean()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, w, v)


@program
def second_derivatives_through_sums() -> Any:
    f = rows(lambda x: (lax.psum(jnp.sin(x).sum(), "x") * jnp.cos(x).mean())[None])
    loss = lambda x: f(x).sum()  # noqa: E731
    x, t = of_rows(8, 2), of_rows(8, 2, seed=1)
    product = lambda x, t: jax.jvp(jax.grad(loss), (x,), (t,))  # noqa: E731
    return jax.jit(product)(x, t), jax.jit(jax.hessian(loss))(x)


@program
def forward_mode_and_linearised() -> Any:
    f = rows(lambda x: jnp.tanh(x) * lax.pmean(x * x, "x"))
    x, t = of_rows(8, 3), of_rows(8, 3, seed=1)

    @jax.jit
    def both(x: Any, t: Any) -> Any:
        y, linear = jax.linearize(f, x)
        (back,) = jax.linear_transpose(linear, x)(t)
        return y, linear(t), back, linear(t).sum(0)

    return jax.jit(lambda x, t: jax.jvp(f, (x,), (t,)))(x, t), both(x, t)


@program
def rematerialised() -> Any:
    found = []
    policies = jax.checkpoint_policies
    for policy in (None, policies.everything_saveable, policies.dots_saveable):
        inside = rows(jax.checkpoint(lambda x: lax.psum(jnp.sin(x @ x.T), "x") @ x, policy=policy))
        around = jax.checkpoint(rows(lambda x: lax.psum(jnp.sin(x @ x.T), "x") @ x), policy=policy)
        found += [gradients(f, of_rows(16, 3)) for f in (inside, around)]
    return found


@program
def rules_of_ones_own() -> Any:
    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 2

    scaled.defvjp(
        lambda x: (scaled(x), x.max()), lambda most, g: (g * 3 + lax.pmax(most, "x") * 0 + 1,)
    )

    @jax.custom_jvp
    def halved(x: Any) -> Any:
        return x / 2

    halved.defjvp(lambda p, t: (halved(*p), t[0] * lax.psum(jnp.ones_like(p[0]), "x")))
    maps = [
        rows(lambda x: scaled(x) * x, check_vma=False),
        rows(lambda x: halved(x) * x, check_vma=False),
        rows(lambda x: lax.scan(lambda c, _: (scaled(c), None), x, length=2)[0], check_vma=False),
    ]
    return [gradients(f, of_rows(8, 3)) for f in maps]


@program
def gradients_in_loops_with_sums() -> Any:
    @rows
    def f(x: Any) -> Any:
        step = lambda c, _: (jnp.tanh(c + lax.psum(c, "x")), lax.pmean(c.sum(), "x"))  # noqa: E731
        x, sums = lax.scan(step, x, length=3)
        return x * sums.mean()

    loss = lambda x: (f(x).sum(0) ** 2).mean()  # noqa: E731
    steps = lambda x: lax.fori_loop(0, 2, lambda _, x: x - jax.grad(loss)(x) / 64, x)  # noqa: E731
    return gradients(f, of_rows(8, 3)), jax.jit(steps)(of_rows(8, 3))


@program
def gradients_of_closed_over_values() -> Any:
    def loss(w: Any, x: Any) -> Any:
        y = jnp.sin(w).sum()
        return (rows(lambda x: x * y + w[0])(x) ** 2).sum()

    w = put(values(8), mesh(8, "x"))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, of_rows(8, 3))


@program
def gradients_of_some_results() -> Any:
    f = rows(
        lambda x: (x * x, lax.psum(x, "x"), lax.pmax(lax.stop_gradient(x), "x")), (P("x"), P(), P())
    )
    x = of_rows(8, 3)
    found = [jax.jit(jax.grad(lambda x, k=k: f(x)[k].sum()))(x) for k in (0, 1)]
    whole = lambda x: sum(y.sum() for y in f(x)[:2])  # noqa: E731
    value = jax.jit(jax.value_and_grad(lambda x: (whole(x), f(x)[2]), has_aux=True))(x)
    split = rows(lambda x: jnp.split(x, 2, axis=0)[0])
    return found, value, jax.jit(jax.grad(lambda x: 0.1 * split(x).mean()))(of_rows(16, 3))


@program
def gradients_of_integers_and_keys() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P("x"), P("x")), out_specs=P("x"))
    def f(x: Any, n: Any, k: Any) -> Any:
        noise = jax.vmap(lambda k: jax.random.uniform(k, (3,)))(k)
        return (x + noise) * n[:, None] + lax.psum(x, "x")

    x, n = of_rows(8, 3), put(values(8, "int32") % 5, over, "x")
    keys = put(jax.random.split(jax.random.key(0), 8), over, "x")
    loss = lambda x: (f(x, n, keys) ** 2).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss))(x)


@program
def vmap_around_and_inside() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.shard_map(lambda x: x - lax.pmean(x, "y"), mesh=over, in_specs=P("y"), out_specs=P("y"))
    x = put(values((8, 6)), over, "x", "y")
    loss = lambda x: (f(x) ** 3).sum()  # noqa: E731
    each = jax.vmap(lambda row: row * lax.psum(row.sum(), "y"))
    inside = jax.shard_map(each, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y"))
    return (
        jax.jit(jax.vmap(f))(x),
        jax.jit(jax.vmap(f, in_axes=1, out_axes=1))(x.T.copy().T[:, :6]),
        jax.jit(jax.vmap(f, spmd_axis_name="x"))(x),
        jax.jit(jax.vmap(jax.value_and_grad(loss), spmd_axis_name="x"))(x),
        jax.jit(lambda x: (inside(x), inside(x).sum(0)))(x),
    )


@program
def jacobians_inside_of_maps() -> Any:
    over = mesh(8, "x")
    w = put(values((3, 4)), over)

    @partial(jax.shard_map, mesh=over, in_specs=(P(), P("x")), out_specs=P("x"))
    def f(w: Any, x: Any) -> Any:
        one = lambda x: jnp.tanh(x @ w).sum(-1)  # noqa: E731
        return jax.vmap(jax.jacrev(one))(x) + jax.vmap(jax.jacfwd(one))(x) * lax.psum(1.0, "x")

    return jax.jit(lambda w, x: (f(w, x), f(w, x).sum(0)))(w, of_rows(16, 3))


@program
def refused_derivatives() -> Any:
    @jax.custom_vjp
    def f(x: Any) -> Any:
        return lax.psum(x, "x")

    f.defvjp(lambda x: (f(x), None), lambda _, g: (lax.psum(g, "x"),))
    x = of_rows(8, 3)
    twice = rows(lambda x: f(f(x)), P())
    most = rows(lambda x: lax.pmax(x, "x"), P())
    return [
        error(jax.jit(jax.grad(lambda x: twice(x).sum())), x).partition(":")[0],
        error(jax.jit(jax.grad(lambda x: most(x).sum())), x),
        error(jax.jit(jax.grad(rows(lambda x: lax.psum(x, "x"), P()))), x),
    ]
