"""The common part of gc-info and gc-monitor: errors, interrupts and exit codes.

Exit codes: 0 for success, 1 for a failure (the reason is on standard error), 2 for invalid
arguments, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from gpusim.errors import GpusimError
from gpusim.version import __version__

__all__ = ["complain", "parser_of", "run"]

INTERRUPTED = 130  # 128 + SIGINT, the shell's convention


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """A parser with --help and --version."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog="GPUSIM_IPUS sets the number of simulated IPUs (default: 16).",
    )
    parser.add_argument("--version", action="version", version=f"gpusim {__version__}")
    return parser


def run(program: str, body: Callable[[], None]) -> int:
    """Run the body of a command, and return the exit code."""
    try:
        body()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for example, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (GpusimError, OSError, ValueError) as error:
        complain(program, error)
        return 1
    return 0


def complain(program: str, problem: object) -> None:
    """Print a line on standard error."""
    print(f"{program}: {problem}", file=sys.stderr)
