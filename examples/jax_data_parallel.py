"""Data-parallel training in JAX: jit with NamedSharding. Parameters are on all devices, each has a
part of the batch, and XLA's partitioner inserts the sums of the gradients.

    python examples/jax_data_parallel.py
    gpusim jaxrun --devices 8 --reduction "ring accumulate=bfloat16" examples/jax_data_parallel.py
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from itertools import pairwise
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before jax is imported

import jax
import jax.numpy as jnp
import numpy as np

SIZES = 16, 64, 64, 4
BATCH, STEPS, RATE = 256, 40, 0.01


def loss(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The cross entropy of a perceptron, as the mean over the batch."""
    for weight, bias in parameters[:-1]:
        x = jnp.tanh(x @ weight + bias)
    weight, bias = parameters[-1]
    return -(y * jax.nn.log_softmax(x @ weight + bias)).sum(1).mean()


@partial(jax.jit, donate_argnums=0)
def update(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """A step of Adam."""
    step, parameters, means, squares = state
    value, gradients = jax.value_and_grad(loss)(parameters, x, y)
    step = step + 1
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, squares, gradients)

    def moved(parameter: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        scale = jnp.sqrt(square / (1 - 0.99**step)) + 1e-8
        return parameter - RATE * mean / (1 - 0.9**step) / scale

    parameters = jax.tree.map(moved, parameters, means, squares)
    return (step, parameters, means, squares), value


def train(whole: Any, split: Any) -> tuple[float, str]:
    """The last loss and a digest of the parameters, with arrays placed as `whole` and `split`."""
    draw = np.random.default_rng(0)
    parameters = [
        (draw.normal(size=(rows, columns)) / rows**0.5, np.zeros(columns))
        for rows, columns in pairwise(SIZES)
    ]
    teacher = draw.normal(size=(SIZES[0], SIZES[-1]))
    parameters = jax.tree.map(lambda x: x.astype(np.float32), parameters)
    zeros = jax.tree.map(np.zeros_like, parameters)
    state = jax.device_put((np.float32(0), parameters, zeros, zeros), whole)
    for _ in range(STEPS):
        x = draw.normal(size=(BATCH, SIZES[0])).astype(np.float32)
        y = np.eye(SIZES[-1], dtype=np.float32)[(x @ teacher).argmax(1)]
        state, value = update(state, *jax.device_put((x, y), split))
    trained = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state[1]))
    return float(value), hashlib.sha256(trained).hexdigest()[:8]


def main() -> None:
    """Train on all devices and on one."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (jax.sharding.AxisType.Auto,))
    whole, split = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    value, digest = train(whole, split)
    print(f"{jax.device_count()} devices: loss {value!r}, parameters {digest}")
    alone, _ = train(jax.devices()[0], jax.devices()[0])
    print(f"one device: loss {alone!r}")
    np.testing.assert_allclose(value, alone, rtol=0.05)
    print("agreed")


if __name__ == "__main__":
    main()
