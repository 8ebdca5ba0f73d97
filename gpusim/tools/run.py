"""`gpusim run`: a program as Python runs it, whose processes are simulated ranks.

Its poptorch and popdist are gpusim's. Where it, or a process that it starts, calls
`torch.distributed.init_process_group`, that process is a rank: `hub`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from gpusim.tools import options, program
from gpusim.tools.arguments import whole_number
from gpusim.tools.hub import hub

__all__ = ["WITH_VALUE", "add", "run"]

WITH_VALUE = (
    "--arrays",
    "--device",
    "--devices",
    "--limit",
    "--record",
    "--reduction",
    "--trace",
)
"""The options whose value is the next argument."""


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "run",
        usage="gpusim run [OPTIONS] (-m MODULE | SCRIPT) ...",
        help="run a program whose processes are simulated ranks, and poptorch gpusim's",
        description="Run a program as python does, with gpusim's modules in place of poptorch and "
        "popdist. Processes that call torch.distributed.init_process_group, as those that it "
        "starts by torch.multiprocessing.spawn, are simulated ranks: the options say how. "
        "Arguments after the script or the module are the program's.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("script", nargs="?", metavar="SCRIPT", help="a file, or a folder or archive")
    which.add_argument("-m", dest="module", metavar="MODULE", help="a module, by its name")
    options.add_reduction(parser)
    parser.add_argument(
        "--device",
        choices=("cpu",),
        help="cpu: the CPU plays the GPUs that the program asks for",
    )
    parser.add_argument(
        "--devices",
        type=whole_number(1),
        metavar="N",
        help="how many GPUs the CPU plays in each process, which is what "
        "torch.cuda.device_count() says; with --device cpu (default: 1)",
    )
    options.add_records(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run a script or a module; its exit code, or 0."""
    try:
        check(arguments)
    except (TypeError, ValueError) as error:
        print(f"gpusim run: {error}", file=sys.stderr)
        return 1
    devices = (arguments.devices or 1) if arguments.device else 0
    with hub(arguments, devices) if sys.platform == "linux" else nullcontext():
        return program.run(arguments.script, arguments.module, rest)


def check(arguments: argparse.Namespace) -> None:
    """**Raises**: ValueError or TypeError for options that are wrong, or do not fit together."""
    options.check_records(arguments)
    options.reduction_of(arguments)
    if arguments.devices is not None and not arguments.device:
        raise ValueError("--devices needs --device cpu")
    asked = [arguments.reduction, arguments.device, arguments.record, arguments.trace]
    if sys.platform != "linux" and (arguments.summary or any(asked)):
        raise ValueError("options of simulated ranks need Linux")
