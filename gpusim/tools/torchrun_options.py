"""The options of `gpusim torchrun`: torchrun's own, how ranks run, and what is looked for."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NoReturn

from gpusim.tools import options as shared_options
from gpusim.tools.findings import add_check_report
from gpusim.tools.options import whole_number

__all__ = ["ENGINES", "add_modes", "add_ranks", "add_torchruns"]

ENGINES = ("nccl", "gloo")
"""Whose rules --check can name."""

ACCEPTED = (
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "node-rank",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "local-addr",
    "numa-binding",
    "shutdown-timeout",
    "signals-to-handle",
)
"""Options of torchrun that say how processes find each other, or end."""

OUTPUT = "redirect the command's output; --only-rank R shows that of rank R alone"
REFUSED = {
    ("--log-dir", "-r", "--redirects", "-t", "--tee", "--logs-specs"): OUTPUT,
    ("--local-ranks-filter",): "--only-rank R shows the output of rank R alone",
    ("--duplicate-stdout-filters", "--duplicate-stderr-filters"): "filter the command's output",
    ("--no-python",): "ranks run a Python script, or a module by -m",
    ("--run-path",): "give the script itself",
    ("--virtual-local-rank",): "LOCAL_RANK is that of torchrun without it",
}
"""Options of torchrun that gpusim lacks, and what to do instead."""


class Refuse(argparse.Action):
    """An option that is an error, and says what to do instead."""

    def __call__(
        self, parser: argparse.ArgumentParser, space: Any, value: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not simulated: {self.const}")


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add how many ranks there are."""
    parser.add_argument(
        "--nnodes",
        type=node_count,
        default=1,
        metavar="N",
        help="the number of nodes (default: %(default)s)",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=simulated_count,
        metavar="N",
        help="the number of ranks of each node (default: 1)",
    )
    shared_options.add_count(
        ranks, default=None, what="all ranks, in equal shares on the nodes", shown="one on each"
    )


def add_torchruns(parser: Any) -> None:
    """Add torchrun's options, those without effect and those that are refused among them."""
    parser.add_argument("--standalone", action="store_true", help="accepted, without effect")
    for name in ACCEPTED:
        parser.add_argument(
            f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS, metavar="VALUE"
        )
    for names, instead in REFUSED.items():
        both = [*names, *(f"--{name[2:].replace('-', '_')}" for name in names if name[2:])]
        spelled = dict.fromkeys(both)
        how = {"action": Refuse, "nargs": "?", "const": instead, "help": argparse.SUPPRESS}
        parser.add_argument(*spelled, dest="refused", **how)
    parser.add_argument(
        "--master-addr", "--master_addr", default="127.0.0.1", help="a value for MASTER_ADDR"
    )
    parser.add_argument(
        "--master-port", "--master_port", default="29500", help="a value for MASTER_PORT"
    )
    parser.add_argument("--role", default="default", help="a value for ROLE_NAME")


def add_modes(parser: argparse.ArgumentParser) -> None:
    """Add how the ranks run."""
    parser.add_argument(
        "--schedule",
        choices=("turns", "free"),
        default="turns",
        help="turns: one rank at a time, so that runs repeat; free: as many as there are cores "
        "(default: %(default)s)",
    )
    shared_options.add_device(parser, "cpu", "cuda")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--processes",
        action="store_true",
        help="run each rank in a process of its own, with modules of its own: the default on "
        "Linux, except where PyTorch finds a GPU, which ranks share as threads only",
    )
    modes.add_argument(
        "--threads",
        action="store_true",
        help="run all ranks as threads of this process, which share the modules that the script "
        "imports: the default elsewhere",
    )
    shared_options.add_preload(parser)
    shared_options.add_seed(
        parser,
        "the generators that the script does not seed; ranks' differ. 'random' draws one, and "
        "prints it",
        type=seed_of,
    )
    parser.add_argument(
        "--instances",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="spread the ranks, as processes, over N instances of this command, which poprun, "
        "mpirun or srun has started, on one machine or several; instance 0 listens at "
        "--master-addr for the others (Linux, mpi4py)",
    )
    parser.add_argument(
        "--only-rank",
        type=whole_number(0),
        metavar="R",
        help="show the output of this rank alone, without its tag; breakpoint() stops in this "
        "rank alone",
    )
    add_check(parser)
    parser.add_argument("--traced", help=argparse.SUPPRESS)  # gpusim equal's settings, as JSON
    parser.add_argument(
        "--explain",
        action=Explain,
        nargs=0,
        help="print the table of what a rank has to itself, as process and as thread, and exit",
    )


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add --check, with the engine as a part of the option: a value could be the script."""
    from_engine = {
        "": "look for what all ranks agree on and that is wrong or would not survive a cluster: "
        "results read before they are there, gradients that are never reduced, orders that hang. "
        "Operands are checked by the rules of the backend that the script names",
        "nccl": "the same, by NCCL's rules",
        "gloo": "the same, by gloo's rules",
    }
    checks = parser.add_mutually_exclusive_group()
    for engine, text in from_engine.items():
        checks.add_argument(
            f"--check={engine}" if engine else "--check",
            dest="check",
            action="store_const",
            const=engine,
            help=text,
        )
    add_check_report(parser)
    explain_check(parser)
    parser.add_argument(
        "--orders",
        type=whole_number(1),
        default=0,
        metavar="N",
        help="run the script N times more: async calls complete at the earliest moment, and at "
        "drawn ones, and ranks take their turns in drawn orders. Values that differ are named",
    )
    parser.add_argument(
        "--check-order",
        type=whole_number(0),
        metavar="K",
        help="run the script in order K of --orders alone",
    )
    parser.add_argument("--check-values", type=Path, help=argparse.SUPPRESS)  # of --orders


def explain_check(parser: argparse.ArgumentParser) -> None:
    """Let the parser's error for --check=OTHER say what is expected."""
    error = parser.error

    def said(message: str) -> NoReturn:
        found = re.search(r"--check\b.*ignored explicit argument '(.*)'", message)
        if found:
            message = f"--check={found[1]}: expected --check, --check=nccl or --check=gloo"
        error(message)

    setattr(parser, "error", said)  # noqa: B010  # mypy refuses to assign a method


class Explain(argparse.Action):
    """An option that prints what a rank has to itself, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        from gpusim.torch.distributed.own.table import explain

        print(explain())
        parser.exit()


def simulated_count(text: str) -> int:
    """An argparse type: a number of ranks or nodes, which torchrun may find out by itself."""
    if text in ("auto", "cpu", "gpu", "xpu"):
        raise argparse.ArgumentTypeError(
            f"a whole number is needed, as no machine is asked how many there are; got {text!r}"
        )
    return whole_number(1)(text)


def seed_of(text: str) -> int | None:
    """An argparse type: a base seed; None for one that is to be drawn."""
    return None if text == "random" else whole_number(0)(text)


def node_count(text: str) -> int:
    """An argparse type: a number of nodes, also as torchrun's range of that number alone."""
    low, colon, high = text.partition(":")
    if colon and low != high:
        raise argparse.ArgumentTypeError(f"give one number, not a range; got {text!r}")
    return simulated_count(low)
