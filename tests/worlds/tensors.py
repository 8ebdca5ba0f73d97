"""Collectives on tensors on an axis that instances share: run under mpirun with a folder to write
each instance's results to, and called by one process alone for the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpusim
import gpusim.torch as gt

REPLICAS = 5


def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some of everything, with a backward pass."""
    return {
        "gradient": torch.func.grad(lambda x: (gt.psum(x, "i") ** 2).sum())(x),
        "gathered": gt.all_gather(x, "i"),
        "passed on": gt.ppermute(x, "i", [(0, 4), (4, 1)]),
        "index": gt.axis_index("i"),
        "scattered": gt.psum_scatter(gt.all_gather(2 * x, "i"), "i"),
    }


def run(own: slice) -> dict[str, torch.Tensor]:
    """The results of these replicas, in lockstep, in threads, and in a backward pass around."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(REPLICAS, 4, generator=generator).half()[own]
    found: dict[str, torch.Tensor] = {}
    maps: dict[str, Callable[..., Any]] = {"vmap": gt.vmap, "pmap": gt.pmap}
    for name, map_ in maps.items():
        with gpusim.reduction(order="ring", rounding="stochastic", seed=1):
            tree = map_(program, axis_name="i")(x)
        found |= {f"{name}, {part}": value for part, value in tree.items()}
    leaf = x.clone().requires_grad_()
    gt.vmap(lambda x: gt.psum(x, "i") * x, axis_name="i")(leaf).sum().backward()
    assert leaf.grad is not None
    found["around"] = leaf.grad
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with gpusim.World.from_environment(replicas=REPLICAS) as world:
        first = world.replica_offset
        found = run(slice(first, first + world.local_replicas))
        torch.save(found, Path(sys.argv[1]) / f"{world.instance}.pt")
