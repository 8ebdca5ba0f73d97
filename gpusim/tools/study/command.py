"""`gpusim study` and `gpusim study train`: arguments in; tables, files and pictures out.

Exit code 2: the arguments, or a file that they name, are invalid; nothing was changed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim.tools.options import (
    STDOUT,
    UsageError,
    add_counts,
    add_csv,
    add_json,
    add_page,
    add_picture,
    add_reduction,
    check_outputs,
    integer,
)
from gpusim.tools.study import train_command

if TYPE_CHECKING:
    from gpusim.tools.study.sweeping import Sweep

__all__ = ["add", "check_options"]

STORE = Path("study.partial.jsonl")
"""The default file of the measurements of an unfinished sweep."""

DESCRIPTION = """\
Sums the replicas of an input in every combination of the settings given, and measures how far the
results are from the exact sums. By default the gradients of a small network are summed in float16,
in linear, ring and tree order, rounded to nearest and stochastically, for 2 to 1,024 replicas.
--preset engines compares the sums of real engines: XLA, MPI, gloo, NCCL and GCL.
"""
EPILOG = """\
Lists are separated by commas. The format e5m6 has 5 bits of exponent and 6 of
mantissa. --replicas 2..1024 doubles from 2 to 1,024, --seeds 0..7 counts.
Partial sums have the format that travels between replicas (--accumulate wire):
that of the values, or what the engine of a twin uses. --accumulate contract is
gpusim's default, float32 for bfloat16 and float16 for 8-bit formats.
A wire is FORMAT, FORMAT:SCALE or FORMAT:SCALE:BLOCK, such as int8:amax:64, and
@hops (each partial sum, and the result), @ends (each value, and the result),
@members or @result; mx:FORMAT is an MX format. It rounds as --rounding says.
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
        usage="gpusim study [OPTIONS]\n       gpusim study train [OPTIONS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_sweep(study)
    study.set_defaults(run=run_sweep)
    kinds = study.add_subparsers(
        title="other studies", dest="kind", metavar="train", prog="gpusim study"
    )
    train = train_command.add(kinds, _add_outputs)
    refused = [action for action in study._actions if action.dest not in _names(train)]

    def run(arguments: argparse.Namespace) -> int:
        for action in refused:
            if action.option_strings and getattr(arguments, action.dest, None) != action.default:
                study.error(f"{action.option_strings[0]} is an option of sweeps, not of train")
        return train_command.run(arguments, _write)

    train.set_defaults(run=run)


def check_options(words: Sequence[str]) -> None:
    """End with an error for an option that a sweep lacks; argparse takes its value for `train`."""
    parser = argparse.ArgumentParser("gpusim study")
    _add_sweep(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    for word in takewhile(lambda word: word != "train", words):
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in options):
            parser.error(f"unrecognized arguments: {word}")


def _names(parser: argparse.ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions}


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    about_input = parser.add_argument_group("the input")
    about_input.add_argument(
        "--input",
        default="gradients",
        metavar="WHAT",
        help="gradients, normal, lognormal, heavy-tailed, cancelling; a file (.npy, .npz, "
        ".safetensors, .pt), whose axis 0 numbers the replicas; or a pattern of files, one from "
        "each worker, in quotes: 'rank*.safetensors' (default: %(default)s)",
    )
    about_input.add_argument(
        "--tensor",
        metavar="NAME",
        help="which of a file's arrays; a pattern such as '*' gives each that matches its own rows",
    )
    about_input.add_argument(
        "--concatenate",
        action="store_true",
        help="the arrays are one value, one after the other, as in a bucket",
    )
    about_input.add_argument(
        "--resample",
        choices=("workers", "elements"),
        help="draw any number of replicas from recorded workers, with replacement: whole workers, "
        "or each element alone",
    )
    about_input.add_argument(
        "--elements", type=integer, metavar="N", help="sum the first N elements only"
    )
    about_input.add_argument(
        "--scale", type=float, metavar="S", help="multiply values by S before they are rounded"
    )
    about_input.add_argument(
        "--epoch",
        type=integer,
        default=5,
        metavar="N",
        help="take gradients after N epochs of training (default: %(default)s)",
    )
    about_input.add_argument(
        "--input-seed",
        default="0",
        metavar="LIST",
        help="seed distributions, the network and --resample; several, such as 0..7, are several "
        "inputs, with confidence intervals (default: %(default)s)",
    )

    settings = parser.add_argument_group("the settings")
    settings.add_argument(
        "--preset",
        default="orders",
        metavar="NAME",
        help="a comparison, which the next three options change: orders (linear, ring and tree, "
        "both roundings), engines (twins) or accumulators (wire and float32) "
        "(default: %(default)s)",
    )
    for name, default, text in (
        (
            "accumulate",
            None,
            "formats of partial sums: wire, contract, float32, e5m6, ...; for the order fixed "
            "int8, int16, int32",
        ),
        (
            "order",
            None,
            "orders of additions: linear, reverse, ring, tree, kahan, neumaier, exact, fixed, "
            "twins",
        ),
        ("rounding", None, "nearest, stochastic"),
        ("dtype", "float16", "formats of the values (default: %(default)s)"),
        ("op", "sum", "sum, mean (default: %(default)s)"),
        ("wire", None, "what is sent is rounded: none, bfloat16, int8:amax:64@ends, mx:..."),
        ("hierarchy", None, "replicas of a group, and the order across: none, 8, 8:tree"),
        ("seeds", "0..7", "seeds of stochastic rounding (default: %(default)s)"),
    ):
        settings.add_argument(f"--{name}", default=default, metavar="LIST", help=text)
    add_reduction(
        settings,
        default=None,
        more="; a list, in place of the options above: 'ring accumulate=float32,gloo-ring'",
        several=True,
    )
    add_counts(
        settings,
        "--replicas",
        what="of the sums",
        default=None,
        type=None,
        shown="2..1024, as far as the input has them, and integers have room",
    )
    settings.add_argument(
        "--error-feedback",
        type=integer,
        metavar="K",
        help="accumulate the sums of K steps, also with residuals of what wires at @ends or "
        "@members lose",
    )
    settings.add_argument(
        "--threads", type=integer, metavar="N", help="fold N at a time (default: a core each)"
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
        help="the figure that --picture shows: relative_error, input_error, max_ulp, bias, cosine, "
        "error_p50, error_p99, sign_flips, correct, overflowed, ... (default: %(default)s)",
    )
    outputs.add_argument(
        "--against",
        default="replicas",
        choices=("replicas", "bytes"),
        help="what --picture shows it against: replicas, or the bytes that each sends "
        "(default: %(default)s)",
    )
    outputs.add_argument(
        "--figures",
        metavar="LIST",
        help="the columns of the table (default: relative_error,input_error,backward_p50,"
        "backward_p99,backward_max,bias,correct)",
    )
    outputs.add_argument(
        "--intervals",
        action="store_true",
        help="show confidence intervals in the table, in place of standard deviations",
    )
    outputs.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="C",
        help="of intervals, in tables, files and pictures (default: %(default)s)",
    )
    outputs.add_argument(
        "--compare",
        nargs=2,
        action="append",
        default=[],
        metavar=("A", "B"),
        help="test whether two settings, by their names in the table, differ by more than chance; "
        "may be given again",
    )
    outputs.add_argument(
        "--compare-metric",
        default="relative_error",
        metavar="NAME",
        help="the figure that --compare tests (default: %(default)s)",
    )


def _add_outputs(group: Any) -> None:
    add_csv(group)
    add_json(group, file=True)
    add_picture(group, "--plot")
    add_page(group, "--report")


def run_sweep(arguments: argparse.Namespace) -> int:
    """Check, sweep, print and write."""
    from gpusim.tools.study import sweeping
    from gpusim.tools.study.command_line import command
    from gpusim.tools.study.store import Store

    store = arguments.store or STORE
    try:
        check_outputs(arguments)
        if arguments.against != "replicas" and arguments.picture is None:
            raise UsageError(
                f"--against {arguments.against}: expected --plot or --picture, which it is for"
            )
        planned = _plan(arguments)
        if arguments.resume and not store.exists():
            print(f"gpusim study: --resume: no {store}; the sweep begins", file=sys.stderr)
        begun = command(planned.arguments)
        kept = Store(planned.identity, store, resume=arguments.resume, command=begun)
    except (ValueError, TypeError, OSError) as error:
        return _refused(error)
    study = None
    try:
        with kept:
            study = sweeping.run(planned, kept, threads=arguments.threads, show=True)
            if study.problems:
                print(f"gpusim study: {sweeping.artefacts(study)}", file=sys.stderr)
            if arguments.json != STDOUT:
                study.show(_figures(arguments), intervals=arguments.intervals)
            _write(study, arguments, metric=arguments.metric, against=arguments.against)
    except ValueError as error:  # a value of the input, found on the way
        return _refused(error)
    except BrokenPipeError:  # the reader, such as `head`, has finished
        if arguments.store is None and study is not None:
            store.unlink()  # all is measured: the same command may run again
        raise
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


def _plan(arguments: argparse.Namespace) -> Sweep:
    from gpusim.tools.study.metrics import METRICS
    from gpusim.tools.study.sweeping import plan

    for option, names in (
        ("--metric", [arguments.metric]),
        ("--compare-metric", [arguments.compare_metric]),
        ("--figures", _figures(arguments)),
    ):
        for name in names or ():
            if name not in METRICS:
                raise ValueError(f"{option}: {name!r} given; expected {', '.join(METRICS)}")
    if arguments.threads is not None and arguments.threads < 1:
        raise ValueError(f"--threads: {arguments.threads} given, expected at least 1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        planned = plan(
            arguments.input,
            replicas=arguments.replicas,
            dtypes=arguments.dtype,
            accumulators=arguments.accumulate,
            orders=arguments.order,
            roundings=arguments.rounding,
            ops=arguments.op,
            preset=arguments.preset,
            seeds=arguments.seeds,
            elements=arguments.elements,
            scale=arguments.scale,
            input_seed=arguments.input_seed,
            epoch=arguments.epoch,
            tensor=arguments.tensor,
            wires=arguments.wire,
            hierarchies=arguments.hierarchy,
            reductions=arguments.reduction,
            concatenate=arguments.concatenate,
            resample=arguments.resample,
            error_feedback=arguments.error_feedback,
            confidence=arguments.confidence,
            compare=arguments.compare,
            compare_metric=arguments.compare_metric,
        )
    for warning in caught:
        print(f"gpusim study: {warning.message}", file=sys.stderr)
    return planned


def _figures(arguments: argparse.Namespace) -> list[str] | None:
    from gpusim.tools.study.settings import items

    return None if arguments.figures is None else items(arguments.figures)


def _write(study: Any, arguments: argparse.Namespace, **plotted: str) -> None:
    """Write the files that the arguments name; `plotted` are options of the picture."""
    for path, make, options in (
        (arguments.csv, study.to_csv, {}),
        (arguments.json, study.to_json, {}),
        (arguments.picture, study.plot, plotted),
        (arguments.page, study.report, {}),
    ):
        if path == STDOUT and make == study.to_json:
            print(study.json_text(), end="")
        elif path is not None:
            print(f"wrote {make(path, **options)}", file=sys.stderr)


def _refused(error: Exception) -> int:
    print(f"gpusim study: {error}", file=sys.stderr)
    return 2
