"""What gc-info and gc-monitor have in common: errors, interrupts and exit codes.

Exit codes: 0 done, 1 could not be done (the reason is on standard error), 2 arguments that make
no sense, 130 interrupted.
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
    """A parser that knows --help and --version."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog="GPUSIM_IPUS says how many simulated IPUs there are (default: 16).",
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
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (GpusimError, OSError, ValueError) as error:
        complain(program, error)
        return 1
    return 0


def complain(program: str, about: object) -> None:
    """A line on standard error."""
    print(f"{program}: {about}", file=sys.stderr)
