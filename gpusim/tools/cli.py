"""The command `gpusim`: parse the arguments and run the subcommand.

Exit codes: 0 success, 1 failure (the reason is on standard error), 2 wrong usage, 130 interrupted.
Where 1 is an answer (`compare`, `equal`, `invariant`, `twin`), a failure is 2. Those of programs
that commands run: `add` of each.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import gpusim
from gpusim.errors import GpusimError
from gpusim.optional import PackageError
from gpusim.platforms import printable
from gpusim.tools import jaxrun, options, program, run, schedule, torchrun
from gpusim.tools.compare import command as compare
from gpusim.tools.equal import command as equal
from gpusim.tools.resume import command as resume
from gpusim.tools.reveal import command as reveal
from gpusim.tools.study import command as study
from gpusim.tools.twins import command as twin

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        printable(stream)
    open_streams()
    parser = command_line()
    words = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if words[:1] == ["run"]:  # arguments after the program's name are the program's
        own, rest = program.split(words[1:], run.WITH_VALUE)
        words = ["run", *own]
    if words[:1] == ["study"]:
        study.check_options(words[1:])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:  # the message is to name the command
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.run is None:
        parser.print_help(sys.stderr)
        return 2
    if arguments.run is run.run:  # exceptions of the program are the program's
        try:
            run.check(arguments)
        except options.UsageError as error:
            return _wrong(arguments, error)
        return run.run(arguments, rest)
    if arguments.run is torchrun.run and argv is None:
        atexit.register(torchrun.end_quickly)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        code = torchrun.interrupted(error)
    except BrokenPipeError:  # the reader, such as `head`, has finished
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (options.UsageError, PackageError) as error:
        return _wrong(arguments, error)
    except (GpusimError, OSError, ValueError, ModuleNotFoundError) as error:
        print(f"gpusim {arguments.command}: {_reason(error)}", file=sys.stderr)
        failure: int = arguments.failure
        return failure
    if code == torchrun.INTERRUPTED and argv is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends Python's own end
    return code


def open_streams() -> None:
    """Give a process whose standard output or error is closed (`>&-`) one that leads nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # as long as it runs


def _wrong(arguments: argparse.Namespace, error: Exception) -> int:
    """Print why nothing was run: wrong arguments, or a missing package; the exit code."""
    print(f"gpusim {arguments.command}: {error}", file=sys.stderr)
    return options.WRONG


def _reason(error: Exception) -> str:
    """The message of an error; the system's errors begin with the file."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error)
    path = Path(os.fsdecode(error.filename))
    if not isinstance(error, FileNotFoundError):
        return f"{path}: {error.strerror}"
    gone = "such file" if path.parent.is_dir() else f"folder {path.parent}"
    return f"{path}: there is no {gone}"


def command_line() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="gpusim",
        description="Replicated programs for machines that you do not have.",
        epilog="gpusim COMMAND --help says more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"gpusim {gpusim.__version__}")
    parser.set_defaults(run=None, parser=parser, failure=1)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    run.add(commands)

    info = commands.add_parser(
        "info",
        help="what this machine offers, and what to install for more",
        description="What this machine offers gpusim, and what to install for more.",
    )
    options.add_json(info)
    info.set_defaults(run=run_info)

    demo = commands.add_parser(
        "demo",
        help="train on many replicas with sums of different order and precision",
        description="Train a small network data-parallel on scikit-learn's handwritten digits, "
        "with gradients summed in different orders and precisions, and compare with float64. "
        "Prints a table; writes it and a picture to DIR.",
    )
    options.add_count(demo, "--replicas", default=64, what="how many replicas train")
    options.add_epochs(demo, default=30)
    options.add_seed(demo, "the weights and the order of the images")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="folder for the results, made if missing (default: %(default)s)",
    )
    demo.set_defaults(run=run_demo)
    study.add(commands)
    twin.add(commands)
    reveal.add(commands)
    schedule.add(commands)
    torchrun.add(commands)
    compare.add(commands)
    equal.add(commands)
    resume.add(commands)
    jaxrun.add(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def run_info(arguments: argparse.Namespace) -> int:
    """Print what the machine offers."""
    from gpusim.tools import info

    machine = info.survey()
    if arguments.json:
        print(info.to_json(machine))
    else:
        info.show(machine)
    return 0


def run_demo(arguments: argparse.Namespace) -> int:
    """Train, compare, and write table and picture."""
    from gpusim.tools import demo

    options.check_folder("--out", arguments.out)
    demo.run(
        replicas=arguments.replicas,
        epochs=arguments.epochs,
        seed=arguments.seed,
        out=arguments.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
