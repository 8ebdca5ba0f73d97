"""k-means: each replica assigns its own points; sums and counts of clusters go through psum.

python examples/gallery/kmeans.py clusters.png
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.figures import COLOURS, figure

REPLICAS, POINTS, CLUSTERS, STEPS = 6, 200, 5, 20


def nearest(points: Any, centres: Any) -> Any:
    return ((points[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=-1)


def fit(points: Any, centres: Any, total: Any = lambda part: part) -> Any:
    """The centres after some steps; `total` adds the sums of all replicas."""
    for _ in range(STEPS):
        member = nearest(points, centres)[:, None] == np.arange(CLUSTERS)
        sums, counts = total((member.T.astype(float) @ points, member.sum(axis=0)))
        centres = sums / np.maximum(counts, 1)[:, None]
    return centres


def main(picture: str | None = None) -> None:
    draws = np.random.default_rng(11)
    truth = draws.uniform(-4, 4, (CLUSTERS, 2))
    points = truth[draws.integers(0, CLUSTERS, REPLICAS * POINTS)]
    points = points + 0.6 * draws.standard_normal(points.shape)
    start = points[:CLUSTERS]

    shards = points.reshape(REPLICAS, POINTS, 2)
    fitted = gpusim.vmap(
        lambda x: fit(x, start, lambda part: lax.psum(part, "i")), axis_name="i", out_axes=None
    )
    centres = fitted(shards)
    spread = np.sqrt(((points - centres[nearest(points, centres)]) ** 2).sum(axis=-1).mean())
    print(f"{len(points)} points on {REPLICAS} replicas; {spread:.3f} from their centres")
    np.testing.assert_allclose(centres, fit(points, start), rtol=1e-9)
    print("agreed with k-means on one replica")
    if picture:
        with figure(picture, width=3.4, height=3.2) as ax:
            ax.scatter(*points.T, c=[COLOURS[i] for i in nearest(points, centres)], s=3)
            ax.scatter(*centres.T, c="black", marker="+", s=120)
            ax.set(title="1,200 points, 5 centres", aspect="equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
