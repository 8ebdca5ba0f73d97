"""Sums between devices in loops, in branches, and in the conditions of both."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, mesh, needs, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def counted_loop() -> Any:
    f = jax.jit(lambda x: lax.fori_loop(0, 5, lambda i, x: x - x.mean(0) * (i + 1) / 8, x))
    return f(grid(values((8, 4))))


@program
def loop_of_a_length_of_the_argument() -> Any:
    f = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda i, x: x - x.sum(0) / 16, x))
    x = grid(values((8, 4)))
    return f(x, 3), f(x, 0), f(x, 7)


@program
def loop_until_a_sum_is_small() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        # The condition is a sum: all devices must leave the loop in the same round.
        again = lambda state: (jnp.sum(state[0] ** 2) > 0.5) & (state[1] < 50)  # noqa: E731
        step = lambda state: (state[0] * 0.75, state[1] + 1)  # noqa: E731
        return lax.while_loop(again, step, (x, 0))

    return f(grid(values((8, 4))))


@program
def sums_in_the_condition_and_the_body() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        again = lambda x: jnp.abs(x).max() > 0.1  # noqa: E731
        return lax.while_loop(again, lambda x: (x - x.mean(0)) * 0.5, x)

    return f(grid(values((8, 4))))


@program
def scans() -> Any:
    x = grid(values((8, 4)))
    xs = put(values((6, 4, 4), seed=1), mesh((4, 2), ("x", "y")), None, "y")

    @jax.jit
    def f(x: Any, xs: Any) -> Any:
        def step(x: Any, w: Any) -> Any:
            x = jnp.tanh(x @ w)
            return x, (x.sum(0), w.mean())

        return lax.scan(step, x, xs)

    return f(x, xs)


@program
def scans_unrolled_and_reversed() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x: [
            lax.scan(lambda c, _: (c - c.mean(0), c.sum()), x, length=5, unroll=n, reverse=back)
            for n, back in ((1, True), (2, False), (True, False))
        ]
    )
    return f(x)


@program
def scan_over_a_sharded_axis() -> Any:
    x = put(values((16, 4)), mesh(8, "x"), "x")
    return jax.jit(lambda x: lax.scan(lambda c, row: (c + row, c @ row), jnp.zeros(4), x))(x)


@program
def scan_in_scan() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        inner = lambda c, _: (c - c.sum(0) / 32, c.max())  # noqa: E731
        outer = lambda c, _: lax.scan(inner, c, length=3)  # noqa: E731
        return lax.scan(outer, x, length=4)

    return f(grid(values((8, 4))))


@program
def branches() -> Any:
    f = jax.jit(lambda p, x: lax.cond(p, lambda x: x.sum(0), lambda x: (x * x).mean(0) - 1, x))
    x = grid(values((8, 4)))
    return f(True, x), f(False, x)


@program
def branch_by_a_sum() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: x @ x.T @ x, x)

    x = grid(values((8, 4)))
    return f(x), f(-x)


@program
def a_sum_in_one_branch_only() -> Any:
    f = jax.jit(lambda p, x: lax.cond(p, lambda x: x.sum(), lambda x: jnp.float32(7), x))
    x = grid(values((8, 4)))
    return f(True, x), f(False, x)


@program
def switches() -> Any:
    branches = [lambda x, k=k: (x**k).sum(k % 2 and 0) for k in range(4)]
    f = jax.jit(lambda i, x: lax.switch(i, branches, x))
    x = grid(values((4, 4)))
    try:
        return [f(i, x) for i in range(6)]
    except TypeError:
        same = [lambda x, k=k: (x**k).sum(0) for k in range(4)]
        return [jax.jit(lambda i, x: lax.switch(i, same, x))(i, x) for i in range(6)]


@program
def branches_in_loops() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return lax.cond(i % 2 == 0, lambda x: x - x.mean(0), lambda x: x / jnp.abs(x).sum(), x)

        return lax.fori_loop(0, 6, step, x)

    return f(grid(values((8, 4))))


@program
def maps_over_rows() -> Any:
    x = put(values((6, 8, 4)), mesh((4, 2), ("x", "y")), None, "x", "y")
    f = jax.jit(lambda x: (lax.map(lambda m: m.sum(0), x), lax.map(jnp.sum, x, batch_size=2)))
    return f(x)


@program
def vmap_of_loops() -> Any:
    x = grid(values((8, 4)))

    def one(x: Any) -> Any:
        return lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x * 0.5, x)

    return jax.jit(jax.vmap(one))(x), jax.jit(jax.vmap(one, 1))(x)


@program
def vmap_of_branches() -> Any:
    x = grid(values((8, 4)))
    f = jax.vmap(lambda x: lax.cond(x.sum() > 0, lambda x: x.sum(), lambda x: x.min(), x))
    return jax.jit(f)(x), jax.jit(jax.vmap(lambda x: lax.cond(x[0] > 0, jnp.sum, jnp.max, x), 1))(x)


@program
def power_iteration() -> Any:
    a = grid(values((8, 8)))

    @jax.jit
    def f(a: Any) -> Any:
        a = a @ a.T
        step = lambda _, v: (a @ v) / jnp.linalg.norm(a @ v)  # noqa: E731
        v = lax.fori_loop(0, 20, step, jnp.ones(8) / 8)
        return v @ a @ v

    return f(a)


@program
def conjugate_gradients() -> Any:
    a = values((8, 8))
    a = grid(a @ a.T + 8 * jnp.eye(8))
    b = put(values(8, seed=1), mesh((4, 2), ("x", "y")), "x")
    return jax.jit(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, tol=1e-4)[0])(a, b)


@program
def custom_roots() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum()

        def solve(g: Any, guess: Any) -> Any:
            return lax.fori_loop(0, 12, lambda _, y: y - g(y) / jax.grad(g)(y), guess)

        return lax.custom_root(
            lambda y: y**3 - total, jnp.float32(2), solve, lambda g, y: y / g(jnp.float32(1))
        )

    x = grid(jnp.abs(values((8, 4))))
    return f(x), jax.jit(jax.grad(f))(x)


@program
def associative_scans() -> Any:
    x = grid(values((16, 4)))
    f = jax.jit(lambda x: lax.associative_scan(lambda a, b: a * 0.5 + b, x).sum(0))
    return f(x)


@program
def constraints_in_loops() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            y = lax.with_sharding_constraint(x @ x.T, NamedSharding(over, P("y")))
            z = lax.with_sharding_constraint(y @ x / 64, NamedSharding(over, P("x", "y")))
            return z, y.sum()

        return lax.scan(step, x, length=3)

    return f(put(values((8, 4)), over, "x", "y"))


@program
def shard_map_in_a_loop() -> Any:
    over = mesh(8, "x")
    center = jax.shard_map(
        lambda x: x - lax.pmean(x, "x"), mesh=over, in_specs=P("x"), out_specs=P("x")
    )
    f = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: center(x) + x.mean(), x))
    return f(put(values((8, 4)) / 8, over, "x"))


@program
def loop_in_shard_map_in_jit() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        def local(x: Any) -> Any:
            step = lambda c, _: (c - lax.pmean(c, "x"), (c**2).sum(1))  # noqa: E731
            return lax.scan(step, x, length=3)

        return jax.shard_map(
            local, mesh=over, in_specs=P("x"), out_specs=(P("x"), P(None, "x")),
            axis_names={"x"}, check_vma=False,
        )(x)  # fmt: skip

    return f(put(values((8, 4)), over, "x", "y"))


@program
def references() -> Any:
    needs("jax.new_ref", "jax.freeze")
    x = grid(values((8, 4)))

    @jax.jit
    def f(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(4))

        def step(i: Any, _: Any) -> None:
            total[...] += x.sum(0) * (i + 1)

        lax.fori_loop(0, 3, step, None)
        return jax.freeze(total)

    return f(x)


@program
def references_as_arguments() -> Any:
    needs("jax.new_ref")
    over = mesh((4, 2), ("x", "y"))
    total = jax.new_ref(put(values((8, 4)), over, "x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        total[...] += x
        return total[...].sum(0)

    x = put(values((8, 4), seed=1), over, "x", "y")
    return f(x), f(x), total[...]
