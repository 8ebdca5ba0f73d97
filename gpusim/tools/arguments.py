"""Types of command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

__all__ = ["add_arrays", "byte_count", "call_range", "whole_number"]

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def add_arrays(parser: argparse.ArgumentParser) -> None:
    """Add --arrays and --limit, which choose the whole arrays of a record."""
    parser.add_argument(
        "--arrays",
        type=call_range,
        metavar="CALLS",
        help="keep whole operands and results in the folder of --record: all, or those of some "
        "calls of each rank, counted from 0, such as 100-199",
    )
    parser.add_argument(
        "--limit",
        type=byte_count,
        default="2GiB",
        metavar="SIZE",
        help="the size of the files of arrays; the oldest are removed (default: %(default)s)",
    )


def byte_count(text: str) -> int:
    """An argparse type: a number of bytes, such as 500MiB or 2GiB."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB)?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MiB or 2GiB; got {text!r}")
    return int(float(found[1]) * UNITS[found[2] or ""])


def call_range(text: str) -> range:
    """An argparse type: the numbers of calls, "all" or FIRST-LAST."""
    found = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if text == "all":
        return range(sys.maxsize)
    if found is None or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"expected all, or calls such as 100-199; got {text!r}")
    return range(int(found[1]), int(found[2]) + 1)


def whole_number(smallest: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `smallest`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(
                f"a whole number of at least {smallest} is needed, got {text!r}"
            )
        return number

    return convert
