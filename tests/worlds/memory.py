"""How much memory a collective takes on an instance, beside its inputs and outputs.

python -m tests.worlds.memory COLLECTIVE MEBIBYTES: each instance prints its peak, in units of its
inputs and outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.fallback import memory
from gpusim.runtime import environment

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum linear": lambda v: lax.psum(v, "i", reduction=gpusim.Reduction(order="linear")),
    "psum reverse": lambda v: lax.psum(v, "i", reduction=gpusim.Reduction(order="reverse")),
    "psum ring": lambda v: lax.psum(v, "i", reduction=gpusim.Reduction(order="ring")),
    "psum tree": lambda v: lax.psum(v, "i", reduction=gpusim.Reduction(order="tree")),
    "psum exact": lambda v: lax.psum(v, "i", reduction=gpusim.Reduction(order="exact")),
    "psum stochastic": lambda v: lax.psum(
        v, "i", reduction=gpusim.Reduction(order="tree", rounding="stochastic")
    ),
    "psum crossed": lambda v: lax.psum(
        v,
        "i",
        axis_index_groups=[
            list(range(0, lax.axis_size("i"), 2)),
            list(range(1, lax.axis_size("i"), 2)),
        ],
    ),
    "pmax": lambda v: lax.pmax(v, "i"),
    "psum_scatter": lambda v: lax.psum_scatter(v, "i", tiled=True),
    "psum_scatter ring": lambda v: lax.psum_scatter(
        v, "i", tiled=True, reduction=gpusim.Reduction(order="ring")
    ),
    "all_gather": lambda v: lax.all_gather(v, "i"),
    "all_to_all": lambda v: lax.all_to_all(v, "i", 0, 0, tiled=True),
    "ppermute": lambda v: lax.ppermute(
        v, "i", [(k, (k + 1) % lax.axis_size("i")) for k in range(lax.axis_size("i"))]
    ),
    "pbroadcast": lambda v: lax.pbroadcast(v, "i", 0),
}


def status(field: str) -> int:
    """A number of bytes that Linux counts for this process."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[field].split()[0]) * 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def main() -> None:
    mebibytes, chosen = int(sys.argv[1]), sys.argv[2:] or [*COLLECTIVES]
    memory.keep_at_most(0)
    world = gpusim.World.from_environment(2 * environment.read().instances)
    with world:
        for name in chosen:
            elements = mebibytes * 2**18 // world.local_replicas
            elements -= elements % world.replicas
            f = gpusim.vmap(COLLECTIVES[name], axis_name="i")
            f(np.ones((world.local_replicas, world.replicas), np.float32))
            x = np.ones((world.local_replicas, elements), np.float32)
            before = status("VmRSS") - x.nbytes
            forget_peak()
            y = f(x)
            result = y[:1] if y.strides[0] == 0 else y  # the same for all replicas: stored once
            print(f"{name}: {(status('VmHWM') - before) / (x.nbytes + result.nbytes):.2f}")
            del x, y, result


if __name__ == "__main__":
    main()
