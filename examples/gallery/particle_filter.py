"""A particle filter: each replica moves its particles, and draws new ones from those of all.

python examples/gallery/particle_filter.py track.svg
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.figures import COLOURS, figure

REPLICAS, PARTICLES, STEPS, NOISE = 8, 64, 60, 0.5
ALL = REPLICAS * PARTICLES


def track(x: Any, moves: Any, comb: Any, measured: Any) -> Any:
    """The estimates of one replica, x (particles,) and moves (steps, particles) being its own.

    Of the particles of all replicas, in their order, those are drawn on which a comb's teeth fall.
    """
    mine = lax.axis_index("i") * PARTICLES + np.arange(PARTICLES)

    def step(x: Any, now: Any) -> Any:
        move, offset, y = now
        x = 0.95 * x + move
        weights = np.exp(-((y - x) ** 2) / (2 * NOISE**2))
        estimate = lax.psum((weights * x).sum(), "i") / lax.psum(weights.sum(), "i")
        everyones, heights = lax.all_gather((x, weights), "i", tiled=True)
        heights = np.cumsum(heights)
        drawn = np.searchsorted(heights / heights[-1], (mine + offset) / ALL)
        return gpusim.at(everyones)[drawn].get(), estimate

    return lax.scan(step, x, (moves, comb, measured))[1]


def on_one_replica(x: Any, moves: Any, comb: Any, measured: Any) -> list[Any]:
    estimates = []
    for move, offset, y in zip(moves, comb, measured, strict=True):
        x = 0.95 * x + move
        weights = np.exp(-((y - x) ** 2) / (2 * NOISE**2))
        estimates.append((weights * x).sum() / weights.sum())
        heights = np.cumsum(weights)
        x = x[np.searchsorted(heights / heights[-1], (np.arange(ALL) + offset) / ALL)]
    return estimates


def main(picture: str | None = None) -> None:
    draws = np.random.default_rng(1)
    truth = [0.0]
    for _ in range(STEPS - 1):
        truth.append(0.95 * truth[-1] + 0.4 * draws.standard_normal())
    measured = truth + NOISE * draws.standard_normal(STEPS)
    x, moves = draws.standard_normal(ALL), 0.4 * draws.standard_normal((STEPS, ALL))
    comb = draws.uniform(0.1, 0.9, STEPS)

    shards = x.reshape(REPLICAS, -1), moves.reshape(STEPS, REPLICAS, -1)
    mapped = gpusim.vmap(track, in_axes=(0, 1, None, None), out_axes=None, axis_name="i")
    estimates = mapped(*shards, comb, measured)
    error = [np.sqrt(np.mean((values - truth) ** 2)) for values in (measured, estimates)]
    print(f"{ALL} particles on {REPLICAS} replicas; error {error[0]:.3f} -> {error[1]:.3f}")
    np.testing.assert_allclose(estimates, on_one_replica(x, moves, comb, measured), rtol=1e-9)
    print("agreed with the filter on one replica")
    if picture:
        with figure(picture) as ax:
            ax.plot(truth, color="black", lw=1, label="truth")
            ax.plot(measured, ".", color=COLOURS[4], label="measured")
            ax.plot(estimates, color=COLOURS[0], label="estimate")
            ax.set(xlabel="step", title="A particle filter on 8 replicas")
            ax.legend(frameon=False, ncols=3)


if __name__ == "__main__":
    main(*sys.argv[1:])
