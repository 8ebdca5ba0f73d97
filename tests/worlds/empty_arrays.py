"""Arrays without elements over instances: mpirun -n N python -m tests.worlds.empty_arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.runtime.engines import mpi

REPLICAS = 4


def scatter(x: Any) -> Any:
    return lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True)


def main() -> None:
    engine = mpi.connect()
    counts = [1] * (engine.instances - 1)
    world = gpusim.World((*counts, REPLICAS - len(counts)), engine)
    rows = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    try:
        for shape in ((0, 8, 3), (2, 0, 3), (2, 8, 0), (0, 8, 0)):
            x = np.zeros((REPLICAS, *shape), np.float32)
            with world:
                found = gpusim.pmap(scatter, axis_name="i")(x[rows])
            expected = gpusim.vmap(scatter, axis_name="i")(x)[rows]
            assert found.shape == expected.shape, (shape, found.shape, expected.shape)
    except BaseException as error:
        engine.abort(repr(error))
    print("empty arrays agree")


if __name__ == "__main__":
    main()
