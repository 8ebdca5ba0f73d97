"""`gpusim study` and `gpusim study train`: arguments in; tables, files and pictures out.

Exit code 2: the arguments, or a file that they name, are invalid; nothing was changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim.tools.study.sweeping import Sweep

__all__ = ["add"]

STORE = Path("study.partial.jsonl")
"""The default file of the measurements of an unfinished sweep."""

MOST_SEEDS = 1_000_000

DESCRIPTION = """\
Sums the replicas of an input in every combination of the settings given, and measures how far the
results are from the exact sums. By default the gradients of a small network are summed in float16,
in linear, ring and tree order, rounded to nearest and stochastically, for 2 to 1,024 replicas.
"""
EPILOG = """\
Lists are separated by commas. --accumulate e5m6 is 5 bits of exponent and 6 of
mantissa. --replicas 2..1024 doubles from 2 to 1,024, --seeds 0..7 counts.
An interrupted sweep keeps its measurements; the same command with --resume continues.
`gpusim study train` trains a network in narrow formats: gpusim study train --help.
"""


def add(commands: Any) -> None:
    """Add `study` to the subcommands of `gpusim`."""
    study = commands.add_parser(
        "study",
        help="what order, format and rounding do to the precision of a sum, or of training",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_sweep(study)
    study.set_defaults(run=run_sweep)
    kinds = study.add_subparsers(title="other studies", dest="kind", metavar="train")
    train = _add_train(kinds)
    refused = [action for action in study._actions if action.dest not in _names(train)]

    def run(arguments: argparse.Namespace) -> int:
        for action in refused:
            if action.option_strings and getattr(arguments, action.dest, None) != action.default:
                study.error(f"{action.option_strings[0]} is an option of sweeps, not of train")
        return run_train(arguments)

    train.set_defaults(run=run)


def _names(parser: argparse.ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions}


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    about_input = parser.add_argument_group("the input")
    about_input.add_argument(
        "--input",
        default="gradients",
        metavar="WHAT",
        help="gradients, normal, lognormal, heavy-tailed, cancelling, or a .npy, .npz or "
        ".safetensors file, whose axis 0 numbers the replicas (default: %(default)s)",
    )
    about_input.add_argument("--tensor", metavar="NAME", help="which of a file's arrays")
    about_input.add_argument(
        "--elements", type=int, metavar="N", help="sum the first N elements only"
    )
    about_input.add_argument(
        "--scale", type=float, metavar="S", help="multiply values by S before they are rounded"
    )
    about_input.add_argument(
        "--epoch",
        type=int,
        default=5,
        metavar="N",
        help="take gradients after N epochs of training (default: %(default)s)",
    )
    about_input.add_argument(
        "--input-seed",
        type=int,
        default=0,
        metavar="S",
        help="seed distributions and the network (default: %(default)s)",
    )

    settings = parser.add_argument_group("the settings")
    for name, default, text in (
        ("replicas", None, "numbers of replicas (default: 2..1024, as far as the input has them)"),
        ("dtype", "float16", "formats of the values (default: %(default)s)"),
        ("accumulate", "own", "of partial sums: own, dtypes, e5m6, ... (default: %(default)s)"),
        ("order", "linear,ring,tree", "orders of additions, twins too (default: %(default)s)"),
        ("rounding", "nearest,stochastic", "roundings (default: %(default)s)"),
        ("seeds", "0..7", "seeds of stochastic rounding (default: %(default)s)"),
    ):
        settings.add_argument(f"--{name}", default=default, metavar="LIST", help=text)
    settings.add_argument(
        "--threads", type=int, metavar="N", help="fold N at a time (default: a core each)"
    )

    outputs = parser.add_argument_group("the outputs")
    outputs.add_argument(
        "--store",
        type=Path,
        metavar="FILE",
        help=f"write every measurement to FILE (default: {STORE}, which a finished sweep removes)",
    )
    outputs.add_argument("--resume", action="store_true", help="continue the sweep of the store")
    _add_outputs(outputs)
    outputs.add_argument(
        "--metric",
        default="relative_error",
        metavar="NAME",
        help="the figure that --plot shows: relative_error, max_ulp, bias, correct or overflowed "
        "(default: %(default)s)",
    )


def _add_outputs(group: Any) -> None:
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the table")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw .png, .svg or .pdf")
    group.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page")


def _add_train(kinds: Any) -> argparse.ArgumentParser:
    train: argparse.ArgumentParser = kinds.add_parser(
        "train",
        help="train a network in narrow formats",
        description="Train a small network on handwritten digits, data-parallel, with weights and "
        "gradients in narrow formats, and compare with float32.",
    )
    train.add_argument(
        "--formats",
        metavar="LIST",
        help="such as float16,bfloat16:stochastic (default: float16, bfloat16 and float8_e4m3fn, "
        "rounded in either way)",
    )
    train.add_argument(
        "--weights",
        action="store_true",
        help="put weights in the format; without --gradients, only them",
    )
    train.add_argument(
        "--gradients",
        action="store_true",
        help="put gradients in the format; without --weights, only them",
    )
    for name, default, kind, text in (
        ("replicas", 8, int, "how many replicas train"),
        ("epochs", 60, int, "passes over the training images"),
        ("rate", 0.005, float, "learning rate"),
        ("seed", 0, int, "seeds weights, images and rounding"),
    ):
        train.add_argument(
            f"--{name}",
            type=kind,
            default=default,
            metavar=name[0].upper(),
            help=f"{text} (default: %(default)s)",
        )
    _add_outputs(train)
    return train


def run_sweep(arguments: argparse.Namespace) -> int:
    """Check, sweep, print and write."""
    from gpusim.tools.study import sweeping
    from gpusim.tools.study.store import Store

    store = arguments.store or STORE
    try:
        _check_outputs(arguments)
        planned = _plan(arguments)
        kept = Store(planned.identity, store, resume=arguments.resume)
    except (ValueError, TypeError, OSError) as error:
        return _refused(error)
    try:
        with kept:
            study = sweeping.run(planned, kept, threads=arguments.threads, show=True)
            study.show()
            _write(study, arguments, metric=arguments.metric)
    except ValueError as error:  # a value of the input, found on the way
        return _refused(error)
    except BaseException:
        print(
            f"\n{len(kept)} measurements are kept in {store}: the same command with --resume "
            "goes on",
            file=sys.stderr,
        )
        raise
    if arguments.store is None:
        store.unlink()
    return 0


def run_train(arguments: argparse.Namespace) -> int:
    """Check, train, print and write."""
    from gpusim.tools.study import training

    both = arguments.weights == arguments.gradients
    try:
        _check_outputs(arguments)
        formats = _texts(arguments.formats) if arguments.formats else training.FORMATS
        found = training.train(
            formats,
            weights=both or arguments.weights,
            gradients=both or arguments.gradients,
            replicas=arguments.replicas,
            epochs=arguments.epochs,
            rate=arguments.rate,
            seed=arguments.seed,
            show=True,
        )
    except (ValueError, TypeError, OSError) as error:
        return _refused(error)
    found.show()
    _write(found, arguments)
    return 0


def _plan(arguments: argparse.Namespace) -> Sweep:
    from gpusim.tools.study.metrics import METRICS
    from gpusim.tools.study.sweeping import plan

    if arguments.metric not in METRICS:
        raise ValueError(f"--metric: {arguments.metric!r} given; expected {', '.join(METRICS)}")
    if arguments.threads is not None and arguments.threads < 1:
        raise ValueError(f"--threads: {arguments.threads} given, expected at least 1")
    replicas = arguments.replicas
    return plan(
        arguments.input,
        replicas=None if replicas is None else _numbers("--replicas", replicas, _doubling),
        dtypes=_texts(arguments.dtype),
        accumulators=[None if a == "own" else a for a in _texts(arguments.accumulate)],
        orders=_texts(arguments.order),
        roundings=_texts(arguments.rounding),
        seeds=_numbers("--seeds", arguments.seeds, _counting),
        elements=arguments.elements,
        scale=arguments.scale,
        input_seed=arguments.input_seed,
        epoch=arguments.epoch,
        tensor=arguments.tensor,
    )


def _texts(given: str) -> list[str]:
    return [part.strip() for part in given.split(",") if part.strip()]


def _numbers(option: str, given: str, between: Callable[[int, int], Iterable[int]]) -> list[int]:
    """The integers of a list in which a..b stands for some of those from a to b."""
    numbers: list[int] = []
    for part in _texts(given):
        ends = part.split("..")
        try:
            low, high = int(ends[0]), int(ends[-1])
            if len(ends) > 2:
                raise ValueError
        except ValueError:
            raise ValueError(f"{option}: {part!r} given, expected a number or a range") from None
        if not 0 <= low <= high:
            raise ValueError(f"{option}: {part!r} given, expected numbers from 0, rising")
        numbers += between(low, high)
    return numbers


def _doubling(low: int, high: int) -> list[int]:
    return [low << n for n in range(max(1, high // max(low, 1)).bit_length())]


def _counting(low: int, high: int) -> Iterable[int]:
    if high - low >= MOST_SEEDS:
        raise ValueError(f"--seeds: {low}..{high} are more than {MOST_SEEDS:,}")
    return range(low, high + 1)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Errors now that would otherwise come after all the work."""
    from gpusim.figures import check_suffix
    from gpusim.optional import require

    if arguments.plot is not None:
        check_suffix(arguments.plot)
    for path in (arguments.csv, arguments.json, arguments.plot, arguments.report):
        if path is not None:
            _check_target(path)
    if arguments.plot is not None or arguments.report is not None:
        require("pictures need", "matplotlib")


def _check_target(path: Path) -> None:
    """OSError now if a file could not be written later."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a file")
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path}: the folder {folder} cannot be written")


def _write(study: Any, arguments: argparse.Namespace, **plotted: str) -> None:
    """Write the files that the arguments name; `plotted` are options of the picture."""
    for path, make, options in (
        (arguments.csv, study.to_csv, {}),
        (arguments.json, study.to_json, {}),
        (arguments.plot, study.plot, plotted),
        (arguments.report, study.report, {}),
    ):
        if path is not None:
            print(f"wrote {make(path, **options)}", file=sys.stderr)


def _refused(error: Exception) -> int:
    print(f"gpusim study: {error}", file=sys.stderr)
    return 2
