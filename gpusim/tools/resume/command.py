"""`gpusim resume`. Exit codes: 0 if all resumed runs are the uninterrupted one, 1 if not, 2 if it
fails."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

from gpusim.files import atomic_write
from gpusim.optional import require
from gpusim.tools import options as shared
from gpusim.tools.options import STDOUT, WRONG, UsageError, counts, note, whole_number
from gpusim.tools.resume.settings import PLACE

__all__ = ["add"]

DESCRIPTION = """\
Runs a script for torchrun up to a checkpoint, resumes it from there on as many ranks or another
number, and compares with a run that was never interrupted: weights, buffers, states of optimizers,
learning rates, schedulers, random states, and which samples are taken. Prints a table of all pairs
of sizes, and the first state that differs. {checkpoint} in the script's arguments stands for the
folder of the checkpoint. The script is not changed.
"""
MOST = 64
"""Pairs that are run at most."""


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "resume",
        usage="gpusim resume --save-ranks LIST [OPTIONS] [-m] SCRIPT ... {checkpoint} ...",
        help="whether a resumed run goes on as one that was never interrupted",
        description=DESCRIPTION,
        epilog="The exit code is 0 if all resumed runs are the uninterrupted one, 1 if one differs "
        "or is refused by the script, 2 for wrong usage or if the script fails uninterrupted.",
    )
    for name, what, shown in (
        ("--save-ranks", "the numbers of ranks that save, such as 1,2,4", ""),
        ("--load-ranks", "the numbers of ranks that resume", " (default: those that save)"),
    ):
        parser.add_argument(name, type=counts(1), metavar="LIST", help=what + shown)
    parser.add_argument(
        "--save-args",
        default="",
        metavar="ARGS",
        help="arguments that the script is given besides, uninterrupted and up to the checkpoint",
    )
    parser.add_argument(
        "--load-args",
        default="",
        metavar="ARGS",
        help="arguments that the script is given besides as it resumes, such as --resume",
    )
    parser.add_argument(
        "--stop-after",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="resume from the first checkpoint that is saved after optimizer step N or later "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="end the runs after optimizer step N, counted over both runs; 0 for the script's own "
        "end (default: %(default)s)",
    )
    shared.add_traced(parser)
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep traces, output and checkpoints in a folder"
    )
    shared.add_json(parser, file=True)
    shared.add_page(parser, "--html")
    shared.add_verbosity(parser)
    shared.add_program(parser, "training script")
    parser.set_defaults(run=run, failure=WRONG)


def run(options: argparse.Namespace) -> int:
    """Run all pairs and compare; 1 if one is not the uninterrupted run."""
    if sys.platform != "linux":
        raise UsageError("gpusim resume runs ranks as processes, which need Linux")
    check(options)
    require("simulated ranks need", "torch")
    from gpusim.tools.resume import report
    from gpusim.tools.resume.running import FailedError, run_all
    from gpusim.tools.torchrun import ends_by_signals

    say = functools.partial(note, options)
    try:
        with ends_by_signals():
            found = run_all(plan_of(options), say, options.keep, options.quiet)
    except FailedError:
        raise
    except Exception:  # 1 would say that a pair differs
        traceback.print_exc()
        return WRONG
    text = json.dumps(report.record(found), indent=1)
    if options.json == STDOUT:
        print(text)
    else:
        print("\n".join(report.sentences(found)))
    if options.json is not None and options.json != STDOUT:
        with atomic_write(options.json) as file:
            file.write(text + "\n")
    if options.page is not None:
        report.write(found, options.page)
    return 0 if found.is_same else 1


def check(options: argparse.Namespace) -> None:
    """**Raises**: UsageError for options that do not fit together."""
    if options.save_ranks is None:
        raise UsageError("expected --save-ranks LIST, such as 1,2,4")
    loads = options.load_ranks or options.save_ranks
    if len(options.save_ranks) * len(loads) > MOST:
        raise UsageError(
            f"--save-ranks, --load-ranks: {len(options.save_ranks)} times {len(loads)} pairs; "
            f"expected at most {MOST}"
        )
    if options.steps and options.steps <= options.stop_after:
        raise UsageError(
            f"--steps {options.steps}: expected more than --stop-after {options.stop_after}, so "
            "that a step follows the checkpoint"
        )
    texts = [*options.arguments, options.save_args, options.load_args]
    if not any(PLACE in text for text in texts):
        raise UsageError(
            f"expected {PLACE} in the script's arguments, in place of the folder that it saves to "
            f"and loads from; got {shlex.join([options.script, *options.arguments])!r}"
        )
    if not options.module and not Path(options.script).exists():
        raise FileNotFoundError(2, "No such file or directory", options.script)
    shared.check_outputs(options)
    if options.keep is not None:
        shared.check_folder("--keep", options.keep)


def plan_of(options: argparse.Namespace) -> Any:
    """The runs that the options ask for."""
    from gpusim.tools.resume.running import Plan

    how = ["--seed", str(options.seed)]
    how += ["--device", options.device] if options.device else []
    how += ["--reduction", options.reduction] if options.reduction else []
    how += [word for module in options.preload for word in ("--preload", module)]
    return Plan(
        (*["-m"] * options.module, options.script, *options.arguments),
        tuple(shlex.split(options.save_args)),
        tuple(shlex.split(options.load_args)),
        tuple(options.save_ranks),
        tuple(options.load_ranks or options.save_ranks),
        options.stop_after,
        options.steps,
        options.trace_limit,
        tuple(how),
    )
