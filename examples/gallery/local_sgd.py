"""Local SGD: replicas take several steps of their own before they average their weights.

python examples/gallery/local_sgd.py losses.svg
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.figures import COLOURS, figure

REPLICAS, ROWS, WEIGHTS, STEPS, RATE = 8, 40, 10, 48, 0.5


def loss_and_gradient(w: Any, x: Any, y: Any) -> Any:
    """Logistic regression, labels y being 0 and 1."""
    chance = 1 / (1 + np.exp(-(x @ w)))
    loss = -np.mean(y * np.log(chance) + (1 - y) * np.log(1 - chance))
    return loss, x.T @ (chance - y) / len(y)


def train(every: int, x: Any, y: Any) -> Any:
    """The averaged weights at the end, and the loss of the averaged weights after each round."""

    def round(w: Any, _: None) -> Any:
        w = lax.fori_loop(0, every, lambda i, w: w - RATE * loss_and_gradient(w, x, y)[1], w)
        w = lax.pmean(w, "i")
        return w, lax.pmean(loss_and_gradient(w, x, y)[0], "i")

    return lax.scan(round, np.zeros(WEIGHTS), length=STEPS // every)


def main(picture: str | None = None) -> None:
    draw_number = np.random.default_rng(0).standard_normal
    x = draw_number((REPLICAS, ROWS, WEIGHTS)) + 0.5 * draw_number((REPLICAS, 1, WEIGHTS))
    y = (x @ draw_number(WEIGHTS) + draw_number((REPLICAS, ROWS)) > 0).astype(float)
    losses = {}
    for every in (1, 4, 16):
        mapped = gpusim.vmap(partial(train, every), axis_name="i", out_axes=None)
        w, losses[every] = mapped(x, y)
        print(f"averaged every {every:2} steps, {STEPS // every:2} times: {losses[every][-1]:.4f}")
        if every == 1:  # averaging each step is gradient descent on all rows
            expected = np.zeros(WEIGHTS)
            for _ in range(STEPS):
                rows = x.reshape(-1, WEIGHTS), y.reshape(-1)
                expected = expected - RATE * loss_and_gradient(expected, *rows)[1]
            np.testing.assert_allclose(w, expected, rtol=1e-9, atol=1e-12)
    print("agreed with gradient descent on one replica")
    if picture:
        with figure(picture) as ax:
            for (every, values), colour in zip(losses.items(), COLOURS, strict=False):
                count = np.arange(1, len(values) + 1)
                ax.plot(count, values, "o-", color=colour, label=f"local steps: {every}")
            ax.set(xscale="log", xlabel="averages communicated", ylabel="loss", title="Local SGD")
            ax.legend(frameon=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
