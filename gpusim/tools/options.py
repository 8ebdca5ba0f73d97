"""Options that the commands share which run torch.distributed."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpusim.fallback.orders import EXACT, FIXED, ORDERS
from gpusim.reduction import Reduction
from gpusim.tools.arguments import add_arrays

__all__ = ["add_records", "add_reduction", "check_records", "check_reduction"]

ORDER_NAMES = (*ORDERS, EXACT, FIXED)


def add_reduction(parser: argparse.ArgumentParser) -> None:
    """Add --reduction."""
    parser.add_argument(
        "--reduction",
        metavar="ORDER",
        help=f"how sums are added: an order ({', '.join(ORDER_NAMES)}) or the name of "
        f"a twin ({', '.join(Reduction.twins())}) (default: linear)",
    )


def add_records(parser: argparse.ArgumentParser) -> None:
    """Add --summary, --record with its --arrays and --limit, and --trace."""
    parser.add_argument(
        "--summary", action="store_true", help="print a table of all collectives at the end"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="PATH",
        help="write a line of JSON for each collective of each rank: to a FILE.jsonl, or "
        "to a folder, with digests of operands and results, for gpusim compare",
    )
    add_arrays(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a Chrome trace of the collectives' order, for Perfetto, without times",
    )


def check_records(options: argparse.Namespace) -> None:
    """**Raises**: ValueError for options of `add_records` that do not fit together."""
    folder = options.record is not None and options.record.suffix != ".jsonl"
    if options.arrays is not None and not folder:
        raise ValueError("--arrays needs --record with a folder")


def check_reduction(options: argparse.Namespace) -> None:
    """**Raises**: ValueError for a --reduction that there is not."""
    if options.reduction not in (None, *ORDER_NAMES, *Reduction.twins()):
        raise ValueError(
            f"--reduction {options.reduction}: expected an order ({', '.join(ORDER_NAMES)}) or the "
            f"name of a twin ({', '.join(Reduction.twins())})"
        )
