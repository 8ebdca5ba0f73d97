"""Sample sort: splitters from samples, keys to their owners by ragged_all_to_all, local sorts.

python examples/gallery/sample_sort.py buckets.svg
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.figures import COLOURS, figure

REPLICAS, KEYS, SAMPLES = 8, 500, 32


def sort(keys: Any) -> Any:
    """This replica's bucket of all keys in order, behind it infinity; and the bucket's size."""
    me = lax.axis_index("i")
    keys = np.sort(keys)
    samples = np.sort(lax.all_gather(keys[:: KEYS // SAMPLES], "i", tiled=True))
    splitters = samples[len(samples) // REPLICAS :: len(samples) // REPLICAS][: REPLICAS - 1]

    starts = np.concatenate([[0], np.searchsorted(keys, splitters)])
    sizes = np.diff(np.concatenate([starts, [KEYS]]))  # to each receiver
    table = lax.all_gather(sizes, "i")  # sender, receiver
    offsets = (np.cumsum(table, axis=0) - table)[me]  # where each receiver puts mine
    arriving = table[:, me]
    room = np.full(REPLICAS * KEYS, np.inf)  # all keys may be of one bucket
    bucket = lax.ragged_all_to_all(keys, room, starts, sizes, offsets, arriving, axis_name="i")
    return np.sort(bucket), arriving.sum()


def main(picture: str | None = None) -> None:
    keys = np.random.default_rng(0).lognormal(size=(REPLICAS, KEYS))
    buckets, sizes = gpusim.vmap(sort, axis_name="i")(keys)
    found = np.concatenate([bucket[:size] for bucket, size in zip(buckets, sizes, strict=True)])
    print(f"{keys.size} keys on {REPLICAS} replicas; buckets of {sizes.min()} to {sizes.max()}")
    np.testing.assert_array_equal(found, np.sort(keys, axis=None))
    print("agreed with np.sort")
    if picture:
        with figure(picture, height=2.2) as ax:
            held = [bucket[:size] for bucket, size in zip(buckets, sizes, strict=True)]
            ax.hist(
                held,
                np.geomspace(0.02, 40, 80),
                histtype="stepfilled",
                stacked=True,
                color=4 * COLOURS[:2],
            )
            ax.set(xscale="log", xlabel="key", ylabel="keys", title="The buckets of 8 replicas")


if __name__ == "__main__":
    main(*sys.argv[1:])
