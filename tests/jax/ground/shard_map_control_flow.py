"""Loops and branches with collectives in shard_map, beside sums of the partitioner's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.jax.ground import P, mesh, program, put, values

ROWS = P("x")


def rows(f: Any, out: Any = ROWS, **options: Any) -> Any:
    """A shard_map over 8 devices, which have the rows of each argument."""
    return jax.shard_map(f, mesh=mesh(8, "x"), in_specs=ROWS, out_specs=out, **options)


def of_rows(*shape: int, seed: int = 0) -> Any:
    """An array with its rows on 8 devices."""
    return put(values(shape, seed=seed), mesh(8, "x"), "x")


@program
def sums_in_a_scan() -> Any:
    @rows
    def f(x: Any) -> Any:
        step = lambda c, k: (c - lax.pmean(c, "x") * k, lax.psum(c.sum(), "x"))  # noqa: E731
        x, sums = lax.scan(step, x, jnp.arange(1.0, 5.0) / 4)
        return x + sums.mean()

    return jax.jit(lambda x: (f(x), f(x).sum(0), x.max()))(of_rows(8, 4))


@program
def sums_of_both_kinds_in_one_loop() -> Any:
    f = rows(lambda x: x - lax.pmean(x, "x"))
    step = lambda k, x: f(x * 1.5) + x.sum(0) / (8 + k)  # noqa: E731
    return jax.jit(lambda x: lax.fori_loop(0, 5, step, x))(of_rows(8, 4))


@program
def a_while_loop_ended_by_a_sum() -> Any:
    @rows
    def f(x: Any) -> Any:
        again = lambda s: (lax.psum((s[0] ** 2).sum(), "x") > 0.5) & (s[1] < 40)  # noqa: E731
        step = lambda s: (s[0] * 0.5 + lax.pmean(s[0], "x") / 4, s[1] + 1)  # noqa: E731
        x, count = lax.while_loop(again, step, (x, 0))
        return x * count

    return jax.jit(lambda x: (f(x), (f(x) ** 2).sum()))(of_rows(8, 4))


@program
def while_loops_with_rounds_of_each_device() -> Any:
    @rows
    def f(x: Any) -> Any:
        # No collective inside: the devices go round a different number of times.
        rounds = 1 + lax.axis_index("x")
        x = lax.while_loop(
            lambda s: s[1] < rounds, lambda s: (s[0] * 1.25, s[1] + 1), (x, rounds * 0)
        )[0]
        return x + lax.psum(x, "x")

    return jax.jit(lambda x: (f(x), f(x).sum(0)))(of_rows(8, 4))


@program
def branches_with_sums() -> Any:
    @rows
    def f(x: Any) -> Any:
        positive = lax.psum(x.sum(), "x") > 0
        return lax.cond(
            positive,
            lambda x: x - lax.pmean(x, "x"),
            lambda x: x * lax.psum(x * x, "x"),
            x,
        )

    g = jax.jit(lambda x: (f(x), lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: x.max(0), x)))
    x = of_rows(8, 4)
    return g(x), g(-x)


@program
def switches_with_sums() -> Any:
    @partial(jax.shard_map, mesh=mesh(8, "x"), in_specs=(P(), P("x")), out_specs=P("x"))
    def f(n: Any, x: Any) -> Any:
        total = lambda x: x + lax.psum(x, "x")  # noqa: E731
        most = lambda x: x - lax.pmax(x, "x")  # noqa: E731
        return lax.switch(n, [total, most, lambda x: x * 2, lambda x: most(total(x))], x)

    g = jax.jit(lambda n, x: (f(n, x), f(n, x).mean()))
    return [g(n, of_rows(8, 4)) for n in range(4)]


@program
def branches_of_single_devices() -> Any:
    @rows
    def f(x: Any) -> Any:
        # Devices take different branches, which have no collectives.
        even = lax.axis_index("x") % 2 == 0
        return lax.psum(lax.cond(even, jnp.sin, lambda x: x * 2, x), "x") + x

    return jax.jit(lambda x: (f(x), x.sum()))(of_rows(8, 4))


@program
def scans_in_scans() -> Any:
    @rows
    def f(x: Any) -> Any:
        inner = lambda c, _: (c - lax.psum(c, "x") / 16, c.sum())  # noqa: E731
        outer = lambda c, _: lax.scan(inner, c + lax.pmean(c.max(), "x"), length=2)  # noqa: E731
        return lax.scan(outer, x, length=3)[0]

    return jax.jit(lambda x: lax.scan(lambda c, _: (f(c) - c.sum(0) / 64, c.sum()), x, length=2))(
        of_rows(8, 4)
    )


@program
def scans_unrolled_reversed_and_stacked() -> Any:
    def step(c: Any, x: Any) -> Any:
        c = c + lax.psum(x, "x") / 8
        return c, lax.psum_scatter(jnp.outer(c, jnp.ones(8)), "x", scatter_dimension=1, tiled=True)

    @partial(jax.shard_map, mesh=mesh(8, "x"), in_specs=P("x"), out_specs=P("x"))
    def f(xs: Any) -> Any:
        found = []
        for options in (
            {"unroll": 2},
            {"reverse": True},
            {"unroll": True},
            {"_split_transpose": False},
        ):
            c = lax.pcast(jnp.zeros(xs.shape[1:]), "x", to="varying") + xs[0] * 0
            found.append(lax.scan(step, c, xs, **options)[0][None])
        return found

    return jax.jit(lambda xs: (f(xs), jax.tree.map(jnp.sum, f(xs))))(of_rows(32, 4))


@program
def map_with_and_without_batches() -> Any:
    @rows
    def f(x: Any) -> Any:
        one = lambda row: row * lax.psum(row.sum(), "x")  # noqa: E731
        return lax.map(one, x) + lax.map(one, x, batch_size=3)

    return jax.jit(lambda x: (f(x), lax.map(lambda v: v.sum(), x.T)))(of_rows(40, 3))


@program
def power_iteration() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=(P("x", "y"), P("y")), out_specs=P("y"))
    def f(a: Any, v: Any) -> Any:
        def step(_: Any, v: Any) -> Any:
            u = lax.psum(a @ v, "y")
            w = lax.psum(a.T @ u, "x")
            return w / jnp.sqrt(lax.psum(w @ w, "y"))

        return lax.fori_loop(0, 4, step, v)

    a, v = put(values((8, 4)), over, "x", "y"), put(values(4, seed=1), over, "y")
    plain = lambda a, v: lax.fori_loop(0, 4, lambda _, v: a.T @ (a @ v) / 32, v)  # noqa: E731
    return jax.jit(lambda a, v: (f(a, v), plain(a, v), (a @ f(a, v)).sum()))(a, v)


@program
def associative_scans() -> Any:
    @rows
    def f(x: Any) -> Any:
        inside = lax.associative_scan(jnp.add, x)
        totals = lax.all_gather(inside[-1], "x")
        before = lax.associative_scan(jnp.add, totals) - totals
        return inside + before[lax.axis_index("x")]

    x = of_rows(32, 3)
    return jax.jit(lambda x: (f(x), lax.associative_scan(jnp.add, x), x.sum(0)))(x)


@program
def loops_around_maps_with_donated_state() -> Any:
    f = rows(lambda x: x - lax.pmean(x, "x") / 2)
    step = jax.jit(lambda x: (f(x) + x.sum(0) / 64, x.mean()), donate_argnums=0)
    x, means = of_rows(8, 4), []
    for _ in range(4):
        x, mean = step(x)
        means.append(mean)
    return x, means


@program
def keys_split_in_loops() -> Any:
    @partial(jax.shard_map, mesh=mesh(8, "x"), in_specs=(P(), P("x")), out_specs=P("x"))
    def f(key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("x"))

        def step(state: Any, _: Any) -> Any:
            key, x = state
            key, own = jax.random.split(key)
            noise = jax.random.uniform(own, x.shape)
            return (key, x + noise - lax.pmean(noise, "x")), lax.psum(noise, "x").sum()

        (_, x), sums = lax.scan(step, (key, x), length=3)
        return x * sums.mean()

    return jax.jit(lambda k, x: (f(k, x), f(k, x).sum(0)))(jax.random.key(3), of_rows(8, 4))
