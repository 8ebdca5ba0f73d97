"""The overhead of vmap and pmap beside the arithmetic: of each operation, and of the start.
And that of launches on a GPU, beside CuPy's own: `python -m tests.cuda.fake_cuda bench` has one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import gpusim
from bench.results import Overhead
from gpusim import collectives, lax
from gpusim.fallback import FoldSpec

REPLICAS = 8
ELEMENTS = 16
CALLS = 100  # of one operation, in one program
BURST = 30  # calls that launch, between two looks at the clock
STARTED = 1024  # replicas
SCALARS = 4096  # replicas with one element each

#: An operation in a vmapped program, and the same on stacked arrays in plain NumPy.
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]
OPERATIONS: dict[str, Pair] = {
    "x + x": (lambda x: x + x, lambda x: x + x),
    "np.sin(x)": (np.sin, np.sin),
    "np.sum(x)": (np.sum, lambda x: np.sum(x, axis=1)),
    "np.where(x > 0, x, 0)": (lambda x: np.where(x > 0, x, 0),) * 2,
    "x.reshape(4, 4)": (lambda x: x.reshape(4, 4), lambda x: x.reshape(-1, 4, 4)),
    "x[1:]": (lambda x: x[1:], lambda x: x[:, 1:]),
    "x @ x": (lambda x: x @ x, lambda x: np.einsum("ri,ri->r", x, x)),
    "np.concatenate([x, x])": (
        lambda x: np.concatenate([x, x]),
        lambda x: np.concatenate([x, x], axis=1),
    ),
}

#: Squares of one element a replica, an argument of the map (a 0-d array) or a NumPy scalar.
SQUARES: dict[str, Callable[[Any], Any]] = {
    "x ** 2": lambda x: x**2,
    "x[()] ** 2": lambda x: x[()] ** 2,
}

CALLS_IN = {"np.where(x > 0, x, 0)": 2}  # NumPy calls that one line of OPERATIONS makes
NUMPY_CALL = "a NumPy call"
LAUNCH = "a launch"


def overheads(seconds: float = 0.3) -> Iterator[Overhead]:
    """All overheads; each is the fastest of the calls that fit into `seconds`, or a failure."""
    x = np.linspace(-1, 1, REPLICAS * ELEMENTS, dtype=np.float32).reshape(REPLICAS, ELEMENTS)
    for name, measure in chain(_vmap(x), _pmap(x), _launches(x)):
        try:
            microseconds, note = measure(seconds)
            yield Overhead(name, microseconds, note)
        except Exception as error:
            yield Overhead(name, None, f"{type(error).__name__}: {error}"[:160])


Measure = Callable[[float], tuple[float, str]]  # microseconds and a note


def best(call: Callable[[], Any], seconds: float) -> float:
    """The microseconds of the fastest of several calls."""
    call()
    fastest, end = math.inf, time.perf_counter() + seconds
    for number in count(1):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now >= end and number >= 3:
            break
    return fastest * 1e6


def repeated(operation: Callable[[Any], Any], calls: int) -> Callable[[Any], Any]:
    """A program that calls the operation some times."""

    def program(x: Any) -> Any:
        for _ in range(calls):
            operation(x)
        return x

    return program


def _psum(x: Any) -> Any:
    return lax.psum(x, "i")


def _vmap(x: NDArray[Any]) -> Iterator[tuple[str, Measure]]:
    def vmapped(operation: Callable[[Any], Any], calls: int) -> Callable[[], Any]:
        return partial(gpusim.vmap(repeated(operation, calls), axis_name="i"), x)

    def each(operation: Callable[[Any], Any], seconds: float) -> float:
        whole, empty = (best(vmapped(operation, calls), seconds) for calls in (CALLS, 0))
        return (whole - empty) / CALLS

    def dispatch(name: str, seconds: float) -> tuple[float, str]:
        batched, plain = OPERATIONS[name]
        calls = CALLS_IN.get(name, 1)
        without = best(partial(repeated(plain, CALLS), x), seconds) / CALLS
        note = f"{NUMPY_CALL}, beyond the {without / calls:.1f} us of NumPy"
        return (each(batched, seconds) - without) / calls, note

    yield "vmap, empty", lambda seconds: (best(vmapped(_psum, 0), seconds), "")
    for name in OPERATIONS:
        yield f"vmap, {name}", partial(dispatch, name)

    def squared(name: str, dtype: str, seconds: float) -> tuple[float, str]:
        x = np.linspace(-1, 1, SCALARS, dtype=dtype)
        square, product = (
            best(partial(gpusim.vmap(call), x), seconds)
            for call in (SQUARES[name], lambda x: x * x)
        )
        return square, f"the map, {square / product:.1f} times that of x * x ({product:.0f} us)"

    for name in SQUARES:
        for dtype in ("float64", "float32"):
            row = f"vmap, {name} of {dtype} on {SCALARS:,} replicas"
            yield row, partial(squared, name, dtype)
    yield "vmap, lax.psum(x)", lambda seconds: (each(_psum, seconds), "a call, with its arithmetic")


def _pmap(x: NDArray[Any]) -> Iterator[tuple[str, Measure]]:
    def pmapped(operation: Callable[[Any], Any], calls: int) -> Callable[[], Any]:
        return partial(gpusim.pmap(repeated(operation, calls), "i"), x)

    def each(operation: Callable[[Any], Any], seconds: float) -> tuple[float, str]:
        calls = CALLS // 5
        whole, empty = (best(pmapped(operation, n), seconds) for n in (calls, 0))
        return (whole - empty) / calls / REPLICAS, "a replica's call, with its arithmetic"

    yield (
        "pmap, empty",
        lambda seconds: (best(pmapped(_psum, 0), seconds) / REPLICAS, f"a replica, of {REPLICAS}"),
    )
    yield "pmap, np.sin(x)", partial(each, np.sin)
    yield "pmap, lax.psum(x)", partial(each, _psum)
    many = np.ones((STARTED, 1), np.float32)
    start, meet = gpusim.pmap(lambda x: x, "i"), gpusim.pmap(_psum, "i")
    yield (
        f"pmap, start and end {STARTED:,} replicas",
        lambda seconds: (best(partial(start, many), seconds), ""),
    )
    yield (
        f"pmap, {STARTED:,} replicas and one psum",
        lambda seconds: (best(partial(meet, many), seconds), ""),
    )


def _launches(x: NDArray[Any]) -> Iterator[tuple[str, Measure]]:
    """The host's time for calls that launch one kernel of gpusim's, beyond CuPy's `x + y`."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):  # no CuPy, or no GPU
        return
    from gpusim import cuda

    given, members = cupy.asarray(x), [cupy.asarray(row) for row in x]
    half, spec = given.astype(np.float16), FoldSpec()
    drawn = FoldSpec(accumulate=np.float16, rounding="stochastic", seed=1)
    calls: dict[str, Callable[[], Any]] = {
        "cuda.run_fold(spec, x)": lambda: cuda.run_fold(spec, given),
        "cuda.fold(x)": lambda: cuda.fold(given),
        "cuda.run_fold(spec, list)": lambda: cuda.run_fold(spec, members),
        "cuda.run_fold(spec, x), stochastic": lambda: cuda.run_fold(drawn, half, call=1),
        "cuda.round_to(x, float16)": lambda: cuda.round_to(given, np.float16),
    }
    for name, call in calls.items():
        yield f"launch, {name}", partial(_beyond, LAUNCH, call, lambda: given + given)
    whole: dict[str, Callable[[], Any]] = {
        "collectives.psum(x)": lambda: collectives.psum(given),
        "vmap of lax.psum(x)": partial(gpusim.vmap(_psum, axis_name="i"), given),
    }
    for name, call in whole.items():
        yield f"launch, {name}", partial(_beyond, "a call", call, lambda: given + given)


def _beyond(
    what: str, call: Callable[[], Any], plain: Callable[[], Any], seconds: float
) -> tuple[float, str]:
    """The processor's time for a call beyond that for another one. Bursts of both take turns."""
    fastest = [math.inf, math.inf]
    end = time.perf_counter() + 2 * seconds
    for turn in count():
        for position, run in enumerate((call, plain)):
            run()
            start = time.thread_time()
            for _ in range(BURST):
                run()
            fastest[position] = min(fastest[position], (time.thread_time() - start) / BURST)
        if turn >= 2 and time.perf_counter() >= end:
            break
    ours, theirs = (1e6 * value for value in fastest)
    beside = f"the {theirs:.1f} us of CuPy's x + y ({ours / theirs:.1f}x)"
    return ours - theirs, f"{what}, beyond {beside}"
