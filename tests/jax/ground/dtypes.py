"""Types of numbers, their sums between devices, and arrays of few or no elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, float_types, mesh, program, put, values


@program
def sums_of_each_float() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.sum(0), x.sum(1), x.sum()))
    return {
        np.dtype(dtype).name: f(put(values((8, 6), dtype), over, "x", "y"))
        for dtype in float_types()
    }


@program
def products_of_each_float() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x, y: (x @ y, jnp.einsum("ij,jk->k", x, y)))
    return {
        np.dtype(dtype).name: f(
            put(values((8, 8), dtype), over, "x", "y"), put(values((8, 4), dtype), over, "y")
        )
        for dtype in float_types()
    }


@program(jax_enable_x64=True)
def sums_of_64_bits() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.sum(0), x.sum(1), x @ x.T))
    return [
        f(put(values((8, 6), dtype), over, "x", "y"))
        for dtype in ("float64", "complex128", "int64", "uint64")
    ]


@program
def sums_of_integers() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.sum(0), x.sum(), x.max(1), x.min(0), x.prod(0), x @ x.T))
    names = ("int32", "uint32", "int16", "uint16", "int8", "uint8")
    return {name: f(put(values((8, 6), name), over, "x", "y")) for name in names}


@program
def truth_values() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 6), "bool"), over, "x", "y")
    f = jax.jit(
        lambda x: (x.any(0), x.all(1), x.sum(), x.mean(), jnp.count_nonzero(x, 0), (x ^ x[0]).any())
    )
    return f(x)


@program
def extremes_of_each_float() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.max(0), x.min(1), x.max(), jnp.argmax(x, 0), jnp.argmin(x), x.ptp()))
    g = jax.jit(lambda x: (x.max(0), x.min(1), x.max(), jnp.argmax(x, 0), jnp.argmin(x)))
    found = {
        np.dtype(dtype).name: g(put(values((8, 6), dtype), over, "x", "y"))
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
    }
    return found, error(f, put(values((8, 6)), over, "x", "y")).partition(":")[0]


@program
def extremes_of_infinities_and_zeros() -> Any:
    x = values((16, 6))
    x[9, 2], x[10, 3] = np.inf, -np.inf
    x[:, 4], x[:, 5] = 0.0, -0.0
    f = jax.jit(lambda x: (x.max(0), x.min(0), x.sum(0), x.max(), jnp.isinf(x).sum()))
    return f(put(x, mesh(8, "x"), "x"))


@program
def sums_of_nan() -> Any:
    x = values((16, 6))
    x[3, 1], x[9, 2], x[10, 2], x[:, 5] = np.nan, np.inf, -np.inf, np.nan
    f = jax.jit(lambda x: (x.sum(0), jnp.nanmax(x, 0), jnp.nansum(x, 0), jnp.isnan(x).any(0)))
    return f(put(x, mesh(8, "x"), "x"))


@program
def extremes_of_nan() -> Any:
    x = values((16, 2))
    x[3, 1] = np.nan
    return jax.jit(lambda x: (x.max(0), x.min(0)))(put(x, mesh(8, "x"), "x"))


@program
def sums_with_zeros_of_both_signs() -> Any:
    x = np.zeros((8, 3), np.float32)
    x[:, 0], x[:, 1] = -0.0, [0.0, -0.0] * 4
    return jax.jit(lambda x: x.sum(0))(put(x, mesh(8, "x"), "x"))


@program
def sums_of_subnormals() -> Any:
    # XLA flushes subnormal numbers in its own arithmetic; each device holds one.
    x = values((8, 5)) * np.float32(1e-39)
    return jax.jit(lambda x: x.sum(0) != 0)(put(x * np.float32(1e6), mesh(8, "x"), "x"))


@program
def products_of_all() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.prod(0), x.prod(), jnp.prod(x, axis=1)))
    return [f(put(values((8, 6), d), over, "x", "y")) for d in ("float32", "float16", "complex64")]


@program
def small_floats() -> Any:
    over = mesh((4, 2), ("x", "y"))
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e5m2fnuz")
    f = jax.jit(
        lambda x: (x.astype(jnp.float32).sum(0), x.astype(jnp.bfloat16) @ x.T.astype("bfloat16"))
    )
    found = {}
    for name in names:
        x = put(values((8, 4), getattr(ml_dtypes, name)), over, "x", "y")
        found[name] = f(x), jax.jit(lambda x: x[1:3])(x)
    return found


@program
def sums_in_small_floats() -> Any:
    over = mesh(8, "x")
    f = jax.jit(lambda x: x.sum(0))
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")
    return {name: f(put(values((8, 4), getattr(ml_dtypes, name)), over, "x")) for name in names}


@program
def small_integers() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.astype(jnp.int32).sum(0), x[::2], jnp.where(x > 0, x, 0)))
    names = ("int4", "uint4")
    return {
        name: f(put(values((8, 4), getattr(ml_dtypes, name)), over, "x", "y")) for name in names
    }


@program
def sums_with_another_type() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 6), ml_dtypes.bfloat16), over, "x", "y")
    n = put(values((8, 6), "int8"), over, "x", "y")

    @jax.jit
    def f(x: Any, n: Any) -> Any:
        wide = jnp.dot(x, x.T, preferred_element_type=jnp.float32)
        return (
            wide,
            x.sum(0, dtype=jnp.float32),
            n.sum(0, dtype=jnp.float32),
            jnp.dot(n, n.T, preferred_element_type=jnp.int32),
        )

    return f(x, n)


@program
def mixed_types_in_one_program() -> Any:
    over = mesh(8, "x")
    arrays = [put(values((8, 3), dtype), over, "x") for dtype in (*float_types(), "int32", "bool")]
    f = jax.jit(lambda *xs: [x.sum(0) for x in xs] + [sum(x.sum() for x in xs)])
    return f(*arrays)


@program
def conversions_around_sums() -> Any:
    x = put(values((16, 4)), mesh(8, "x"), "x")

    @jax.jit
    def f(x: Any) -> Any:
        half = x.astype(jnp.bfloat16)
        return half.sum(0).astype(jnp.float32), (half * half).mean(0), x.astype(jnp.float16).sum()

    return f(x)


@program
def bits_of_sums() -> Any:
    x = put(values((16, 4)), mesh(8, "x"), "x")

    @jax.jit
    def f(x: Any) -> Any:
        whole = jax.lax.bitcast_convert_type(jnp.round(x * 8).sum(0), jnp.uint32)
        return whole, whole ^ 1, jax.lax.population_count(whole)

    return f(x)


@program
def scalars() -> Any:
    over = mesh((4, 2), ("x", "y"))
    s = put(np.float32(1.25), over)
    x = put(values((8, 4)), over, "x", "y")
    f = jax.jit(lambda s, x: (s * x.sum(), s + 1, jnp.sum(s), s.reshape(1, 1) @ x.sum(0)[None]))
    return f(s, x), float(f(s, x)[0]) != 0, complex(s), f(s, x)[0].item() != 0


@program
def arrays_without_elements() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x.sum(0), x.sum(1), x.sum(), x @ x.T, x.T @ x, x * 2))
    shapes = ((8, 0), (0, 8), (0, 0))
    return [f(put(np.zeros(shape, np.float32), over, "x", "y")) for shape in shapes]


@program
def extremes_without_elements() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(np.zeros((8, 0), np.float32), over, "x", "y")
    f = jax.jit(
        lambda x: (x.max(0), x.min(0), x.max(1, initial=2.0), jnp.concatenate([x, x]).sum(1))
    )
    return f(x), error(jax.jit(lambda x: x.max(1)), x)


@program
def one_element_for_each_device() -> Any:
    x = put(values(8), mesh(8, "x"), "x")
    return jax.jit(lambda x: (x.sum(), x @ x, x.mean(), x.std(), jnp.outer(x, x).sum(0)))(x)


@program
def many_dimensions() -> Any:
    over = mesh((2, 2, 2), ("a", "b", "c"))
    x = put(values((2, 1, 4, 1, 2, 2, 1)), over, "a", None, "b", None, None, "c")
    f = jax.jit(lambda x: (x.sum((0, 2)), x.sum((1, 5)), x.transpose(6, 5, 4, 3, 2, 1, 0).sum(1)))
    return f(x)


@program
def weak_types() -> Any:
    x = put(values((8, 4)), mesh(8, "x"), "x")
    f = jax.jit(lambda x, y: (x.sum(0) * y, jnp.sum(jnp.broadcast_to(y, (8, 2)), 0), y))
    return f(x, 2.0), f(x.astype(jnp.bfloat16), 3), jax.jit(lambda y: y + 1)(1)


@program
def keys_as_arrays() -> Any:
    over = mesh((4, 2), ("x", "y"))
    seeds = put(np.arange(32, dtype=np.uint32).reshape(8, 4), over, "x", "y")

    @jax.jit
    def f(seeds: Any) -> Any:
        keys = jax.vmap(jax.vmap(jax.random.key))(seeds)
        noise = jax.vmap(jax.vmap(lambda key: jax.random.normal(key, (3,))))(keys)
        return keys.T, noise.sum(0), noise.sum((0, 1))

    return f(seeds)


@program
def keys_as_arguments() -> Any:
    over = mesh((4, 2), ("x", "y"))
    keys = jax.random.split(jax.random.key(3), 8)
    split = jax.device_put(keys, NamedSharding(over, P(("x", "y"))))

    @jax.jit
    def f(keys: Any) -> Any:
        each = jax.vmap(lambda key: jax.random.uniform(key, (4,)))(keys)
        return each.sum(0), keys[2:4], jax.random.fold_in(keys[0], 1)

    return f(split), f(keys)


@program
def tokens_as_arguments() -> Any:
    x = put(values((8, 2)), mesh(8, "x"), "x")
    token = jax.lax.create_token(None)
    total, back = jax.jit(lambda x, token: (x.sum(0), token))(jax.device_put(x), token)
    return total, type(back).__name__


@program(jax_numpy_dtype_promotion="strict")
def strict_promotion() -> Any:
    x = put(values((8, 2)), mesh(8, "x"), "x")
    f = jax.jit(lambda x, y: (x.sum(0) + y, x @ x.T))
    return f(x, np.float32(2)), error(f, x, np.int32(2)).partition("(")[0]


@program(jax_default_matmul_precision="float32")
def precision_of_products() -> Any:
    over = mesh((4, 2), ("x", "y"))
    a, b = put(values((8, 8)), over, "x", "y"), put(values((8, 8), seed=1), over, "y")
    with jax.default_matmul_precision("bfloat16"):
        low = jax.jit(jnp.dot)(a, b)
    return low, jax.jit(lambda a, b: jnp.dot(a, b, precision="highest"))(a, b)
