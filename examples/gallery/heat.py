"""Heat on a torus: each replica holds a tile, and exchanges its edges with four neighbours.

python examples/gallery/heat.py heat.png
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax
from gpusim.figures import figure

ROWS, COLUMNS, SIDE, STEPS, RATE = 3, 4, 96, 200, 0.2


def from_neighbour(edge: Any, axis: str, shift: int) -> Any:
    count = lax.axis_size(axis)
    return lax.ppermute(edge, axis, [(i, (i + shift) % count) for i in range(count)])


def diffuse(i: int, t: Any) -> Any:
    """One step on this replica's tile."""
    above, below = from_neighbour(t[-1:], "row", 1), from_neighbour(t[:1], "row", -1)
    left, right = from_neighbour(t[:, -1:], "column", 1), from_neighbour(t[:, :1], "column", -1)
    tall, wide = np.concatenate([above, t, below]), np.concatenate([left, t, right], axis=1)
    return t + RATE * (tall[:-2] + tall[2:] + wide[:, :-2] + wide[:, 2:] - 4 * t)


@gpusim.shard_map(
    mesh=gpusim.Mesh((ROWS, COLUMNS), ("row", "column")),
    in_specs=P("row", "column"),
    out_specs=P("row", "column"),
)
def simulate(t: Any) -> Any:
    return lax.fori_loop(0, STEPS, diffuse, t)


def main(picture: str | None = None) -> None:
    start = np.zeros((SIDE, SIDE))
    for x, y in np.random.default_rng(2).integers(0, SIDE - 8, (9, 2)):
        start[x : x + 8, y : y + 8] = 1
    end = simulate(start)
    expected = start
    for _ in range(STEPS):
        neighbours = [np.roll(expected, shift, axis) for axis in (0, 1) for shift in (1, -1)]
        expected = expected + RATE * (sum(neighbours) - 4 * expected)
    print(f"{SIDE} x {SIDE} cells on {ROWS} x {COLUMNS} replicas, {STEPS} steps")
    print(
        f"mean {start.mean():.4f} -> {end.mean():.4f}, largest {start.max():.2f} -> {end.max():.2f}"
    )
    np.testing.assert_allclose(end, expected, rtol=1e-9, atol=1e-12)
    print("agreed with one array and np.roll")
    if picture:
        with figure(picture, height=2.7, columns=2) as axes:
            for ax, t, when in zip(axes, (start, end), ("before", "after"), strict=True):
                ax.imshow(t, cmap="inferno", extent=(0, COLUMNS, ROWS, 0), aspect="auto")
                ax.set(title=when, xticks=range(COLUMNS + 1), yticks=range(ROWS + 1))
                ax.grid(color="white")


if __name__ == "__main__":
    main(*sys.argv[1:])
