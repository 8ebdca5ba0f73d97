"""`gpusim compare` and `gpusim invariant`.

Exit codes: 0 if the runs are equal, 1 if they differ, 2 for wrong usage or after a failure: 1 says
that there is a difference, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim.optional import require
from gpusim.tools.options import (
    UsageError,
    add_counts,
    add_json,
    add_page,
    add_picture,
    add_program,
    add_record,
    add_reduction,
    check_folder,
    check_outputs,
    counts,
)
from gpusim.words import count

__all__ = ["add"]

COMPARE = """\
Finds the first collective at which two recorded runs differ. Records are folders that gpusim
torchrun --record FOLDER writes, or gpusim.recording.torch_hook for real processes. If operands
are equal and results differ, the collective is the cause; with whole arrays (--arrays) the folds
behind both results are named. If operands differ, the cause lies before.
"""
REPLAY = """\
reduce the recorded operands of RUN in another way (--reduction), without the program, and compare
"""
INVARIANT = """\
Runs a script for torchrun on several numbers of ranks, and compares the results of collectives
that all ranks receive. Their operands may differ between numbers of ranks.
"""


def add(commands: Any) -> None:
    """Add the commands to the command line's subparsers."""
    compare = commands.add_parser(
        "compare", help="find where two recorded runs begin to differ, and why", description=COMPARE
    )
    compare.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="two records")
    compare.add_argument("--replay", type=Path, metavar="RUN", help=REPLAY)
    add_reduction(compare, default=None, more="; with --replay")
    add_page(compare, "--html")
    add_picture(compare)
    add_json(compare)
    compare.add_argument(
        "--no-folds", action="store_true", help="do not look for the folds behind the results"
    )
    compare.set_defaults(run=lambda options: run_compare(options, compare), failure=2)

    invariant = commands.add_parser(
        "invariant",
        usage="gpusim invariant [OPTIONS] [-m] SCRIPT ...",
        help="whether a script's results are the same bits on all numbers of ranks",
        description=INVARIANT,
    )
    add_counts(
        invariant,
        "--ranks",
        what="the first is compared with each other one",
        default="1,2,4,8",
        type=counts(1, fewest=2),
    )
    add_reduction(invariant)
    add_record(
        invariant, "--keep", note="; of this command a folder, made if missing, with one for each"
    )
    add_json(invariant)
    add_program(invariant, "training script")
    invariant.set_defaults(run=run_invariant, failure=2)


def run_compare(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compare two records, or a record with its replay; 1 if they differ."""
    from gpusim import figures
    from gpusim.tools.compare import report
    from gpusim.tools.compare.comparing import compare
    from gpusim.tools.compare.replaying import replay
    from gpusim.tools.compare.runs import read

    if options.replay is None and (len(options.runs) != 2 or options.reduction is not None):
        parser.error("expected two records, or --replay RUN --reduction TEXT")
    if options.replay is not None and (options.runs or options.reduction is None):
        parser.error("--replay: expected --reduction TEXT, and no other record")
    check_outputs(options)
    if options.replay is not None:
        comparison = replay(read(options.replay), options.reduction)
    else:
        one, other = map(read, options.runs)
        comparison = compare(one, other, folds=not options.no_folds)
    if options.json:
        print(json.dumps(comparison.record(), indent=1))
    else:
        report.print_text(comparison)
    if options.page is not None:
        report.write(comparison, options.page)
    if options.picture is not None:
        with report.drawn(comparison) as figure:
            figures.write(figure, options.picture)
    return 0 if comparison.verdict is None else 1


def run_invariant(options: argparse.Namespace) -> int:
    """Run the script on each number of ranks, and compare; 1 if a result differs."""
    from gpusim.tools.compare import report
    from gpusim.tools.compare.comparing import compare
    from gpusim.tools.compare.runs import read

    require("simulated ranks need", "torch")
    record: Path | None = options.record
    if record is not None:
        if record.suffix == ".jsonl":
            raise UsageError(f"--record {record}: expected a folder, not FILE.jsonl")
        check_folder("--record", record)
    if not options.module and not Path(options.script).exists():
        raise FileNotFoundError(f"{options.script}: there is no such file")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if record is None else record
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"ranks-{ranks}" for ranks in options.ranks]
        for ranks, path in zip(options.ranks, paths, strict=True):
            print(f"running on {count(ranks, 'rank')} ...", file=sys.stderr)
            done = subprocess.run(
                command_of(options, ranks, path),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr)
                raise ValueError(f"the script failed on {count(ranks, 'rank')}")
        first, *others = [read(path) for path in paths]
        comparisons = [compare(first, other) for other in others]
        if options.json:
            print(json.dumps([comparison.record() for comparison in comparisons], indent=1))
        for comparison in comparisons if not options.json else ():
            print(f"{first.ranks} and {count(comparison.b.ranks, 'rank')}")
            for sentence in report.sentences(comparison):
                print(f"  {sentence}")
    return 0 if all(comparison.verdict is None for comparison in comparisons) else 1


def command_of(options: argparse.Namespace, ranks: int, path: Path) -> Sequence[str]:
    """The command that runs the script of `gpusim invariant` on this number of ranks."""
    command = [sys.executable, "-m", "gpusim", "torchrun", f"--nproc-per-node={ranks}"]
    if options.reduction is not None:
        command += ["--reduction", options.reduction]
    if options.arrays is not None:
        chosen: range = options.arrays
        whole = chosen.stop == sys.maxsize
        command += ["--arrays", "all" if whole else f"{chosen[0]}-{chosen[-1]}"]
        command += ["--limit", f"{options.limit}B"]
    command += ["--record", str(path), *["-m"] * options.module]
    return [*command, options.script, *options.arguments]
