"""Kinds of memory, of arrays and in programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from tests.jax.ground import P, Skip, error, mesh, program, put, values


def host(*spec: Any) -> Any:
    """A sharding in the host's memory, on a mesh of 4 by 2."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        raise Skip(f"XLA:CPU has the memories {sorted(kinds)}")
    return NamedSharding(mesh((4, 2), ("x", "y")), P(*spec), memory_kind="pinned_host")


@program
def kinds_of_memory() -> Any:
    device = jax.devices()[0]
    return sorted(m.kind for m in device.addressable_memories()), device.default_memory().kind


@program
def arguments_in_the_memory_of_the_host() -> Any:
    x = jax.device_put(values((8, 4)), host("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        y = jax.device_put(x, host("x", "y").with_memory_kind("device"))
        return y.sum(0), y * 2

    return f(x), x


@program
def results_in_the_memory_of_the_host() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")
    f = jax.jit(lambda x: (x * 2, x.sum(0)), out_shardings=(host("x", "y"), None))
    return f(x)


@program
def moved_inside_of_a_program() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")

    @jax.jit
    def f(x: Any) -> Any:
        away = jax.device_put(jnp.sin(x), host("x", "y"))
        back = jax.device_put(away, host("x", "y").with_memory_kind("device"))
        return back.sum(0)

    return f(x)


@program
def offloaded_activations() -> Any:
    from jax.ad_checkpoint import checkpoint_name

    host()
    w = put(values((4, 4)), mesh((4, 2), ("x", "y")), None, "y")
    x = put(values((8, 4), seed=1), mesh((4, 2), ("x", "y")), "x")
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip

    @partial(jax.checkpoint, policy=policy)
    def layer(w: Any, x: Any) -> Any:
        h = checkpoint_name(jnp.tanh(x @ w), "h")
        return (jnp.sin(h) ** 2).sum()

    return jax.jit(jax.grad(layer))(w, x)


@program
def unknown_kinds() -> Any:
    over = mesh((4, 2), ("x", "y"))
    return error(NamedSharding, over, P("x"), memory_kind="no such memory")


@program
def the_memory_of_sharding_types() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")
    total = jax.jit(lambda x: x.sum(0))(x)
    return x.sharding.memory_kind, total.sharding.memory_kind, total
