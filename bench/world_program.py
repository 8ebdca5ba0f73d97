"""A program of several instances, which measures collectives of a World beside raw MPI's.

mpirun -n 2 python -m bench.world_program SECONDS SIZE ...: each size is the replicas that an
instance holds x the elements of a value, such as 4x16Mi. Instance 0 prints a line of JSON for each
result. All participants of a case take turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import gpusim
from bench.cases import Case, Size, parse_size
from bench.peers.mpi import MAKERS
from bench.results import Exchange
from bench.timing import Timing
from gpusim import collectives, lax
from gpusim.runtime.world import without_world

ORDERS = ("linear", "reverse", "ring", "tree", "engine")
RAW = "raw"
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
#: Sums of a few numbers below 1: how far two orders of additions may lie apart.
TOLERANCE = 1e-5

Array = NDArray[Any]
Call = Callable[[], Any]


def values(replica: int, elements: int) -> Array:
    """A replica's value: numbers in [-1, 1), in which an order of additions shows."""
    rng = np.random.default_rng(replica)
    return 2 * rng.random(elements, np.float32) - 1


def everywhere(truth: bool) -> bool:
    """Whether it is so on all instances."""
    return bool(MPI.COMM_WORLD.allreduce(truth, MPI.LAND))


def seconds(call: Call) -> float:
    """Of one call, which all instances begin together; the slowest counts."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    result = call()
    spent = time.perf_counter() - start
    del result
    return float(MPI.COMM_WORLD.allreduce(spent, MPI.MAX))


def in_turns(calls: Mapping[str, Call], budget: float) -> dict[str, Timing]:
    """The timing of each call, in about this number of seconds; the first round does not count."""
    start = time.perf_counter()
    names = list(calls)
    for name in names:
        seconds(calls[name])
    once = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
    rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget / once)))
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(seconds(calls[name]))
    return {name: Timing.of(spent) for name, spent in found.items()}


def expected_sums(replicas: int, elements: int) -> Iterator[tuple[str, Array]]:
    """The results of one process, instance 0, from all values, in each order."""
    world = MPI.COMM_WORLD
    stacked = [values(r, elements) for r in range(replicas)] if world.rank == 0 else []
    for order in ORDERS:
        total = np.empty(elements, np.float32)
        if world.rank == 0:
            reduction = gpusim.Reduction(order=order)
            with without_world():
                total[:] = collectives.psum(stacked, reduction=reduction).value
        world.Bcast(total)
        yield order, total


def wrong(found: Array, expected: Array, *, bits: bool) -> str | None:
    """The error of a result on any instance, or None."""
    if bits:
        return None if everywhere(np.array_equal(found, expected)) else "wrong bits"
    near = np.allclose(found, expected, rtol=0, atol=TOLERANCE)
    return None if everywhere(near) else f"wrong result: further off than {TOLERANCE:g}"


def psum(world: gpusim.World, x: Array, budget: float) -> Iterator[Exchange]:
    """psum in every order beside np.add.reduce of the local values and Allreduce."""

    def sum_in(order: str) -> Call:
        reduction = gpusim.Reduction(order=order)
        mapped = gpusim.vmap(
            lambda v: lax.psum(v, "i", reduction=reduction), axis_name="i", out_axes=None
        )
        return lambda: mapped(x)

    elements = x.shape[1]
    case = Case("psum", "float32", world.replicas, elements)
    calls = {RAW: MAKERS["psum"](case, x)} | {order: sum_in(order) for order in ORDERS}
    problems = {}
    for order, total in expected_sums(world.replicas, elements):
        problems[order] = wrong(calls[order](), total, bits=order != "engine")
        problems[RAW] = wrong(calls[RAW](), total, bits=False)
    yield from exchanges("psum", world, elements, calls, problems, budget)


def all_to_all(world: gpusim.World, x: Array, budget: float) -> Iterator[Exchange]:
    """all_to_all beside Alltoall, which needs packing for several replicas."""
    elements = x.shape[1]
    pieces = x.reshape(len(x), world.replicas, -1)
    mapped = gpusim.vmap(lambda v: lax.all_to_all(v, "i", 0, 0), axis_name="i")
    case = Case("all_to_all", "float32", world.replicas, elements)
    calls = {RAW: MAKERS["all_to_all"](case, pieces), "": lambda: mapped(pieces)}
    mine = slice(world.replica_offset, world.replica_offset + world.local_replicas)
    problems: dict[str, str | None] = {}
    for name, call in calls.items():
        found = call()
        right = all(
            np.array_equal(found[:, r], values(r, elements).reshape(world.replicas, -1)[mine])
            for r in range(world.replicas)
        )
        problems[name] = None if everywhere(right) else "wrong result"
    yield from exchanges("all_to_all", world, elements, calls, problems, budget)


def exchanges(
    collective: str,
    world: gpusim.World,
    elements: int,
    calls: Mapping[str, Call],
    problems: Mapping[str, str | None],
    budget: float,
) -> Iterator[Exchange]:
    """The results of one case; wrong results have no time."""
    timings = in_turns(calls, budget)
    for order in calls:
        if order == RAW:
            continue
        problem = problems[order] or (problems[RAW] and f"MPI: {problems[RAW]}")
        ours, raw = (None, None) if problem else (timings[order], timings[RAW])
        where = (world.instances, world.local_replicas, elements)
        yield Exchange(collective, order, *where, ours, raw, problem)


def measure(size: Size, budget: float) -> Iterator[Exchange]:
    """All cases of one size."""
    held, elements = size
    with gpusim.World.from_environment(held * MPI.COMM_WORLD.size) as world:
        mine = range(world.replica_offset, world.replica_offset + held)
        x = np.stack([values(replica, elements) for replica in mine])
        yield from psum(world, x, budget)
        yield from all_to_all(world, x, budget)


def main(arguments: list[str]) -> None:
    budget, *sizes = arguments
    for size in sizes:
        for exchange in measure(parse_size(size), float(budget)):
            if MPI.COMM_WORLD.rank == 0:
                print(json.dumps(asdict(exchange)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
