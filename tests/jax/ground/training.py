"""Small models that are trained: data, tensor, expert and pipeline parallel."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, reshard

from tests.jax.ground import P, mesh, program, put, values

#: Last bits that a few steps of training may add up to.
STEPS = 256


def weights(*sizes: int) -> list[Any]:
    """The matrices of a perceptron."""
    return [
        values(shape, seed=k) / np.float32(np.sqrt(shape[0]))
        for k, shape in enumerate(itertools.pairwise(sizes))
    ]


def loss(ws: Any, x: Any, y: Any) -> Any:
    """The squared error of a perceptron."""
    for w in ws[:-1]:
        x = jax.nn.relu(x @ w)
    return ((x @ ws[-1] - y) ** 2).mean()


@jax.jit
def descend(ws: Any, x: Any, y: Any) -> Any:
    """A step of gradient descent."""
    value, grads = jax.value_and_grad(loss)(ws, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def trained(ws: Any, x: Any, y: Any, steps: int = 4) -> Any:
    """The weights after some steps, and the losses."""
    losses = []
    for _ in range(steps):
        ws, value = descend(ws, x, y)
        losses.append(value)
    return ws, losses


@program(last_bits=STEPS)
def data_parallel() -> Any:
    over = mesh(8, "data")
    ws = [put(w, over) for w in weights(6, 8, 4)]
    return trained(ws, put(values((16, 6)), over, "data"), put(values((16, 4)), over, "data"))


@program(last_bits=STEPS)
def tensor_parallel() -> Any:
    over = mesh((4, 2), ("data", "model"))
    a, b = weights(6, 8, 4)
    ws = [put(a, over, None, "model"), put(b, over, "model", None)]
    return trained(ws, put(values((8, 6)), over, "data"), put(values((8, 4)), over, "data"))


@program(last_bits=STEPS)
def sharded_parameters() -> Any:
    over = mesh(8, "data")
    ws = [put(w, over, "data") for w in weights(8, 16, 8)]
    return trained(ws, put(values((16, 8)), over, "data"), put(values((16, 8)), over, "data"))


@program(last_bits=STEPS)
def bfloat16_with_float32_weights() -> Any:
    over = mesh((4, 2), ("data", "model"))
    a, b = weights(6, 8, 4)
    ws = [put(a, over, None, "model"), put(b, over, "model", None)]
    x, y = put(values((8, 6)), over, "data"), put(values((8, 4)), over, "data")

    @jax.jit
    def step(ws: Any, x: Any, y: Any) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), ws)
        grads = jax.grad(loss)(low, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
        return jax.tree.map(lambda w, g: w - 0.1 * g.astype(jnp.float32), ws, grads)

    return [jnp.round(w * 8) for w in step(ws, x, y)]


@program(last_bits=STEPS)
def adam() -> Any:
    over = mesh((4, 2), ("data", "model"))
    a, b = weights(6, 8, 4)
    ws = [put(a, over, None, "model"), put(b, over, "model", None)]
    x, y = put(values((8, 6)), over, "data"), put(values((8, 4)), over, "data")

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, count: Any, x: Any, y: Any) -> Any:
        ws, ms, vs = state
        grads = jax.grad(loss)(ws, x, y)
        norm = jnp.sqrt(sum((g**2).sum() for g in grads))
        grads = [g / jnp.maximum(norm, 1) for g in grads]
        ms = [0.9 * m + 0.1 * g for m, g in zip(ms, grads, strict=True)]
        vs = [0.99 * v + 0.01 * g * g for v, g in zip(vs, grads, strict=True)]
        new = [
            w - 0.01 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.99**count)) + 1e-2)
            for w, m, v in zip(ws, ms, vs, strict=True)
        ]
        return (new, ms, vs), norm

    state = ws, [0 * w for w in ws], [0 * w for w in ws]
    norms = []
    for count in range(1, 4):
        state, norm = step(state, float(count), x, y)
        norms.append(norm)
    return state, norms


@program(last_bits=STEPS)
def explicit_data_parallel() -> Any:
    with jax.set_mesh(mesh(8, "data", explicit=True)):
        ws = [jax.device_put(w, P()) for w in weights(6, 8, 4)]
        x, y = (jax.device_put(values((16, n)), P("data")) for n in (6, 4))
        return trained(ws, x, y)


@program(last_bits=STEPS)
def explicit_sharded_parameters() -> Any:
    with jax.set_mesh(mesh(4, "data", explicit=True)):
        ws = [jax.device_put(w, P("data")) for w in weights(8, 8, 8)]
        x, y = (jax.device_put(values((16, 8), seed=s), P("data")) for s in range(2))

        @jax.jit
        def step(ws: Any, x: Any, y: Any) -> Any:
            def gathered(ws: Any) -> Any:
                return loss([reshard(w, P(None, None)) for w in ws], x, y)

            value, grads = jax.value_and_grad(gathered)(ws)
            return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], value

        losses = []
        for _ in range(3):
            ws, value = step(ws, x, y)
            losses.append(value)
        return ws, losses


@program(last_bits=STEPS)
def layers_in_a_scan() -> Any:
    over = mesh((4, 2), ("data", "model"))
    stack = put(np.stack([values((8, 8), seed=k) / 3 for k in range(4)]), over, None, None, "model")
    x = put(values((8, 8)), over, "data")

    @jax.jit
    def step(stack: Any, x: Any) -> Any:
        def deep(stack: Any) -> Any:
            layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w) + h, None))
            return (lax.scan(layer, x, stack)[0] ** 2).mean()

        return stack - 0.1 * jax.grad(deep)(stack)

    return step(step(stack, x), x)


@program(last_bits=STEPS)
def steps_in_a_loop() -> Any:
    over = mesh(8, "data")
    ws = [put(w, over) for w in weights(6, 8, 4)]
    x, y = put(values((16, 6)), over, "data"), put(values((16, 4)), over, "data")

    @jax.jit
    def train(ws: Any, x: Any, y: Any) -> Any:
        return lax.fori_loop(0, 4, lambda _, ws: descend(ws, x, y)[0], ws)

    return train(ws, x, y)


@program(last_bits=STEPS)
def batch_normalisation() -> Any:
    over = mesh(8, "data")
    w, x = put(weights(6, 4)[0], over), put(values((16, 6)), over, "data")

    @jax.jit
    def step(w: Any, mean: Any, x: Any) -> Any:
        def normal(w: Any) -> Any:
            h = x @ w
            h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
            return (jax.nn.relu(h) ** 2).mean(), jnp.abs(h).mean(0)

        (value, seen), grad = jax.value_and_grad(normal, has_aux=True)(w)
        return w - 0.1 * grad, 0.9 * mean + seen, value

    return step(w, jnp.zeros(4), x)


@program(last_bits=STEPS)
def experts_chosen_by_routers() -> Any:
    over = mesh((2, 4), ("data", "expert"))
    experts = put(values((4, 6, 6)) / 3, over, "expert")
    router, x = put(values((6, 4), seed=1), over), put(values((8, 6), seed=2), over, "data")

    @jax.jit
    def f(experts: Any, router: Any, x: Any) -> Any:
        gates = jax.nn.softmax(x @ router)
        each = jnp.einsum("td,edf->tef", x, experts)
        mixed = jnp.einsum("te,tef->tf", gates, jax.nn.gelu(each))
        balance = (gates.mean(0) ** 2).sum()
        return (mixed**2).mean() + 0.1 * balance

    return jax.jit(jax.value_and_grad(f, (0, 1)))(experts, router, x)


@program(last_bits=STEPS)
def a_map_for_the_data_and_the_partitioner_for_the_model() -> Any:
    over = mesh((4, 2), ("data", "model"))
    a, b = weights(6, 8, 4)
    ws = [put(a, over, None, "model"), put(b, over, "model", None)]
    x, y = put(values((8, 6)), over, "data"), put(values((8, 4)), over, "data")

    @jax.jit
    def step(ws: Any, x: Any, y: Any) -> Any:
        def local(ws: Any, x: Any, y: Any) -> Any:
            grads = jax.grad(loss)(ws, x, y)
            return [w - 0.1 * lax.pmean(g, "data") for w, g in zip(ws, grads, strict=True)]

        return jax.shard_map(
            local, mesh=over, in_specs=(P(), P("data"), P("data")), out_specs=P(),
            axis_names={"data"}, check_vma=False,
        )(ws, x, y)  # fmt: skip

    return step(step(ws, x, y), x, y)


@program(last_bits=STEPS)
def a_recurrent_network() -> Any:
    over = mesh((4, 2), ("data", "model"))
    w = put(values((8, 8)) / 4, over, None, "model")
    xs = put(values((5, 8, 8), seed=1), over, None, "data")

    def f(w: Any, xs: Any) -> Any:
        h, hs = lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, jnp.zeros((8, 8)), xs)
        return (h**2).mean() + hs.sum() / 100

    return jax.jit(jax.value_and_grad(f))(w, xs)


@program(last_bits=STEPS)
def parameters_that_are_saved_and_loaded() -> Any:
    over, other = mesh((4, 2), ("data", "model")), mesh((2, 4), ("data", "model"))
    a, b = weights(8, 8, 8)
    ws = [put(a, over, None, "model"), put(b, over, "model", None)]
    x, y = (put(values((8, 8), seed=s), over, "data") for s in range(2))
    ws, _ = trained(ws, x, y, 2)
    kept = [np.asarray(w) for w in ws]
    again = [put(kept[0], other, None, "model"), put(kept[1], other, "model", None)]
    return trained(again, put(np.asarray(x), other, "data"), put(np.asarray(y), other, "data"), 2)


@program(last_bits=STEPS)
def evaluation_and_metrics() -> Any:
    over = mesh(8, "data")
    ws = [put(w, over) for w in weights(6, 8, 4)]
    x = put(values((16, 6)), over, "data")
    labels = put(np.arange(16, dtype=np.int32) % 4, over, "data")

    @partial(jax.jit, out_shardings=NamedSharding(over, P()))
    def evaluate(ws: Any, x: Any, labels: Any) -> Any:
        logits = jax.nn.relu(x @ ws[0]) @ ws[1]
        right = logits.argmax(1) == labels
        counts = jnp.zeros((4, 4), jnp.int32).at[labels, logits.argmax(1)].add(1)
        return {"accuracy": right.mean(), "right": right.sum(), "confusion": counts}

    return evaluate(ws, x, labels)
