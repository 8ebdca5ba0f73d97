"""jax.random in sharded programs, beside sums of its numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, mesh, program, put, values


def rows(*spec: Any) -> Any:
    """A sharding on a mesh of 4 by 2."""
    return NamedSharding(mesh((4, 2), ("x", "y")), P(*spec))


@program
def sharded_results() -> Any:
    key = jax.random.key(7)
    f = jax.jit(lambda key: jax.random.normal(key, (16, 4)), out_shardings=rows("x", "y"))
    g = jax.jit(
        lambda key: lax.with_sharding_constraint(
            jax.random.uniform(key, (16, 4)), rows("x", "y")
        ).sum(0)
    )
    return f(key), g(key), f(key).sum(0)


@program(jax_threefry_partitionable=False)
def not_partitionable() -> Any:
    f = jax.jit(
        lambda key: lax.with_sharding_constraint(jax.random.normal(key, (16, 4)), rows("x")).sum(0)
    )
    return f(jax.random.key(7))


@program
def other_generators() -> Any:
    found = []
    for name in ("rbg", "unsafe_rbg", "threefry2x32"):
        key = jax.random.key(3, impl=name)

        @jax.jit
        def f(key: Any) -> Any:
            x = lax.with_sharding_constraint(jax.random.normal(key, (16, 4)), rows("x", "y"))
            return x, x.sum(0), x.mean()

        found.append(f(key))
    return found


@program
def bits_of_the_hardware() -> Any:
    key = np.array([1, 2, 3, 4], np.uint32)

    @jax.jit
    def f(key: Any) -> Any:
        state, bits = lax.rng_bit_generator(key, (16, 4))
        bits = lax.with_sharding_constraint(bits, rows("x"))
        return state, bits, (bits >> 9).astype(jnp.float32).sum(0)

    return f(key)


@program
def dropout_of_a_sharded_layer() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")

    @jax.jit
    def f(key: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(kept, x / 0.7, 0).sum(0), kept.mean()

    return f(jax.random.key(1), x)


@program
def keys_for_each_row() -> Any:
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), rows(("x", "y")))

    @jax.jit
    def f(keys: Any) -> Any:
        x = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
        return x.sum(0), jax.vmap(jax.random.fold_in, (0, None))(keys, 3)

    return f(keys)


@program
def old_keys() -> Any:
    key = jax.random.PRNGKey(5)
    f = jax.jit(lambda key: jax.random.normal(key, (16, 4)).sum(0), in_shardings=rows())
    return f(key), jax.jit(lambda key: jax.random.split(key, 3))(key)


@program
def permutations_and_choices() -> Any:
    x = put(values((16, 4)), mesh((4, 2), ("x", "y")), "x", "y")

    @jax.jit
    def f(key: Any, x: Any) -> Any:
        taken = jax.random.choice(key, x, (6,), replace=False)
        return jax.random.permutation(key, x).sum(0), taken, jax.random.categorical(key, x)

    return f(jax.random.key(2), x)


@program
def other_distributions() -> Any:
    @jax.jit
    def f(key: Any) -> Any:
        found = [
            jax.random.gamma(key, 2.0, (16,)), jax.random.truncated_normal(key, -1, 1, (16,)),
            jax.random.gumbel(key, (16,)), jax.random.randint(key, (16,), 0, 9),
            jax.random.exponential(key, (16,)),
        ]  # fmt: skip
        return [lax.with_sharding_constraint(x, rows("x")).sum() for x in found]

    return f(jax.random.key(4))


@program
def numbers_in_loops() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")

    @jax.jit
    def f(key: Any, x: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            key, x = state
            key, own = jax.random.split(key)
            x = x + 0.1 * jax.random.normal(own, x.shape)
            return (key, x), x.mean()

        return lax.scan(step, (key, x), length=4)

    return f(jax.random.key(6), x)


@program
def monte_carlo() -> Any:
    @jax.jit
    def f(key: Any) -> Any:
        points = lax.with_sharding_constraint(jax.random.uniform(key, (4096, 2)), rows(("x", "y")))
        return 4 * ((points**2).sum(1) < 1).mean()

    return f(jax.random.key(8))


@program
def numbers_in_shard_map() -> Any:
    over = mesh(8, "x")

    def local(key: Any) -> Any:
        own = jax.random.fold_in(key, lax.axis_index("x"))
        return lax.pmean(jax.random.normal(own, (4,)), "x")

    f = jax.jit(jax.shard_map(local, mesh=over, in_specs=P(), out_specs=P(), check_vma=False))
    return f(jax.random.key(9)), jax.jit(lambda k: f(k).sum())(jax.random.key(9))


@program
def initial_weights() -> Any:
    init = jax.nn.initializers.orthogonal()

    @jax.jit
    def f(key: Any) -> Any:
        w = jax.nn.initializers.lecun_normal()(key, (16, 8))
        w = lax.with_sharding_constraint(w, rows("x", "y"))
        q = lax.with_sharding_constraint(init(key, (8, 8)), rows("x"))
        return w, jnp.linalg.norm(w), jnp.abs(q.T @ q - jnp.eye(8)).max() < 1e-4

    return f(jax.random.key(10))
