"""`gpusim compare` and `gpusim invariant`.

Exit codes: 0 if the runs are equal, 1 if they differ, 2 for invalid arguments or after a failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpusim.optional import require
from gpusim.tools.arguments import call_range, whole_number
from gpusim.tools.options import reduction_of

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
    compare.add_argument("--reduction", metavar="TEXT", help="with --replay: as gpusim torchrun's")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    compare.add_argument("--picture", type=Path, metavar="FILE", help="write the picture")
    compare.add_argument("--json", action="store_true", help="print JSON instead of text")
    compare.add_argument(
        "--no-folds", action="store_true", help="do not look for the folds behind the results"
    )
    compare.set_defaults(run=lambda options: run_compare(options, compare), failure=2)

    invariant = commands.add_parser(
        "invariant",
        usage="gpusim invariant [OPTIONS] SCRIPT ...",
        help="whether a script's results are the same bits on all numbers of ranks",
        description=INVARIANT,
    )
    invariant.add_argument(
        "--ranks",
        type=_ranks,
        default="1,2,4,8",
        metavar="N,N,...",
        help="numbers of ranks; the first is compared with each other one (default: %(default)s)",
    )
    invariant.add_argument("--reduction", metavar="TEXT", help="as gpusim torchrun's")
    invariant.add_argument(
        "--arrays", type=call_range, metavar="CALLS", help="as gpusim torchrun's, for amounts"
    )
    invariant.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the records here")
    invariant.add_argument("--json", action="store_true", help="print JSON instead of text")
    invariant.add_argument("script", metavar="SCRIPT", help="the training script")
    invariant.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    invariant.set_defaults(run=run_invariant, failure=2)


def _ranks(text: str) -> list[int]:
    found = [whole_number(1)(word) for word in text.split(",")]
    if len(found) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"expected different numbers, such as 1,2,4; got {text!r}")
    return found


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
    if options.picture is not None:
        figures.check_suffix(options.picture)
    if options.replay is not None:
        comparison = replay(read(options.replay), options.reduction)
    else:
        one, other = map(read, options.runs)
        comparison = compare(one, other, folds=not options.no_folds)
    if options.json:
        print(json.dumps(comparison.record(), indent=1))
    else:
        report.print_text(comparison)
    if options.html is not None:
        report.write(comparison, options.html)
    if options.picture is not None:
        with report.drawn(comparison) as figure:
            figures.write(figure, options.picture)
    return 0 if comparison.verdict is None else 1


def run_invariant(options: argparse.Namespace) -> int:
    """Run the script on each number of ranks, and compare; 1 if a result differs."""
    from gpusim.tools.compare import report
    from gpusim.tools.compare.comparing import compare
    from gpusim.tools.compare.runs import read

    require("gpusim invariant needs", "torch")
    reduction_of(options)  # an error here, and not of each run
    if not Path(options.script).exists():
        raise FileNotFoundError(f"{options.script}: there is no such file")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.keep is None else options.keep
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"ranks-{ranks}" for ranks in options.ranks]
        for ranks, path in zip(options.ranks, paths, strict=True):
            command = [sys.executable, "-m", "gpusim", "torchrun", f"--nproc-per-node={ranks}"]
            if options.reduction is not None:
                command += ["--reduction", options.reduction]
            if options.arrays is not None:
                chosen = options.arrays
                whole = chosen.stop == sys.maxsize
                command += ["--arrays", "all" if whole else f"{chosen[0]}-{chosen[-1]}"]
            command += ["--record", str(path), options.script, *options.arguments]
            print(f"running on {ranks} ranks ...", file=sys.stderr)
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            if done.returncode:
                print(done.stdout, file=sys.stderr)
                raise ValueError(f"the script failed on {ranks} ranks")
        first, *others = [read(path) for path in paths]
        found = [compare(first, other) for other in others]
        if options.json:
            print(json.dumps([comparison.record() for comparison in found], indent=1))
        for comparison in found if not options.json else ():
            print(f"{first.ranks} and {comparison.b.ranks} ranks")
            for sentence in report.sentences(comparison):
                print(f"  {sentence}")
    return 0 if all(comparison.verdict is None for comparison in found) else 1
