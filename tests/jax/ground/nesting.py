"""jit in jit, shard_map in jit, jit in shard_map, and maps nested in maps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, mesh, needs, program, put, values


@program
def jit_in_jit() -> Any:
    inner = jax.jit(lambda x: x.sum(0))
    outer = jax.jit(lambda x: inner(jnp.sin(x)) + inner(x))
    return outer(put(values((8, 4)), mesh(8, "x"), "x"))


@program
def shardings_of_inner_jits() -> Any:
    over = mesh((4, 2), ("x", "y"))
    rows, columns = NamedSharding(over, P("x")), NamedSharding(over, P(None, "y"))
    inner = jax.jit(lambda x: x @ x.T, in_shardings=rows, out_shardings=columns)
    outer = jax.jit(lambda x: inner(x * 2).sum(0), in_shardings=columns, out_shardings=rows)
    return outer(values((8, 4)))


@program
def the_same_inner_jit_many_times() -> Any:
    inner = jax.jit(lambda x: x - x.sum(0))

    @jax.jit
    def outer(x: Any) -> Any:
        for _ in range(5):
            x = inner(x)
        return x, inner(x[:4])

    return outer(put(values((8, 4)) / 8, mesh(8, "x"), "x"))


@program
def inner_jit_with_a_constant() -> Any:
    over = mesh(8, "x")
    constant = put(values((8, 4), seed=1), over, "x")

    @jax.jit
    def outer(x: Any) -> Any:
        @jax.jit
        def inner(y: Any) -> Any:
            return (y * constant + x).sum(0)

        return inner(x) + inner(2 * x)

    return outer(put(values((8, 4)), over, "x"))


@program
def inline_jit() -> Any:
    inner = jax.jit(lambda x: x.sum(0), inline=True)
    return jax.jit(lambda x: inner(x) * inner(-x))(put(values((8, 4)), mesh(8, "x"), "x"))


@program
def shard_map_in_jit() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        # Sums of the partitioner before and after, and one of the program's own between.
        x = jnp.sin(x - x.mean(0)) + 1
        local = lambda x: lax.psum(x.sum(0), "x")  # noqa: E731
        y = jax.shard_map(local, mesh=over, in_specs=P("x", "y"), out_specs=P("y"))(x)
        return y.sum(), y

    return f(put(values((8, 4)), over, "x", "y"))


@program
def shard_map_over_some_axes() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        def local(x: Any) -> Any:
            # The second axis is the partitioner's: the mean over it is a sum that it inserts.
            return lax.psum(x - x.mean(1, keepdims=True), "x")

        return jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P(), axis_names={"x"})(x)

    return f(put(values((8, 4)), over, "x", "y"))


@program
def only_the_partitioner_sums_in_a_partly_manual_map() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        local = lambda x: x.sum(1) * lax.axis_index("x")  # noqa: E731
        return jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})(
            x
        )

    return f(put(values((8, 4)), over, "x", "y"))


@program
def products_in_a_partly_manual_map() -> Any:
    over = mesh((2, 2, 2), ("a", "b", "c"))

    @jax.jit
    def f(x: Any, w: Any) -> Any:
        def local(x: Any, w: Any) -> Any:
            y = lax.with_sharding_constraint(x @ w, NamedSharding(over.abstract_mesh, P()))
            return lax.pmean(y, "a")

        try:
            return jax.shard_map(
                local, mesh=over, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"}
            )(x, w)
        except ValueError:  # the constraint's mesh has to be the map's
            body = lambda x, w: lax.pmean(x @ w, "a")  # noqa: E731
            return jax.shard_map(
                body, mesh=over, in_specs=(P("a"), P()), out_specs=P(), axis_names={"a"}
            )(x, w)

    x, w = put(values((4, 8)), over, "a", "b"), put(values((8, 4), seed=1), over, "b", "c")
    return f(x, w)


@program
def shard_map_in_shard_map() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        def outer(x: Any) -> Any:
            def inner(x: Any) -> Any:
                return lax.psum(x, "y")

            y = jax.shard_map(inner, in_specs=P(None, "y"), out_specs=P(), axis_names={"y"})(x)
            return lax.psum(y, "x")

        return jax.shard_map(outer, mesh=over, in_specs=P("x"), out_specs=P(), axis_names={"x"})(x)

    return f(put(values((8, 4)), over, "x", "y"))


@program
def jit_in_shard_map() -> Any:
    over = mesh(8, "x")
    inner = jax.jit(lambda x: lax.psum(x, "x") / 8)
    local = lambda x: inner(x) + inner(x.sum(0, keepdims=True))  # noqa: E731
    f = jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P("x"))
    x = put(values((8, 4)), over, "x")
    return f(x), jax.jit(f)(x)


@program
def vmap_of_shard_map_and_of_jit() -> Any:
    over = mesh(8, "x")
    f = jax.shard_map(
        lambda x: lax.psum(x, "x"), mesh=over, in_specs=P("x"), out_specs=P(), check_vma=False
    )
    x = values((3, 8, 4))
    g = jax.jit(lambda x: x.sum(0))
    sharded = put(x, over, None, "x")
    return jax.jit(jax.vmap(f))(x), jax.vmap(g)(sharded), jax.jit(jax.vmap(g, 1, 1))(sharded)


@program
def vmap_with_the_name_of_a_mesh_axis() -> Any:
    over = mesh((4, 2), ("x", "y"))

    def one(x: Any) -> Any:
        x = lax.with_sharding_constraint(x, NamedSharding(over, P("y")))
        return x.sum(), (x * x).sum(0)

    f = jax.jit(jax.vmap(one, spmd_axis_name="x"))
    return f(values((8, 4, 3)))


@program
def grad_through_nested_maps() -> Any:
    over = mesh((4, 2), ("x", "y"))

    def loss(w: Any, x: Any) -> Any:
        h = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w)
        local = lambda h: lax.pmean((h**2).sum(), ("x", "y"))  # noqa: E731
        parts = jax.shard_map(local, mesh=over, in_specs=P("x", "y"), out_specs=P())
        return parts(h) + h.mean()

    w, x = put(values((6, 4)), over, None, "y"), put(values((8, 6), seed=1), over, "x")
    return jax.jit(jax.value_and_grad(loss))(w, x)


@program
def pmap_beside_jit() -> Any:
    x = values((8, 4))
    parallel = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    over = mesh(8, "x")
    placed = jax.device_put(parallel, NamedSharding(over, P("x")))
    return np.asarray(parallel), jax.jit(lambda x: x.sum(0))(placed)


@program
def recursion_of_jits() -> Any:
    over = mesh(8, "x")

    def f(x: Any, depth: int) -> Any:
        if not depth:
            return x.sum(0)
        return jax.jit(partial(f, depth=depth - 1))(jnp.cos(x - x.mean(0)))

    return jax.jit(partial(f, depth=5))(put(values((8, 4)), over, "x"))


@program
def automatic_axes_in_an_explicit_mesh() -> Any:
    needs("jax.sharding.auto_axes")
    over = mesh((4, 2), ("x", "y"), explicit=True)

    @partial(jax.sharding.auto_axes, out_sharding=P("x", None))
    def product(a: Any, b: Any) -> Any:
        return a @ b

    with jax.set_mesh(over):
        a, b = put(values((8, 4)), over, "x", "y"), put(values((4, 8), seed=1), over, "y", "x")
        f = jax.jit(lambda a, b: product(jnp.sin(a), b) + 1)
        return f(a, b), product(a, b), f(a, b).sum(0)


@program
def explicit_axes_in_an_automatic_mesh() -> Any:
    needs("jax.sharding.explicit_axes")
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.sharding.explicit_axes, in_sharding=(P("x", "y"), P("y", None)))
    def product(a: Any, b: Any) -> Any:
        return jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", None))

    with jax.set_mesh(over):
        a, b = put(values((8, 4)), over, "x", "y"), put(values((4, 8), seed=1), over, "y", "x")
        return jax.jit(lambda a, b: product(jnp.sin(a), b).sum(0))(a, b)


@program
def eager_shard_map() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.shard_map(
        lambda x: lax.psum(x.sum(0), "x"), mesh=over, in_specs=P("x", "y"), out_specs=P("y")
    )
    x = put(values((8, 4)), over, "x", "y")
    return f(x), f(x).sum()


@program
def named_calls_and_scopes() -> Any:
    x = put(values((8, 4)), mesh(8, "x"), "x")

    @jax.jit
    def f(x: Any) -> Any:
        with jax.named_scope("layer.0/attention"):
            y = jax.named_call(lambda x: x.sum(0), name="a name with 'quotes' and \"more\"")(x)
        return y

    return f(x)
