"""`gpusim twin`: compare the twins with the engines of this machine, and find a sum's fold.

Exit codes: 0 if everything agrees (check) or a fold was found (infer); 1 if not; 2 for invalid
arguments, after a failure, or without an engine to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpusim.tools.options import UsageError, add_counts, add_json, counts, split_names

__all__ = ["add"]

CHECK = """\
Starts the engines that are installed (JAX, Open MPI, MPICH, gloo) in real processes. They sum
random values of many sizes, and every element is compared with the twin's, bit by bit. Then the
engine's trees of additions are revealed (see gpusim reveal) and compared with the twin's. An engine
in another environment is run by its Python: --python PATH, which may be repeated.
"""
INFER = """\
FILE is an .npz with two arrays: inputs, of shape (R, N), a row for each rank; and sum, of shape
(N,), the result of an engine's all-reduce. All known folds are tried: twins, orders, rings with
other starts, directions and cuts, exact sums, sums of integers. Means, wires and levels are not
tried. If several agree, more elements or ranks distinguish them.
"""


def add(commands: Any) -> None:
    """Add the command to the command line's subparsers."""
    twin = commands.add_parser(
        "twin",
        help="compare twins with the engines they reproduce; find the fold behind a sum",
        description="The twins of real engines: gpusim.Reduction.like(name).",
    )
    twin.set_defaults(run=lambda _: _help(twin), failure=2)
    verbs = twin.add_subparsers(title="commands", dest="verb", metavar="COMMAND")

    check = verbs.add_parser(
        "check", help="compare the twins with the engines on this machine", description=CHECK
    )
    check.add_argument(
        "twins", nargs="*", metavar="TWIN", help="only these twins (default: all; see --list)"
    )
    add_counts(check, "--ranks", what="of each engine", default="2-8", type=counts(2))
    check.add_argument(
        "--dtype", action="append", metavar="LIST", help="only these types; may be repeated"
    )
    check.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python whose engines are run as well; may be repeated",
    )
    check.add_argument(
        "--brief", action="store_true", help="fewer sizes: not those where a fold changes"
    )
    check.add_argument(
        "--no-reveal", action="store_true", help="random values alone: reveal no trees"
    )
    form = check.add_mutually_exclusive_group()
    add_json(form)
    form.add_argument(
        "--markdown", action="store_true", help="print the table of the documentation"
    )
    form.add_argument("--list", action="store_true", help="list the twins, and run no engine")
    check.set_defaults(run=run_check)

    infer = verbs.add_parser(
        "infer", help="find the known fold that gives a sum", description=INFER
    )
    infer.add_argument("file", type=Path, metavar="FILE", help="an .npz with inputs and sum")
    infer.add_argument(
        "--dtype", metavar="TYPE", help="the type of values stored as raw bytes, such as bfloat16"
    )
    add_json(infer)
    infer.set_defaults(run=run_infer)


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def run_check(arguments: argparse.Namespace) -> int:
    """Run all engines that are found; 1 if a twin disagrees, 2 if no engine was or one failed."""
    from ...twins import SETTINGS, TWINS
    from . import report
    from .checking import Agreement, check
    from .revealing import Revealed, reveal
    from .run_engines import INSTALLS, EngineFailed, engines

    known = TWINS | SETTINGS
    for name in arguments.twins:
        if name not in known:
            raise UsageError(f"{name!r}: expected one of {', '.join(known)}")
    twins = arguments.twins or list(known)
    if arguments.list:
        report.twins(twins)
        return 0
    rows: list[Agreement] = []
    revealed: list[Revealed] = []
    failed = False
    for engine in engines(arguments.python):
        if all(known[name].worker != engine.name for name in twins):
            continue
        print(f"running {engine.name} ...", file=sys.stderr)
        chosen: dict[str, Any] = {
            "twins": twins,
            "ranks": arguments.ranks,
            "dtypes": split_names(arguments.dtype),
            "brief": arguments.brief,
        }
        try:
            rows += check(engine, **chosen)
            if not arguments.no_reveal:
                revealed += reveal(engine, **chosen)
        except EngineFailed as error:  # the others may answer
            print(f"gpusim twin: {error}", file=sys.stderr)
            failed = True
    missing = [name for name in twins if name not in {row.twin for row in rows}]
    if arguments.json:
        found = {
            "rows": [asdict(row) for row in rows],
            "revealed": [asdict(row) for row in revealed],
            "not asked": missing,
            "install": {
                worker: INSTALLS[worker]
                for worker in dict.fromkeys(known[name].worker for name in missing)
                if worker
            },
        }
        print(json.dumps(found, indent=1))
    elif arguments.markdown:
        report.markdown(rows, twins, revealed)
    else:
        report.check(rows, missing, revealed)
    if not (all(row.equal for row in rows) and all(row.equal for row in revealed)):
        return 1
    return 2 if failed or not rows else 0


def run_infer(arguments: argparse.Namespace) -> int:
    """Find the fold; 1 if no known fold gives this sum."""
    from . import report
    from .inferring import infer, read

    inputs, total = read(arguments.file, arguments.dtype)
    found = infer(inputs, total)
    if arguments.json:
        names = [
            {"fold": f.candidate.name, "agreeing": f.agreeing, "elements": f.elements}
            for f in found
        ]
        print(json.dumps(names, indent=1))
    else:
        report.infer(found, inputs)
    return 0 if any(f.equal for f in found) else 1
