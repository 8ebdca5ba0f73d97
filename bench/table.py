"""Results as people read them: ratios first, then times, reasons below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bench.cases import size_name
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Exchange,
    InJax,
    Outcome,
    Overhead,
    RanksCase,
    Results,
    SmallCall,
    Start,
    Training,
    Verdict,
)
from bench.timing import Timing
from gpusim.tools.tables import print_table

#: The participants that gpusim is compared with, and the headings of their columns.
PEERS = {
    "NumPy": "NumPy",
    "JAX shard_map": "JAX smap",
    "JAX vmap": "JAX vmap",
    "LocalTensor": "LocalT.",
    "MPI 2": "MPI 2",
    "MPI 8": "MPI 8",
}
#: gpusim's other ways to the same result; the tables show their times.
WAYS = {
    "gpusim": "gpusim",
    "gpusim, NumPy kernels": "NumPy k.",
    "gpusim, copied": "copied",  # in older files
    "gpusim, nearest": "nearest",
    "gpusim, segments": "segments",
    "memcpy": "memcpy",
    "gpusim.collectives": "stacked",
    "gpusim pmap": "pmap",
    "gpusim in JAX": "in JAX",
    LIMIT: "limit",
    ARITHMETIC: "arithm.",
}
#: They take part in some cases only; their absence needs no reason.
SPECIAL = ("gpusim, nearest", "gpusim, segments", "memcpy", ARITHMETIC)
LEFT = set("collective dtype order instances target bound operation note".split())
LEFT |= {"", "measured on"}
PIPE = 220  # columns of a pipe or a file, which have no width of their own


Row = list[str]


@dataclass(frozen=True)
class Table:
    """A title, headings and rows of text."""

    title: str
    headings: list[str]
    rows: list[Row]
    notes: tuple[str, ...] = ()


Maker = Callable[[Results], Table]


def factor(ratio: float | None) -> str:
    """A ratio in three digits.

    >>> factor(1.234), factor(23.45), factor(12345.0), factor(None)
    ('1.23', '23.4', '12,345', '-')
    """
    return "-" if ratio is None else f"{ratio:,.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}"


def duration(seconds: float | None) -> str:
    """Seconds in a fitting unit.

    >>> duration(1.5), duration(0.0123), duration(4.56e-05), duration(2.5e-07), duration(None)
    ('1.50 s', '12.3 ms', '45.6 us', '0.25 us', '-')
    """
    if seconds is None:
        return "-"
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def amount(count: int | None) -> str:
    """Bytes in mebibytes.

    >>> amount(3 * 2**20), amount(None)
    ('3.0', '-')
    """
    return "-" if count is None else f"{count / 2**20:,.1f}"


def tables(results: Results) -> list[Table]:
    """Everything, the targets last."""
    by_size = groupby(results.outcomes, key=lambda outcome: outcome.case.size)
    made = [cases_table(size_name(size), list(outcomes)) for size, outcomes in by_size]
    return made + [table for part in PARTS if (table := part(results)).rows or table.notes]


def cases_table(size: str, outcomes: Sequence[Outcome]) -> Table:
    """The cases of one size: against the limit, against the peers, and times."""
    present = {name for o in outcomes for name, entry in o.entries.items() if entry.timing}
    peers = {name: heading for name, heading in PEERS.items() if name in present}
    ways = {name: heading for name, heading in WAYS.items() if name in present}
    memory = any(outcome.extra_bytes is not None for outcome in outcomes)
    headings = ["collective", "dtype", "/ limit", *peers.values(), *ways.values(), "median"]
    rows = []
    for outcome in outcomes:
        case = outcome.case
        ours = outcome.entries.get(OURS)
        median = ours.timing.median if ours and ours.timing else None
        row = [case.collective, case.variant, factor(outcome.ratio(OURS, LIMIT))]
        row += [factor(outcome.ratio(name)) for name in peers]
        row += [duration(outcome.seconds(name)) for name in ways]
        rows.append([*row, duration(median), *([amount(outcome.extra_bytes)] if memory else [])])
    headings += ["extra MiB"] if memory else []
    return Table(f"{size} elements", headings, rows, tuple(reasons(outcomes)))


def reasons(outcomes: Iterable[Outcome]) -> list[str]:
    """Why peers have no figure: one line for a peer and a reason, with the cases."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for entry in outcome.entries.values():
            if entry.problem and entry.name not in SPECIAL:
                where = found.setdefault(f"{entry.name}: {entry.problem}", [])
                where.append(f"{outcome.case.collective} {outcome.case.variant}")
    lines = []
    for reason, where in found.items():
        cases = where if len(where) <= 3 else [*where[:2], f"{len(where) - 2} more"]
        lines.append(f"{reason} ({', '.join(cases)})")
    return lines


def part(attribute: str, title: str, headings: str) -> Callable[[Callable[[Any], Row]], Maker]:
    """Make the function that gives an item's row one that gives the table of all items.

    Items with a problem have no row; the problems are the table's notes.
    """

    def maker(row: Callable[[Any], Row]) -> Maker:
        def made(results: Results) -> Table:
            found = getattr(results, attribute)
            rows = [row(each) for each in found if not each.problem]
            notes = tuple(note for each in found for note in each.notes)
            return Table(title, headings.split(", "), rows, notes)

        return made

    return maker


def fastest(*timings: Timing | None) -> Row:
    return [duration(timing.min if timing else None) for timing in timings]


@part("overheads", "Overhead", "operation, us, note")
def overhead_table(o: Overhead) -> Row:
    return [o.name, "-" if o.microseconds is None else f"{o.microseconds:,.1f}", o.note]


@part(
    "small",
    "Small calls",
    "operation, Python calls, before, / NumPy, / before, gpusim, NumPy's, before's",
)
def small_table(call: SmallCall) -> Row:
    ratios = [factor(call.ratio(over)) for over in ("numpy", "old")]
    counts = [str(call.calls), str(call.before)]
    return [call.name, *counts, *ratios, *fastest(call.ours, call.numpy, call.old)]


@part(
    "starts",
    "The first psum by a compiled kernel",
    "dtype, import, empty cache, import, later process",
)
def starts_table(start: Start) -> Row:
    times = start.cold_import, start.cold, start.later_import, start.later
    return [start.variant, *map(duration, times)]


@part(
    "exchanges",
    "Worlds, beside raw mpi4py",
    "collective, order, instances, / MPI, medians, gpusim, MPI, median, MPI's",
)
def worlds_table(e: Exchange) -> Row:
    size = size_name((e.held, e.elements))
    ratios = [factor(e.ratio(by)) for by in ("min", "median")]
    medians = [duration(timing.median if timing else None) for timing in (e.ours, e.raw)]
    where = [e.collective, e.order, f"{e.instances} of {size}"]
    return [*where, *ratios, *fastest(e.ours, e.raw), *medians]


@part(
    "trainings",
    "A step of training, beside PyTorch",
    "replicas, loop, one batch, gpusim, trainingModel, loop's, one batch's, replicas / s",
)
def trainings_table(t: Training) -> Row:
    per_second = t.replicas / t.ours.min if t.ours else 0.0
    ratios = [factor(t.ratio(name)) for name in ("loop", "whole")]
    times = fastest(t.ours, t.model, t.loop, t.whole)
    return [f"{t.replicas} x {t.batch}", *ratios, *times, f"{float(f'{per_second:.3g}'):,.0f}"]


@part(
    "ranks",
    "A step on simulated ranks of torch.distributed, beside PyTorch's own",
    "operation, turns / free, threaded, LocalT., turns, free, threaded's, LocalT.'s, load",
)
def ranks_table(case: RanksCase) -> Row:
    ratios = [case.ratio("turns", "free"), case.ratio("threaded"), case.ratio("LocalTensor")]
    times = fastest(*map(case.timings.get, ("turns", "free", "threaded", "LocalTensor")))
    load = "-" if case.load is None else f"{case.load:.1f}"
    return [str(case), *map(factor, ratios), *times, load]


@part(
    "in_jax",
    "JAX programs with gpusim's sums, beside plain JAX's (medians)",
    "operation, dtype, order, devices, / XLA, CPU / XLA, gpusim, XLA, load",
)
def in_jax_table(case: InJax) -> Row:
    size = f" of {case.size // 1024} KiB" if case.size else ""
    what = [f"{case.measures} {case.program}{size}", case.dtype, case.reduction]
    medians = [duration(timing.median if timing else None) for timing in (case.ours, case.xla)]
    ratios = [factor(case.ratio()), factor(case.cpu_ratio)]
    load = "-" if case.load is None else f"{case.load:.1f}"
    return [*what, str(case.devices), *ratios, *medians, load]


VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


@part("targets", "Targets", ", measured, bound, target, measured on")
def targets_table(v: Verdict) -> Row:
    return [VERDICTS[v.met], factor(v.ratio), v.target, v.description, v.basis]


#: The tables beside those of the cases, in their order.
PARTS = (
    overhead_table,
    small_table,
    starts_table,
    worlds_table,
    trainings_table,
    ranks_table,
    in_jax_table,
    targets_table,
)


def heading(results: Results) -> str:
    """The machine, in a few lines."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    gib = (machine["memory_bytes"] or 0) / 2**30
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {gib:.0f} GiB, {machine['system']}",
        f"Python {machine['python']}, {packages}, kernels: {machine.get('kernels', 'numpy')}",
        f"commit {machine['commit']}, {results.started}, {results.seconds:.0f} s, load average "
        f"{results.load_before} before and {results.load_after} after",
        f"copies {(results.bandwidth or 0) / 1e9:.1f} GB/s, read and written",
        "Ratios compare the fastest calls. '/ limit': how many times as long as copying the bytes "
        "once; peers: how many times as long as gpusim.",
    ]
    if results.interrupted:
        lines.append("Interrupted: this is what had been measured.")
    return "\n".join(lines)


def show(results: Results) -> None:
    """Print it all."""
    print(heading(results))
    for table in tables(results):
        print()
        draw(table)
        for note in table.notes:
            print(f"  {note}")


def draw(table: Table) -> None:
    """Print a table, without its notes."""
    names = [row[0] for row in table.rows] if table.headings[0] == "collective" else []
    breaks = {k for k in range(1, len(names)) if names[k] != names[k - 1]}
    print_table(table.title, table.headings, table.rows, breaks, LEFT, PIPE)
