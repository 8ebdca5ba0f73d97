"""python -m bench.gpu: the kernels on a GPU, beside its own copies, CuPy, JAX and torch.

All in one run. A call is timed on the GPU, between two events that are queued behind some other
work, and on the host, until it is queued. The targets are judged, and the results written as JSON
after every case.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench import machine, table
from bench.results import Verdict
from bench.table import Table, draw, duration, factor
from bench.timing import Timing
from gpusim import Reduction, Wire, collectives, fallback
from gpusim.cuda import launch, ragged
from gpusim.cuda.device import Launch
from gpusim.files import atomic_write

GIB = 2**30
BYTES = 2 * GIB  # of most cases' input; the largest has four times as many
FOLDER = Path(__file__).parent / "results"
OURS, COPY = "gpusim", "copy"
CUPY, JAX, TORCH = "CuPy", "JAX", "torch"
BLOCK = 1 << 24  # elements
SAMPLES, MOST_SAMPLES, SECONDS = 7, 200, 0.6  # samples of a participant, and seconds for them
BURST, MOST_QUEUED = 0.02, 100  # seconds of calls that are queued one after the other, and calls
WASTE = 256 << 20  # bytes that a unit of delay copies: more than any cache holds
LAUNCH_LIMIT = 20.0  # microseconds of a launch on the host, beyond those of `x + y`
ORDERS = ("linear", "reverse", "tree", "ring")
WIDE = ("float32", "float16", "bfloat16")
#: A case of each kind, the quick ones.
TELLING = (
    "8 replicas of 4 Mi float32",
    "8 replicas of 4 Mi bfloat16",
    "256 replicas of 64 Ki float32",
    "float32 linear",
    "65,536 replicas of 16 Ki",
    "float16 linear stochastic at every step",
    "wire of bfloat16",
    "wire of float8_e4m3fn by 32",
    "wire of bfloat16, 512 replicas",
    "ragged rows of 64 B",
    "float32 exact",
    "float32 logical_and",
    "int32 max",
    "float32 to e4m3",
    "scatter of float32",
)
Call = Callable[[], Any]


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuCase:
    """One kernel's work.

    **Attributes**:

    - `dtype`: of the input and the output; the output of a conversion is of `to`.
    - `replicas`, `elements`: of the input, mostly 2 GiB; the run's size scales them.
    - `reduction`: of a fold.
    - `row`: bytes of a row of a ragged copy.
    - `target`: the least fraction of the copy's bandwidth.
    - `kind`: cases of one kind have one verdict, by the worst of them.
    - `what`: "sum", another operator of a fold, "ragged", "round", or "scatter".
    """

    name: str
    dtype: str
    replicas: int = 64
    elements: int = 0
    reduction: Reduction = field(default_factory=Reduction)
    row: int = 0
    target: float | None = None
    kind: str = ""
    what: str = "sum"
    to: str = ""

    @property
    def type(self) -> np.dtype[Any]:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


def fold_case(dtype: str, order: str, target: float, kind: str, **how: Any) -> GpuCase:
    """64 replicas, 2 GiB in all."""
    reduction = Reduction(order=order, seed=1, **how)
    parts = [dtype, order]
    if reduction.rounding == "stochastic":
        parts.append(
            "stochastic at every step" if "every step" in kind else "stochastic at the end"
        )
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    elements = BYTES // 64 // itemsize
    return GpuCase(" ".join(parts), dtype, 64, elements, reduction, 0, target, kind)


def all_cases() -> list[GpuCase]:
    """The cases of the targets, the most telling first: a run may be cut."""
    cases, plain = [], "fold, 8 to 256 replicas"
    for replicas, elements in ((8, 4 << 20), (256, 64 << 10)):
        size = f"{elements >> 20} Mi" if elements >> 20 else f"{elements >> 10} Ki"
        for dtype in WIDE:
            name = f"{replicas} replicas of {size} {dtype}"
            cases.append(GpuCase(name, dtype, replicas, elements, target=0.85, kind=plain))
    cases += [fold_case(dtype, order, 0.85, plain) for order in ORDERS for dtype in WIDE]
    for elements, target in ((65536, 0.8), (16384, 0.4)):
        many = f"65,536 replicas of {elements // 1024} Ki"
        cases.append(GpuCase(many, "float16", 65536, elements, target=target, kind=many))
        if elements == 65536:
            few = f"64 replicas of as much as {many}"
            cases.append(GpuCase(few, "float16", 64, 65536 * elements // 64))
    for order in ("linear", "tree"):
        name = f"65,536 replicas of 256 float32 {order}"
        cases.append(GpuCase(name, "float32", 65536, 256, Reduction(order=order)))
    stochastic: dict[str, Any] = {"rounding": "stochastic"}
    for dtype in ("float16", "bfloat16"):
        held_in = "float32" if dtype == "float16" else None  # bfloat16's own accumulator
        for order in ("linear", "tree"):
            how = {**stochastic, "accumulate": held_in}
            cases.append(fold_case(dtype, order, 0.8, "fold, stochastic at the end", **how))
    every = [("float16", 0.25), ("bfloat16", 0.25), ("float8_e4m3fn", 0.12), ("float8_e5m2", 0.12)]
    for dtype, least in every:
        kept: Any = getattr(ml_dtypes, dtype, dtype) if "16" in dtype else "float16"
        narrow = "8-bit inputs, " if dtype.startswith("float8") else ""
        kind = f"fold, {narrow}stochastic at every step"
        cases.append(fold_case(dtype, "linear", least, kind, accumulate=kept, **stochastic))
    for row, target in ((1024, 0.8), (64, 0.5)):
        name = f"ragged rows of {'1 KiB' if row == 1024 else '64 B'}"
        ragged_case = GpuCase(name, "float32", row=row, target=target, kind=name, what="ragged")
        cases.append(ragged_case)
    cases += other_cases()
    return sorted(cases, key=lambda case: case.name not in TELLING)


def other_cases() -> list[GpuCase]:
    """Wires, other operators and orders, conversions and scatters."""
    bfloat16, scaled_by_32 = Wire("bfloat16"), Wire("float8_e4m3fn", "amax", 32)
    half, third = "wire of bfloat16", "wire of float8_e4m3fn by 32"
    exact = Reduction(order="exact")
    mib, kib = 1 << 20, 1 << 10
    return [
        GpuCase(half, "float32", 64, 16 * mib, Reduction(wire=bfloat16), 0, 0.5, half),
        GpuCase(third, "float32", 64, 16 * mib, Reduction(wire=scaled_by_32), 0, 0.3, third),
        GpuCase(f"{half}, 512 replicas", "float32", 512, 64 * kib, Reduction(wire=bfloat16)),
        GpuCase("float32 exact", "float32", 64, 8 * mib, exact),
        GpuCase("float32 logical_and", "float32", 64, 8 * mib, what="logical_and"),
        GpuCase("int32 max", "int32", 64, 8 * mib, what="max"),
        GpuCase("float32 to bfloat16", "float32", 64, 8 * mib, what="round", to="bfloat16"),
        GpuCase("float32 to e4m3", "float32", 64, 8 * mib, what="round", to="float8_e4m3fn"),
        GpuCase("scatter of float32", "float32", 1, 16 * mib, what="scatter"),
    ]


def first_look() -> list[GpuCase]:
    """A case of each size, for the smoke test."""
    chosen = ("float32 linear", "float16 tree")
    return [
        case
        for case in all_cases()
        if case.name in chosen or ("replicas of" in case.name and "as much" not in case.name)
    ]


def six_folds() -> list[GpuCase]:
    """The cases that the profiler runs."""
    names = (
        "8 replicas of 4 Mi float32",
        "8 replicas of 4 Mi float16",
        "256 replicas of 64 Ki float32",
        "float32 tree",
        "65,536 replicas of 16 Ki",
        "float16 linear stochastic at every step",
    )
    by_name = {case.name: case for case in all_cases()}
    return [by_name[name] for name in names]


# --- what runs ----------------------------------------------------------------------------------


@dataclass
class Prepared:
    """A case's calls by participant, the bytes that each moves, and who cannot take part."""

    calls: dict[str, Call]
    moved: int
    problems: dict[str, str] = field(default_factory=dict)


def scaled(case: GpuCase, shift: int) -> tuple[int, int]:
    """Replicas and elements for a part 2**-shift of the size: fewer elements, then replicas."""
    elements = max(min(64, case.elements), case.elements >> shift)
    shrunk = (case.elements >> shift) / elements
    return max(2, int(case.replicas * min(1.0, shrunk))), elements


def prepare(case: GpuCase, cupy: Any, shift: int, peers: Sequence[str]) -> Prepared:
    """Make the input and the calls."""
    make = {"ragged": _ragged, "round": _round, "scatter": _scatter}.get(case.what, _fold)
    return make(case, cupy, shift, peers)


def scattered(cupy: Any, size: int) -> Any:
    """Bytes that look random: zeros are moved faster on some GPUs."""
    numbers = cupy.arange(-(-size // 4), dtype=np.uint32)
    numbers *= np.uint32(2654435761)  # of Knuth's: it scatters
    return numbers.view(np.uint8)[:size]


def values(case: GpuCase, cupy: Any, shape: tuple[int, ...]) -> Any:
    """Numbers from -4 to 4, or any integers, which come again after some millions."""
    size = math.prod(shape)
    block = scattered(cupy, 4 * min(size, BLOCK)).view(np.uint32)
    if case.type.kind != "i":
        block >>= np.uint32(8)
        block = block.astype(np.float32)
        block *= np.float32(2.0**-21)
        block -= np.float32(4)
    if case.type.itemsize < 4:
        block = launch.round_to(block, case.type)
    bits = f"u{case.type.itemsize}"  # CuPy has no copies of 8-bit formats
    x, block = cupy.empty(size, bits), block.view(bits)
    for start in range(0, size, BLOCK):
        x[start : start + BLOCK] = block[: size - start]
    return x.view(case.type).reshape(shape)


def _fold(case: GpuCase, cupy: Any, shift: int, peers: Sequence[str]) -> Prepared:
    replicas, elements = scaled(case, shift)
    x = values(case, cupy, (replicas, elements))
    moved = (replicas + 1) * elements * case.type.itemsize
    prepared = Prepared({OURS: lambda: folded(case, x)}, moved)
    prepared.calls[COPY] = copy_of(cupy, moved // 2)
    how = case.reduction
    rounded_once = case.what == "sum" and how.wire is None and how.order != "exact"
    if CUPY in peers and rounded_once and case.dtype in ("float32", "float16"):
        prepared.calls[CUPY] = lambda: x.sum(axis=0)
    plain = rounded_once and how.rounding == "nearest" and how.order == "linear"
    for name, make in ((JAX, _jax_psum), (TORCH, _torch_sum)):
        if name not in peers or not plain or case.dtype not in WIDE:
            continue
        try:
            prepared.calls[name] = make(x)
        except Exception as error:  # whatever another library finds wrong
            prepared.problems[name] = _said(error)
    return prepared


def folded(case: GpuCase, x: Any) -> Any:
    """The case's fold of an array of CuPy or NumPy."""
    if case.what == "sum":
        return collectives.psum(x, reduction=case.reduction).value
    return (fallback if isinstance(x, np.ndarray) else launch).fold(x, op=case.what)


def _round(case: GpuCase, cupy: Any, shift: int, peers: Sequence[str]) -> Prepared:
    x = values(case, cupy, scaled(case, shift))
    to = np.dtype(getattr(ml_dtypes, case.to))
    moved = x.size * (case.type.itemsize + to.itemsize)
    calls: dict[str, Call] = {OURS: lambda: launch.round_to(x, to)}
    return Prepared(calls | {COPY: copy_of(cupy, moved // 2)}, moved)


def _scatter(case: GpuCase, cupy: Any, shift: int, peers: Sequence[str]) -> Prepared:
    """Additions at as many random places as there are elements: some are named again."""
    x, places, added = scattering(case, cupy, scaled(case, shift)[1])
    moved = x.nbytes * 3 + places.nbytes  # values and places are read, elements read and written
    calls: dict[str, Call] = {OURS: lambda: launch.update_at(np.add, x, places, added)}
    if CUPY in peers:
        calls[CUPY] = lambda: cupy.add.at(x, places, added)
    return Prepared(calls | {COPY: copy_of(cupy, moved // 2)}, moved)


def scattering(case: GpuCase, cupy: Any, size: int) -> tuple[Any, Any, Any]:
    """An array, places in it, and what is added there."""
    places = scattered(cupy, 4 * size).view(np.uint32).astype(np.int64)
    places %= size
    return values(case, cupy, (size,)), places, values(case, cupy, (size,))


def copy_of(cupy: Any, size: int) -> Call:
    """A copy within the GPU's memory that reads `size` bytes and writes as many."""
    source, target = scattered(cupy, size), cupy.empty(size, np.uint8)

    def copied() -> None:
        target[...] = source

    return copied


def _jax_psum(x: Any) -> Call:
    import jax

    if jax.default_backend() != "gpu":
        raise RuntimeError("this JAX sees no GPU: pip install 'jax[cuda13]'")
    there = jax.dlpack.from_dlpack(x)
    summed = jax.jit(jax.vmap(lambda v: jax.lax.psum(v, "i"), axis_name="i", out_axes=None))
    return lambda: summed(there)


def _torch_sum(x: Any) -> Call:
    import torch

    there = torch.from_dlpack(x)

    return lambda: there.sum(0)


class Recorder(launch.CupyDevice):
    """A device that records its launches and their arguments, to launch them again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.launches: list[Launch] = []
        self.kept: list[Any] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.kept.append(super().empty(shape, dtype))
        return self.kept[-1]

    def upload(self, values: Any) -> Any:
        self.kept.append(super().upload(values))
        return self.kept[-1]

    def run(self, launch: Launch) -> None:
        self.launches.append(launch._replace(arguments=launch.arguments.copy()))
        super().run(launch)


def _ragged(case: GpuCase, cupy: Any, shift: int, peers: Sequence[str]) -> Prepared:
    replicas, width = 64, case.row // 4
    rows = max(256, (BYTES >> shift) // replicas // case.row)
    sources = values(case, cupy, (replicas, rows, width))
    output = cupy.empty((replicas, rows, width), np.float32)
    segments = ragged_segments(replicas, rows)
    moved = 2 * int(segments[:, 4].sum()) * case.row
    device = Recorder(int(sources.device.id))
    ragged.ragged_copy(device, sources, output, segments)
    again = device.launches[-1]
    prepared = Prepared({OURS: lambda: device.run(again)}, moved)
    prepared.calls[f"{OURS}, checked"] = lambda: launch.ragged_copy(sources, output, segments)
    prepared.calls[COPY] = copy_of(cupy, moved // 2)
    if CUPY in peers:
        flat, numbers = sources.reshape(-1, width), cupy.asarray(_sources_of_rows(segments, rows))
        prepared.calls[CUPY] = lambda: flat.take(numbers, axis=0)
    return prepared


def ragged_segments(replicas: int, rows: int) -> np.ndarray:
    """Segments of very different lengths, from every replica to every other, of almost all rows."""
    random = np.random.default_rng(0)
    weights = random.pareto(1.5, (replicas, replicas)) + 0.05
    for _ in range(50):  # until every sender sends as much as every receiver receives
        weights /= weights.sum(axis=0)
        weights /= weights.sum(axis=1, keepdims=True)
    made = []
    written = np.zeros(replicas, np.int64)
    for sender in range(replicas):
        ends = np.round(np.cumsum(weights[sender]) * rows).astype(np.int64)
        sizes = np.diff(ends, prepend=0)
        for receiver in range(replicas):
            size = min(int(sizes[receiver]), rows - int(written[receiver]))
            start = int(ends[receiver] - sizes[receiver])
            if size:
                made.append((sender, start, receiver, int(written[receiver]), size))
                written[receiver] += size
    return np.array(made, np.int64)


def _sources_of_rows(segments: np.ndarray, rows: int) -> np.ndarray:
    """Which row of all sources goes to each written row, in the segments' order."""
    return np.concatenate(
        [np.arange(size) + sender * rows + start for sender, start, _, _, size in segments]
    )


# --- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuEntry:
    """One participant's times of a call.

    **Attributes**:

    - `timing`: seconds on the GPU, between events; of JAX, which has streams of its own, `queued`.
    - `host`: seconds until a call is queued.
    - `queued`: seconds of a call of many, queued one after the other.
    - `fraction`: its bytes in a second, of the copy's.
    """

    timing: Timing
    host: float
    queued: float
    fraction: float = 0.0


@dataclass
class GpuOutcome:
    """A case, all who took part, and whether our bits are the CPU's. `error` where it failed."""

    case: str
    dtype: str
    replicas: int
    elements: int
    row: int
    target: float | None
    kind: str
    moved: int = 0
    entries: dict[str, GpuEntry] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    bits: str = "not compared"
    error: str | None = None


class Timer:
    """Times calls on CuPy's current stream."""

    def __init__(self, cupy: Any, shift: int) -> None:
        self._cupy = cupy
        half = max(1, (WASTE >> shift) // 2)
        self._waste = scattered(cupy, half), cupy.empty(half, np.uint8)
        self._units = 1
        self._units = self._needed(0.0)

    def wait(self) -> None:
        """Until the device has done everything, of every library's streams."""
        self._cupy.cuda.Device().synchronize()

    def measure(self, call: Call, seconds: float, events: bool = True) -> GpuEntry:
        """Time a call. Without `events`, the time on the GPU is that of queued calls."""
        call()
        self.wait()
        host, queued = self._queued(call, seconds / 3)
        found = queued
        if events:
            self._units = self._needed(host)
            found, end = [], time.perf_counter() + seconds * 2 / 3
            while len(found) < SAMPLES or (time.perf_counter() < end and len(found) < MOST_SAMPLES):
                found.append(self._sample(call))
        return GpuEntry(Timing.of(found), host, min(queued))

    def _queued(self, call: Call, seconds: float) -> tuple[float, list[float]]:
        """The median time on the host, and the times of a call of several, in each round."""
        start = time.perf_counter()
        call()
        self.wait()
        number = max(3, min(MOST_QUEUED, int(BURST / max(time.perf_counter() - start, 1e-6))))
        host: list[float] = []
        rounds: list[float] = []
        end = time.perf_counter() + seconds
        while len(rounds) < 3 or (time.perf_counter() < end and len(rounds) < MOST_SAMPLES):
            first = last = time.perf_counter()
            for _ in range(number):
                call()
                now = time.perf_counter()
                host.append(now - last)
                last = now
            self.wait()
            rounds.append((time.perf_counter() - first) / number)
        return statistics.median(host), rounds

    def _sample(self, call: Call) -> float:
        """Seconds between two events around a call. The work before them keeps the GPU busy until
        the host has queued all three, and empties the caches."""
        first, last = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        source, target = self._waste
        for _ in range(self._units):
            target[...] = source
        first.record()
        call()
        last.record()
        last.synchronize()
        return max(float(self._cupy.cuda.get_elapsed_time(first, last)) / 1e3, 1e-9)

    def _needed(self, host: float) -> int:
        """How many copies take twice as long as the host needs for a call."""
        source, target = self._waste

        def copied() -> None:
            target[...] = source

        self._sample(copied)
        unit = min(self._sample(copied) for _ in range(3))
        return max(2, min(MOST_QUEUED, math.ceil(2 * (host + 50e-6) / unit)))


def measure(
    case: GpuCase, cupy: Any, shift: int, seconds: float, peers: Sequence[str]
) -> GpuOutcome:
    """Time everybody, then compare bits on a small part."""
    replicas, elements = (64, 0) if case.what == "ragged" else scaled(case, shift)
    about = (case.name, case.dtype, replicas, elements, case.row, case.target, case.kind)
    prepared = prepare(case, cupy, shift, peers)
    timer = Timer(cupy, shift)
    entries: dict[str, GpuEntry] = {}
    for name, call in prepared.calls.items():
        try:
            entries[name] = timer.measure(call, seconds, events=name != JAX)
        except Exception as error:
            if name in (OURS, COPY):
                raise
            prepared.problems[name] = _said(error)
    limit = entries[COPY]
    for name, entry in entries.items():
        copied = limit.queued if name == JAX else limit.timing.min
        entries[name] = replace(entry, fraction=copied / entry.timing.min)
    prepared.calls.clear()
    bits = verified(case, cupy)
    return GpuOutcome(*about, prepared.moved, entries, prepared.problems, bits)


def attempt(
    case: GpuCase, cupy: Any, shift: int, seconds: float, peers: Sequence[str]
) -> GpuOutcome:
    """`measure`; an exception is part of the outcome. Frees the memory of all libraries."""
    try:
        outcome = measure(case, cupy, shift, seconds, peers)
    except Exception as error:
        about = (case.name, case.dtype, case.replicas, case.elements, case.row)
        outcome = GpuOutcome(*about, case.target, case.kind, error=_said(error))
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return outcome


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def launch_overhead(cupy: Any, calls: int = 1000) -> dict[str, float]:
    """Microseconds on the host of a small fold, a psum, and CuPy's `x + y`."""
    x, y = cupy.zeros((8, 64), np.float32), cupy.zeros((8, 64), np.float32)
    found = {}
    for name, call in (
        ("fold", lambda: launch.fold(x)),
        ("psum", lambda: collectives.psum(x)),
        ("x + y", lambda: x + y),
    ):
        times = []
        for number in range(calls + calls // 10):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if number % 100 == 0:  # the queue is never full
                cupy.cuda.Device().synchronize()
        found[name] = statistics.median(times[calls // 10 :]) * 1e6
    return found


def verified(case: GpuCase, cupy: Any) -> str:
    """Whether the GPU's result has the CPU's bits, on an input of some thousand elements."""
    if case.what == "ragged":
        segments = ragged_segments(64, 64)
        sources = values(case, cupy, (64, 64, case.row // 4))
        output = cupy.zeros(sources.shape, np.float32)
        launch.ragged_copy(sources, output, segments)
        expected = np.zeros(sources.shape, np.float32)
        fallback.ragged_copy(sources.get(), expected, segments)
        return _verdict_on_bits(output, expected)
    if case.what == "scatter":
        x, places, added = scattering(case, cupy, 3333)
        expected = x.get()
        np.add.at(expected, places.get(), added.get())
        launch.update_at(np.add, x, places, added)
        return _verdict_on_bits(x, expected)
    x = values(case, cupy, (min(case.replicas, 300), 333))
    host = x.view(f"u{x.dtype.itemsize}").get().view(x.dtype)
    if case.what == "round":
        to = np.dtype(getattr(ml_dtypes, case.to))
        return _verdict_on_bits(launch.round_to(x, to), fallback.round_to(host, to))
    return _verdict_on_bits(folded(case, x), folded(case, host))


def _verdict_on_bits(found: Any, expected: np.ndarray) -> str:
    kind = f"u{expected.dtype.itemsize}"
    return "equal" if np.array_equal(found.view(kind).get(), expected.view(kind)) else "DIFFERENT"


# --- judging ------------------------------------------------------------------------------------


def judge(
    outcomes: Sequence[GpuOutcome], overhead: dict[str, float] | None = None
) -> list[Verdict]:
    """One verdict for each target, the worst case of each kind."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    return [
        *_fractions(done),
        *_many_replicas(done),
        *_launches(overhead),
        *_peers(done),
        _bits(outcomes),
    ]


def _fractions(outcomes: Sequence[GpuOutcome]) -> Iterator[Verdict]:
    for kind, least in {(o.kind, o.target): None for o in outcomes if o.target is not None}:
        found = [o for o in outcomes if (o.kind, o.target) == (kind, least)]
        worst = min(found, key=lambda o: o.entries[OURS].fraction)
        ratio = worst.entries[OURS].fraction
        yield Verdict(f"{kind}, of the copy", ratio, f"≥ {least:g}", ratio >= least, worst.case)


def _launches(overhead: dict[str, float] | None) -> Iterator[Verdict]:
    if overhead:
        beyond = overhead["fold"] - overhead["x + y"]
        target, basis = f"≤ {LAUNCH_LIMIT:g}", "8 replicas of 64 float32"
        description = "µs of a fold's launch, beyond `x + y`"
        yield Verdict(description, beyond, target, beyond <= LAUNCH_LIMIT, basis)


def _many_replicas(outcomes: Sequence[GpuOutcome]) -> Iterator[Verdict]:
    by_name = {o.case: o for o in outcomes}
    for name, few in by_name.items():
        many = by_name.get(name.removeprefix("64 replicas of as much as "))
        if many is few or many is None:
            continue
        ratio = many.entries[OURS].timing.min / few.entries[OURS].timing.min
        what = f"{many.case}, of 64 replicas of as much"
        yield Verdict(what, ratio, "≤ 1.1", ratio <= 1.1, many.case)


def _peers(outcomes: Sequence[GpuOutcome]) -> Iterator[Verdict]:
    for peer in (CUPY, JAX, TORCH):
        found = [
            (o.entries[peer].queued / o.entries[OURS].queued, o.case)
            for o in outcomes
            if peer in o.entries and not re.search("stochastic|ragged|scatter", o.case)
        ]
        what = f"sums, than {peer}'s"
        if found:
            ratio, basis = min(found)
            yield Verdict(what, ratio, "≥ 1x faster", ratio >= 1, basis)
        else:
            yield Verdict(what, None, "≥ 1x faster", None)


def _bits(outcomes: Sequence[GpuOutcome]) -> Verdict:
    wrong = [o.case for o in outcomes if o.bits != "equal"]
    met = None if not outcomes else not wrong
    return Verdict("every case has the CPU's bits", None, "equal", met, ", ".join(wrong))


# --- showing and keeping ------------------------------------------------------------------------


def tables(outcomes: Sequence[GpuOutcome], verdicts: Sequence[Verdict]) -> list[Table]:
    peers = [
        p for p in (f"{OURS}, checked", CUPY, JAX, TORCH) if any(p in o.entries for o in outcomes)
    ]
    rows = []
    for outcome in outcomes:
        if outcome.error is not None:
            continue
        ours = outcome.entries[OURS]
        row = [
            outcome.case,
            factor(ours.fraction),
            "-" if outcome.target is None else f"{outcome.target:g}",
            duration(ours.timing.min),
            duration(ours.timing.median),
            f"{outcome.moved / ours.timing.min / 1e9:,.0f}",
            duration(ours.host),
        ]
        row += [
            factor(outcome.entries[p].queued / ours.queued) if p in outcome.entries else "-"
            for p in peers
        ]
        rows.append([*row, outcome.bits])
    headings = [
        "case",
        "of the copy",
        "bound",
        "min",
        "median",
        "GB/s",
        "host",
        *(f"/ {p}" for p in peers),
        "bits",
    ]
    notes = sorted({f"{n}: {why}" for o in outcomes for n, why in o.problems.items()})
    notes += [f"{o.case}: FAILED: {o.error}" for o in outcomes if o.error]
    title = "Kernels; '/ peer': how many times as long the peer takes, of calls one after the other"
    found = [Table(title, headings, rows, tuple(notes))]
    judged = [
        [table.VERDICTS[v.met], factor(v.ratio), v.target, v.description, v.basis] for v in verdicts
    ]
    return [*found, Table("Targets", ["", "ratio", "bound", "target", "measured on"], judged)]


def describe(cupy: Any) -> dict[str, Any]:
    """The GPU, the driver, and the versions of all that takes part."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    packages = ("cupy-cuda13x", "cupy-cuda12x", "jax", "jaxlib", "torch", "nvidia-nccl-cu13")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    name = properties["name"]
    return {
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "packages": versions,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add = made.add_argument
    add("--shift", type=int, default=0, help="divide all sizes by 2 ** this, for a dry run")
    add("--seconds", type=float, default=SECONDS, help="for each participant of a case")
    add("--only", metavar="TEXT", default="", help="the cases whose names contain this")
    add("--without", metavar="PEER", action="append", default=[], choices=[CUPY, JAX, TORCH])
    add("--json", type=Path, help="where results go (default: bench/results/gpu-NAME.json)")
    add("--key", help="go on with results that have the same key")
    return made


def gpu_or_reason() -> Any:
    """CuPy if it works on a GPU, else a string that names the problem."""
    try:
        cupy = launch.require_cupy()
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return str(error)
    except Exception as error:  # CUDARuntimeError, which only CuPy defines
        return f"CuPy finds no GPU: {error}"
    return cupy if count else "CuPy finds no GPU"


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    cupy = gpu_or_reason()
    if isinstance(cupy, str):
        print(f"bench.gpu: nothing can be measured here: {cupy}", file=sys.stderr)
        return 1
    peers = [peer for peer in (CUPY, JAX, TORCH) if peer not in given.without]
    content: dict[str, Any] = {
        "schema": 2,
        "machine": machine.survey(),
        "gpu": (about := describe(cupy)),
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "shift": given.shift,
        "key": given.key,
    }
    path = given.json or FOLDER / f"gpu-{machine.slug(about['name'])}.json"
    outcomes, overhead = kept(path, given.key)
    done = {outcome.case for outcome in outcomes}
    if done:
        print(f"{len(done)} cases are there", file=sys.stderr, flush=True)
    try:
        overhead = overhead or launch_overhead(cupy)
        print(f"launch: {overhead}", file=sys.stderr, flush=True)
    except Exception as error:
        content["launch error"] = _said(error)
        print(f"launch: FAILED: {_said(error)}", file=sys.stderr, flush=True)
    for case in all_cases():
        if given.only not in case.name or case.name in done:
            continue
        outcomes.append(attempt(case, cupy, given.shift, given.seconds, peers))
        print(_line(outcomes[-1]), file=sys.stderr, flush=True)
        keep(path, content, outcomes, overhead)
    verdicts = judge(outcomes, overhead)
    commit = content["machine"]["commit"]
    print(f"{about['name']}, driver {about['driver']}, commit {commit}, {content['started']}")
    for drawn in tables(outcomes, verdicts):
        print()
        draw(drawn)
        for note in drawn.notes:
            print(f"  {note}")
    print(f"\nwritten to {path.name}")
    return int(overhead is None or any(outcome.bits != "equal" for outcome in outcomes))


def _line(outcome: GpuOutcome) -> str:
    if outcome.error is not None:
        return f"{outcome.case}: FAILED: {outcome.error}"
    ours = outcome.entries[OURS]
    return (
        f"{outcome.case}: {duration(ours.timing.min)}, {factor(ours.fraction)} of the copy, "
        f"{duration(ours.host)} on the host, bits {outcome.bits}"
    )


def kept(path: Path, key: str | None) -> tuple[list[GpuOutcome], dict[str, float] | None]:
    """The cases that a run of the same key has measured, and its overhead; those that failed, or
    whose bits differ, are measured again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = {}
    if key is None or found.get("key") != key:
        return [], None
    outcomes = []
    for case in found["cases"]:
        if case["bits"] == "equal":
            entries = {
                name: GpuEntry(**{**entry, "timing": Timing(**entry["timing"])})
                for name, entry in case["entries"].items()
            }
            outcomes.append(GpuOutcome(**{**case, "entries": entries}))
    return outcomes, found["launch"]


def keep(
    path: Path,
    content: dict[str, Any],
    outcomes: Sequence[GpuOutcome],
    overhead: dict[str, float] | None,
) -> None:
    """Write the results so far."""
    found = {
        **content,
        "launch": overhead,
        "cases": [asdict(outcome) for outcome in outcomes],
        "targets": [asdict(verdict) for verdict in judge(outcomes, overhead)],
    }
    with atomic_write(path) as file:
        file.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
