"""Collectives of thousands of replicas on few instances, against one process.

python -m tests.worlds.many REPLICAS: each instance prints the seconds that each takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import gpusim
from gpusim import lax

Case = tuple[str, Callable[..., Any], list[np.ndarray]]


def cases(replicas: int) -> Iterator[Case]:
    index = np.arange(replicas)
    x = np.random.default_rng(0).standard_normal((replicas, 16)).astype(np.float32)
    wide = np.random.default_rng(1).standard_normal((replicas, replicas)).astype(np.float16)
    pairs = [[k, k + replicas // 2] for k in range(replicas // 2)]
    neighbours = [[k, k + 1] for k in range(0, replicas, 2)]
    shift = [(k, (k + 5) % replicas) for k in range(replicas)]
    for order in ("linear", "tree", "ring"):
        reduction = gpusim.Reduction(order=order)
        yield (
            f"psum {order}",
            lambda v, r=reduction: lax.psum(v, "i", reduction=r),
            [x],
        )
    yield "psum pairs", lambda v: lax.psum(v, "i", axis_index_groups=pairs), [x]
    yield "psum neighbours", lambda v: lax.psum(v, "i", axis_index_groups=neighbours), [x]
    yield "all_gather pairs", lambda v: lax.all_gather(v, "i", axis_index_groups=pairs), [x]
    yield (
        "all_to_all pairs",
        lambda v: lax.all_to_all(v[:2], "i", 0, 0, axis_index_groups=pairs),
        [x],
    )
    yield "ppermute", lambda v: lax.ppermute(v, "i", shift), [x]
    yield "pmax", lambda v: lax.pmax(v, "i"), [x]
    yield "all_to_all", lambda v: lax.all_to_all(v, "i", 0, 0), [wide]
    yield "psum_scatter", lambda v: lax.psum_scatter(v, "i"), [wide]
    yield "pgather", lambda v, k: lax.pgather(v, k, "i"), [x, index * 7 % replicas]
    if replicas <= 512:
        sizes = (index[:, None] + index) % 2
        starts, targets = np.cumsum(sizes, 1) - sizes, np.cumsum(sizes, 0) - sizes
        rows = int(sizes.sum(1).max())
        operand = np.arange(replicas * rows * 2.0).reshape(replicas, rows, 2)
        tables = [starts, sizes, targets, sizes.T]
        yield (
            "ragged_all_to_all",
            lambda a, *t: lax.ragged_all_to_all(a, a * 0, *t, axis_name="i"),
            [operand, *tables],
        )


def main() -> None:
    replicas = int(sys.argv[1])
    expected = [gpusim.vmap(f, axis_name="i")(*arguments) for _, f, arguments in cases(replicas)]
    world = gpusim.World.from_environment(replicas)
    here = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    with world:
        for (name, f, arguments), right in zip(cases(replicas), expected, strict=True):
            local = [argument[here] for argument in arguments]
            begin = time.perf_counter()
            found = gpusim.vmap(f, axis_name="i")(*local)
            print(f"{name}: {time.perf_counter() - begin:.3f}", flush=True)
            assert np.array_equal(found, right[here]), name


if __name__ == "__main__":
    main()
