"""pmap with collectives: all of them, in groups, in loops, in gradients, and beside jit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.jax.ground import error, mesh, program, put, values

pmap = partial(jax.pmap, axis_name="i")


@program
def each_collective() -> Any:
    ring = [(k, (k + 1) % 8) for k in range(8)]
    x = values((8, 8, 3))
    maps = [
        lambda x: lax.psum(x, "i"),
        lambda x: lax.pmean(x, "i"),
        lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i")),
        lambda x: lax.all_gather(x, "i"),
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
        lambda x: lax.psum_scatter(x, "i"),
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        lambda x: lax.all_to_all(x, "i", 0, 1),
        lambda x: lax.ppermute(x, "i", ring),
        lambda x: lax.pshuffle(x, "i", [7, 6, 5, 4, 3, 2, 1, 0]),
        lambda x: x * lax.axis_index("i") + lax.psum(1, "i"),
    ]
    return [pmap(f)(x) for f in maps]


@program
def types_of_numbers() -> Any:
    f = pmap(lambda x: (lax.psum(x, "i"), lax.pmean(x, "i")))
    kinds = (jnp.float32, jnp.float16, jnp.bfloat16, jnp.complex64)
    return [f(values((8, 5), kind)) for kind in kinds], pmap(lambda x: lax.psum(x, "i"))(
        values((8, 5), "int32")
    )


@program
def sums_of_trees() -> Any:
    f = pmap(lambda t: lax.psum(t, "i"))
    tree = {"a": values((8, 3)), "b": [values(8, "int32"), (values((8, 2, 2), seed=1),)]}
    return f(tree), pmap(lambda t: lax.pmean(t, "i"))({"a": tree["a"], "c": ()})


@program
def groups_of_devices() -> Any:
    halves, pairs = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 7], [1, 6], [2, 5], [3, 4]]
    x = values((8, 4))
    return [
        pmap(lambda x: lax.psum(x, "i", axis_index_groups=halves))(x),
        pmap(lambda x: lax.pmean(x, "i", axis_index_groups=pairs))(x),
        pmap(lambda x: lax.pmax(x, "i", axis_index_groups=halves))(x),
        pmap(lambda x: lax.all_gather(x, "i", axis_index_groups=pairs))(x),
        pmap(lambda x: lax.psum_scatter(x, "i", axis_index_groups=halves))(x),
        pmap(lambda x: lax.all_to_all(x, "i", 0, 0, axis_index_groups=halves))(x),
        pmap(lambda x: lax.psum(lax.psum(x, "i", axis_index_groups=pairs), "i"))(x),
    ]


@program
def loops_and_branches() -> Any:
    @pmap
    def f(x: Any) -> Any:
        step = lambda c, _: (c - lax.pmean(c, "i") / 2, lax.psum(c.sum(), "i"))  # noqa: E731
        x, sums = lax.scan(step, x, length=3)
        again = lambda s: (lax.psum((s[0] ** 2).sum(), "i") > 1) & (s[1] < 20)  # noqa: E731
        x, count = lax.while_loop(again, lambda s: (s[0] * 0.75, s[1] + 1), (x, 0))
        total = lax.psum(x.sum(), "i")
        x = lax.cond(total > 0, lambda x: x + lax.pmax(x, "i"), lambda x: x * lax.psum(x, "i"), x)
        return x, sums, count

    return f(values((8, 3))), f(values((8, 3), seed=1))


@program
def gradients_inside() -> Any:
    @partial(pmap, in_axes=(None, 0, 0))
    def step(w: Any, x: Any, y: Any) -> Any:
        value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
        return lax.pmean(value, "i"), lax.pmean(grad, "i")

    return step(values((4, 2)), values((8, 5, 4), seed=1), values((8, 5, 2), seed=2))


@program
def gradients_outside() -> Any:
    f = pmap(lambda x: x * lax.psum(jnp.sin(x), "i") + lax.all_gather(x, "i").mean(0))
    x, t = values((8, 3)), values((8, 3), seed=1)
    loss = lambda x: (f(x) ** 2).sum()  # noqa: E731
    return jax.value_and_grad(loss)(x), jax.jvp(f, (x,), (t,)), jax.vjp(f, x)[1](t)


@program
def training_by_replicas() -> Any:
    @partial(pmap, donate_argnums=0)
    def step(w: Any, x: Any) -> Any:
        loss = lambda w: ((x @ w) ** 2).mean()  # noqa: E731
        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * lax.pmean(grad, "i"), lax.pmean(value, "i")

    w = jax.device_put(jnp.broadcast_to(values((4, 2)), (8, 4, 2)))
    losses = []
    for k in range(4):
        w, loss = step(w, values((8, 5, 4), seed=k))
        losses.append(loss[0])
    return w, losses


@program
def results_that_jit_sums() -> Any:
    f = pmap(lambda x: x * x + lax.pmean(x, "i"))
    y = f(values((8, 3)))
    total = jax.jit(lambda y: (y.sum(0), (y * y).mean(), y.max(0)))
    return total(y), y.sum(0), jnp.linalg.norm(y)


@program
def pmap_after_jit_on_a_mesh() -> Any:
    x = jax.jit(lambda x: x - x.sum(0) / 8)(put(values((8, 3)), mesh(8, "x"), "x"))
    return pmap(lambda x: lax.psum(x * x, "i"))(x)


@program
def products_split_over_devices() -> Any:
    @pmap
    def f(a: Any, b: Any) -> Any:
        return lax.psum(a @ b, "i"), lax.psum_scatter(a @ b, "i", tiled=True)

    return f(values((8, 8, 4)), values((8, 4, 3), seed=1))


@program
def key_streams() -> Any:
    @pmap
    def f(key: Any) -> Any:
        x = jax.random.normal(key, (4,))
        return x, lax.pmean(x, "i"), lax.psum(jax.random.bernoulli(key), "i")

    return f(jax.random.split(jax.random.key(1), 8))


@program
def refused_collectives() -> Any:
    x = values((8, 4))
    return [
        error(pmap(lambda x: lax.psum(x, "j")), x),
        error(pmap(lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3, 4, 5, 6, 7]])), x),
        error(pmap(lambda x: lax.psum_scatter(x[:3], "i", tiled=True)), x),
        error(pmap(lambda x: lax.all_to_all(x, "i", 0, 0)), x),
        error(pmap(lambda x: lax.ppermute(x, "i", [(0, 1), (1, 1)])), x),
    ]
