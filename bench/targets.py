"""The targets of `docs/performance.md`, and whether a measurement meets them.

Most are ratios of the fastest calls in one run. If a target names several cases, the worst counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from bench.cases import COLLECTIVES, KI, LARGE, MI, SHORT, SHORT_SIZES, Case, Size
from bench.overhead import LAUNCH, NUMPY_CALL
from bench.popxl import NOTE as OP
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Exchange,
    InJax,
    Outcome,
    Results,
    SmallCall,
    Verdict,
)

JAX = "JAX shard_map"
FASTER, LONGER = "x faster", "x as long"
#: By the sign of a bound: whether a figure meets it, and the worst of several figures.
SIGNS = {
    "≤": (operator.le, max),
    "<": (operator.lt, max),
    "≥": (operator.ge, min),
    ">": (operator.gt, min),
}
Found = Iterable[tuple[float | None, str]]


def verdict(description: str, found: Found, sign: str, bound: float, unit: str) -> Verdict:
    """The worst of the figures, each with what it was measured on, against a bound."""
    meets, worst = SIGNS[sign]
    known = [(figure, basis) for figure, basis in found if figure is not None]
    figure, basis = worst(known, default=(None, ""))
    met = None if figure is None else meets(figure, bound)
    return Verdict(description, figure, f"{sign} {bound:g}{unit}", met, basis)


@dataclass(frozen=True)
class Target:
    """A bound for gpusim's time in a case: a ratio to participants of the same case, which `over`
    names, or nanoseconds. `of` is the way of gpusim that is judged."""

    description: str
    collectives: tuple[str, ...]
    variant: str
    sizes: tuple[Size, ...]
    over: tuple[str, ...]
    faster: float | None = None  # at least this many times as fast
    within: float | None = None  # at most this many times as long
    nanoseconds: float | None = None  # at most, for an element of all replicas' values
    of: str = OURS
    of_arithmetic: float | None = None  # at most this many times as long as the arithmetic: instead

    def matches(self, case: Case) -> bool:
        # Peers round to nearest: without a variant of its own, a target is about equal work.
        nearest = case.arithmetic.rounding == "nearest"
        return (
            case.collective in self.collectives
            and (case.variant == self.variant if self.variant else nearest)
            and (not self.sizes or case.size in self.sizes)
        )

    def judge(self, outcomes: Iterable[Outcome]) -> Verdict:
        matching = [outcome for outcome in outcomes if self.matches(outcome.case)]
        if self.nanoseconds is not None:
            each = [(o.seconds(self.of), o.case) for o in matching]
            found: Found = [
                (s * 1e9 / (c.replicas * c.elements), str(c)) for s, c in each if s is not None
            ]
            return verdict(self.description, found, "≤", self.nanoseconds, " ns an element")
        if self.faster is not None:
            found = self._ratios(matching)
            return verdict(self.description, found, "≥", self.faster, FASTER)
        assert self.within is not None
        instead = f", or {self.of_arithmetic:g}x of the arithmetic" if self.of_arithmetic else ""
        bound = "≤", self.within, f"{LONGER}{instead}"
        beyond = [outcome for outcome in matching if not self._is_near_arithmetic(outcome)]
        judged = verdict(self.description, self._ratios(beyond), *bound)
        if judged.met is not None:
            return judged
        near = verdict(self.description, self._ratios(matching), *bound)
        return near if near.met is None else replace(near, met=True)

    def _ratios(self, outcomes: Iterable[Outcome]) -> Iterator[tuple[float, str]]:
        for outcome in outcomes:
            for name in self.over:
                if (ratio := outcome.ratio(name, self.of)) is not None:
                    basis = f"{outcome.case}, {name}"
                    yield (ratio if self.faster is not None else 1 / ratio), basis

    def _is_near_arithmetic(self, outcome: Outcome) -> bool:
        """Whether a case takes little longer than its arithmetic."""
        ratio = outcome.ratio(self.of, ARITHMETIC) if self.of_arithmetic is not None else None
        return ratio is not None and ratio <= (self.of_arithmetic or 0)


TARGETS = (
    Target("psum float32, than JAX shard_map", ("psum",), "float32", LARGE, (JAX,), faster=2),
    Target("psum bfloat16, than JAX shard_map", ("psum",), "bfloat16", LARGE, (JAX,), faster=2),
    Target("psum float16 added in float32, than JAX's float16", ("psum",), "float16-f32", LARGE,
           (JAX,), faster=2.5),
    Target("psum float16, default reduction, than JAX", ("psum",), "float16", LARGE, (JAX,),
           faster=1.5),
    Target("psum float32, of the memory limit", ("psum",), "float32", LARGE, (LIMIT,), within=1.4),
    Target("psum float16 with stochastic rounding, of the same rounded to nearest", ("psum",),
           "float16-sr", LARGE, ("gpusim, nearest",), within=1.5),
    Target("all_gather, pbroadcast, all_to_all at 8 x 4 Mi, than JAX",
           ("all_gather", "pbroadcast", "all_to_all"), "", LARGE[:1], (JAX,), faster=10),
    Target("all_gather at 256 x 64 Ki, than JAX", ("all_gather",), "", LARGE[1:], (JAX,),
           faster=100),
    Target("ppermute, psum_scatter, of the memory limit", ("ppermute", "psum_scatter"), "float32",
           LARGE, (LIMIT,), within=1.4),
    Target("ppermute, psum_scatter, than JAX", ("ppermute", "psum_scatter"), "float32", LARGE,
           (JAX,), faster=1),
    Target("ragged_all_to_all, 8 replicas, 1 MiB a pair, of the memory limit",
           ("ragged_all_to_all",), "float32", ((8, 2 * MI),), (LIMIT,), within=1.5),
    Target("ragged_all_to_all, 256 replicas, 4 KiB a pair, of the memory limit",
           ("ragged_all_to_all",), "float32", ((256, 256 * KI),), (LIMIT,), within=3),
    Target("ragged_all_to_all, than mpi4py Alltoallv", ("ragged_all_to_all",), "float32",
           ((8, 2 * MI), (256, 256 * KI)), ("MPI 2", "MPI 8"), faster=1),
    *(
        Target(f"psum {variant}, of the memory limit", ("psum",), variant, LARGE, (LIMIT,),
               within=1.5, of_arithmetic=1.3)
        for variant in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    ),
    *(
        Target(f"psum {variant}, stochastic rounding at every step", ("psum",), variant, LARGE, (),
               nanoseconds=1.2)
        for variant in ("float16-sr16", "bfloat16-srb16")
    ),
    Target("ragged_all_to_all, rows of 64 B, of memcpy", (SHORT,), "float32", SHORT_SIZES,
           ("memcpy",), within=2),
    Target("the copies of these rows alone, of memcpy", (SHORT,), "float32", SHORT_SIZES,
           ("memcpy",), within=2, of="gpusim, segments"),
    Target("anything, than LocalTensor", COLLECTIVES, "", (), ("LocalTensor",), faster=10),
)  # fmt: skip

MICROSECONDS = 10.0  # vmap's overhead of a NumPy call, and a session's of an op
LAUNCH_MICROSECONDS = 20.0
#: By the number of replicas, how many times as long as a loop over them a step may take.
TRAINING = {2: 1.2, 64: 1 / 8}
#: Python calls at most, by the beginning of a small call's name.
SMALL_CALLS = {"psum": 85, "PopTorch step": 300}
SMALL_FASTER = 2.0  # a small psum, than in the older checkout
SMALL_WITHIN = 12.0  # times as long as np.add.reduce
PMAP = "pmap of 64 replicas, five"  # the beginning of a small call's name
PMAP_WITHIN = 2.0  # times as long as a Python loop
#: Seconds of the first psum with a compiled kernel: with an empty cache, the import included; and
#: in later processes, beyond the import.
START, LATER_START = 5.0, 0.3
RANKS_WITHIN = 1.5  # times as long in turns as with free threads
LARGE_VALUE = 16 * MI  # bytes; with smaller ones, latency dominates
#: psum over the instances of a World: the orders, the replicas of an instance, and how many times
#: as long as raw MPI it may take.
WORLDS = (
    (("engine",), (1,), 1.1),
    (("tree",), (1, 4), 1.5),
    (("linear", "reverse", "ring"), (1, 4), 2.0),
)
#: By the number of JAX's devices, how many times as long as XLA's own a sum may take.
IN_JAX = {64: 1.5, 8: 2.0}
COMPILED_WITHIN = 2.2  # times as long as plain JAX compiles


def spoken_of(case: Case) -> bool:
    """Whether a target names the case's size; float16 stands for a target without a dtype."""
    return any(
        target.matches(case) and (target.variant or case.variant == "float16")
        for target in TARGETS
        if target.sizes
    )


def judge(results: Results) -> list[Verdict]:
    """One verdict for each target."""
    return [
        *(target.judge(results.outcomes) for target in TARGETS),
        *_worlds(results.exchanges),
        *_trainings(results),
        *_small_calls(results),
        *_starts(results),
        *_ranks(results),
        *_in_jax(results.in_jax),
        *_overheads(results),
    ]


def _worlds(exchanges: list[Exchange]) -> Iterator[Verdict]:
    large = [e for e in exchanges if e.collective == "psum" and e.elements * 4 >= LARGE_VALUE]
    for orders, held, within in WORLDS:
        each = " or ".join(map(str, held))
        name = f"psum in a World, order {', '.join(orders)}, {each} to an instance, of mpi4py "
        found = [(e.ratio(), str(e)) for e in large if e.order in orders and e.held in held]
        yield verdict(f"{name}Allreduce", found, "≤", within, LONGER)


def _trainings(results: Results) -> Iterator[Verdict]:
    """The numbers of replicas that the targets name; the slower of gpusim's two ways counts."""
    for replicas, most in TRAINING.items():
        name = f"a step of training {replicas} replicas of a small MLP, than a loop in PyTorch"
        ways = {"lockstep": "ours", "trainingModel": "model"}
        ratios = [
            (ratio, way)
            for training in [t for t in results.trainings if t.replicas == replicas][-1:]
            for way, over in ways.items()
            if (ratio := training.ratio(over=over)) is not None
        ]
        if most < 1:
            yield verdict(name, ratios, "≥", 1 / most, FASTER)
        else:
            yield verdict(name, [(1 / ratio, way) for ratio, way in ratios], "≤", most, LONGER)


def _starts(results: Results) -> Iterator[Verdict]:
    """The slowest first psum, with an empty cache and in later processes."""
    found = [start for start in results.starts if start.problem is None]
    first = [(start.cold_import + start.cold, start.variant) for start in found]
    later = [(start.later, start.variant) for start in found]
    for when, each, most in (
        ("with an empty cache, import included", first, START),
        ("in later processes, beyond the import", later, LATER_START),
    ):
        name = f"the first psum by a compiled kernel {when}, in seconds"
        yield verdict(name, each, "<", most, " s")


def _small_calls(results: Results) -> Iterator[Verdict]:
    """The Python calls of each small call, the time of the psum beside NumPy's and an older
    checkout's, and that of pmap beside a Python loop."""

    def named(name: str) -> list[SmallCall]:
        return [call for call in results.small if call.name.startswith(name)]

    for name, most in SMALL_CALLS.items():
        counts = [(call.calls, f"{call.before} before") for call in named(name)[-1:]]
        yield verdict(f"Python calls of a small {name}", counts, "≤", most, "")
    name, psum = "a small psum under vmap", named("psum")[-1:]
    ratios: Found = [(call.ratio("numpy"), "") for call in psum]
    yield verdict(f"{name}, of np.add.reduce", ratios, "≤", SMALL_WITHIN, LONGER)
    ratios = [(1 / ratio, "") for call in psum if (ratio := call.ratio("old"))]
    name = f"{name}, than in the checkout beside (--beside)"
    yield verdict(name, ratios, "≥", SMALL_FASTER, FASTER)
    name = "pmap of a few NumPy calls, than a Python loop over the replicas"
    ratios = [(call.ratio("numpy"), "") for call in named(PMAP)[:1]]
    yield verdict(name, ratios, "≤", PMAP_WITHIN, LONGER)


def _ranks(results: Results) -> Iterator[Verdict]:
    """Ranks in turns beside free ones, and both beside PyTorch's simulations; the worst case."""
    name = "ranks of torch.distributed"
    each: Found = [(case.ratio("turns", "free"), str(case)) for case in results.ranks]
    yield verdict(f"{name} in turns, of free ones", each, "≤", RANKS_WITHIN, LONGER)
    for peer, title in (("threaded", "torch's threaded group"), ("LocalTensor", "LocalTensor")):
        each = [
            (case.ratio(peer, ours), f"{case}, {ours}")
            for case in results.ranks
            for ours in ("turns", "free")
        ]
        yield verdict(f"{name}, than {title}", each, ">", 1, FASTER)


def _in_jax(cases: list[InJax]) -> Iterator[Verdict]:
    """Sums and compilations in JAX by medians, each the worst case."""
    for devices, most in IN_JAX.items():
        runs = [c for c in cases if c.measures == "run" and c.devices == devices]
        name = f"JAX sums of 256 KiB on {devices} devices, of XLA's own"
        yield verdict(name, [(c.ratio(), str(c)) for c in runs], "≤", most, LONGER)
    compilations = [(c.ratio(), str(c)) for c in cases if c.measures == "compile"]
    name = "JAX programs' compilation with chosen sums, of plain JAX's"
    yield verdict(name, compilations, "≤", COMPILED_WITHIN, LONGER)


def _overheads(results: Results) -> Iterator[Verdict]:
    """The costliest of the overheads whose names and notes begin so."""
    vmaps = "vmap's overhead of a batched NumPy call on small arrays"
    launches = "a kernel launch's time on the host beyond CuPy's x + y"
    for description, name, note, most in (
        (vmaps, "vmap", NUMPY_CALL, MICROSECONDS),
        ("a PopXL session's overhead of an op in a repeat", "popxl", OP, MICROSECONDS),
        (launches, "launch", LAUNCH, LAUNCH_MICROSECONDS),
    ):
        found = [
            (overhead.microseconds, overhead.name)
            for overhead in results.overheads
            if overhead.name.startswith(name) and overhead.note.startswith(note)
        ]
        yield verdict(f"{description}, in microseconds", found, "<", most, " us")
