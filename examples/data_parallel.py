"""Data-parallel linear regression: a shard of the data a replica, gradients averaged by pmean.

The same function runs lockstep under vmap, in a thread per replica under pmap, and over the
shards of one global array under shard_map; all three end with the same bits.

    python examples/data_parallel.py --replicas 8 --steps 50
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax

FEATURES, ROWS, RATE = 5, 16, 0.3  # rows per replica


def descend(steps: int, weights: Any, x: Any, y: Any) -> Any:
    """Gradient descent from `weights`, x (rows, features) and y (rows,) being this replica's."""
    for _ in range(steps):
        gradient = x.T @ (x @ weights - y) / x.shape[0]
        weights = weights - RATE * lax.pmean(gradient, "i")
    return weights


def make_data(replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """x (replicas, rows, features) and y (replicas, rows) with a little noise."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((replicas, ROWS, FEATURES))
    y = x @ np.arange(1.0, FEATURES + 1) + 0.01 * draw.standard_normal((replicas, ROWS))
    return x, y


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(arguments)

    x, y = make_data(options.replicas)
    start = np.zeros(FEATURES)
    train = partial(descend, options.steps)

    lockstep = gpusim.vmap(train, in_axes=(None, 0, 0), out_axes=None, axis_name="i")
    threads = gpusim.pmap(train, "i", in_axes=(None, 0, 0), out_axes=None)
    mesh = gpusim.Mesh((options.replicas,), ("i",))
    sharded = gpusim.shard_map(train, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P())

    by_vmap = lockstep(start, x, y)
    by_pmap = threads(start, x, y)
    rows = options.replicas * ROWS
    by_shard_map = sharded(start, x.reshape(rows, FEATURES), y.reshape(rows))

    alone = start
    for _ in range(options.steps):  # one device that holds all the data
        residual = x.reshape(rows, FEATURES) @ alone - y.reshape(rows)
        alone = alone - RATE * x.reshape(rows, FEATURES).T @ residual / rows

    print(f"{options.replicas} replicas, {ROWS} rows each, {options.steps} steps")
    for name, found in (
        ("vmap", by_vmap),
        ("pmap", by_pmap),
        ("shard_map", by_shard_map),
        ("one device", alone),
    ):
        print(f"  {name:10}", np.array2string(found, precision=6, floatmode="fixed"))
    np.testing.assert_array_equal(by_vmap, by_pmap)
    np.testing.assert_array_equal(by_vmap, by_shard_map)
    np.testing.assert_allclose(by_vmap, alone, rtol=1e-12)
    print("agreed: vmap, pmap and shard_map to the bit, one device to 1e-12")


if __name__ == "__main__":
    main()
