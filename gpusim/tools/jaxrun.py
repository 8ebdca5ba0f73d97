"""`gpusim jaxrun`: a JAX program on fake CPU devices, with gpusim's collectives installed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from gpusim.optional import require
from gpusim.reduction import Reduction
from gpusim.tools import program
from gpusim.tools.arguments import whole_number
from gpusim.tools.program import NoProgramError

__all__ = ["add"]

COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "jaxrun",
        usage="gpusim jaxrun [OPTIONS] [-m] SCRIPT ...",
        help="run a JAX program on fake CPU devices",
        description="Run a JAX program on fake devices of XLA:CPU, after gpusim.jax.install(): "
        "lax.ragged_all_to_all works, and lax.psum adds as --reduction says.",
    )
    parser.add_argument(
        "--devices",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="how many devices JAX shows (default: %(default)s)",
    )
    parser.add_argument(
        "--reduction",
        metavar="ORDER",
        help="how sums are added: an order of gpusim.Reduction or the name of a twin, such as "
        "gloo-ring (default: XLA adds)",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program; its exit code, or 0."""
    require("gpusim jaxrun needs", "jax")
    reduction = None if options.reduction is None else Reduction(order=options.reduction)
    try:
        find = program.found_module if options.module else program.found_script
        script = find(options.script)
    except NoProgramError as error:
        print(f"gpusim jaxrun: {error}", file=sys.stderr)
        return error.code
    choose_devices(options.devices)
    program.lead_path(script.folder)
    from gpusim.jax import install  # not before: importing jax reads the environment

    install(reduction)
    sys.argv = [script.name, *options.arguments]
    return program.execute(script)


def choose_devices(count: int) -> None:
    """Set the environment from which JAX takes its devices.

    **Raises**: ValueError if JAX has been imported, which reads it.
    """
    if "jax" in sys.modules:
        raise ValueError("jaxrun has to start before the process imports jax")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    # A count among XLA's flags would be a second one.
    flags = COUNT.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    if flags:
        os.environ["XLA_FLAGS"] = flags
    else:
        os.environ.pop("XLA_FLAGS", None)
