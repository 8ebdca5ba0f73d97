"""The cost of wires, levels and exact sums: `python -m bench.wires` times them beside other folds.

A line compares a fold with the one that rounds as often: a wire of a format with an accumulator of
that format; what no accumulator does (scales, levels, exact and fixed sums) with the plain order.
Both are timed in turns, by the processor time of one thread; the least of several runs counts. The
limit is that of the memory: every member is read, and a result written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GPUSIM_THREADS", "1")  # before the kernels count their threads

import numpy as np

from bench.machine import survey
from gpusim import Reduction, Wire, collectives
from gpusim.files import atomic_write

REPLICAS, ELEMENTS = 64, 256 * 1024
RUNS = 5
FORMATS = ("bfloat16", "float16", "float8_e4m3fn")
TARGET = 1.0
"""A wire costs what an accumulator of its format does."""


class Line(NamedTuple):
    """A fold, what it is compared with, and the most that it may cost; None: no target."""

    name: str
    fold: Reduction
    beside: Reduction
    target: float | None = None


def lines() -> Iterator[Line]:
    for order in ("linear", "ring", "tree"):
        for name in FORMATS:
            for rounding in ("nearest", "stochastic"):
                wire = Wire(name, rounding=rounding)
                accumulator = Reduction(order=order, accumulate=name, rounding=rounding)
                title = f"{order}, wire {name}, {rounding}"
                yield Line(title, Reduction(order=order, wire=wire), accumulator, TARGET)
        plain = Reduction(order=order)
        for wire in (
            Wire("int8", "amax", 64),
            Wire("int8", "amax", 64, at="ends"),
            Wire.mx("float8_e4m3fn"),
            Wire.mx("float4_e2m1fn", "even"),
        ):
            yield Line(f"{order}, {wire!r}", Reduction(order=order, wire=wire), plain)
        levels = Reduction(order=order, groups_of=8, across=plain)
        yield Line(f"{order} in groups of 8, {order} across", levels, plain)
    for order in ("exact", "fixed"):
        yield Line(order, Reduction(order=order), Reduction())


def seconds(call: Callable[[], Any]) -> float:
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def measure(line: Line, x: np.ndarray[Any, Any], runs: int) -> tuple[float, float]:
    """The least seconds of the fold and of what it is compared with."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for found, reduction in zip(times, (line.fold, line.beside), strict=True):
            found.append(seconds(lambda: collectives.psum(x, reduction=reduction)))  # noqa: B023
    return min(times[0]), min(times[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each fold; 1 if one is above its target by more than a quarter."""
    parser = argparse.ArgumentParser(prog="python -m bench.wires", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each fold (default {RUNS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    x = np.random.default_rng(0).standard_normal((REPLICAS, ELEMENTS)).astype(np.float32)
    out = np.empty_like(x)
    limit = min(seconds(lambda: np.copyto(out, x)) for _ in range(options.runs))
    limit *= (REPLICAS + 1) / (2 * REPLICAS)  # a copy reads and writes every member
    print(f"{REPLICAS} x {ELEMENTS:,} float32, one thread; the memory's limit {1e3 * limit:.1f} ms")
    rows, worst = [], 0.0
    for line in lines():
        mine, beside = measure(line, x, options.runs)
        row = {"name": line.name, "seconds": mine, "beside": beside, "limit": limit}
        rows.append({**row, "ratio": mine / beside, "target": line.target})
        worst = max(worst, mine / beside / line.target if line.target else 0.0)
        goal = f", target {line.target:g}" if line.target else ""
        print(
            f"{line.name:70} {1e3 * mine:7.1f} ms, {mine / limit:6.1f} of the limit; "
            f"{mine / beside:5.2f} of {line.beside!r}{goal}",
            flush=True,
        )
    if options.json:
        with atomic_write(options.json) as file:
            file.write(json.dumps({"machine": survey(), "wires": rows}, indent=1) + "\n")
    return int(worst > 1.25)


if __name__ == "__main__":
    sys.exit(main())
