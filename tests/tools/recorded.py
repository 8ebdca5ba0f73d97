"""A program in maps with one planted difference, for one process or for the instances of a World.

`mpirun -n 2 python -m tests.tools.recorded FOLDER MAP PLANT,ORDER ...` records it on two instances.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gpusim
from gpusim import lax

REPLICAS = 4
STEPS = 3
WIDTH = 40


def train(x: Any, plant: str) -> Any:
    """Three steps of one replica: a mean of gradients, a norm, a gather and an exchange in each."""
    # Instances agree on when the loop ends; this exchange is not a call of the program.
    rounds = lax.while_loop(lambda n: n < 3 + (x[0, 0] > 0), lambda n: n + 1, x[0, 0] * 0)
    w = np.full(WIDTH, 0.5, np.float32) + rounds * np.float32(0)
    rate = 0.2 if plant == "rate" else 0.1
    for step in range(STEPS):
        now = plant if step == 1 else "none"
        gradient = (w - x[step]) * x[step]
        if now == "cast":
            gradient = gradient.astype(ml_dtypes.bfloat16)
        mean = lax.pmean(gradient, "i")  # backward
        w = w - np.float32(rate) * mean.astype(np.float32)
        if now != "missing":
            norm = lax.psum(gradient.astype(np.float32) ** 2, "i")  # norm
        if now == "doubled":
            norm = lax.psum(norm, "i")  # again
        shard = lax.psum_scatter(x[step] * w, "i", tiled=True)  # shard
        lax.all_gather(shard, "i", tiled=True)  # gather
        source = 2 if now == "root" else 1
        lax.pbroadcast(shard, "i", source)  # broadcast
        lax.all_to_all(x[step], "i", 0, 0, tiled=True)  # exchange
        lax.pmax(norm.sum(), "i")  # largest
        lax.psum(np.full(3, 0.1, np.float32), "i")  # constant
    return w


def data(plant: str) -> Any:
    """(replicas, steps, width), float32."""
    x = np.random.default_rng(0).standard_normal((REPLICAS, STEPS, WIDTH)).astype(np.float32)
    if plant == "seed":
        x[2, 1] = np.random.default_rng(9).standard_normal(WIDTH)
    return x


def run(folder: Path, mapper: Callable[..., Any], plant: str, order: str) -> Any:
    """Record the program; its result on this instance."""
    with gpusim.record(folder, arrays=True), gpusim.reduction(order=order):
        with gpusim.World.from_environment(replicas=REPLICAS) as world:
            x = data(plant)[world.replica_offset :][: world.local_replicas]
            return mapper(lambda x: train(x, plant), axis_name="i")(x)


if __name__ == "__main__":
    folder, mapper, *runs = sys.argv[1:]
    for name in runs:
        run(Path(folder) / name, getattr(gpusim, mapper), *name.split(","))
