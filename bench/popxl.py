"""The overhead of PopXL's session beside the arithmetic, and of many replicas against one.

`python -m bench.popxl` prints both against their targets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import gpusim.popxl as popxl
from bench import results
from gpusim.popxl import ops

NOTE = "an op"  # the notes of small ops begin with it
SMALL = 16  # elements of a small op
OPS = 1000  # ops of one run
OVERHEAD_TARGET = 10.0  # microseconds per op
ELEMENTS = 1 << 16  # of one replica
REPLICAS = 256
RATIO_TARGET = 1.25  # of the time per element: noise included

#: Small ops, and the same on stacked arrays in plain NumPy.
SMALL_OPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "x * x": (lambda x: ops.mul(x, x), lambda x: x * x),
    "exp": (ops.exp, np.exp),
    "sum, then add": (  # two ops
        lambda x: ops.sum(x, axis=0, keepdims=True) + x,
        lambda x: np.sum(x, axis=1, keepdims=True) + x,
    ),
}


class Overhead(NamedTuple):
    """A small op in a repeat: microseconds in the session, and in NumPy alone."""

    name: str
    layout: str
    session: float
    library: float

    @property
    def beyond(self) -> float:
        """The overhead of the session."""
        return self.session - self.library


class Scaling(NamedTuple):
    """Nanoseconds per element and op on one replica and on many, of the same size in all."""

    one: float
    many: float

    @property
    def ratio(self) -> float:
        """How many times as much an element costs on many replicas."""
        return self.many / self.one


def repeated(
    op: Callable[[Any], Any], shape: tuple[int, ...], replicas: int, body: int, count: int
) -> popxl.Session:
    """A session that repeats a graph of `body` ops `count` times."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x = popxl.variable(np.zeros(shape, np.float32))

        def run(x: popxl.Tensor) -> popxl.Tensor:
            for _ in range(body):
                x = op(x)
            return x

        (y,) = ops.repeat(ir.create_graph(run, x), count, x)
        ops.host_store(popxl.d2h_stream((1,), popxl.float32), ops.flatten(y)[:1])
    return popxl.Session(ir, "ipu_model")


def fastest(call: Callable[[], Any], seconds: float) -> float:
    """The seconds of the fastest of several calls."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def overheads(seconds: float = 0.3) -> list[Overhead]:
    """Small ops, as 1,000 repeats of one and as one graph of 1,000."""
    x = np.zeros((1, SMALL), np.float32)
    found = []
    for name, (op, plain) in SMALL_OPS.items():

        def library(plain: Callable[[Any], Any] = plain) -> None:
            for _ in range(OPS):
                plain(x)

        alone = fastest(library, seconds) * 1e6 / OPS
        for body, count in ((1, OPS), (OPS, 1)):
            with repeated(op, (SMALL,), 1, body, count) as session:
                took = fastest(session.run, seconds) * 1e6 / OPS
            found.append(Overhead(name, f"{count} x {body} op(s)", took, alone))
    return found


def scaling(
    seconds: float = 1.0, elements: int = ELEMENTS, replicas: int = REPLICAS, body: int = 4
) -> Scaling:
    """One op on `replicas` replicas of `elements` elements, and on one of as many in all."""

    def per_element(count: int, size: int) -> float:
        with repeated(lambda x: ops.mul(x, x), (size,), count, body, 2) as session:
            return fastest(session.run, seconds) * 1e9 / (2 * body * elements * replicas)

    return Scaling(per_element(1, elements * replicas), per_element(replicas, elements))


def measured(seconds: float = 0.3) -> Iterator[results.Overhead]:
    """All of it, for `make bench`."""
    for each in overheads(seconds):
        note = f"{NOTE}, beyond the {each.library:.1f} us of NumPy"
        yield results.Overhead(f"popxl, {each.name}, {each.layout}", each.beyond, note)
    found = scaling(3 * seconds)
    microseconds = found.many * ELEMENTS * REPLICAS / 1e3
    note = f"{found.ratio:.2f} times what one replica of as many elements in all takes"
    yield results.Overhead(f"popxl, {REPLICAS} replicas of {ELEMENTS:,} x * x", microseconds, note)


def main() -> None:
    """Print the figures."""
    for each in overheads():
        verdict = "met" if each.beyond < OVERHEAD_TARGET else "MISSED"
        print(
            f"{each.name:14} {each.layout:14} {each.session:7.2f} us per op, NumPy "
            f"{each.library:5.2f}: {each.beyond:6.2f} us beyond (target "
            f"{OVERHEAD_TARGET:g}: {verdict})"
        )
    found = scaling()
    verdict = "met" if found.ratio <= RATIO_TARGET else "MISSED"
    print(
        f"{REPLICAS} replicas of {ELEMENTS} elements: {found.many:.3f} ns per element and op, one "
        f"replica of as many in all {found.one:.3f}: ratio {found.ratio:.2f} (target "
        f"{RATIO_TARGET:g}: {verdict})"
    )


if __name__ == "__main__":
    main()
