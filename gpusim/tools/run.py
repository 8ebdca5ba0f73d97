"""`gpusim run`: a program as Python runs it, whose processes are simulated ranks.

Its poptorch and popdist are gpusim's. Where it, or a process that it starts, calls
`torch.distributed.init_process_group`, that process is a rank: `hub`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from gpusim.recording.reads import HostRead, listening
from gpusim.tools import options, program
from gpusim.tools.findings import add_check_report, check_report_target, show_findings
from gpusim.tools.hub import hub

__all__ = ["WITH_VALUE", "add", "check", "run"]

WITH_VALUE = (
    "--arrays",
    "--check-report",
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
        "exception; 2 after a wrong argument or without the script. With --check also 1 if it has "
        "findings.",
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
    parser.add_argument(
        "--check",
        action="store_true",
        help="name the lines of a PopTorch model's forward method that read a tensor's value, "
        "which an IPU does not have while it compiles the model. Ranks of torch.distributed are "
        "checked by gpusim torchrun --check",
    )
    add_check_report(parser)
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

    def run_program() -> int:
        with hub(arguments, devices) if simulates else nullcontext():
            return program.run(arguments.script, arguments.module, rest)

    return run_checked(arguments, run_program) if arguments.check else run_program()


def run_checked(arguments: argparse.Namespace, run_program: Callable[[], int]) -> int:
    """Run a program, and show which lines of its models' forward read values; the exit code."""
    code, ended = 0, None
    with listening() as reads:
        try:
            code = run_program()
        except BaseException as error:  # SystemExit, and what ends a process
            ended = error
    if code == program.CANNOT_OPEN:  # a program's own 2 is a SystemExit
        return code
    found = show_reads(arguments, [*reads])
    if ended is not None and not (isinstance(ended, SystemExit) and ended.code in (None, 0)):
        raise ended
    return code or found


def show_reads(arguments: argparse.Namespace, reads: Sequence[HostRead]) -> int:
    """Show reads as findings; the exit code."""
    if not reads:  # perhaps there is no torch
        return show_findings(arguments, [], "check: no findings")
    with warnings.catch_warnings():  # of torch's modules, which the program has not imported
        warnings.simplefilter("ignore")
        from gpusim.torch.distributed.checks.findings import Finding, shown
    kind = "host-read-in-forward"
    findings = [Finding(kind, each.site, sorted(each.replicas), str(each)) for each in reads]
    return show_findings(arguments, findings, shown(findings, ""))


def check(arguments: argparse.Namespace) -> None:
    """**Raises**: UsageError for options that do not fit together."""
    options.check_records(arguments)
    check_report_target(arguments)
    arguments.check = arguments.check or arguments.check_report is not None
    if arguments.devices is not None and not arguments.device:
        raise options.UsageError(f"--devices {arguments.devices} needs --device cpu")
    asked = [arguments.reduction, arguments.device, arguments.record, arguments.trace]
    if sys.platform != "linux" and (arguments.summary or any(asked)):
        raise options.UsageError("options of simulated ranks need Linux")
