"""Four SPMD programs as JAX's users write them, and their ports by docs/porting-jax.md alone."""

from __future__ import annotations

from tests.oracles import jax_oracle  # isort: skip - first: it sets JAX's devices and 64-bit types

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpusim

jax, jnp = jax_oracle.jax, jax_oracle.jnp
DEVICES = 4
draw = np.random.default_rng(17).standard_normal


def mesh_of_jax(name: str) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), (name,))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# A sharded matmul, whose partial products are summed and scattered


def matmul_in_jax() -> Callable[..., Any]:
    from jax import lax
    from jax.sharding import PartitionSpec as P

    @jax.jit
    @jax.shard_map(mesh=mesh_of_jax("x"), in_specs=(P(None, "x"), P("x")), out_specs=P("x"))
    def matmul(a, b):
        return lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)

    return matmul


def matmul_ported() -> Callable[..., Any]:
    from gpusim import P, lax

    @gpusim.shard_map(
        mesh=gpusim.Mesh(DEVICES, "x"), in_specs=(P(None, "x"), P("x")), out_specs=P("x")
    )
    def matmul(a, b):
        return lax.psum_scatter(a @ b, "x", scatter_dimension=0, tiled=True)

    return matmul


# A pipeline: microbatches pass through the stages, one hop a step of the scan


def pipeline_in_jax() -> Callable[..., Any]:
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def stages(w, microbatches):
        stage, count = lax.axis_index("stage"), lax.axis_size("stage")
        onward = [(i, (i + 1) % count) for i in range(count)]
        last = len(microbatches) - 1

        def tick(carry, t):
            x, results = carry
            fresh = lax.dynamic_index_in_dim(microbatches, jnp.minimum(t, last), keepdims=False)
            x = jnp.tanh(jnp.where(stage == 0, fresh, x) @ w[0])
            done = t - (count - 1)
            results = lax.cond(
                (stage == count - 1) & (done >= 0),
                lambda results, x: lax.dynamic_update_index_in_dim(
                    results, x, jnp.maximum(done, 0), axis=0
                ),
                lambda results, x: results,
                results,
                x,
            )
            return (lax.ppermute(x, "stage", onward), results), jnp.sum(x)

        start = jnp.zeros(microbatches.shape[1:]), jnp.zeros(microbatches.shape)
        start = lax.pcast(start, "stage", to="varying")
        steps = jnp.arange(len(microbatches) + count - 1)
        (_, results), sums = lax.scan(tick, start, steps)
        return lax.psum(jnp.where(stage == count - 1, results, 0), "stage"), sums[None]

    return jax.jit(
        jax.shard_map(
            stages,
            mesh=mesh_of_jax("stage"),
            in_specs=(P("stage"), P()),
            out_specs=(P(), P("stage")),
        )
    )


def pipeline_ported() -> Callable[..., Any]:
    from gpusim import P, lax

    def stages(w, microbatches):
        stage, count = lax.axis_index("stage"), lax.axis_size("stage")
        onward = [(i, (i + 1) % count) for i in range(count)]
        last = len(microbatches) - 1

        def tick(carry, t):
            x, results = carry
            fresh = lax.dynamic_index_in_dim(microbatches, np.minimum(t, last), keepdims=False)
            x = np.tanh(np.where(stage == 0, fresh, x) @ w[0])
            done = t - (count - 1)
            results = lax.cond(
                (stage == count - 1) & (done >= 0),
                lambda results, x: lax.dynamic_update_index_in_dim(
                    results, x, np.maximum(done, 0), axis=0
                ),
                lambda results, x: results,
                results,
                x,
            )
            return (lax.ppermute(x, "stage", onward), results), np.sum(x)

        start = np.zeros(microbatches.shape[1:]), np.zeros(microbatches.shape)
        start = lax.pcast(start, "stage", to="varying")
        steps = np.arange(len(microbatches) + count - 1)
        (_, results), sums = lax.scan(tick, start, steps)
        return lax.psum(np.where(stage == count - 1, results, 0), "stage"), sums[None]

    return gpusim.shard_map(
        stages,
        mesh=gpusim.Mesh(DEVICES, "stage"),
        in_specs=(P("stage"), P()),
        out_specs=(P(), P("stage")),
    )


# A ring: while a block of b is multiplied, the next one arrives


def ring_in_jax() -> Callable[..., Any]:
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def matmul(a, b):
        me, count = lax.axis_index("i"), lax.axis_size("i")
        width = b.shape[0]
        onward = [(i, (i + 1) % count) for i in range(count)]

        def hop(step, carry):
            total, b = carry
            source = (me - step) % count
            columns = lax.dynamic_slice_in_dim(a, source * width, width, axis=1)
            return total + columns @ b, lax.ppermute(b, "i", onward)

        total = lax.pcast(jnp.zeros((a.shape[0], b.shape[1]), a.dtype), "i", to="varying")
        return lax.fori_loop(0, count, hop, (total, b))[0]

    return jax.jit(
        jax.shard_map(matmul, mesh=mesh_of_jax("i"), in_specs=(P("i"), P("i")), out_specs=P("i"))
    )


def ring_ported() -> Callable[..., Any]:
    from gpusim import P, lax

    def matmul(a, b):
        me, count = lax.axis_index("i"), lax.axis_size("i")
        width = b.shape[0]
        onward = [(i, (i + 1) % count) for i in range(count)]

        def hop(step, carry):
            total, b = carry
            source = (me - step) % count
            columns = lax.dynamic_slice_in_dim(a, source * width, width, axis=1)
            return total + columns @ b, lax.ppermute(b, "i", onward)

        total = lax.pcast(np.zeros((a.shape[0], b.shape[1]), a.dtype), "i", to="varying")
        return lax.fori_loop(0, count, hop, (total, b))[0]

    return gpusim.shard_map(
        matmul, mesh=gpusim.Mesh(DEVICES, "i"), in_specs=(P("i"), P("i")), out_specs=P("i")
    )


# A mixture of experts: tokens go to their experts, up to a capacity, by all_to_all

EXPERTS, CAPACITY = 8, 3


def moe_in_jax() -> Callable[..., Any]:
    from jax import lax
    from jax.sharding import PartitionSpec as P

    def layer(params, tokens):
        probabilities = jax.nn.softmax(tokens @ params["router"])
        expert = jnp.argmax(probabilities, axis=-1)
        gate = jnp.take_along_axis(probabilities, expert[:, None], axis=-1)
        chosen = jax.nn.one_hot(expert, EXPERTS)
        position = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)
        slot = jax.nn.one_hot(position.astype(int), CAPACITY)  # zeros beyond the capacity
        dispatch = chosen[:, :, None] * slot[:, None, :]

        sent = jnp.einsum("nec,nd->ecd", dispatch, tokens)
        here = lax.all_to_all(sent, "expert", 0, 1, tiled=True)
        hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", here, params["up"]))
        done = jnp.einsum("ech,ehd->ecd", hidden, params["down"])
        back = lax.all_to_all(done, "expert", 1, 0, tiled=True)

        dropped = lax.psum(jnp.sum(1 - jnp.sum(dispatch, axis=(1, 2))), "expert")
        return jnp.einsum("nec,ecd->nd", dispatch * gate[:, :, None], back), dropped

    specs = {"router": P(), "up": P("expert"), "down": P("expert")}
    return jax.jit(
        jax.shard_map(
            layer,
            mesh=mesh_of_jax("expert"),
            in_specs=(specs, P("expert")),
            out_specs=(P("expert"), P()),
        )
    )


def moe_ported() -> Callable[..., Any]:
    from gpusim import P, lax

    def one_hot(i, n):
        return (i[..., None] == np.arange(n)).astype(float)

    def layer(params, tokens):
        probabilities = softmax(tokens @ params["router"])
        expert = np.argmax(probabilities, axis=-1)
        gate = np.take_along_axis(probabilities, expert[:, None], axis=-1)
        chosen = one_hot(expert, EXPERTS)
        position = np.sum((np.cumsum(chosen, axis=0) - 1) * chosen, axis=-1)
        slot = one_hot(position.astype(int), CAPACITY)  # zeros beyond the capacity
        dispatch = chosen[:, :, None] * slot[:, None, :]

        sent = np.einsum("nec,nd->ecd", dispatch, tokens)
        here = lax.all_to_all(sent, "expert", 0, 1, tiled=True)
        hidden = np.maximum(np.einsum("ecd,edh->ech", here, params["up"]), 0)
        done = np.einsum("ech,ehd->ecd", hidden, params["down"])
        back = lax.all_to_all(done, "expert", 1, 0, tiled=True)

        dropped = lax.psum(np.sum(1 - np.sum(dispatch, axis=(1, 2))), "expert")
        return np.einsum("nec,ecd->nd", dispatch * gate[:, :, None], back), dropped

    specs = {"router": P(), "up": P("expert"), "down": P("expert")}
    return gpusim.shard_map(
        layer,
        mesh=gpusim.Mesh(DEVICES, "expert"),
        in_specs=(specs, P("expert")),
        out_specs=(P("expert"), P()),
    )


EXPERT_WEIGHTS = {
    "router": draw((5, EXPERTS)),
    "up": draw((EXPERTS, 5, 7)),
    "down": draw((EXPERTS, 7, 5)),
}
PORTS = {
    "matmul": (matmul_in_jax, matmul_ported, (draw((8, 12)), draw((12, 5)))),
    "pipeline": (
        pipeline_in_jax,
        pipeline_ported,
        (draw((DEVICES, 6, 6)) / 2, draw((7, 3, 6))),
    ),
    "ring": (ring_in_jax, ring_ported, (draw((8, 12)), draw((12, 5)))),
    "moe": (moe_in_jax, moe_ported, (EXPERT_WEIGHTS, draw((DEVICES * 16, 5)))),
}


@pytest.mark.parametrize("program", PORTS)
def test_the_port_has_the_originals_values(program: str) -> None:
    original, ported, arguments = PORTS[program]
    expected, found = original()(*arguments), ported()(*arguments)
    leaves, structure = gpusim.tree.flatten(found)
    wanted, other = gpusim.tree.flatten(expected)
    assert structure == other
    for a, b in zip(leaves, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-12, atol=1e-13)
    if program == "moe":
        assert found[1] > 0  # some tokens find no room
