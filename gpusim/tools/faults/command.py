"""The options of a campaign of `gpusim torchrun`, and the command.

It imports neither torch nor the rest of the package before it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim.files import atomic_write
from gpusim.tools import options as shared
from gpusim.tools.options import STDOUT, UsageError, note, whole_number
from gpusim.tools.progress import progress, silent
from gpusim.words import count

if TYPE_CHECKING:
    from gpusim.torch.distributed.faults.plans import Fault

    from .observations import Observation
    from .settings import Settings

__all__ = ["add_campaign", "asks_for_campaign", "run_campaign"]

RUNS = 100
"""How many plans are drawn unless --runs says it."""


def add_campaign(parser: Any) -> None:
    """Add the options of a campaign."""
    parser.add_argument(
        "--runs",
        type=whole_number(1),
        metavar="N",
        help="with --faults 'seed=S [kinds=KIND,KIND] [faults=N..M]': draw N plans of faults for "
        f"the script, and judge how it survives each (default: {RUNS}). With a plan: judge it N "
        "times",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(1),
        metavar="N",
        help="how many runs of --runs go on at a time (default: as many as there are cores)",
    )
    shared.add_json(parser, file=True)
    shared.add_page(parser)


def asks_for_campaign(options: argparse.Namespace) -> bool:
    """Whether the options ask for a campaign, and not for one run.

    **Raises**: UsageError for options that do not fit together.
    """
    drawn = any(
        word.startswith(("seed=", "kinds=", "faults=")) for word in (options.faults or "").split()
    )
    if options.faults is not None and (drawn or options.runs is not None):
        return True
    shared.check_outputs(options)
    for name in ("runs", "jobs", "json", "page"):
        value = getattr(options, name, None)
        if value is not None:
            raise UsageError(
                f"--{name} {value}: expected --faults 'seed=S' with it, or a plan and --runs"
            )
    return False


def run_campaign(
    options: argparse.Namespace,
    command: Callable[[argparse.Namespace], int],
    ranks: int,
    processes: bool,
) -> int:
    """Run the campaign; 1 if a plan is silently different, hung or unnamed.

    **Arguments**: `command` is `gpusim torchrun` with the options of one run; `processes`: whether
    it runs ranks as processes.

    **Raises**: UsageError.
    """
    check(options, processes)
    from gpusim.torch.distributed.faults.plans import PlanError

    from .campaign import FailedError, run_plans
    from .running import Runner

    try:
        plans_of = plans_by(options, ranks)
    except PlanError as error:
        raise UsageError(f"--faults: {error}") from None
    jobs = options.jobs or len(os.sched_getaffinity(0))
    runs = options.runs or RUNS
    title = (
        f"{options.script}: {count(runs, 'plan')} of faults ({options.faults}), "
        f"{count(ranks, 'rank')}"
    )
    note(options, f"{title}, {jobs} at a time")
    with tempfile.TemporaryDirectory(prefix="gpusim-faults-") as scratch:
        runner = Runner(options, command, ranks, Path(scratch), jobs)
        try:
            if options.quiet:
                found = run_plans(runner, plans_of, options.check is not None, silent)
            else:
                with progress(runs + 2) as advance:
                    found = run_plans(runner, plans_of, options.check is not None, advance)
        except FailedError as error:
            raise UsageError(f"--faults {options.faults}: {error}") from None
        finally:
            runner.close()
    return report(options, found, title, ranks)


def check(options: argparse.Namespace, processes: bool) -> None:
    """**Raises**: UsageError for options that a campaign cannot have."""
    from gpusim.tools import elastic

    shared.check_outputs(options)
    if sys.platform != "linux":
        raise UsageError("--faults: ranks run as processes, which need Linux")
    for name in ("record", "trace", "summary", "orders", "check_report"):
        if getattr(options, name):
            shown = name.replace("_", "-")
            raise UsageError(f"--faults {options.faults} --{shown}: expected it for one run alone")
    own = argparse.Namespace(**vars(options))
    own.faults = "kill rank=0 call=1"  # the rules of one plan
    elastic.check_elastic(own, 1, processes)


def plans_by(
    options: argparse.Namespace, ranks: int
) -> Callable[[Observation], list[tuple[Fault, ...]]]:
    """The function that gives the plans, once the run without faults has been seen.

    **Raises**: PlanError.
    """
    from gpusim.torch.distributed.faults.plans import check_ranks, parse

    from . import settings
    from .drawing import draw_plans

    if not settings.is_campaign(options.faults):
        plan = parse(options.faults)
        check_ranks(plan, ranks)
        return lambda seen: [plan] * options.runs
    how: Settings = settings.read(options.faults)
    runs, restarts = options.runs or RUNS, options.max_restarts

    def drawn(found: Observation) -> list[tuple[Fault, ...]]:
        try:
            return draw_plans(how, found.seen, runs, restarts)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from None

    return drawn


def report(options: argparse.Namespace, found: Any, title: str, ranks: int) -> int:
    """Show and write the report; the exit code."""
    from . import report as shown

    command = repeating(options, ranks)
    if options.json is not None:
        text = json.dumps(shown.as_json(found, options.faults, command), indent=1)
        if options.json == STDOUT:
            print(text)
        else:
            with atomic_write(options.json) as file:
                file.write(f"{text}\n")
    if options.json != STDOUT:
        shown.show(found, title, command)
    if options.page is not None:
        shown.write(found, title, command, options.page)
    return 1 if found.worst else 0


def repeating(options: argparse.Namespace, ranks: int) -> str:
    """The command that judges one plan again, which {plan} stands for."""
    words = ["gpusim", "torchrun"]
    if options.nnodes > 1:
        words += ["--nnodes", str(options.nnodes)]
    words += ["--nproc-per-node", str(ranks // options.nnodes)]
    for name, usual in (("max_restarts", 0), ("reduction", None), ("device", None), ("seed", 0)):
        value = getattr(options, name)
        if value != usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if options.check is not None:
        words.append(f"--check={options.check}" if options.check else "--check")
    words += [word for module in options.preload for word in ("--preload", module)]
    program = ["-m"] * options.module + [options.script, *options.arguments]
    # {folder} has no meaning for a shell, and is easier to read without quotes.
    quoted = [word if word == "{folder}" else shlex.quote(word) for word in (*words, *program)]
    place = len(words)
    return " ".join([*quoted[:place], "--faults", "{plan}", "--runs", "1", *quoted[place:]])
