"""Arguments that are given away: their buffers hold results."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, program, put, values


def deleted(*arrays: Any) -> list[bool]:
    """Which arrays a program has taken."""
    return [each.is_deleted() for each in arrays]


@program
def donated_and_kept() -> Any:
    over = mesh(8, "x")
    x, y = put(values((8, 4)), over, "x"), put(values((8, 4), seed=1), over, "x")
    f = jax.jit(lambda x, y: (x - x.mean(0) + y, y.sum()), donate_argnums=0)
    return f(x, y), deleted(x, y), error(lambda: x + 1)


@program
def donated_by_name() -> Any:
    over = mesh((4, 2), ("x", "y"))
    trees = [
        {"a": put(values((8, 4), seed=s), over, "x"), "b": put(values(4, seed=s), over, "y")}
        for s in range(3)
    ]
    f = jax.jit(
        lambda p, q, r: jax.tree.map(lambda a, b, c: a + b.sum() - c, p, q, r), donate_argnames="q"
    )
    found = f(trees[0], q=trees[1], r=trees[2])
    return found, [deleted(*jax.tree.leaves(tree)) for tree in trees]


@program
def training_state_is_donated() -> Any:
    over = mesh((4, 2), ("data", "model"))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        m = 0.9 * m + g
        return w - 0.1 * m, m

    w, m = put(values((4, 8)), over, None, "model"), put(values((4, 8)) * 0, over, None, "model")
    x = put(values((8, 4), seed=1), over, "data")
    first = w, m
    for _ in range(3):
        w, m = step(w, m, x)
    return w, m, deleted(*first, w, m, x)


@program
def donated_but_of_another_shape() -> Any:
    x = put(values((8, 4)), mesh(8, "x"), "x")
    f = jax.jit(lambda x: x @ x.T, donate_argnums=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = f(x)
    texts = [str(each.message).splitlines()[0] for each in told if each.category is UserWarning]
    return found, deleted(x), texts


@program
def aliases_as_text() -> Any:
    over = mesh((2, 2), ("x", "y"))
    x = put(values((8, 2)), over, "x", "y")
    f = jax.jit(lambda x, y: (x * 2, y - y.sum(0)), donate_argnums=(0, 1))
    lowered = f.lower(x, x)
    text = lowered.as_text()
    compiled = lowered.compile().as_text()
    alias = next(line for line in compiled.splitlines() if line.startswith("HloModule"))
    words = "tf.aliasing_output", "jax.buffer_donor"
    return (
        [text.count(word) for word in words],
        "input_output_alias" in alias,
        alias.count("may-alias"),
    )


@program
def donation_with_another_result_sharding() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 8)), over, "x", "y")
    f = jax.jit(
        lambda x: (x @ x).T, donate_argnums=0, out_shardings=NamedSharding(over, P("x", "y"))
    )
    return f(x), deleted(x)


@program
def donation_of_what_is_returned() -> Any:
    x = put(values((8, 4)), mesh(8, "x"))
    f = jax.jit(lambda x: (x, x.sum(), x * 2), donate_argnums=0)
    return f(x), deleted(x)


@program
def donation_through_loops() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 4)), over, "x", "y")
    f = jax.jit(lambda x: lax.fori_loop(0, 4, lambda _, x: x - x.mean(0), x), donate_argnums=0)
    found = f(x)
    again = f(found)
    return again, deleted(x, found, again)


@program
def uncommitted_donation() -> Any:
    over = mesh(8, "x")
    x = jnp.asarray(values((8, 4)))
    f = jax.jit(lambda x: x - x.mean(0), donate_argnums=0, in_shardings=NamedSharding(over, P("x")))
    return f(x), deleted(x)


@program
def donated_by_a_compiled_program() -> Any:
    over = mesh(8, "x")
    x = put(values((8, 4)), over, "x")
    compiled = jax.jit(lambda x: x - x.sum(0), donate_argnums=0).lower(x).compile()
    found = compiled(x)
    info = jax.tree.map(lambda a: a.donated, compiled.args_info)
    return found, deleted(x), info


@program
def device_put_donates() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x, y = put(values((8, 8)), over, "x"), put(values((8, 8), seed=1), over, "x")
    moved = jax.device_put((x, y), NamedSharding(over, P("y", "x")), donate=(True, False))
    return jax.jit(lambda a: a[0].sum(0) + a[1].sum(0))(moved), deleted(x, y)


@program
def buffers_are_reused_many_times() -> Any:
    over = mesh((2, 2, 2), ("a", "b", "c"))
    x = put(values((8, 8, 8)), over, "a", "b", "c")
    f = jax.jit(lambda x: x / jnp.sqrt((x * x).sum((0, 2), keepdims=True)), donate_argnums=0)
    for _ in range(10):
        x = f(x)
    return x
