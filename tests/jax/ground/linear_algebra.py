"""Decompositions, solvers and Fourier transforms of sharded arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, mesh, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


def positive(n: int) -> Any:
    """A well-conditioned symmetric matrix."""
    a = values((n, n))
    return a @ a.T / n + 2 * np.eye(n, dtype=np.float32)


@program(last_bits=64)
def cholesky() -> Any:
    f = jax.jit(lambda a: (jnp.linalg.cholesky(a @ a.T), jnp.linalg.cholesky(a).sum(0)))
    return f(grid(positive(8)))


@program(last_bits=64)
def singular_values() -> Any:
    f = jax.jit(lambda x: (jnp.linalg.svd(x.T @ x, compute_uv=False), jnp.linalg.norm(x, 2)))
    return f(grid(values((16, 4))))


@program(last_bits=64)
def eigenvalues() -> Any:
    f = jax.jit(lambda a: (jnp.linalg.eigvalsh(a @ a.T), jnp.linalg.eigvalsh(a).sum()))
    return f(grid(positive(8)))


@program(last_bits=64)
def orthogonal_factors() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        q, r = jnp.linalg.qr(x)
        return q @ r, jnp.abs(r).sum(0)

    return f(grid(values((16, 4))))


@program(last_bits=64)
def solving() -> Any:
    a, b = grid(positive(8)), grid(values((8, 2), seed=1), "x")
    f = jax.jit(
        lambda a, b: (
            jnp.linalg.solve(a, b), jax.scipy.linalg.solve(a, b, assume_a="pos"),
            jax.scipy.linalg.solve_triangular(jnp.tril(a), b, lower=True), jnp.linalg.inv(a) @ b,
            jnp.linalg.slogdet(a)[1], jnp.linalg.lstsq(a, b)[0],
        )
    )  # fmt: skip
    return f(a, b)


@program(last_bits=64)
def batches_of_decompositions() -> Any:
    over = mesh(8, "x")
    a = put(np.stack([positive(4) + k * np.eye(4, dtype=np.float32) for k in range(8)]), over, "x")
    b = put(values((8, 4), seed=1), over, "x")

    @jax.jit
    def f(a: Any, b: Any) -> Any:
        x = jnp.linalg.solve(a, b[..., None])[..., 0]
        return x.sum(0), jnp.linalg.cholesky(a).sum(0), jnp.linalg.slogdet(a)[1].mean()

    return f(a, b)


@program(last_bits=64)
def gradients_of_decompositions() -> Any:
    f = jax.jit(jax.grad(lambda a: jnp.linalg.slogdet(a @ a.T)[1] + jnp.linalg.inv(a).sum()))
    return f(grid(positive(8)))


@program
def fourier_transforms() -> Any:
    x = grid(values((16, 8)))
    f = jax.jit(
        lambda x: (
            jnp.fft.fft(x, axis=0).sum(0), jnp.fft.rfft(x, axis=1), jnp.fft.fft2(x),
            jnp.fft.ifft(jnp.fft.fft(x, axis=0), axis=0).real.sum(1),
        )
    )  # fmt: skip
    return f(x)


@program
def fourier_transforms_of_sharded_batches() -> Any:
    x = put(values((8, 4, 8)), mesh(8, "x"), "x")
    f = jax.jit(lambda x: (jnp.abs(jnp.fft.fft2(x)).mean(0), jnp.fft.irfft(jnp.fft.rfft(x))))
    return f(x)


@program
def matrix_functions() -> Any:
    a = grid(positive(8) / 8)
    f = jax.jit(
        lambda a: (
            jax.scipy.linalg.expm(a).sum(0), jnp.linalg.matrix_power(a, 5),
            jnp.linalg.multi_dot([a, a, a[:, :2]]), jnp.linalg.trace(a), jnp.linalg.det(a),
        )
    )  # fmt: skip
    return f(a)


@program(last_bits=64)
def least_squares_by_gradients() -> Any:
    a, b = grid(values((16, 4)), "x"), grid(values(16, seed=1), "x")

    @jax.jit
    def f(a: Any, b: Any) -> Any:
        step = lambda _, w: w - 0.02 * (a.T @ (a @ w - b))  # noqa: E731
        w = lax.fori_loop(0, 20, step, jnp.zeros(4))
        return w, ((a @ w - b) ** 2).mean()

    return f(a, b)


@program(last_bits=64)
def principal_components() -> Any:
    x = grid(values((32, 4)), "x")

    @jax.jit
    def f(x: Any) -> Any:
        centered = x - x.mean(0)
        covariance = centered.T @ centered / 31
        return covariance, jnp.linalg.eigvalsh(covariance)

    return f(x)


@program(last_bits=64)
def triangular_products_and_constraints() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(a: Any) -> Any:
        low = lax.with_sharding_constraint(jnp.tril(a), NamedSharding(over, P("y", "x")))
        return low @ low.T, jnp.triu(a @ low).sum(0), jnp.diagonal(a @ a).sum()

    return f(grid(values((8, 8))))
