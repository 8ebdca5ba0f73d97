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
from gpusim.tools.hub import hub

__all__ = ["WITH_VALUE", "add", "check", "run"]

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
        epilog="The exit code is the program's, as python's: that of sys.exit, 1 after an "
        "exception; 2 after a wrong argument or without the script.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("script", nargs="?", metavar="SCRIPT", help="a file, or a folder or archive")
    which.add_argument(
        "-m", "--module", dest="module", metavar="MODULE", help="a module, by its name"
    )
    options.add_reduction(parser)
    options.add_device(parser, "cpu")
    options.add_devices(
        parser,
        default=None,
        what="torch.cuda.device_count() in each process; with --device cpu",
        shown="1",
    )
    options.add_records(parser)
    options.add_verbosity(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run a script or a module, whose options `check` has seen; its exit code, or 0."""
    devices = (arguments.devices or 1) if arguments.device else 0
    simulates = sys.platform == "linux"
    ranks = f"; sums: {arguments.reduction or 'linear'}" if simulates else ""
    options.note(
        arguments,
        f"{arguments.module or arguments.script} as python runs it; each process that calls "
        f"init_process_group is {'a simulated' if simulates else 'its own'} rank{ranks}",
    )
    with hub(arguments, devices) if simulates else nullcontext():
        return program.run(arguments.script, arguments.module, rest)


def check(arguments: argparse.Namespace) -> None:
    """**Raises**: UsageError for options that do not fit together."""
    options.check_records(arguments)
    if arguments.devices is not None and not arguments.device:
        raise options.UsageError(f"--devices {arguments.devices} needs --device cpu")
    asked = [arguments.reduction, arguments.device, arguments.record, arguments.trace]
    if sys.platform != "linux" and (arguments.summary or any(asked)):
        raise options.UsageError("options of simulated ranks need Linux")
