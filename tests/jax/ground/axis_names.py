"""Collectives over axes of jax.vmap, alone and beside axes of meshes and of pmap."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.jax.ground import P, error, mesh, program, put, values


def warned_of(function: Callable[[], Any]) -> Callable[[], Any]:
    """A program with sums over an axis of jax.vmap, which are XLA's after a warning."""

    @functools.wraps(function)
    def quiet() -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "gpusim.jax: XLA reduces axes .* jax.vmap")
            return function()

    return quiet


@program
@warned_of
def collectives_over_vmap() -> Any:
    def f(x: Any) -> Any:
        ring = [(k, (k + 1) % 6) for k in range(6)]
        return (
            lax.psum(x, "i"), lax.pmean(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i"),
            lax.all_gather(x, "i"), lax.ppermute(x, "i", ring), lax.axis_index("i"),
            lax.psum_scatter(jnp.outer(jnp.arange(6.0), x), "i"),
            lax.all_to_all(jnp.outer(jnp.arange(6.0), x), "i", 0, 0),
        )  # fmt: skip

    x = values((6, 3))
    return jax.vmap(f, axis_name="i")(x), jax.jit(jax.vmap(f, axis_name="i"))(x)


@program
@warned_of
def vmap_over_a_sharded_axis() -> Any:
    f = jax.vmap(
        lambda x: (lax.psum(x, "i"), x - lax.pmean(x, "i"), lax.pmax(x, "i")), axis_name="i"
    )
    x = put(values((16, 3)), mesh(8, "x"), "x")
    return jax.jit(lambda x: (f(x), x.sum(0)))(x)


@program
@warned_of
def nested_vmaps() -> Any:
    inner = lambda x: lax.psum(x, "i") + lax.psum(x, "j") * lax.pmean(x, ("i", "j"))  # noqa: E731
    f = jax.vmap(jax.vmap(inner, axis_name="j"), axis_name="i")
    x = values((4, 6))
    return f(x), jax.jit(f)(put(x, mesh((4, 2), ("x", "y")), "x", "y"))


@program
@warned_of
def vmap_inside_of_a_map() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    @partial(jax.vmap, axis_name="i")
    def f(x: Any) -> Any:
        return x + lax.psum(x, "x") - lax.psum(x, ("i", "x")) / 8 + lax.pmax(x, "i")

    return jax.jit(lambda x: (f(x), f(x).sum(0)))(put(values((24, 3)), over, "x"))


@program
def vmap_outside_of_a_map() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.shard_map(lambda x: x * lax.psum(x, "y"), mesh=over, in_specs=P("y"), out_specs=P("y"))
    x = put(values((4, 6)), over, "x", "y")
    plain = jax.vmap(f, axis_name="i")
    spread = jax.vmap(f, axis_name="i", spmd_axis_name="x")
    return jax.jit(lambda x: (plain(x), spread(x), plain(x).max(0)))(x)


@program
def vmap_with_the_name_of_the_map() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.shard_map(lambda x: x + lax.psum(x, "y"), mesh=over, in_specs=P("y"), out_specs=P("y"))
    return jax.jit(jax.vmap(f, axis_name="x"))(put(values((4, 6)), over, "x", "y"))


@program
@warned_of
def gradients_over_vmap() -> Any:
    f = jax.vmap(lambda x: x * lax.psum(jnp.sin(x), "i"), axis_name="i")
    x = put(values((8, 3)), mesh(8, "x"), "x")
    return jax.jit(jax.value_and_grad(lambda x: (f(x) ** 2).sum()))(x)


@program
@warned_of
def vmap_of_pmap_and_pmap_of_vmap() -> Any:
    f = jax.pmap(
        jax.vmap(lambda x: x * lax.psum(x, "i") + lax.psum(x, "v"), axis_name="v"), axis_name="i"
    )
    g = jax.vmap(jax.pmap(lambda x: x - lax.pmean(x, "i"), axis_name="i"))
    x = values((8, 5, 3))
    return f(x), g(x[:4].swapaxes(0, 1)[:, :4])


@program
@warned_of
def batch_normalisation() -> Any:
    def normalise(x: Any) -> Any:
        mean, square = lax.pmean(x, "batch"), lax.pmean(x * x, "batch")
        return (x - mean) * lax.rsqrt(square - mean**2 + 1e-3)

    over = mesh(8, "x")
    by_vmap = jax.jit(jax.vmap(normalise, axis_name="batch"))
    by_pmap = jax.pmap(normalise, axis_name="batch")
    by_map = jax.jit(
        jax.shard_map(
            lambda x: normalise(x), mesh=mesh(8, "batch"), in_specs=P("batch"), out_specs=P("batch")
        )
    )
    x = values((8, 3))
    return by_vmap(put(x, over, "x")), by_pmap(x), by_map(x)


@program
def refused_names() -> Any:
    x = values((4, 3))
    return [
        error(jax.vmap(lambda x: lax.psum(x, "j"), axis_name="i"), x),
        error(jax.jit(lambda x: lax.psum(x, "i")), x),
        error(jax.vmap(lambda x: lax.axis_index("j"), axis_name="i"), x),
        error(jax.vmap(lambda x: lax.all_gather(x, ("i", "k")), axis_name="i"), x),
    ]
