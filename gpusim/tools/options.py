"""The options that commands share: one definition for each name, so that it means one thing.

Exit codes are shared too. 0: done, or the same. 1: the program failed, or a difference was found.
2: wrong usage, or no answer where 1 is one (`compare`, `equal`,
`invariant`, `twin`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpusim.figures import check_suffix
from gpusim.optional import require
from gpusim.reduction import Reduction, as_reduction

__all__ = [
    "COUNTS",
    "STDOUT",
    "WRONG",
    "UsageError",
    "add_arrays",
    "add_count",
    "add_counts",
    "add_csv",
    "add_device",
    "add_devices",
    "add_epochs",
    "add_json",
    "add_page",
    "add_picture",
    "add_preload",
    "add_program",
    "add_record",
    "add_records",
    "add_reduction",
    "add_seed",
    "add_traced",
    "add_verbosity",
    "byte_count",
    "check_folder",
    "check_outputs",
    "check_records",
    "counts",
    "integer",
    "note",
    "positive",
    "reduction_of",
    "split_names",
    "whole_number",
]

WRONG = 2
"""The exit code of wrong usage; argparse's own."""

STDOUT = Path("-")
"""The FILE of `--json` that stands for standard output."""

COUNTS = ("--ranks", "--replicas")
"""The common names of the number of participants, beside a command's own."""

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

MOST = 1_000_000
"""The longest range of a list of numbers."""


class UsageError(ValueError):
    """Arguments of a command that are wrong, or that do not fit together: exit code 2.

    The message names the option, what was given and what is expected.
    """


# ---------------------------------------------------------------- types


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


def integer(text: str) -> int:
    """An argparse type: an integer, whose range the command checks."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number is needed, got {text!r}") from None


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"a finite number above 0 is needed, got {text!r}")
    return number


def counts(smallest: int, fewest: int = 1) -> Callable[[str], list[int]]:
    """An argparse type: numbers from `smallest` on, at least `fewest`, which differ.

    >>> counts(1)("3,5-7"), counts(1)("2..16")
    ([3, 5, 6, 7], [2, 4, 8, 16])
    """
    expected = f"expected a number from {smallest}, or several, as 2,4 or 2-8 or 2..64 (doubling)"

    def convert(text: str) -> list[int]:
        numbers: list[int] = []
        for item in text.split(","):
            ends = re.fullmatch(r"([0-9]{1,9})(?:(\.\.|-)([0-9]{1,9}))?", item.strip())
            low, high = (int(ends[1]), int(ends[3] or ends[1])) if ends else (1, 0)
            if low > high or low < smallest or high - low >= MOST:
                raise argparse.ArgumentTypeError(f"{expected}; got {text!r}")
            if ends is not None and ends[2] == "..":
                numbers += [low << n for n in range((high // max(low, 1)).bit_length())]
            else:
                numbers += range(low, high + 1)
        if len(set(numbers)) < max(fewest, len(numbers)):
            raise argparse.ArgumentTypeError(
                f"expected different numbers{f', at least {fewest}' * (fewest > 1)}, such as "
                f"1,2,4; got {text!r}"
            )
        return numbers

    return convert


def byte_count(text: str) -> int:
    """An argparse type: a number of bytes, such as 500MiB or 2GiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]iB)?B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MiB or 2GiB; got {text!r}")
    return int(float(match[1]) * UNITS[match[2] or ""])


def call_range(text: str) -> range:
    """An argparse type: the numbers of calls, "all" or FIRST-LAST."""
    match = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if text == "all":
        return range(sys.maxsize)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"expected all, or calls such as 100-199; got {text!r}")
    return range(int(match[1]), int(match[2]) + 1)


seed_of = whole_number(0)
"""An argparse type: a seed."""


def reduction_text(text: str) -> str:
    """An argparse type: the text of a Reduction, whose operator is the program's."""
    try:
        chosen = as_reduction(text, "")  # argparse names the option
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("=")) from None
    if chosen.op != "sum":
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected op='sum', as the program names the operator"
        )
    return text


def reduction_of(options: argparse.Namespace) -> Reduction | None:
    """The Reduction that --reduction says."""
    return None if options.reduction is None else as_reduction(options.reduction, "--reduction")


# ---------------------------------------------------------------- participants


def add_count(
    parser: Any, *names: str, default: int | None, what: str, shown: str = "%(default)s"
) -> None:
    """Add the number of participants, by the command's `names` and the common ones."""
    parser.add_argument(
        *dict.fromkeys([*names, *COUNTS]),
        type=whole_number(1),
        default=default,
        metavar="N",
        help=f"the number of participants: {what} (default: {shown})",
    )


def add_counts(
    parser: Any,
    *names: str,
    what: str,
    default: str | None,
    type: Callable[[str], Any] | None,
    shown: str = "%(default)s",
) -> None:
    """Add the numbers of participants of a command that compares several."""
    parser.add_argument(
        *dict.fromkeys([*names, *COUNTS]),
        type=type,
        default=default,
        metavar="LIST",
        help=f"the numbers of participants, as 2,4 or 2-8 or 2..64 (doubling): {what} "
        f"(default: {shown})",
    )


PLAYS = {"cpu": "cpu, the host", "cuda": "cuda, the machine's first GPU"}


def add_device(parser: Any, *players: str) -> None:
    """Add --device: which of `PLAYS` may play a program's GPUs."""
    parser.add_argument(
        "--device",
        choices=players,
        help="what plays the GPUs that the program asks for, of which torchrun's ranks of a node "
        f"have one each: {' or '.join(PLAYS[player] for player in players)}",
    )


def add_devices(parser: Any, *more: str, default: int | None, what: str, shown: str) -> None:
    """Add --devices: how many the program finds."""
    parser.add_argument(
        "--devices",
        *more,
        type=whole_number(1),
        default=default,
        metavar="N",
        help=f"how many devices the program finds: {what} (default: {shown})",
    )


def add_program(parser: Any, what: str) -> None:
    """Add -m, the program and its arguments."""
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help=f"the {what}")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help=f"arguments of the {what}"
    ).required = False


# ---------------------------------------------------------------- how it runs


def add_reduction(
    parser: Any, default: str | None = "linear", more: str = "", several: bool = False
) -> None:
    """Add --reduction; `default` is what its help says of sums without one.

    `more` is said of it besides; `several` are a list, which the command itself takes apart.
    """
    ending = f"{more}{f' (default: {default})' * bool(default)}"
    parser.add_argument(
        "--reduction",
        type=None if several else reduction_text,
        metavar="LIST" if several else "TEXT",
        help="how sums are added: an order, such as ring, or the name of a twin, such as "
        "gloo-ring, and fields: 'ring accumulate=float32 wire=bfloat16'. The documentation's page "
        f"on numerics has all of them, under 'A reduction as text'{ending}",
    )


def add_seed(
    parser: Any, what: str, type: Callable[[str], int | None] = seed_of, default: int = 0
) -> None:
    """Add --seed, which seeds `what`."""
    parser.add_argument(
        "--seed",
        type=type,
        default=default,
        metavar="S",
        help=f"the base seed; it seeds {what} (default: %(default)s)",
    )


def add_preload(parser: Any) -> None:
    """Add --preload."""
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module once, before the ranks' processes are forked, which then share it; "
        "without it each rank imports it for itself, as torchrun's do. All ranks have what it "
        "computes as it is imported. May be repeated",
    )


def add_traced(parser: Any) -> None:
    """Add how programs run whose ranks are traced, for a comparison."""
    add_device(parser, "cpu")
    add_reduction(parser)
    add_seed(parser, "the generators that the script does not seed")
    add_preload(parser)
    parser.add_argument(
        "--trace-limit",
        type=byte_count,
        default="4GiB",
        metavar="SIZE",
        help="the size of a program's trace on disk; what is beyond is not compared (default: "
        "%(default)s)",
    )


def add_epochs(parser: Any, default: int) -> None:
    """Add --epochs."""
    parser.add_argument(
        "--epochs",
        type=whole_number(1),
        default=default,
        metavar="N",
        help="passes over the training images (default: %(default)s)",
    )


def add_verbosity(parser: Any) -> None:
    """Add -v and -q, which decide whether `note` prints."""
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="print what is started; without it a terminal alone shows that",
    )
    loudness.add_argument(
        "-q", "--quiet", action="store_true", help="print neither what is started nor progress"
    )


def note(options: argparse.Namespace, text: str) -> None:
    """Say on standard error what is started: on a terminal or with -v, and not with -q."""
    if not options.quiet and (options.verbose or sys.stderr.isatty()):
        print(f"gpusim {options.command}: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- records


def add_records(parser: Any) -> None:
    """Add --summary, --record with its --arrays and --limit, and --trace."""
    parser.add_argument(
        "--summary", action="store_true", help="print a table of all collectives at the end"
    )
    add_record(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a Chrome trace of the collectives' order, for Perfetto, without times",
    )


def add_record(parser: Any, *more: str, note: str = "") -> None:
    """Add --record, by `more` names too, with --arrays and --limit; `note` is the command's own."""
    parser.add_argument(
        "--record",
        *more,
        type=Path,
        metavar="PATH",
        help="write a line of JSON for each collective of each rank: to a FILE.jsonl, or "
        f"to a folder, with digests of operands and results, for gpusim compare{note}",
    )
    add_arrays(parser)


def add_arrays(parser: Any) -> None:
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


def check_records(options: argparse.Namespace, folder_only: bool = False) -> None:
    """**Raises**: UsageError for options of `add_record` that do not fit together, and for a record
    or trace that cannot be written.

    `folder_only`: a record of lines alone is not one of this command's.
    """
    record: Path | None = options.record
    is_folder = record is not None and record.suffix != ".jsonl"
    if options.arrays is not None and not is_folder:
        given = "no --record" if record is None else f"--record {record}"
        raise UsageError(f"--arrays needs --record with a folder; got {given}")
    if record is not None and is_folder:
        if record.exists() and not record.is_dir():
            raise UsageError(f"--record {record}: a file is there; expected a folder or FILE.jsonl")
        check_target("--record", record, folder=True)
    elif record is not None:
        if folder_only:
            raise UsageError(f"--record {record}: expected a folder, not FILE.jsonl")
        check_target("--record", record, in_place=True)
    if getattr(options, "trace", None) is not None:
        check_target("--trace", options.trace, in_place=True)


# ---------------------------------------------------------------- what it writes


def add_json(parser: Any, file: bool = False) -> None:
    """Add --json; with `file` it takes a FILE to write in place of standard output."""
    text = "print JSON in place of text"
    if file:
        parser.add_argument(
            "--json",
            type=Path,
            nargs="?",
            const=STDOUT,
            metavar="FILE",
            help=f"{text}; with FILE, write it there, and print the text",
        )
    else:
        parser.add_argument("--json", action="store_true", help=text)


def add_csv(parser: Any) -> None:
    """Add --csv."""
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table")


def add_picture(parser: Any, *old: str, default: Path | None = None) -> None:
    """Add --picture, and the command's older names of it."""
    parser.add_argument(
        "--picture",
        *old,
        type=Path,
        default=default,
        metavar="FILE",
        help=f"draw the picture: .png, .svg or .pdf{' (default: %(default)s)' * bool(default)}",
    )


def add_page(parser: Any, *old: str) -> None:
    """Add --page, and the command's older names of it."""
    parser.add_argument(
        "--page", *old, type=Path, metavar="FILE", help="write an HTML page with text and pictures"
    )


def check_outputs(options: argparse.Namespace) -> None:
    """Errors now that would otherwise come after all the work.

    **Raises**: UsageError for a picture's suffix, and for a file that could not be written;
    ModuleNotFoundError if a package for pictures is missing.
    """
    picture: Path | None = getattr(options, "picture", None)
    page: Path | None = getattr(options, "page", None)
    if picture is not None:
        try:
            check_suffix(picture)
        except ValueError as error:
            raise UsageError(f"--picture {error}") from None
    for name, path in (
        ("--csv", getattr(options, "csv", None)),
        ("--json", getattr(options, "json", None)),
        ("--picture", picture),
        ("--page", page),
    ):
        if isinstance(path, Path) and path != STDOUT:
            check_target(name, path)
    if picture is not None or page is not None:
        require("pictures need", "matplotlib")


def check_target(option: str, path: Path, folder: bool = False, in_place: bool = False) -> None:
    """**Raises**: UsageError if a file, or a `folder`, could not be written later.

    `in_place`: a file that is there is opened, and not replaced by another.
    """
    if path.is_dir() and not folder:
        raise UsageError(f"{option}: {path} is a folder, expected a file")
    around = path if path.is_dir() or (in_place and path.exists()) else path.parent
    if not around.exists():
        raise UsageError(f"{option}: {path}: no such folder: {around}")
    if around != path and not around.is_dir():
        raise UsageError(f"{option}: {path}: {around} is a file, expected a folder")
    if not os.access(around, os.W_OK):
        kind = "folder" if around.is_dir() else "file"
        raise UsageError(f"{option}: {path}: the {kind} {around} cannot be written")


def check_folder(option: str, folder: Path) -> None:
    """**Raises**: UsageError if a folder could not be made, with those around it, or written."""
    around = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if not around.is_dir():
        named = "" if around == folder else f"{folder}: "
        raise UsageError(f"{option}: {named}a folder is needed, {str(around)!r} is a file")
    if not os.access(around, os.W_OK):
        raise UsageError(f"{option}: {folder}: the folder {around} cannot be written")


def split_names(given: Sequence[str] | None) -> list[str] | None:
    """The names of an option that takes lists, and may be repeated; None if it is not there."""
    if given is None:
        return None
    return [part.strip() for text in given for part in text.split(",") if part.strip()]
