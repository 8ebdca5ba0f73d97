"""A pmap in a pmap whose inner threads meet over the world's axis, many at once, in any order."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np

import gpusim
from gpusim import lax

THREADS = 12


def main() -> None:
    schedule = sys.argv[1]
    world = gpusim.World.from_environment(4)

    def inner(v: Any) -> Any:
        number = int(lax.axis_index("j"))
        # Each instance comes to its meetings in an order of its own.
        chance = random.Random(100 * world.instance + number)
        for _ in range(4):
            if schedule == "cores":
                time.sleep(0.03 * chance.random())
            v = v + lax.psum(v, "i") * 0.25
        return v

    with world:
        x = np.arange(world.replica_offset, world.replica_offset + world.local_replicas)
        rows = np.repeat(x[:, None], THREADS, axis=1).astype(np.float64)
        out = gpusim.pmap(lambda v: gpusim.pmap(inner, "j")(v), "i", schedule=schedule)(rows)
    expected = x.astype(np.float64)
    everybody = np.arange(4.0)
    for _ in range(4):
        expected, everybody = (
            expected + everybody.sum() * 0.25,
            everybody + everybody.sum() * 0.25,
        )
    assert np.array_equal(out, np.repeat(expected[:, None], THREADS, axis=1)), out
    print("right")


if __name__ == "__main__":
    main()
