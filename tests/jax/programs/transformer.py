"""A training step of a small transformer on a mesh data x model, in two spellings.

`Trainer` is a program of jit: arrays with shardings, and sums that XLA's partitioner inserts.
`explicit_gradients` is the same network in jax.shard_map, with `lax.psum` where the partitioner
sums. Adam is written out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WORDS, WIDTH, HEADS, INNER, LENGTH, BATCH = 32, 16, 4, 32, 8, 8
RATE, FIRST, SECOND, LEAST = 0.01, 0.9, 0.99, 1e-6

#: How each parameter is split: columns of what goes into a head, rows of what comes out of one.
SPECS = {
    "embedding": P(None, None),
    "queries": P(None, "model"),
    "keys": P(None, "model"),
    "values": P(None, "model"),
    "attended": P("model", None),
    "widened": P(None, "model"),
    "narrowed": P("model", None),
    "scale": P(None),
}
SHAPES = {
    "embedding": (WORDS, WIDTH),
    "queries": (WIDTH, WIDTH),
    "keys": (WIDTH, WIDTH),
    "values": (WIDTH, WIDTH),
    "attended": (WIDTH, WIDTH),
    "widened": (WIDTH, INNER),
    "narrowed": (INNER, WIDTH),
    "scale": (WIDTH,),
}

Parameters = dict[str, Any]


def stored(name: str) -> str:
    """The parameter's name: words come in and go out by one table."""
    return "embedding" if name == "output" else name


def parameters(dtype: Any) -> Parameters:
    rng = np.random.default_rng(0)
    found = {
        name: (rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype)
        for name, shape in SHAPES.items()
    }
    return {**found, "scale": np.ones(WIDTH, dtype)}


def batches(count: int) -> Any:
    return np.random.default_rng(1).integers(0, WORDS, (count, BATCH, LENGTH + 1)).astype(np.int32)


def network(use: Callable[[str], Any], tokens: Any, whole: Callable[[Any], Any], count: int) -> Any:
    """The negative log-likelihoods of the next tokens, (batch, length).

    **Arguments**: `use` gives a parameter where it is used; `whole` sums over the parts of the
    model, where parts of rows have been multiplied; `count` is the number of heads in a part.
    """
    x = use("embedding")[tokens[:, :-1]]
    h = normalized(x) * use("scale")
    q, k, v = (
        (h @ use(name)).reshape(*h.shape[:2], count, -1) for name in ("queries", "keys", "values")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS).astype(x.dtype)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(x.dtype).min), axis=-1)
    heads = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*h.shape[:2], -1)
    x = x + whole(heads @ use("attended"))
    h = normalized(x) * use("scale")
    x = x + whole(jax.nn.relu(h @ use("widened")) @ use("narrowed"))
    logits = normalized(x) @ use("output").T
    found = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]


def normalized(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-3)


def implicit_loss(p: Parameters, tokens: Any) -> Any:
    return network(lambda name: p[stored(name)], tokens, lambda x: x, HEADS).sum() / (
        BATCH * LENGTH
    )


def explicit_loss(mesh: Mesh, transposed: Container[str] = ()) -> Callable[..., Any]:
    """The same in shard_map. Gradients of what all devices hold are psums, by JAX's types.

    **Arguments**: `transposed` are parameters whose gradients are summed as transposed arrays.
    """

    def local(p: Parameters, tokens: Any) -> Any:
        def use(name: str) -> Any:
            value = p[stored(name)]
            # What is cast to vary is the array whose gradient is summed.
            if name in transposed:
                return lax.pcast(value.T, "data", to="varying").T
            return lax.pcast(value, "data", to="varying")

        found = network(use, tokens, lambda x: lax.psum(x, "model"), HEADS // mesh.shape["model"])
        return lax.psum(found.sum(), "data") / (BATCH * LENGTH)

    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P("data", None)), out_specs=P())


def adam(step: Any, p: Any, gradient: Any, mean: Any, square: Any) -> tuple[Any, Any, Any]:
    """One parameter's update: its new value and moments."""
    gradient = gradient.astype(jnp.float32)
    mean = FIRST * mean + (1 - FIRST) * gradient
    square = SECOND * square + (1 - SECOND) * gradient * gradient
    step_size = RATE * jnp.sqrt(1 - SECOND**step) / (1 - FIRST**step)
    return (p - step_size * mean / (jnp.sqrt(square) + LEAST)).astype(p.dtype), mean, square


class Trainer:
    """Parameters and moments on their devices, and a compiled step, whose arguments it donates."""

    def __init__(self, mesh: Mesh, dtype: Any, loss: Callable[..., Any] = implicit_loss) -> None:
        self.shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        self.tokens = NamedSharding(mesh, P("data", None))
        self.dtype = dtype
        self.begin()
        self.gradients = jax.jit(jax.value_and_grad(loss), out_shardings=(None, self.shardings))

        @partial(
            jax.jit,
            donate_argnums=(1, 2, 3),
            out_shardings=(None, self.shardings, self.shardings, self.shardings),
        )
        def step(
            number: Any, p: Parameters, means: Any, squares: Any, tokens: Any
        ) -> tuple[Any, Parameters, Any, Any]:
            value, gradients = jax.value_and_grad(loss)(p, tokens)
            updated = {
                name: adam(number, p[name], gradients[name], means[name], squares[name])
                for name in p
            }
            return value, *({name: leaf[k] for name, leaf in updated.items()} for k in range(3))

        self.step = step

    def begin(self) -> None:
        """Go back to the first parameters."""
        self.parameters = jax.device_put(parameters(self.dtype), self.shardings)
        zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self.means, self.squares = (jax.device_put(zeros, self.shardings) for _ in range(2))

    def train(self, steps: int) -> tuple[list[Any], str]:
        """The losses, and a digest of them and of all that the training has made."""
        losses = []
        for number, tokens in enumerate(batches(steps), 1):
            placed = jax.device_put(tokens, self.tokens)
            loss, self.parameters, self.means, self.squares = jax.block_until_ready(
                self.step(np.float32(number), self.parameters, self.means, self.squares, placed)
            )
            losses.append(np.asarray(loss))
        digest = hashlib.sha256()
        for leaf in [*losses, *jax.tree.leaves((self.parameters, self.means, self.squares))]:
            digest.update(np.asarray(leaf).tobytes())
        return losses, digest.hexdigest()
