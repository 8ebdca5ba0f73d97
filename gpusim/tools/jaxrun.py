"""`gpusim jaxrun`: a JAX program on fake CPU devices, with gpusim's collectives installed."""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import suppress
from typing import Any

import gpusim
from gpusim.optional import require
from gpusim.tools import program
from gpusim.tools.options import (
    COUNTS,
    WRONG,
    UsageError,
    add_devices,
    add_program,
    add_record,
    add_reduction,
    add_verbosity,
    check_records,
    note,
    reduction_of,
)
from gpusim.tools.program import NoProgramError

__all__ = ["add"]

REACHED = (
    "; it reaches lax.psum, pmean, psum_scatter, the transposes of others, and the sums that XLA's "
    "partitioner inserts, as under jit with NamedSharding; xla-cpu has the bits of XLA's own sums, "
    "except of subnormal numbers, which XLA takes for zero, and of constants of the program, which "
    "XLA multiplies by the number of devices"
)

COUNT = re.compile(r"--xla_force_host_platform_device_count=\S*")


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "jaxrun",
        usage="gpusim jaxrun [OPTIONS] [-m] SCRIPT ...",
        help="run a JAX program on fake CPU devices",
        description="Run a JAX program on fake devices of XLA:CPU, after gpusim.jax.install(): "
        "lax.ragged_all_to_all works, and all sums between devices add as --reduction says, those "
        "that XLA's partitioner inserts too.",
        epilog="The exit code is the program's: that of sys.exit, 1 after an exception; 2 after a "
        "wrong argument or without the program.",
    )
    add_devices(parser, *COUNTS, default=8, what="JAX shows them", shown="%(default)s")
    add_reduction(parser, default="XLA adds", more=REACHED)
    add_record(
        parser,
        note="; of this command a folder, with --reduction (xla-cpu is as XLA adds)",
    )
    add_verbosity(parser)
    add_program(parser, "program")
    parser.set_defaults(run=run)


class ProgramFailed(Exception):
    """How a recorded program has ended."""


def run(options: argparse.Namespace) -> int:
    """Run the program; its exit code, or 0."""
    require("programs of JAX need", "jax")
    reduction = reduction_of(options)
    check_records(options, folder_only=True)
    if options.record is not None and reduction is None:
        raise UsageError(
            "--record needs --reduction: without it XLA adds, and its sums are not recorded; "
            "--reduction xla-cpu has XLA's bits"
        )
    try:
        find = program.found_module if options.module else program.found_script
        script = find(options.script)
    except NoProgramError as error:
        print(f"gpusim jaxrun: {error}", file=sys.stderr)
        return WRONG
    except Exception as error:  # a syntax error, or a package that fails
        return program.ended(error)
    choose_devices(options.devices)
    note(
        options,
        f"{options.script} on {options.devices} device{'s' * (options.devices > 1)} of XLA:CPU; "
        f"all sums between devices: {options.reduction or 'as XLA adds'}",
    )
    program.lead_path(script.folder)
    from gpusim.jax import install  # not before: importing jax reads the environment

    install(reduction)
    sys.argv = [script.name, *options.arguments]
    if options.record is None:
        return program.execute(script)
    chosen = False if options.arrays is None else options.arrays
    code = 0
    with suppress(ProgramFailed):
        with gpusim.record(options.record.absolute(), arrays=chosen, limit=options.limit):
            code = program.execute(script)
            if code:
                raise ProgramFailed(f"exit code {code}")
    return code


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
