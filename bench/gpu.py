"""python -m bench.gpu: the kernels on a GPU, beside its own copies, CuPy, JAX and torch.
All in one run, by events on the GPU; says which of issue 5's targets are met, and writes JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import fallback
from bench import machine, table
from bench.results import Verdict
from bench.table import Table, draw, duration, factor
from bench.timing import Timing
from gpusim import Reduction, collectives
from gpusim.cuda import launch, ragged
from gpusim.cuda.device import Launch

GIB = 2**30
BYTES = 2 * GIB  # of each case's input; the largest has four times as many
FOLDER = Path(__file__).parent / "results"
OURS, COPY = "gpusim", "copy"
CUPY, JAX, TORCH = "CuPy", "JAX", "torch"
BLOCK = 1 << 24  # elements
SAMPLES, SECONDS, BURST = 5, 1.0, 0.02  # samples at least, seconds for all, and for each
ORDERS = ("linear", "reverse", "tree", "ring")
WIDE = ("float32", "float16", "bfloat16")
Call = Callable[[], Any]


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuCase:
    """A fold, or with `row` a ragged copy of rows of `row` bytes.

    **Attributes**:

    - `dtype`: of the input and the output.
    - `replicas`, `elements`: of a fold, as for an input of 2 GiB; the run's size scales them.
    - `reduction`: of a fold.
    - `row`: bytes of a row.
    - `target`: the least fraction of the copy's bandwidth.
    """

    name: str
    dtype: str
    replicas: int = 64
    elements: int = 0
    reduction: Reduction = field(default_factory=Reduction)
    row: int = 0
    target: float | None = None

    @property
    def type(self) -> np.dtype[Any]:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))


def fold_case(dtype: str, order: str, target: float, **how: Any) -> GpuCase:
    reduction = Reduction(order=order, seed=1, **how)
    parts = [dtype, order]
    if reduction.rounding == "stochastic":
        parts.append("stochastic at every step" if "accumulate" in how else "stochastic at the end")
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    return GpuCase(" ".join(parts), dtype, 64, BYTES // 64 // itemsize, reduction, 0, target)


def all_cases() -> list[GpuCase]:
    """The cases of the targets."""
    stochastic: dict[str, Any] = {"rounding": "stochastic"}
    cases = [fold_case(dtype, order, 0.85) for dtype in WIDE for order in ORDERS]
    for dtype in ("float16", "bfloat16"):
        held_in = "float32" if dtype == "float16" else None  # bfloat16's own accumulator
        for order in ("linear", "tree"):
            at_the_end = fold_case(dtype, order, 0.8, **stochastic)
            held = Reduction(order=order, seed=1, accumulate=held_in, rounding="stochastic")
            cases.append(GpuCase(at_the_end.name, dtype, 64, at_the_end.elements, held, 0, 0.8))
    every = [("float16", 0.25), ("bfloat16", 0.25), ("float8_e4m3fn", 0.12), ("float8_e5m2", 0.12)]
    for dtype, least in every:
        kept: Any = getattr(ml_dtypes, dtype, dtype) if "16" in dtype else "float16"
        cases.append(fold_case(dtype, "linear", least, accumulate=kept, **stochastic))
    cases += [
        GpuCase("ragged rows of 1 KiB", "float32", row=1024, target=0.8),
        GpuCase("ragged rows of 64 B", "float32", row=64, target=0.5),
    ]
    for elements, target in ((65536, None), (16384, 0.4)):
        total = 65536 * elements
        many = f"65,536 replicas of {elements // 1024} Ki"
        cases.append(GpuCase(many, "float16", 65536, elements, target=target))
        if target is None:
            cases.append(GpuCase(f"64 replicas of as much as {many}", "float16", 64, total // 64))
    return cases


# --- what runs ----------------------------------------------------------------------------------


@dataclass
class Prepared:
    """A case's calls by participant, the bytes that each moves, and who cannot take part."""

    calls: dict[str, Call]
    moved: int
    problems: dict[str, str] = field(default_factory=dict)


def scaled(case: GpuCase, scale: float) -> tuple[int, int]:
    """Replicas and elements for a part of 2 GiB: fewer elements, and then fewer replicas."""
    elements = max(64, int(case.elements * scale))
    shrunk = case.elements * scale / elements
    return max(2, int(case.replicas * min(1.0, shrunk))), elements


def prepare(case: GpuCase, cupy: Any, scale: float, peers: Sequence[str]) -> Prepared:
    """Make the input and the calls."""
    return (_ragged if case.row else _fold)(case, cupy, scale, peers)


def values(case: GpuCase, cupy: Any, shape: tuple[int, ...]) -> Any:
    """Numbers from -4 to 4 in the case's dtype, which come again after some millions."""
    size = math.prod(shape)
    numbers = cupy.arange(min(size, BLOCK), dtype=np.uint32)
    numbers *= np.uint32(2654435761)  # of Knuth's: it scatters
    numbers >>= np.uint32(8)
    block = numbers.astype(np.float32)
    block *= np.float32(2.0**-21)
    block -= np.float32(4)
    if case.type != np.float32:
        block = launch.round_to(block, case.type)
    bits = f"u{case.type.itemsize}"  # CuPy has no copies of 8-bit formats
    x, block = cupy.empty(size, bits), block.view(bits)
    for start in range(0, size, BLOCK):
        x[start : start + BLOCK] = block[: size - start]
    return x.view(case.type).reshape(shape)


def _fold(case: GpuCase, cupy: Any, scale: float, peers: Sequence[str]) -> Prepared:
    replicas, elements = scaled(case, scale)
    x = values(case, cupy, (replicas, elements))
    moved = (replicas + 1) * elements * case.type.itemsize
    prepared = Prepared({}, moved)
    prepared.calls[OURS] = lambda: collectives.psum(x, reduction=case.reduction).value
    prepared.calls[COPY] = copy_of(cupy, moved // 2)
    if CUPY in peers and case.dtype in ("float32", "float16"):
        prepared.calls[CUPY] = lambda: x.sum(axis=0)
    plain = case.reduction.rounding == "nearest" and case.reduction.order == "linear"
    for name, make in ((JAX, _jax_psum), (TORCH, _torch_sum)):
        if name not in peers or not plain or case.dtype not in WIDE:
            continue
        try:
            prepared.calls[name] = make(x)
        except Exception as error:  # whatever another library finds wrong
            prepared.problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return prepared


def copy_of(cupy: Any, size: int) -> Call:
    """A copy within the GPU's memory that reads `size` bytes and writes as many."""
    source, target = cupy.zeros(size, np.uint8), cupy.empty(size, np.uint8)

    def copied() -> None:
        target[...] = source

    return copied


def _jax_psum(x: Any) -> Call:
    import jax

    if jax.default_backend() != "gpu":
        raise RuntimeError("this JAX sees no GPU: pip install 'jax[cuda13]'")
    there = jax.dlpack.from_dlpack(x)
    summed = jax.jit(jax.vmap(lambda v: jax.lax.psum(v, "i"), axis_name="i", out_axes=None))
    return lambda: summed(there).block_until_ready()


def _torch_sum(x: Any) -> Call:
    import torch

    there = torch.from_dlpack(x)

    def summed() -> Any:
        total = there.sum(0)
        torch.cuda.synchronize()
        return total

    return summed


class Recorder(launch.CupyDevice):
    """A device that records its launches and their arguments, to launch them again."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.launches: list[Launch] = []
        self.kept: list[Any] = []

    def upload(self, values: Any) -> Any:
        self.kept.append(super().upload(values))
        return self.kept[-1]

    def run(self, launch: Launch) -> None:
        self.launches.append(launch._replace(arguments=launch.arguments.copy()))
        super().run(launch)


def _ragged(case: GpuCase, cupy: Any, scale: float, peers: Sequence[str]) -> Prepared:
    replicas, width = 64, case.row // 4
    rows = max(256, int(BYTES * scale) // replicas // case.row)
    sources = cupy.zeros((replicas, rows, width), np.float32)
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
    """One participant's time for a call; its bytes in a second, of the copy's."""

    timing: Timing
    fraction: float


@dataclass
class GpuOutcome:
    """A case, all who took part, and whether our bits are the CPU's."""

    case: str
    dtype: str
    replicas: int
    elements: int
    row: int
    target: float | None
    moved: int
    entries: dict[str, GpuEntry]
    problems: dict[str, str]
    bits: str


def timed(cupy: Any, call: Call, seconds: float) -> Timing:
    """Seconds of a call between two events, of some queued one after the other: the GPU does not
    wait for Python then."""
    call()
    cupy.cuda.get_current_stream().synchronize()
    start = time.perf_counter()
    call()
    cupy.cuda.get_current_stream().synchronize()
    one = max(time.perf_counter() - start, 1e-6)
    queued = max(1, min(50, int(BURST / one)))
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < SAMPLES or time.perf_counter() < end:
        first, last = cupy.cuda.Event(), cupy.cuda.Event()
        first.record()
        for _ in range(queued):
            call()
        last.record()
        last.synchronize()
        found.append(cupy.cuda.get_elapsed_time(first, last) / 1e3 / queued)
        if len(found) >= 200:
            break
    return Timing.of(found)


def measure(
    case: GpuCase, cupy: Any, scale: float, seconds: float, peers: Sequence[str]
) -> GpuOutcome:
    """Time everybody, then compare bits on a small part."""
    replicas, elements = (64, 0) if case.row else scaled(case, scale)
    prepared = prepare(case, cupy, scale, peers)
    timings = {name: timed(cupy, call, seconds) for name, call in prepared.calls.items()}
    limit = timings[COPY].min
    entries = {name: GpuEntry(timing, limit / timing.min) for name, timing in timings.items()}
    del prepared.calls
    bits = verified(case, cupy)
    about = (case.name, case.dtype, replicas, elements, case.row, case.target, prepared.moved)
    return GpuOutcome(*about, entries, prepared.problems, bits)


def verified(case: GpuCase, cupy: Any) -> str:
    """Whether the GPU's result has the CPU's bits, on an input of some thousand elements."""
    if case.row:
        segments = ragged_segments(64, 64)
        sources = values(case, cupy, (64, 64, case.row // 4))
        output = cupy.zeros(sources.shape, np.float32)
        launch.ragged_copy(sources, output, segments)
        expected = np.zeros(sources.shape, np.float32)
        fallback.ragged_copy(sources.get(), expected, segments)
        return _verdict_on_bits(output, expected)
    x = values(case, cupy, (min(case.replicas, 300), 333))
    found = collectives.psum(x, reduction=case.reduction).value
    host = x.view(f"u{x.dtype.itemsize}").get().view(x.dtype)
    return _verdict_on_bits(found, collectives.psum(host, reduction=case.reduction).value)


def _verdict_on_bits(found: Any, expected: np.ndarray) -> str:
    kind = f"u{expected.dtype.itemsize}"
    return "equal" if np.array_equal(found.view(kind).get(), expected.view(kind)) else "DIFFERENT"


# --- judging ------------------------------------------------------------------------------------


def judge(outcomes: Sequence[GpuOutcome]) -> list[Verdict]:
    """One verdict for each target, the worst case of each kind."""
    return [*_fractions(outcomes), *_many_replicas(outcomes), *_peers(outcomes), _bits(outcomes)]


def _fractions(outcomes: Sequence[GpuOutcome]) -> Iterator[Verdict]:
    for least in sorted({o.target for o in outcomes if o.target is not None}, reverse=True):
        kinds: dict[str, list[GpuOutcome]] = {}
        for outcome in outcomes:
            if outcome.target == least:
                kinds.setdefault(_kind(outcome), []).append(outcome)
        for kind, found in kinds.items():
            worst = min(found, key=lambda o: o.entries[OURS].fraction)
            ratio = worst.entries[OURS].fraction
            yield Verdict(f"{kind}, of the copy", ratio, f"≥ {least:g}", ratio >= least, worst.case)


def _kind(outcome: GpuOutcome) -> str:
    name = outcome.case
    if outcome.row or "replicas" in name:
        return name
    narrow = "8-bit inputs, " if outcome.dtype.startswith("float8") else ""
    _, _, how = name.partition("stochastic ")
    return f"fold, {narrow}stochastic {how}" if how else "fold"


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
            (o.entries[peer].timing.min / o.entries[OURS].timing.min, o.case)
            for o in outcomes
            if peer in o.entries and "stochastic" not in o.case and not o.row
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
        ours = outcome.entries[OURS]
        rate = outcome.moved / ours.timing.min / 1e9
        row = [
            outcome.case,
            factor(ours.fraction),
            "-" if outcome.target is None else f"{outcome.target:g}",
        ]
        row += [duration(ours.timing.min), duration(ours.timing.median), f"{rate:,.0f}"]
        row += [
            factor(outcome.entries[p].timing.min / ours.timing.min) if p in outcome.entries else "-"
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
        *(f"/ {p}" for p in peers),
        "bits",
    ]
    notes = sorted({f"{n}: {why}" for o in outcomes for n, why in o.problems.items()})
    found = [
        Table(
            "Kernels; '/ peer': how many times as long the peer takes", headings, rows, tuple(notes)
        )
    ]
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


def slug(name: str) -> str:
    """A name for files.

    >>> slug("NVIDIA H200 (SXM)")
    'nvidia-h200-sxm'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    add = made.add_argument
    add(
        "--bytes", type=int, default=BYTES, help="of each input (default 2 GiB, as the targets say)"
    )
    add("--seconds", type=float, default=SECONDS, help="for each participant of a case")
    add("--only", metavar="TEXT", default="", help="the cases whose names contain this")
    add("--without", metavar="PEER", action="append", default=[], choices=[CUPY, JAX, TORCH])
    add("--json", type=Path, help="where results go (default: bench/results/gpu-NAME.json)")
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
    about = describe(cupy)
    path = given.json or FOLDER / f"gpu-{slug(about['name'])}.json"
    started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    outcomes: list[GpuOutcome] = []
    for case in all_cases():
        if given.only not in case.name:
            continue
        try:
            outcome = measure(case, cupy, given.bytes / BYTES, given.seconds, peers)
        except MemoryError as error:  # CuPy's is one
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        outcomes.append(outcome)
        ours = outcomes[-1].entries[OURS]
        print(f"{case.name}: {duration(ours.timing.min)}, {factor(ours.fraction)} of the copy, "
              f"bits {outcomes[-1].bits}", file=sys.stderr, flush=True)  # fmt: skip
        keep(path, about, started, given.bytes, outcomes)
    verdicts = judge(outcomes)
    print(f"{about['name']}, driver {about['driver']}, commit {machine.commit()}, {started}")
    for drawn in tables(outcomes, verdicts):
        print()
        draw(drawn)
        for note in drawn.notes:
            print(f"  {note}")
    print(f"\nwritten to {path.name}")
    return 0 if all(v.met is not False for v in verdicts if v.ratio is None) else 1


def keep(
    path: Path, about: dict[str, Any], started: str, size: int, outcomes: Sequence[GpuOutcome]
) -> None:
    """Write the results so far."""
    content = {
        "schema": 1,
        "machine": machine.survey(),
        "gpu": about,
        "started": started,
        "bytes": size,
        "cases": [asdict(outcome) for outcome in outcomes],
        "targets": [asdict(verdict) for verdict in judge(outcomes)],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
