"""Operations that partition themselves, shardings that are alike, and foreign functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from tests.jax.ground import P, mesh, needs, needs_module, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


def by_rows(function: Any, rule: str = "i j -> i j") -> Any:
    """A function of rows, which a partitioner may give parts of the rows."""
    wrapped = custom_partitioning(function)

    def partition(over: Any, arguments: Any, result: Any) -> Any:
        spec = tuple(arguments[0].sharding.spec) + (None,) * 2
        rows = NamedSharding(over, P(spec[0], None))
        return over, function, rows, (rows,)

    def infer(over: Any, arguments: Any, result: Any) -> Any:
        spec = tuple(arguments[0].sharding.spec) + (None,) * 2
        return NamedSharding(over, P(spec[0], None))

    wrapped.def_partition(
        partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule
    )
    return wrapped


@program
def custom_partitioning_by_rows() -> Any:
    f = by_rows(lambda x: x / jnp.sqrt((x * x).sum(1, keepdims=True)))
    x = grid(values((8, 4)))
    return jax.jit(f)(x), jax.jit(lambda x: f(x).sum(0))(x), jax.jit(lambda x: f(x).mean())(x)


@program
def custom_partitioning_with_its_own_sum() -> Any:
    wrapped = custom_partitioning(lambda x: x.sum(0))

    def partition(over: Any, arguments: Any, result: Any) -> Any:
        axis = next(iter(arguments[0].sharding.spec), None)

        def lowered(x: Any) -> Any:
            local = x.sum(0)
            return local if axis is None else lax.psum(local, axis)

        return over, lowered, NamedSharding(over, P(None)), (NamedSharding(over, P(axis, None)),)

    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda over, *_: NamedSharding(over, P(None)),
        sharding_rule="i j -> j",
    )
    f = jax.jit(lambda x: (wrapped(x), x.sum(0), wrapped(jnp.sin(x)).sum()))
    return f(grid(values((8, 4)))), f(grid(values((8, 4)), "y")), f(values((8, 4)))


@program
def only_a_custom_partitioning_sums() -> Any:
    wrapped = custom_partitioning(lambda x: jnp.cos(x))

    def partition(over: Any, arguments: Any, result: Any) -> Any:
        rows = NamedSharding(over, P("x", None))
        local = lambda x: jnp.cos(x) * lax.psum(x, "x")  # noqa: E731
        return over, local, rows, (rows,)

    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda over, *_: NamedSharding(over, P("x", None)),
        sharding_rule="i j -> i j",
    )
    return jax.jit(wrapped)(put(values((8, 4)), mesh((4, 2), ("x", "y")), "x"))


@program
def custom_partitioning_in_a_gradient() -> Any:
    normal = by_rows(lambda x: x - x.mean(1, keepdims=True))

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return normal(x)

    f.defvjp(lambda x: (normal(x), None), lambda _, g: (normal(g),))
    return jax.jit(jax.value_and_grad(lambda x: (f(x) ** 3).sum()))(grid(values((8, 4))))


@program
def custom_partitioning_in_loops() -> Any:
    f = by_rows(lambda x: jnp.tanh(x))
    g = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: f(x) - x.mean(0), x))
    return g(grid(values((8, 4))))


@program
def shardings_that_are_alike() -> Any:
    needs_module("jax.experimental.shard_alike")
    from jax.experimental.shard_alike import shard_alike

    @jax.jit
    def f(x: Any) -> Any:
        _, y = shard_alike(x, jnp.ones_like(x) * 0.1)
        a, b = shard_alike(x @ x.T, jnp.cos(jnp.arange(64.0)).reshape(8, 8))
        return y, y.sum(0), (a * b).sum(1)

    return f(grid(values((8, 4))))


@program
def alike_in_loops() -> Any:
    needs_module("jax.experimental.shard_alike")
    from jax.experimental.shard_alike import shard_alike

    def step(c: Any, x: Any) -> Any:
        c, x = shard_alike(c, x)
        return c * 0.5 + x, (c * x).sum()

    f = jax.jit(lambda c, xs: lax.scan(step, c, xs))
    over = mesh((4, 2), ("x", "y"))
    return f(values((8, 4)), put(values((3, 8, 4), seed=1), over, None, "x", "y"))


@program
def foreign_functions_on_each_device() -> Any:
    needs("jax.ffi.ffi_call")
    over = mesh(8, "x")

    def local(a: Any) -> Any:
        # LAPACK's Cholesky decomposition, as a custom call of each device.
        return jnp.linalg.cholesky(a), lax.pmean(jnp.linalg.cholesky(a), "x")

    a = values((8, 3, 3))
    a = put(a @ a.transpose(0, 2, 1) + 3 * jnp.eye(3), over, "x")
    f = jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=(P("x"), P("x")))
    return jax.jit(lambda a: [y.sum(0) for y in f(a)])(a)


@program
def custom_batching() -> Any:
    @jax.custom_batching.custom_vmap
    def f(x: Any) -> Any:
        return x - x.mean()

    @f.def_vmap
    def rule(size: Any, batched: Any, x: Any) -> Any:
        return x - x.mean(tuple(range(1, x.ndim)), keepdims=True), True

    return jax.jit(lambda x: jax.vmap(f)(x).sum(0))(grid(values((8, 4))))


@program
def closures_converted() -> Any:
    w = grid(values((4, 4)), None, "y")

    @jax.jit
    def f(x: Any, w: Any) -> Any:
        body, constants = jax.closure_convert(lambda x: jnp.tanh(x @ w), x)
        return lax.fori_loop(0, 3, lambda _, x: body(x, *constants), x).sum(0)

    return f(grid(values((8, 4)), "x"), w)


@program
def platform_dependent_branches() -> Any:
    f = jax.jit(
        lambda x: lax.platform_dependent(x, cpu=lambda x: x.sum(0), default=lambda x: x.max(0))
    )
    return f(grid(values((8, 4))))


@program
def composites() -> Any:
    needs("jax.lax.composite")
    center = lax.composite(lambda x: x - x.mean(0), "my.center")
    return jax.jit(lambda x: center(x) * x.sum())(grid(values((8, 4))))


@program
def compute_on_the_host() -> Any:
    from jax.experimental import compute_on

    marked = getattr(compute_on, "compute_on2", compute_on.compute_on)
    spaces = jax.memory.Space.Device

    @partial(marked, compute_type="device_host", out_memory_spaces=spaces)
    def host(x: Any) -> Any:
        return x.sum(0) * 2

    x = grid(values((8, 4)))
    return jax.jit(lambda x: host(jnp.sin(x)) + x.sum(0))(x)


@program
def partial_tree_functions() -> Any:
    model = jax.tree_util.Partial(lambda w, x: (x @ w).sum(0), grid(values((4, 4)), None, "y"))
    f = jax.jit(lambda model, x: model(x) * 2)
    return f(model, grid(values((8, 4)), "x")), partial(f, model)(values((8, 4)))
