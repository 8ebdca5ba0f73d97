"""The targets of `docs/performance.md`, and whether a measurement meets them.

Most are ratios of the fastest calls in one run. If a target names several cases, the worst counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.cases import COLLECTIVES, KI, LARGE, MI, SHORT, SHORT_SIZES, Case, Size
from bench.overhead import LAUNCH, NUMPY_CALL
from bench.popxl import NOTE as OP
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Exchange,
    Outcome,
    RanksCase,
    Results,
    SmallCall,
    Start,
    Training,
    Verdict,
)

JAX = "JAX shard_map"


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

    @property
    def bound(self) -> str:
        if self.nanoseconds:
            return f"≤ {self.nanoseconds:g} ns an element"
        instead = f", or {self.of_arithmetic:g}x of the arithmetic" if self.of_arithmetic else ""
        if self.faster:
            return f"≥ {self.faster:g}x faster"
        return f"≤ {self.within:g}x as long{instead}"

    def matches(self, case: Case) -> bool:
        # Peers round to nearest: without a variant of its own, a target is about equal work.
        nearest = case.arithmetic.rounding == "nearest"
        return (
            case.collective in self.collectives
            and (case.variant == self.variant if self.variant else nearest)
            and (not self.sizes or case.size in self.sizes)
        )


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

DISPATCH_MICROSECONDS = 10.0
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


@dataclass(frozen=True)
class WorldTarget:
    """A bound for psum over the instances of a World, by the time that raw MPI takes."""

    orders: tuple[str, ...]
    held: tuple[int, ...]  # replicas of an instance
    within: float

    @property
    def description(self) -> str:
        each = " or ".join(map(str, self.held))
        orders = ", ".join(self.orders)
        return f"psum in a World, order {orders}, {each} to an instance, of mpi4py Allreduce"

    def matches(self, exchange: Exchange) -> bool:
        return (
            exchange.collective == "psum"
            and exchange.order in self.orders
            and exchange.held in self.held
            and exchange.elements * 4 >= LARGE_VALUE
        )


WORLD_TARGETS = (
    WorldTarget(("engine",), (1,), 1.1),
    WorldTarget(("tree",), (1, 4), 1.5),
    WorldTarget(("linear", "reverse", "ring"), (1, 4), 2),
)


def spoken_of(case: Case) -> bool:
    """Whether a target names the case's size; float16 stands for a target without a dtype."""
    return any(
        target.matches(case) and (target.variant or case.variant == "float16")
        for target in TARGETS
        if target.sizes
    )


def judge(results: Results) -> list[Verdict]:
    """One verdict for each target."""
    verdicts = [_judge(target, results.outcomes) for target in TARGETS]
    worlds = [_judge_world(target, results.exchanges) for target in WORLD_TARGETS]
    training = _judge_training(results.trainings)
    small = _judge_small(results.small)
    ranks = _judge_ranks(results.ranks)
    starts = _judge_starts(results.starts)
    overheads = _dispatch(results), _session(results), _launch(results)
    return [*verdicts, *worlds, *training, *small, *starts, *ranks, *overheads]


def _judge(target: Target, outcomes: Iterable[Outcome]) -> Verdict:
    found = list(_ratios(target, outcomes))
    if not found:
        return Verdict(target.description, None, target.bound, None)
    if target.nanoseconds is not None:
        worst, basis = max(found)
        met = worst <= target.nanoseconds
        return Verdict(target.description, worst, target.bound, met, basis)
    if target.faster is not None:
        ratio, basis = min(found)
        return Verdict(target.description, ratio, target.bound, ratio >= target.faster, basis)
    assert target.within is not None
    bound_by_arithmetic = {*_near_arithmetic(target, outcomes)}
    beyond = [each for each in found if each[1] not in bound_by_arithmetic]
    ratio, basis = max(beyond or found)
    met = not beyond or ratio <= target.within
    return Verdict(target.description, ratio, target.bound, met, basis)


def _ratios(target: Target, outcomes: Iterable[Outcome]) -> Iterator[tuple[float, str]]:
    """The ratios or nanoseconds of a target, each with its case and participant."""
    for outcome in outcomes:
        if not target.matches(outcome.case):
            continue
        if target.nanoseconds is not None and (seconds := outcome.seconds(target.of)) is not None:
            yield seconds * 1e9 / (outcome.case.replicas * outcome.case.elements), str(outcome.case)
        for name in target.over:
            ratio = outcome.ratio(name, target.of)
            if ratio is not None:
                basis = f"{outcome.case}, {name}"
                yield (ratio if target.faster is not None else 1 / ratio), basis


def _near_arithmetic(target: Target, outcomes: Iterable[Outcome]) -> Iterator[str]:
    """The bases of the cases that take little longer than their arithmetic."""
    for outcome in outcomes:
        if target.of_arithmetic is None or not target.matches(outcome.case):
            continue
        ratio = outcome.ratio(target.of, ARITHMETIC)
        if ratio is not None and ratio <= target.of_arithmetic:
            yield from (f"{outcome.case}, {name}" for name in target.over)


def _judge_world(target: WorldTarget, exchanges: Iterable[Exchange]) -> Verdict:
    found = [
        (ratio, str(exchange))
        for exchange in exchanges
        if target.matches(exchange) and (ratio := exchange.ratio()) is not None
    ]
    bound = f"≤ {target.within:g}x as long"
    if not found:
        return Verdict(target.description, None, bound, None)
    ratio, basis = max(found)
    return Verdict(target.description, ratio, bound, ratio <= target.within, basis)


def _judge_training(trainings: Iterable[Training]) -> Iterator[Verdict]:
    """The numbers of replicas that the targets name; the slower of gpusim's two ways counts."""
    by_count = {training.replicas: training for training in trainings}
    for replicas, most in TRAINING.items():
        description = (
            f"a step of training {replicas} replicas of a small MLP, than a loop in PyTorch"
        )
        found = by_count.get(replicas)
        ways = {"lockstep": "ours", "trainingModel": "model"}
        ratios = [
            (ratio, name)
            for name, over in ways.items()
            if found is not None and (ratio := found.ratio(over=over)) is not None
        ]
        ratio, basis = min(ratios, default=(None, ""))  # of the loop's time
        if most < 1:
            bound = f"≥ {1 / most:g}x faster"
        else:
            bound = f"≤ {most:g}x as long"
            ratio = None if ratio is None else 1 / ratio
        met = None if ratio is None else (ratio >= 1 / most if most < 1 else ratio <= most)
        yield Verdict(description, ratio, bound, met, basis)


def _judge_starts(starts: Iterable[Start]) -> Iterator[Verdict]:
    """The slowest first psum, with an empty cache and in later processes."""
    found = [start for start in starts if start.problem is None]
    first = [(start.cold_import + start.cold, start.variant) for start in found]
    later = [(start.later, start.variant) for start in found]
    for what, each, most in (
        ("with an empty cache, import included", first, START),
        ("in later processes, beyond the import", later, LATER_START),
    ):
        seconds, basis = max(each, default=(None, ""))
        met = None if seconds is None else seconds < most
        description = f"the first psum by a compiled kernel {what}, in seconds"
        yield Verdict(description, seconds, f"< {most:g} s", met, basis)


def _judge_small(found: Iterable[SmallCall]) -> Iterator[Verdict]:
    """The Python calls of each small call, the time of the psum beside NumPy's and an older
    checkout's, and that of pmap beside a Python loop."""
    found = list(found)
    by_name = {name: call for call in found for name in SMALL_CALLS if call.name.startswith(name)}
    for name, most in SMALL_CALLS.items():
        call = by_name.get(name)
        calls = call.calls if call else None
        met = None if calls is None else calls <= most
        basis = f"{call.before} before" if call and calls is not None else ""
        yield Verdict(f"Python calls of a small {name}", calls, f"≤ {most}", met, basis)
    ratio = by_name["psum"].ratio("numpy") if "psum" in by_name else None
    yield Verdict(
        "a small psum under vmap, of np.add.reduce",
        ratio,
        f"≤ {SMALL_WITHIN:g}x as long",
        None if ratio is None else ratio <= SMALL_WITHIN,
    )
    ratio = by_name["psum"].ratio("old") if "psum" in by_name else None
    faster = 1 / ratio if ratio else None
    yield Verdict(
        "a small psum under vmap, than in the checkout beside (--beside)",
        faster,
        f"≥ {SMALL_FASTER:g}x faster",
        None if faster is None else faster >= SMALL_FASTER,
    )
    ratio = next((call.ratio("numpy") for call in found if call.name.startswith(PMAP)), None)
    yield Verdict(
        "pmap of a few NumPy calls, than a Python loop over the replicas",
        ratio,
        f"≤ {PMAP_WITHIN:g}x as long",
        None if ratio is None else ratio <= PMAP_WITHIN,
    )


def _judge_ranks(found: Sequence[RanksCase]) -> Iterator[Verdict]:
    """Ranks in turns beside free ones, and both beside PyTorch's simulations; the worst case."""
    each = [(ratio, str(case)) for case in found if (ratio := case.ratio("turns", "free"))]
    ratio, basis = max(each, default=(None, ""))
    met = None if ratio is None else ratio <= RANKS_WITHIN
    name = "ranks of torch.distributed in turns, of free ones"
    yield Verdict(name, ratio, f"≤ {RANKS_WITHIN:g}x as long", met, basis)
    for peer, title in (("threaded", "torch's threaded group"), ("LocalTensor", "LocalTensor")):
        each = [
            (ratio, f"{case}, {ours}")
            for case in found
            for ours in ("turns", "free")
            if (ratio := case.ratio(peer, ours)) is not None
        ]
        ratio, basis = min(each, default=(None, ""))
        met = None if ratio is None else ratio > 1
        yield Verdict(f"ranks of torch.distributed, than {title}", ratio, "> 1x faster", met, basis)


def _dispatch(results: Results) -> Verdict:
    """The costliest NumPy operation under vmap."""
    description = "vmap's overhead of a batched NumPy call on small arrays, in microseconds"
    return _judge_overhead(description, results, "vmap", NUMPY_CALL)


def _session(results: Results) -> Verdict:
    """The costliest op of a PopXL session."""
    description = "a PopXL session's overhead of an op in a repeat, in microseconds"
    return _judge_overhead(description, results, "popxl", OP)


def _launch(results: Results) -> Verdict:
    """The costliest launch on a GPU."""
    description = "a kernel launch's time on the host beyond CuPy's x + y, in microseconds"
    return _judge_overhead(description, results, "launch", LAUNCH, LAUNCH_MICROSECONDS)


def _judge_overhead(
    description: str, results: Results, whose: str, what: str, most: float = DISPATCH_MICROSECONDS
) -> Verdict:
    """The costliest of those whose names and notes begin so."""
    found = [
        (overhead.microseconds, overhead.name)
        for overhead in results.overheads
        if overhead.microseconds is not None
        and overhead.name.startswith(whose)
        and overhead.note.startswith(what)
    ]
    bound = f"< {most:g} us"
    if not found:
        return Verdict(description, None, bound, None)
    worst, name = max(found)
    return Verdict(description, worst, bound, worst < most, name)
