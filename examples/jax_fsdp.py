"""Fully sharded training in JAX with explicit sharding: each device holds a part of each weight,
gathers a layer's weights in bfloat16 as the layer begins, and receives its part of the gradients.

    python examples/jax_fsdp.py
    gpusim jaxrun --devices 8 --reduction "tree accumulate=float32" examples/jax_fsdp.py
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before jax is imported

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import reshard

LAYERS, WIDTH, HIDDEN = 3, 64, 128
BATCH, STEPS, RATE = 256, 30, 0.3
SHARDED = P(None, "data")  # of weights, behind the axis of the layers


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    """A residual layer; its weights are gathered for it."""
    up, down = (reshard(w.astype(jnp.bfloat16), P()) for w in weights)
    return x + jax.nn.gelu(x @ up) @ down, None


def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean square error. The backward pass gathers the weights again."""
    found, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), weights)
    return jnp.square(found.astype(jnp.float32) - y).mean()


@partial(jax.jit, donate_argnums=0)
def update(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A step of SGD with momentum, on each device for its parts of the weights."""
    weights, momenta = state
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, gradients)
    weights = jax.tree.map(lambda w, m: w - RATE * m, weights, momenta)
    return (weights, momenta), value


def train() -> tuple[float, str]:
    """The last loss and a digest of the weights, on the devices of the mesh that is set."""
    draw = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    weights = tuple(draw.normal(size=s).astype(np.float32) / s[1] ** 0.5 for s in shapes)
    target = draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    state = jax.device_put((weights, jax.tree.map(np.zeros_like, weights)), SHARDED)
    for _ in range(STEPS):
        x = draw.normal(size=(BATCH, WIDTH))
        batch = x.astype(np.float32), np.tanh(x @ target).astype(np.float32)
        state, value = update(state, *jax.device_put(batch, P("data")))
    trained = b"".join(np.asarray(leaf).tobytes() for leaf in state[0])
    return float(value), hashlib.sha256(trained).hexdigest()[:8]


def main() -> None:
    """Train on all devices and on one."""
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):  # Explicit by default
        value, digest = train()
    print(f"{jax.device_count()} devices: loss {value!r}, parameters {digest}")
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        alone, _ = train()
    print(f"one device: loss {alone!r}")
    np.testing.assert_allclose(value, alone, rtol=0.05)
    print("agreed")


if __name__ == "__main__":
    main()
