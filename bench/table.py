"""Results as people read them: ratios first, then times, reasons below."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby

from bench.cases import size_name
from bench.results import ARITHMETIC, LIMIT, OURS, Outcome, Results

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


@dataclass(frozen=True)
class Table:
    """A title, headings and rows of text."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    notes: tuple[str, ...] = ()


def factor(ratio: float | None) -> str:
    """A ratio in three digits.

    >>> factor(1.234), factor(23.45), factor(12345.0), factor(None)
    ('1.23', '23.4', '12,345', '-')
    """
    if ratio is None:
        return "-"
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def duration(seconds: float | None) -> str:
    """Seconds in a fitting unit.

    >>> duration(1.5), duration(0.0123), duration(4.56e-05), duration(2.5e-07), duration(None)
    ('1.50 s', '12.3 ms', '45.6 us', '0.25 us', '-')
    """
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "us":
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


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
    if results.overheads:
        made.append(overhead_table(results))
    if results.small:
        made.append(small_table(results))
    if results.starts:
        made.append(starts_table(results))
    if results.exchanges:
        made.append(worlds_table(results))
    if results.trainings:
        made.append(trainings_table(results))
    if results.ranks:
        made.append(ranks_table(results))
    if results.targets:
        made.append(targets_table(results))
    return made


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
    found: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for entry in outcome.entries.values():
            if entry.problem and entry.name not in SPECIAL:
                where = found.setdefault((entry.name, entry.problem), [])
                where.append(f"{outcome.case.collective} {outcome.case.variant}")
    lines = []
    for (name, problem), where in found.items():
        cases = where if len(where) <= 3 else [*where[:2], f"{len(where) - 2} more"]
        lines.append(f"{name}: {problem} ({', '.join(cases)})")
    return lines


def overhead_table(results: Results) -> Table:
    rows = [
        [o.name, "-" if o.microseconds is None else f"{o.microseconds:,.1f}", o.note]
        for o in results.overheads
    ]
    return Table("Overhead", ["operation", "us", "note"], rows)


def small_table(results: Results) -> Table:
    """Small calls: Python calls, and times beside NumPy's and an older checkout's."""
    rows, notes = [], []
    for found in results.small:
        if found.problem:
            notes.append(f"{found.name}: {found.problem}")
            continue
        times = [None if t is None else t.min for t in (found.ours, found.numpy, found.old)]
        ratios = [factor(found.ratio(over)) for over in ("numpy", "old")]
        counts = [str(found.calls), str(found.before)]
        rows.append([found.name, *counts, *ratios, *map(duration, times)])
    headings = ["operation", "Python calls", "before", "/ NumPy", "/ before"]
    headings += ["gpusim", "NumPy's", "before's"]
    return Table("Small calls", headings, rows, tuple(notes))


def starts_table(results: Results) -> Table:
    """The first psum of a process, which compiles its kernel or finds it in the cache."""
    rows, notes = [], []
    for found in results.starts:
        if found.problem:
            notes.append(f"{found.variant}: {found.problem}")
            continue
        times = (found.cold_import, found.cold, found.later_import, found.later)
        rows.append([found.variant, *map(duration, times)])
    headings = ["dtype", "import", "empty cache", "import", "later process"]
    return Table("The first psum by a compiled kernel", headings, rows, tuple(notes))


def worlds_table(results: Results) -> Table:
    """Collectives between instances: against raw MPI, and times."""
    rows, notes = [], []
    for found in results.exchanges:
        if found.problem:
            notes.append(f"{found}: {found.problem}" if found.collective else found.problem)
            continue
        times = [(t.min, t.median) if t else (None, None) for t in (found.ours, found.raw)]
        (ours, our_median), (raw, raw_median) = times
        cells = [factor(found.ratio()), factor(found.ratio("median"))]
        cells += map(duration, (ours, raw, our_median, raw_median))
        size = size_name((found.held, found.elements))
        rows.append([found.collective, found.order, f"{found.instances} of {size}", *cells])
    headings = ["collective", "order", "instances", "/ MPI", "medians", "gpusim", "MPI"]
    headings += ["median", "MPI's"]
    return Table("Worlds, beside raw mpi4py", headings, rows, tuple(notes))


def trainings_table(results: Results) -> Table:
    """Training on simulated replicas: against PyTorch, and times."""
    rows, notes = [], []
    for found in results.trainings:
        if found.problem:
            notes.append(f"{found.replicas} replicas: {found.problem}")
            continue
        ways = (found.ours, found.model, found.loop, found.whole)
        times = [None if t is None else t.min for t in ways]
        per_second = found.replicas / found.ours.min if found.ours else 0.0
        row = [f"{found.replicas} x {found.batch}", factor(found.ratio())]
        row += [
            factor(found.ratio("whole")),
            *map(duration, times),
            f"{float(f'{per_second:.3g}'):,.0f}",
        ]
        rows.append(row)
    headings = ["replicas", "loop", "one batch", "gpusim", "trainingModel", "loop's"]
    headings += ["one batch's", "replicas / s"]
    return Table("A step of training, beside PyTorch", headings, rows, tuple(notes))


def ranks_table(results: Results) -> Table:
    """Steps on simulated ranks: against PyTorch's own simulations, and times."""
    rows, notes = [], []
    names = ("turns", "free", "threaded", "LocalTensor")
    for found in results.ranks:
        notes += [f"{name}: {text} ({found})" for name, text in found.problems.items()]
        ratios = [found.ratio("turns", "free"), *map(found.ratio, names[2:])]
        times = [found.timings[name].min if name in found.timings else None for name in names]
        load = "-" if found.load is None else f"{found.load:.1f}"
        rows.append([str(found), *map(factor, ratios), *map(duration, times), load])
    headings = ["operation", "turns / free", "threaded", "LocalT.", "turns", "free"]
    headings += ["threaded's", "LocalT.'s", "load"]
    title = "A step on simulated ranks of torch.distributed, beside PyTorch's own"
    return Table(title, headings, rows, tuple(notes))


VERDICTS = {True: "met", False: "MISSED", None: "not measured"}


def targets_table(results: Results) -> Table:
    rows = [
        [VERDICTS[v.met], factor(v.ratio), v.target, v.description, v.basis]
        for v in results.targets
    ]
    return Table("Targets", ["", "measured", "bound", "target", "measured on"], rows)


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
    """Print it all: with rich where that is installed, else in plain columns."""
    print(heading(results))
    for table in tables(results):
        print()
        draw(table)
        for note in table.notes:
            print(f"  {note}")


def draw(table: Table) -> None:
    """Print a table, without its notes."""
    (_print_rich if find_spec("rich") is not None else _print_plain)(table)


def _print_plain(table: Table) -> None:
    lines = [table.headings, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(table.title)
    for line in lines:
        cells = zip(line, widths, table.headings, strict=True)
        print("  ".join(c.ljust(w) if h in LEFT else c.rjust(w) for c, w, h in cells).rstrip())


def _print_rich(table: Table) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Rich
    from rich.text import Text

    drawn = Rich(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in table.headings:
        drawn.add_column(title, justify="left" if title in LEFT else "right", no_wrap=True)
    previous = None
    for row in table.rows:
        if previous is not None and row[0] != previous and table.headings[0] == "collective":
            drawn.add_section()
        previous = row[0]
        drawn.add_row(*map(Text, row))
    # A pipe or a file has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=220)
    console.print(drawn)
