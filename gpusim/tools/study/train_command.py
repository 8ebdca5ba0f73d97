"""`gpusim study train`: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from gpusim.tools.options import (
    STDOUT,
    UsageError,
    add_count,
    add_epochs,
    add_seed,
    check_outputs,
    positive,
    whole_number,
)

__all__ = ["add", "run"]

OPTIMIZERS = ("sgd", "momentum", "adam")
EPILOG = """\
Formats have short names: bf16, fp16, fp32, fp8, and sr for stochastic rounding: bf16:sr.
States are an optimizer's: m of momentum, m and v of adam. --state-format m=bf16:sr+v=fp32 names
each. All arithmetic of steps is float32's.
Ctrl-C keeps the trainings that are complete: the table is printed and files are written, and the
exit code is 130.
"""
INTERRUPTED = 130


def add(kinds: Any, add_outputs: Callable[[Any], None]) -> argparse.ArgumentParser:
    """Add `train` to the kinds of studies; `add_outputs` adds the files that it writes."""
    train: argparse.ArgumentParser = kinds.add_parser(
        "train",
        usage="gpusim study train [OPTIONS]",
        help="train a network in narrow formats",
        description="Train a small network on handwritten digits, data-parallel, with weights, "
        "gradients and an optimizer's states in narrow formats, and compare with float32.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_formats(train)
    add_count(train, "--replicas", default=8, what="how many replicas train")
    add_epochs(train, default=60)
    train.add_argument(
        "--rate",
        type=positive,
        metavar="R",
        help="learning rate (default: 0.005 of sgd, 0.0005 of momentum, 0.001 of adam)",
    )
    add_seed(train, "weights, images and rounding")
    train.add_argument(
        "--seeds",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="train each with N seeds, from --seed on; figures are means with confidence "
        "intervals (default: %(default)s)",
    )
    _add_steps(train)
    add_outputs(train)
    return train


def _add_formats(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--formats",
        metavar="LIST",
        help="such as float16,bf16:sr,e5m6 (default: float16, bfloat16 and float8_e4m3fn, rounded "
        "in either way; float32 with --state-format)",
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
    train.add_argument(
        "--master",
        metavar="FORMAT",
        help="keep master weights in this format, which are updated; the network computes with a "
        "copy in the format of --formats (default: none, weights are updated in their format)",
    )


def _add_steps(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="how weights are updated (default: %(default)s, plain gradient descent)",
    )
    train.add_argument(
        "--state-format",
        "--state-formats",
        dest="state_formats",
        metavar="LIST",
        help="the formats of the optimizer's states between steps, such as bf16,bf16:sr or "
        "m=bf16+v=fp32; each is trained with each of --formats (default: fp32)",
    )
    train.add_argument(
        "--clip",
        type=positive,
        metavar="NORM",
        help="scale a mean gradient of a larger global norm to it (default: no clipping)",
    )
    train.add_argument(
        "--clip-norm",
        default="tree",
        metavar="TEXT",
        help="how the squares of all elements are added for that norm: an order and fields, as "
        "'linear accumulate=bfloat16' (default: %(default)s, in float32)",
    )
    train.add_argument(
        "--error-feedback",
        action="store_true",
        help="let each replica add what rounding its gradient lost to its next gradient",
    )


def run(arguments: argparse.Namespace, write: Callable[[Any, argparse.Namespace], None]) -> int:
    """Check, train, print and write."""
    from gpusim.tools.study import training

    both = arguments.weights == arguments.gradients
    code = 0
    check_outputs(arguments)
    try:
        found = training.train(
            arguments.formats,
            weights=both or arguments.weights,
            gradients=both or arguments.gradients,
            replicas=arguments.replicas,
            epochs=arguments.epochs,
            rate=arguments.rate,
            seed=arguments.seed,
            seeds=arguments.seeds,
            optimizer=arguments.optimizer,
            state_formats=arguments.state_formats,
            master=arguments.master,
            clip=arguments.clip,
            clip_norm=arguments.clip_norm,
            error_feedback=arguments.error_feedback,
            show=True,
        )
    except training.TrainingInterrupted as error:
        print(f"gpusim study: interrupted: {error}", file=sys.stderr)
        if error.training is None:
            return INTERRUPTED
        found, code = error.training, INTERRUPTED
    except (ValueError, TypeError) as error:
        raise UsageError(_with_options(str(error))) from None
    if arguments.json != STDOUT:
        found.show()
    write(found, arguments)
    return code


def _with_options(message: str) -> str:
    """A message of `train`, with the option in place of the argument that it begins with.

    >>> _with_options("state_formats='x': expected one of float32, ...")
    "--state-format 'x': expected one of float32, ..."
    """
    name, sign, rest = message.partition("=")
    if not sign or not name.isidentifier():
        return message
    option = "state-format" if name == "state_formats" else name.replace("_", "-")
    return f"--{option} {rest}"
