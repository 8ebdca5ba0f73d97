"""The cases of `everything` on CuPy arrays, which NCCL carries between the instances.

python -m tests.worlds.on_gpus REPLICAS FOLDER, as there. Each instance takes the GPU of its number,
or shares the only one.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gpusim
from gpusim.collectives.distributed import algorithms, job
from gpusim.libraries import to_host, to_library_of
from tests.worlds.everything import cases, nested_cases

# For NCCL's first use: several ranks on one GPU, which older versions refuse on one host.
SETTINGS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_HOSTID": f"instance {os.environ.get('OMPI_COMM_WORLD_RANK', '0')}",
}


def run(world: gpusim.World, cupy: Any) -> dict[str, np.ndarray]:
    """The bytes of what the replicas that are here have got, by case and leaf."""
    here = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    found: dict[str, np.ndarray] = {}
    like = cupy.empty(0)
    with world:
        chosen = [*cases(world.replicas), *nested_cases(world.replicas)]
        for name, f, arguments in chosen:
            if "wires, integers" in name:  # order="fixed", which GPUs refuse by name
                continue
            local = [to_library_of(like, argument[here]) for argument in arguments]
            results: Any = gpusim.vmap(f, axis_name="i")(*local)
            for number, leaf in enumerate(gpusim.trees.flatten(results)[0]):
                rows = np.frombuffer(np.ascontiguousarray(to_host(leaf)).tobytes(), np.uint8)
                found[f"vmap {name}, leaf {number}"] = rows.reshape(world.local_replicas, -1)
    return found


def main() -> None:
    replicas, folder = int(sys.argv[1]), Path(sys.argv[2])
    job.BLOCK, algorithms.SMALL = 1024, 1024
    world = gpusim.World.from_environment(replicas)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    cupy = importlib.import_module("cupy")
    cupy.cuda.Device(world.instance % cupy.cuda.runtime.getDeviceCount()).use()
    found = run(world, cupy)
    np.savez(folder / f"{world.instance}.npz", **{n.replace("/", "|"): v for n, v in found.items()})


if __name__ == "__main__":
    main()
