"""Conjugate gradients on a Poisson equation: halos by ppermute, dot products by psum.

python examples/gallery/conjugate_gradients.py residual.svg
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.figures import COLOURS, figure

REPLICAS, SIDE, TOLERANCE = 8, 32, 1e-8
DOWN = [(i, i + 1) for i in range(REPLICAS - 1)]
UP = [(i + 1, i) for i in range(REPLICAS - 1)]


def laplacian(u: Any) -> Any:
    """4 u minus the four neighbours, u being this replica's rows; beyond the edge u is 0."""
    above, below = lax.ppermute(u[-1:], "i", DOWN), lax.ppermute(u[:1], "i", UP)
    tall = np.concatenate([above, u, below])
    wide = np.pad(u, ((0, 0), (1, 1)))
    return 4 * u - tall[:-2] - tall[2:] - wide[:, :-2] - wide[:, 2:]


def dot(a: Any, b: Any) -> Any:
    return lax.psum((a * b).sum(), "i")


def solve(f: Any) -> Any:
    """u with laplacian(u) = f, and the norm of the residual after each step."""

    def step(state: Any) -> Any:
        u, r, p, rr, norms, count = state
        q = laplacian(p)
        alpha = rr / dot(p, q)
        u, r = u + alpha * p, r - alpha * q
        following = dot(r, r)
        norms = lax.dynamic_update_index_in_dim(norms, np.sqrt(following), count, 0)
        return u, r, r + following / rr * p, following, norms, count + 1

    start = np.zeros(f.shape), f, f, dot(f, f), np.zeros(4 * SIDE), 0
    *_, norms, count = result = lax.while_loop(lambda s: s[3] > TOLERANCE**2, step, start)
    return result[0], norms, count


def main(picture: str | None = None) -> None:
    f = np.random.default_rng(0).standard_normal((REPLICAS, SIDE // REPLICAS, SIDE))
    u, norms, count = gpusim.vmap(solve, axis_name="i", out_axes=(0, None, None))(f)
    print(f"{SIDE * SIDE} unknowns on {REPLICAS} replicas; {count} steps to {TOLERANCE:g}")
    line = 2 * np.eye(SIDE) - np.eye(SIDE, k=1) - np.eye(SIDE, k=-1)
    matrix = np.kron(line, np.eye(SIDE)) + np.kron(np.eye(SIDE), line)
    np.testing.assert_allclose(u.reshape(-1), np.linalg.solve(matrix, f.reshape(-1)), atol=1e-7)
    print("agreed with np.linalg.solve")
    if picture:
        with figure(picture, height=2.2) as ax:
            ax.semilogy(norms[: int(count)], color=COLOURS[0])
            ax.set(xlabel="step", ylabel="norm of the residual", title="Conjugate gradients")


if __name__ == "__main__":
    main(*sys.argv[1:])
