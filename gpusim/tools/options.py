"""Options that the commands share which run torch.distributed."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpusim.reduction import Reduction, as_reduction
from gpusim.tools.arguments import add_arrays

__all__ = ["add_records", "add_reduction", "check_records", "reduction_of"]


def add_reduction(parser: argparse.ArgumentParser, default: str = "linear") -> None:
    """Add --reduction; `default` is what its help says of sums without one."""
    parser.add_argument(
        "--reduction",
        metavar="TEXT",
        help="how sums are added: an order, such as ring, or the name of a twin, such as "
        "gloo-ring, and fields: 'ring accumulate=float32 wire=bfloat16'. The documentation's page "
        f"on numerics has all of them, under 'A reduction as text' (default: {default})",
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


def reduction_of(options: argparse.Namespace) -> Reduction | None:
    """The Reduction that --reduction says.

    **Raises**: ValueError or TypeError for a text that says none.
    """
    return None if options.reduction is None else as_reduction(options.reduction, "--reduction")
