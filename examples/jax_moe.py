"""A mixture of experts in JAX on fake CPU devices: tokens go to their experts and back by
lax.ragged_all_to_all, which XLA:CPU does not have without gpusim.

    python examples/jax_moe.py
    python examples/jax_moe.py "ring accumulate=bfloat16"
    gpusim jaxrun --devices 64 examples/jax_moe.py tree
"""

from __future__ import annotations

import hashlib
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before jax is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gpusim.jax

REDUCTION = sys.argv[1] if len(sys.argv) > 1 else None  # of the sums; None leaves them to XLA
gpusim.jax.install(REDUCTION)

EXPERTS = jax.device_count()  # one on each device
TOKENS, WIDTH, CHOSEN = 16, 8, 2


def route(tokens: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, and their weights: both (tokens, CHOSEN)."""
    scores, experts = lax.top_k(tokens @ router, min(CHOSEN, EXPERTS))
    return experts, jax.nn.softmax(scores)


def layer(tokens: jax.Array, router: jax.Array, expert: jax.Array) -> jax.Array:
    """The layer on one device: its tokens, the router, and the weights of its expert."""
    experts, weights = route(tokens, router)
    order = jnp.argsort(experts.reshape(-1))
    rows = tokens[order // experts.shape[1]]  # a row for each token and expert, by expert
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    starts = jnp.cumsum(sizes) - sizes

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "i", 0, 0, tiled=True)

    received = exchange(sizes)
    places = jnp.cumsum(received) - received  # where each device's rows begin here
    room = jnp.zeros((EXPERTS * len(rows), WIDTH))
    arrived = lax.ragged_all_to_all(
        rows, room, starts, sizes, exchange(places), received, axis_name="i"
    )
    done = jnp.tanh(arrived @ expert[0])
    returned = lax.ragged_all_to_all(
        done, jnp.zeros_like(rows), places, received, exchange(starts), sizes, axis_name="i"
    )
    outputs = jnp.zeros_like(rows).at[order].set(returned).reshape(*weights.shape, WIDTH)
    return (outputs * weights[..., None]).sum(1)


def dense(tokens: jax.Array, router: jax.Array, experts: jax.Array) -> jax.Array:
    """The same without devices: all experts for all tokens."""
    chosen, weights = route(tokens, router)
    every = jnp.tanh(jnp.einsum("td,edf->tef", tokens, experts))
    return (jnp.take_along_axis(every, chosen[..., None], axis=1) * weights[..., None]).sum(1)


def main() -> None:
    """Compare the loss and the gradients with those of the dense layer."""
    mesh = Mesh(np.array(jax.devices()), ("i",))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("i"), P(), P("i")), out_specs=P("i"))
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.normal(keys[0], (EXPERTS * TOKENS, WIDTH))
    router = jax.random.normal(keys[1], (WIDTH, EXPERTS))
    experts = jax.random.normal(keys[2], (EXPERTS, WIDTH, WIDTH))

    def loss(layer, *arguments):  # type: ignore[no-untyped-def]
        return (layer(*arguments) ** 2).sum()

    def step(layer):  # type: ignore[no-untyped-def]
        gradients = jax.value_and_grad(lambda *a: loss(layer, *a), argnums=(0, 1, 2))
        return jax.jit(gradients)(tokens, router, experts)

    (value, found), (plain, expected) = step(mapped), step(dense)
    bound = 1e-2 if REDUCTION else 1e-4
    np.testing.assert_allclose(value, plain, rtol=bound)
    for x, y in zip(found, expected, strict=True):
        assert jnp.linalg.norm(x - y) < bound * jnp.linalg.norm(y)
    gradients = b"".join(np.asarray(each).tobytes() for each in found)
    digest = hashlib.sha256(gradients).hexdigest()[:8]
    print(f"{EXPERTS} devices: loss {float(value)!r}, gradients {digest}")
    print(f"a dense layer: loss {float(plain)!r}")
    print("agreed")


if __name__ == "__main__":
    main()
