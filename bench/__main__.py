"""The command: python -m bench, or make bench."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from bench import (
    in_jax,
    machine,
    memory,
    overhead,
    picture,
    popxl,
    ranks,
    small,
    start,
    table,
    training,
    worlds,
)
from bench.cases import (
    COLLECTIVES,
    VARIANTS,
    Case,
    Size,
    parse_size,
    select,
)
from bench.measure import measure, with_bandwidth
from bench.peers import FAMILIES, Peer, roster
from bench.peers.limit import Limit
from bench.results import LIMIT, OURS, Outcome, Results
from bench.targets import judge, spoken_of

BUDGET = 4.0  # seconds for a case, about
QUICK_BUDGET = 0.6
# Seconds for a collective and size of a World, and the sizes.
WORLDS, QUICK_WORLDS = (3.0, worlds.SIZES), (1.0, worlds.QUICK_SIZES)
# Seconds for a step of training, and the numbers of replicas.
TRAININGS, QUICK_TRAININGS = (4.0, training.REPLICAS), (1.5, training.QUICK_REPLICAS)
# Seconds for a case of simulated ranks, and the cases.
RANKS, QUICK_RANKS = (40.0, ranks.CASES), (8.0, ranks.QUICK_CASES)
# Seconds for a JAX program with all its reductions.
IN_JAX, QUICK_IN_JAX = 12.0, 3.0
PARTS = ("memory", "overhead", "small", "start", "worlds", "training", "ranks", "jax", "cases")
LATEST = Path(__file__).parent / "results" / "latest.json"


def listed(kind: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: names with commas between them, each one of the known."""

    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no {kind} {name!r}; choose from {', '.join(known)}"
                )
        return chosen

    return names


def sizes(text: str) -> list[Size]:
    """An argument type: sizes with commas between them."""
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    made.description = "Measure gpusim's collectives against its alternatives, in turns."
    add = made.add_argument
    add(
        "--collectives",
        metavar="NAMES",
        type=listed("collective", COLLECTIVES),
        default=list(COLLECTIVES),
        help=", ".join(COLLECTIVES),
    )
    add(
        "--dtypes",
        metavar="NAMES",
        type=listed("dtype", list(VARIANTS)),
        help=f"{', '.join(VARIANTS)}; default: all for psum, three for the others",
    )
    add("--sizes", metavar="SIZES", type=sizes, help="replicas x elements, such as 8x4Mi,64x256Ki")
    add(
        "--peers",
        metavar="NAMES",
        type=listed("peer", list(FAMILIES)),
        default=list(FAMILIES),
        help=f"{', '.join(FAMILIES)}; gpusim always takes part",
    )
    add(
        "--quick",
        action="store_true",
        help="the targets' cases only, in less time",
    )
    add("--budget", metavar="S", type=float, help=f"seconds for a case (default {BUDGET:g})")
    add(
        "--json",
        metavar="FILE",
        type=Path,
        default=LATEST,
        help="where the results go (default: latest.json in bench/results)",
    )
    add(
        "--without",
        metavar="NAMES",
        type=listed("part", PARTS),
        default=[],
        help=f"{', '.join(PARTS)}: parts to leave out",
    )
    add(
        "--beside",
        metavar="PATH",
        type=Path,
        help="an older checkout of gpusim, whose small calls are measured in turns with these",
    )
    add(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw each participant's time over the memory's limit (.svg, .png or .pdf)",
    )
    add(
        "--show", metavar="FILE", type=Path, help="show results of another run, and measure nothing"
    )
    return made  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if (problem := refused(given)) is not None:
        print(problem, file=sys.stderr)
        return 2
    if given.show:
        try:
            results = Results.load(given.show)
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"--show {given.show}: not results of the bench: {error}", file=sys.stderr)
            return 2
        results.targets = judge(results)
        table.show(results)
        return plotted(results, given.plot)
    results = Results(machine.survey(), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", machine.load())
    began = time.monotonic()
    budget = given.budget or (QUICK_BUDGET if given.quick else BUDGET)
    cases = list(select(given.collectives, given.dtypes, given.sizes))
    if given.quick and given.sizes is None:
        cases = [case for case in cases if spoken_of(case)]
    peers = roster(given.peers)
    try:
        if "cases" not in given.without:
            with ended(peers):
                for case in counted(cases, "cases"):
                    results.outcomes.append(measure(case, peers, budget))
                    print(line(results.outcomes[-1]), file=sys.stderr)
                    keep(results, began, given.json, peers)
        if "overhead" not in given.without:
            seconds = 0.1 if given.quick else 0.3
            results.overheads += overhead.overheads(seconds)
            results.overheads += popxl.measured(seconds)
        if "small" not in given.without:
            seconds = 1.0 if given.quick else 3.0
            beside = given.beside and given.beside.resolve()
            for call in small.small_calls(seconds, beside):
                results.small.append(call)
                keep(results, began, given.json, peers)
        if "start" not in given.without:
            for found_start in start.starts():
                results.starts.append(found_start)
                keep(results, began, given.json, peers)
        if "worlds" not in given.without:
            for exchange in worlds.exchanges(*QUICK_WORLDS if given.quick else WORLDS):
                results.exchanges.append(exchange)
                keep(results, began, given.json, peers)
        if "training" not in given.without:
            for found in training.trainings(*QUICK_TRAININGS if given.quick else TRAININGS):
                results.trainings.append(found)
                keep(results, began, given.json, peers)
        if "ranks" not in given.without:
            for case_of_ranks in ranks.ranks_cases(*QUICK_RANKS if given.quick else RANKS):
                results.ranks.append(case_of_ranks)
                keep(results, began, given.json, peers)
        if "jax" not in given.without:
            for found_in_jax in in_jax.in_jax_cases(QUICK_IN_JAX if given.quick else IN_JAX):
                results.in_jax.append(found_in_jax)
                keep(results, began, given.json, peers)
        if "memory" not in given.without:
            for k, outcome in enumerate(results.outcomes):
                results.outcomes[k] = replace(outcome, extra_bytes=memory.extra_bytes(outcome.case))
    except KeyboardInterrupt:
        results.interrupted = True
        print("interrupted", file=sys.stderr)
    keep(results, began, given.json, peers)
    table.show(Results.load(given.json))  # rounded as in the file, so that --show shows the same
    code = plotted(results, given.plot)
    return 130 if results.interrupted else code


def refused(given: argparse.Namespace) -> str | None:
    """The first fault of the arguments, found before anything is measured."""
    if given.plot:
        try:
            picture.check(given.plot)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            return f"--plot {error}" if str(given.plot) in str(error) else f"--plot: {error}"
        if not given.show and ("cases" in given.without or "limit" not in given.peers):
            return "--plot: the picture is of the part cases, beside the peer limit"
    if given.show:
        return None
    if not given.json.parent.is_dir():
        return f"--json {given.json}: its folder does not exist"
    if given.json.is_dir() or not os.access(given.json.parent, os.W_OK):
        return f"--json {given.json}: it cannot be written"
    if given.beside and not (given.beside / "gpusim").is_dir():
        return f"--beside {given.beside}: expected a checkout of gpusim"
    return None


def plotted(results: Results, path: Path | None) -> int:
    """Draw the picture, if one is asked for. **Returns**: the exit code."""
    if path is None:
        return 0
    try:
        picture.draw(results, path)
    except (ValueError, OSError) as error:
        print(f"--plot {path}: {error}", file=sys.stderr)
        return 1
    return 0


def keep(results: Results, start: float, path: Path, peers: Sequence[Peer]) -> None:
    """Write the results so far, so that an interrupt loses nothing."""
    for limit in peers:
        if isinstance(limit, Limit) and math.isfinite(limit.fastest):
            results.bandwidth = limit.bandwidth
            results.outcomes = [with_bandwidth(o, limit.bandwidth) for o in results.outcomes]
    results.load_after = machine.load()
    results.seconds = time.monotonic() - start
    results.targets = judge(results)
    results.save(path)


@contextmanager
def ended(peers: Sequence[Peer]) -> Iterator[None]:
    """End the peers' processes and threads after the block."""
    try:
        yield
    finally:
        for peer in peers:
            peer.close()


def counted(cases: Sequence[Case], what: str) -> Iterator[Case]:
    """The cases, with their numbers on standard error."""
    for number, case in enumerate(cases, start=1):
        print(f"[{number}/{len(cases)} {what}] ", end="", file=sys.stderr, flush=True)
        yield case


def line(outcome: Outcome) -> str:
    """A line about a measured case."""
    parts = [f"{outcome.case}: {table.duration(outcome.seconds(OURS))}"]
    limit = outcome.ratio(OURS, LIMIT)
    if limit is not None:
        parts.append(f"{table.factor(limit)} of the limit")
    for name in table.PEERS:
        if (ratio := outcome.ratio(name)) is not None:
            parts.append(f"{name} {table.factor(ratio)}x")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
