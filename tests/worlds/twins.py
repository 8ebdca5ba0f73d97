"""Sums of every twin in a world of R replicas: python -m tests.worlds.twins REPLICAS FOLDER."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import gpusim
from gpusim import Reduction, lax
from gpusim.collectives.distributed import algorithms, job, layout
from gpusim.fallback.schedules import Case, Schedule
from gpusim.twins import SETTINGS, TWINS
from tests.contract.order_files import random_trees
from tests.worlds.everything import values

LARGE = 9_001  # elements, in several blocks


def cases(replicas: int) -> Iterator[tuple[str, Any, np.ndarray]]:
    """A name, what each replica does, and the values of all replicas."""
    halves = [list(range(0, replicas, 2)), list(range(1, replicas, 2))]
    for name in (*TWINS, *SETTINGS):
        how = {"reduction": Reduction.like(name)}
        random = {"reduction": replace(Reduction.like(name), rounding="stochastic", seed=3)}
        for size in (5, LARGE):
            x = values(replicas, (size,), np.float32)
            yield f"{name} {size}", lambda v, how=how: lax.psum(v, "i", **how), x
            yield f"{name} mean {size}", lambda v, how=how: lax.pmean(v, "i", **how), x
            groups = {"axis_index_groups": halves, **how}
            yield f"{name} groups {size}", lambda v, g=groups: lax.psum(v, "i", **g), x
            if "float16" in Reduction.twins()[name].dtypes:
                half = x.astype(np.float16)
                yield f"{name} random {size}", lambda v, r=random: lax.psum(v, "i", **r), half
        y = values(replicas, (replicas, 400), np.float32)
        yield f"{name} slices", lambda v, how=how: lax.psum_scatter(v, "i", **how), y
        z = values(replicas, (3, 1_000), np.float32)
        inner = gpusim.vmap(lambda v, how=how: lax.psum(v, "i", **how))
        yield f"{name} batches", inner, z


def revealed(replicas: int) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Sums by random trees, which differ by ranges of elements."""
    random = np.random.default_rng(replicas)
    for rounding, dtype in (("nearest", np.float32), ("stochastic", np.float16)):
        for size in (5, 4 * LARGE):
            order = Schedule((Case(random_trees(random, replicas, size)),))
            how = {"reduction": Reduction(order=order, rounding=rounding, seed=3)}
            x = values(replicas, (size,), dtype)
            yield f"trees {rounding} {size}", lambda v, how=how: lax.psum(v, "i", **how), x
        order = Schedule((Case(random_trees(random, replicas, replicas * 4_000)),))
        how = {"reduction": Reduction(order=order, rounding=rounding, seed=3)}
        y = values(replicas, (replicas, 4_000), dtype)
        yield f"trees {rounding} slices", lambda v, how=how: lax.psum_scatter(v, "i", **how), y


def run(world: gpusim.World) -> dict[str, np.ndarray]:
    """The results of the local replicas, by case."""
    here = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    with world:
        return {
            name: np.ascontiguousarray(gpusim.vmap(f, axis_name="i")(x[here]))
            for name, f, x in (*cases(world.replicas), *revealed(world.replicas))
        }


def main() -> None:
    replicas, folder = int(sys.argv[1]), Path(sys.argv[2])
    # Folds of these sizes then go all ways, in several blocks.
    job.BLOCK, algorithms.SMALL, layout.LONG_MESSAGE = 1024, 1024, 512
    world = gpusim.World.from_environment(replicas)
    np.savez(folder / f"{world.instance}.npz", **run(world))


if __name__ == "__main__":
    main()
