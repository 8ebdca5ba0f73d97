"""`gpusim equal`. Exit codes: 0 if the programs are equal, 1 if they differ, 2 if it fails."""

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
from gpusim.tools.equal.settings import Program, Settings
from gpusim.tools.options import STDOUT, WRONG, UsageError, note, whole_number

__all__ = ["add"]

DESCRIPTION = """\
Runs a script for torchrun on one rank, the reference, and on several, the candidate; both in
float64. Finds how each tensor of the candidate's ranks relates to the reference's: replicated,
sharded, a partial sum. Names the first that does not, in the order of computation, and why.
Outputs of modules, their gradients, weights and their gradients, states of optimizers, norms and
losses are compared. The script is not changed.
"""
DTYPES = ("auto", "float64", "keep")


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "equal",
        usage="gpusim equal --ranks N [OPTIONS] [-m] SCRIPT ...\n"
        "       gpusim equal --ranks N --reference 'SCRIPT ...' --candidate 'SCRIPT ...'",
        help="whether a parallel script computes what it computes on one rank",
        description=DESCRIPTION,
        epilog="The exit code is 0 if the programs are equal, 1 if they differ, 2 for wrong usage "
        "or if a program fails.",
    )
    shared.add_count(parser, default=None, what="ranks of the candidate", shown="none")
    parser.add_argument(
        "--reference-ranks",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="ranks of the reference (default: %(default)s)",
    )
    parser.add_argument("--reference", metavar="COMMAND", help="the reference, with its arguments")
    parser.add_argument("--candidate", metavar="COMMAND", help="the candidate, with its arguments")
    parser.add_argument(
        "--steps",
        type=whole_number(0),
        default=3,
        metavar="N",
        help="end the programs after N optimizer steps; 0 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: float32 becomes float64, and 16-bit floats too if the reference computes in "
        "them; float64: all do; keep: the programs' own, compared up to rounding (default: "
        "%(default)s)",
    )
    shared.add_traced(parser)
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="keep the traces in a folder, made if missing"
    )
    shared.add_json(parser, file=True)
    shared.add_page(parser, "--html")
    shared.add_verbosity(parser)
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    parser.set_defaults(run=run, failure=2)


def run(options: argparse.Namespace) -> int:
    """Run both programs and compare; 1 if they differ."""
    if sys.platform != "linux":
        raise UsageError("gpusim equal runs ranks as processes, which need Linux")
    reference, candidate = programs(options)
    shared.check_outputs(options)
    if options.traces is not None:
        shared.check_folder("--traces", options.traces)
    require("simulated ranks need", "torch")
    from gpusim.tools.equal import report
    from gpusim.tools.equal.running import FailedError, run_both
    from gpusim.tools.torchrun import ends_by_signals

    dtype = {"auto": "float64", "float64": "wide", "keep": ""}[options.dtype]
    settings = Settings("", options.steps, dtype, options.trace_limit)
    say = functools.partial(note, options)
    try:
        with ends_by_signals():
            found = run_both(reference, candidate, settings, say, options.traces, options.quiet)
    except FailedError:
        raise
    except Exception:  # 1 would say that the programs differ
        traceback.print_exc()
        return WRONG
    if options.json == STDOUT:
        print(json.dumps(report.record(found), indent=1))
    else:
        print("\n".join(report.sentences(found)))
    if options.json is not None and options.json != STDOUT:
        with atomic_write(options.json) as file:
            file.write(json.dumps(report.record(found), indent=1) + "\n")
    if options.page is not None:
        report.write(found, options.page)
    return 2 if found.failure else 0 if found.equal else 1


def programs(options: argparse.Namespace) -> tuple[Program, Program]:
    """The reference and the candidate. **Raises**: UsageError if they are not said."""
    if options.ranks is None:
        raise UsageError("expected --ranks N, the ranks of the candidate, before the script")
    both = options.reference, options.candidate
    if options.script is not None and any(both):
        raise UsageError("expected SCRIPT, or --reference and --candidate; got both")
    if options.script is None and not all(both):
        raise UsageError(
            "expected SCRIPT, or --reference 'SCRIPT ...' and --candidate 'SCRIPT ...'"
        )
    if options.script is None:
        words = [tuple(shlex.split(text)) for text in both]
    else:
        one = (*["-m"] * options.module, options.script, *options.arguments)
        words = [one, one]
    for own in words:
        script = next((word for word in own if word != "-m"), None)
        if script is None:
            raise UsageError("--reference, --candidate: expected a script")
        if own[0] != "-m" and not Path(script).exists():
            raise FileNotFoundError(2, "No such file or directory", script)
    how = ["--seed", str(options.seed)]
    how += ["--device", options.device] if options.device else []
    how += ["--reduction", options.reduction] if options.reduction else []
    how += [word for module in options.preload for word in ("--preload", module)]
    return (
        Program(words[0], options.reference_ranks, tuple(how)),
        Program(words[1], options.ranks, tuple(how)),
    )
