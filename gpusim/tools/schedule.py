"""`gpusim schedule`: draw which IPU does what and when, without a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpusim.tools.options import (
    UsageError,
    add_picture,
    check_outputs,
    positive,
    whole_number,
)

__all__ = ["add"]

DESCRIPTION = """\
Draws which IPU computes which stage of a model for which micro-batch, and when, and prints the
bubble: the share of the IPUs' time that they spend waiting. For a model of your own, call
model.schedulePlot("schedule.svg").
"""
STRATEGIES = ("pipelined", "sharded", "phased")


def add(commands: Any) -> None:
    """Add `schedule` to the subcommands of `gpusim`."""
    schedule = commands.add_parser(
        "schedule",
        help="draw what the IPUs of a pipelined model do, and when",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = schedule.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--stages",
        type=whole_number(1),
        metavar="N",
        help="stages of the forward pass, each on its IPU",
    )
    which.add_argument(
        "--ipus", type=ipus, metavar="I,J,...", help="the IPU of each stage, in order: 0,1,0"
    )
    schedule.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="pipelined",
        help="how the stages are run; phased: each is a phase (default: %(default)s)",
    )
    depth = schedule.add_mutually_exclusive_group()
    depth.add_argument(
        "--accumulation",
        type=whole_number(1),
        metavar="N",
        help="train, with gradients of N micro-batches accumulated (default: the fewest that will "
        "do)",
    )
    depth.add_argument(
        "--iterations",
        type=whole_number(1),
        metavar="N",
        help="infer, with N device iterations in a call",
    )
    schedule.add_argument(
        "--backward",
        type=positive,
        default=2.0,
        metavar="X",
        help="how long a backward pass takes, in forward passes (default: %(default)g)",
    )
    add_picture(schedule, "--out", default=Path("schedule.svg"))
    schedule.set_defaults(run=run)


def ipus(text: str) -> list[int]:
    """An argparse type: numbers of IPUs, separated by commas."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"numbers of IPUs are needed, as 0,1,0, got {text!r}")
    return numbers


def run(arguments: argparse.Namespace) -> int:
    """Draw the schedule and print its summary."""
    from gpusim.poptorch.schedule import picture, tasks

    kinds = {"pipelined": tasks.pipelined, "sharded": tasks.sharded, "phased": tasks.phased}
    check_outputs(arguments)
    numbers = arguments.ipus or list(range(arguments.stages))
    stages = [tasks.PipelineStage(ipu, phase=place) for place, ipu in enumerate(numbers)]
    training = arguments.iterations is None
    fewest = len(tasks.steps(len(tasks.merge(stages)), training))
    micro_batches = arguments.accumulation or arguments.iterations or fewest
    try:
        schedule = kinds[arguments.strategy](
            stages, micro_batches, training=training, backward=arguments.backward
        )
    except ValueError as error:
        name = "--accumulation" if training else "--iterations"
        raise UsageError(f"{name} {micro_batches}: {error}") from None
    picture.write(schedule, arguments.picture)
    print(picture.summary(schedule))
    print(f"written to {arguments.picture}")
    return 0
