"""ZeRO: every replica holds one shard of Adam's moments, and updates one shard of the weights.

python examples/gallery/zero.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import gpusim
from gpusim import lax

REPLICAS, ROWS, WEIGHTS, STEPS, RATE = 8, 32, 64, 60, 0.05


def gradient(w: Any, x: Any, y: Any) -> Any:
    return x.T @ (x @ w - y) / len(y)


def adam(w: Any, m: Any, v: Any, g: Any, step: int) -> Any:
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g**2
    return w - RATE * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8), m, v


def train(w: Any, x: Any, y: Any) -> Any:
    """All steps of one replica: its rows, all weights, and its shard of the moments."""
    shard = WEIGHTS // REPLICAS
    m = v = np.zeros(shard)
    for step in range(1, STEPS + 1):
        g = lax.psum_scatter(gradient(w, x, y), "dp", tiled=True) / REPLICAS
        mine = lax.dynamic_slice_in_dim(w, lax.axis_index("dp") * shard, shard)
        mine, m, v = adam(mine, m, v, g, step)
        w = lax.all_gather(mine, "dp", tiled=True)
    return w, m.nbytes + v.nbytes


def main() -> None:
    draw = np.random.default_rng(0).standard_normal
    x, truth = draw((REPLICAS, ROWS, WEIGHTS)), draw(WEIGHTS)
    y = x @ truth
    replicated = gpusim.vmap(train, in_axes=(None, 0, 0), out_axes=None, axis_name="dp")
    w, held = replicated(np.zeros(WEIGHTS), x, y)

    expected = m = v = np.zeros(WEIGHTS)
    for step in range(1, STEPS + 1):
        g = gradient(expected, x.reshape(-1, WEIGHTS), y.reshape(-1))
        expected, m, v = adam(expected, m, v, g, step)
    print(f"bytes of moments: {m.nbytes + v.nbytes} on one replica, {held} on each of {REPLICAS}")
    print(f"distance to the true weights: {np.linalg.norm(w - truth):.3f}")
    np.testing.assert_allclose(w, expected, rtol=1e-9, atol=1e-12)
    print("agreed with Adam on one replica")


if __name__ == "__main__":
    main()
