"""Collectives on tensors on an axis that instances share: run under mpirun with a folder to write
each instance's results to, and called by one process alone for the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpusim
import gpusim.poptorch_experimental_addons as pea
import gpusim.torch as gt
from gpusim.poptorch.axis import AXIS
from gpusim.torch.seeds import seeded

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


def addons(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of poptorch_experimental_addons those that know where a replica stands, with gradients."""
    operations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_reduce": lambda x: pea.collectives.all_reduce_cross_replica_sum(x, REPLICAS),
        "inserted": lambda x: pea.collectives.all_reduce_cross_replica_sum(x, REPLICAS, True),
        "all_gather": lambda x: pea.collectives.all_gather_cross_replica(x, REPLICAS),
        "equal": lambda x: pea.collectives.all_gather_cross_replica_identical_grads_in(x, REPLICAS),
        "quantised": lambda x: pea.quantise_fpx(x, 2, 1, bwd=True),
    }
    found = {}
    for name, operation in operations.items():
        found[name], back = torch.func.vjp(operation, x)
        found[f"{name}, back"] = back(found[name] * (1 + gt.axis_index(AXIS)))[0]
    return found


def run(rows: slice) -> dict[str, torch.Tensor]:
    """The results of these replicas, in lockstep, in threads, and in a backward pass around."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(REPLICAS, 4, generator=generator).half()[rows]
    found: dict[str, torch.Tensor] = {}
    maps: dict[str, Callable[..., Any]] = {"vmap": gt.vmap, "pmap": gt.pmap}
    for name, map_ in maps.items():
        with gpusim.reduction(order="ring", rounding="stochastic", seed=1):
            tree = map_(program, axis_name="i")(x)
            with seeded(2):
                tree |= map_(addons, axis_name=AXIS)(x)
        found |= {f"{name}, {part}": value for part, value in tree.items()}
    leaf = x.clone().requires_grad_()
    gt.vmap(lambda x: gt.psum(x, "i") * x, axis_name="i")(leaf).sum().backward()
    assert leaf.grad is not None
    found["around"] = leaf.grad
    return found


def refuse_shared_arguments_that_differ() -> None:
    """Weights that differ between instances are noticed before they are used."""
    for map_ in (gt.vmap, gt.pmap):
        with gpusim.World.from_environment(replicas=REPLICAS) as world:
            x = torch.ones(world.local_replicas, 3)
            call = map_(lambda w, x: w["w"] * x, in_dims=(None, 0))
            call({"w": torch.nn.Parameter(torch.ones(3).bfloat16()), "step": 1}, x)
            try:
                call({"w": torch.ones(3) + world.instance, "step": 1}, x)
            except gpusim.CollectiveMismatchError as error:
                assert "leaf 1 of the arguments" in str(error) and "in_dims=None" in str(error)
            else:
                raise AssertionError("it went unnoticed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with gpusim.World.from_environment(replicas=REPLICAS) as world:
        first = world.replica_offset
        found = run(slice(first, first + world.local_replicas))
        torch.save(found, Path(sys.argv[1]) / f"{world.instance}.pt")
    refuse_shared_arguments_that_differ()
