"""The command `poprun`, with PopRun's arguments.

Its exit code is that of the first instance that failed, or 128 + N if signal N killed it; 2 for
wrong usage, without the program or an mpirun; 128 + N if signal N stopped poprun itself.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import stat
import sys
import time
from collections.abc import Sequence
from functools import partial

import gpusim
from gpusim.devices.command import complain
from gpusim.devices.table import DEFAULT_IPUS, MOST_IPUS, Table
from gpusim.platforms import lacks
from gpusim.tools.launch import mpirun
from gpusim.tools.launch.layout import LaunchLayout, hosts_of, lay_out
from gpusim.tools.launch.supervise import supervise
from gpusim.tools.options import WRONG, whole_number

__all__ = ["main"]

PROGRAM = "poprun"
TAKES_OPTIONS = ("--mpi-global-args", "--mpi-local-args")  # whose value may begin with a dash
BOOLEANS = {"yes": True, "true": True, "on": True, "1": True}
BOOLEANS |= {"no": False, "false": False, "off": False, "0": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Run poprun with the arguments `argv` (default: the process's) and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(join_options(sys.argv[1:] if argv is None else argv))
    program = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        parser.error("the program to run is missing: poprun [options] PROGRAM [ARGUMENTS]")
    only = arguments.only_output_from_instance
    if only is not None and only >= arguments.num_instances:
        parser.error(
            f"--only-output-from-instance {only}: expected less than "
            f"--num-instances {arguments.num_instances}"
        )
    if not hasattr(os, "mkfifo"):
        complain(PROGRAM, lacks("instances", "mpirun and FIFOs"))
        return WRONG
    try:
        hosts = hosts_of(arguments.host) if arguments.host is not None else ()
        ipus = arguments.ipus_per_replica
        layout = lay_out(arguments.num_instances, arguments.num_replicas, ipus, hosts)
        environ = dict(os.environ) | ipu_variables(layout)
        mpi_args = [shlex.split(text) for text in (arguments.mpi_global, arguments.mpi_local)]
    except ValueError as error:
        parser.error(str(error))
    try:
        if not hosts:
            check_executable(program[0])
    except OSError as error:
        complain(PROGRAM, error)
        return WRONG
    try:
        executable = mpirun.find()
    except OSError as error:
        complain(PROGRAM, error)
        return WRONG
    log(arguments.verbose, 1, describe(layout))
    warn_of_ignored(arguments)

    reads = has_input()
    feed = reads and not hosts and not os.isatty(0)  # else mpirun copies the input

    def line(environ: dict[str, str], fifo: str) -> list[str]:
        words = mpirun.command_line(
            executable,
            layout,
            program,
            global_args=mpi_args[0],
            local_args=mpi_args[1],
            environ=environ,
            source=fifo if feed else None if reads else "",
        )
        log(arguments.verbose, 2, f"Running command: {shlex.join(words)}")
        return words

    return supervise(
        line,
        len(layout.instances),
        only=only,
        verbose=arguments.verbose > 0,
        feed=feed,
        environ=environ,
        complain=partial(complain, PROGRAM),
    )


def command_line() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="poprun [options] PROGRAM [ARGUMENTS]",
        description="Starts PROGRAM as several instances, which share the replicas evenly, with "
        "Open MPI's mpirun. Each instance finds its share in PopDist's variables.",
        epilog="GPUSIM_IPUS sets the number of simulated IPUs of a host; without it, a host has as "
        f"many as its instances need, and at least {DEFAULT_IPUS}.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"gpusim {gpusim.__version__}")
    number = whole_number(1)
    add("--num-instances", type=number, default=1, metavar="I", help="processes (default: 1)")
    add(
        "--num-replicas",
        type=number,
        metavar="R",
        help="replicas, in total; the first instances hold one more where I does not divide R "
        "(default: one for each instance)",
    )
    add("--ipus-per-replica", type=number, default=1, metavar="N", help="(default: 1)")
    add(
        "-H",
        "--host",
        metavar="H1,H2",
        help="the hosts that the instances are divided among, also H[1-3] (default: this one)",
    )
    add(
        "--only-output-from-instance",
        type=whole_number(0),
        metavar="I",
        help="hide what the others print; if one fails, its last errors are shown",
    )
    add("--mpi-global-args", dest="mpi_global", default="", metavar="'...'", help="for mpirun")
    add(
        "--mpi-local-args",
        dest="mpi_local",
        default="",
        metavar="'-x A -x B'",
        help="for mpirun, repeated for each instance",
    )
    add(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="print what is started, and if the run fails the errors of all instances; twice: with "
        "mpirun's command line",
    )
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    ignored = parser.add_argument_group("accepted for compatibility with PopRun, without effect")
    ignored.add_argument("--vipu-partition", metavar="P", help="simulated IPUs need no partition")
    for option in ("--update-partition", "--remove-partition", "--reset-partition"):
        ignored.add_argument(option, type=boolean, metavar="yes|no")
    for option in ("--vipu-server-host", "--vipu-server-port", "--vipu-server-timeout"):
        ignored.add_argument(option, metavar="...")
    for option in ("--vipu-cluster", "--vipu-allocation", "--num-ilds"):
        ignored.add_argument(option, metavar="...")
    parser.set_defaults(ignored=[action.dest for action in ignored._group_actions])
    return parser


def join_options(argv: Sequence[str]) -> list[str]:
    """Write `--mpi-local-args -v` as `--mpi-local-args=-v`: argparse refuses a value with a dash.

    >>> join_options(["--mpi-local-args", "-v", "ls", "--mpi-local-args", "-v"])
    ['--mpi-local-args=-v', 'ls', '--mpi-local-args', '-v']
    """
    joined: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in TAKES_OPTIONS and words:
            word = f"{word}={words.pop(0)}"
        joined.append(word)
        if not word.startswith("-") and not is_value(joined):
            break  # the program: the rest are its arguments
    return joined + words


def is_value(words: list[str]) -> bool:
    """Whether the last word belongs to the option before it."""
    before = words[-2] if len(words) > 1 else ""
    return before.startswith("-") and "=" not in before and before not in FLAGS


FLAGS = ("-v", "-vv", "-vvv", "--verbose", "-h", "--help", "--version", "--")


def boolean(text: str) -> bool:
    """An argparse type: yes or no."""
    try:
        return BOOLEANS[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected yes or no, got {text!r}") from None


def ipu_variables(layout: LaunchLayout) -> dict[str, str]:
    """GPUSIM_IPUS with the IPUs that a host needs, unless it is set.

    ValueError if it is set to a smaller number.
    """
    needed = layout.ipus_per_host
    if os.environ.get("GPUSIM_IPUS", "").strip():
        count = Table.from_environment().count
        if count < needed:
            raise ValueError(
                f"{layout.replicas} replicas of {layout.ipus_per_replica} IPUs in "
                f"{len(layout.instances)} instances need {needed} IPUs on a host; "
                f"GPUSIM_IPUS={os.environ['GPUSIM_IPUS']!r}"
            )
        return {}
    # More than MOST_IPUS is an error only for a program that asks for devices.
    return {"GPUSIM_IPUS": str(needed)} if DEFAULT_IPUS < needed <= MOST_IPUS else {}


def check_executable(program: str) -> None:
    """OSError if the program does not exist. mpirun would print a long message per instance."""
    if shutil.which(program):
        return
    if os.path.isdir(program):
        raise IsADirectoryError(f"{program} is a folder, not a program")
    if os.path.isfile(program):
        raise PermissionError(
            f"{program} is not executable: put its interpreter before it, as in "
            f"`poprun python {program}`"
        )
    raise FileNotFoundError(f"there is no program {program!r}")


def has_input() -> bool:
    """Whether standard input is open, and not /dev/null."""
    try:
        found, null = os.fstat(0), os.stat(os.devnull)
    except OSError:
        return False
    return not stat.S_ISCHR(found.st_mode) or found.st_rdev != null.st_rdev


def describe(layout: LaunchLayout) -> str:
    """The layout, in a line."""
    replicas = [str(instance.replicas) for instance in layout.instances]
    shares = replicas[0] if layout.uniform else ", ".join(replicas)
    hosts = dict.fromkeys(i.host for i in layout.instances if i.host)
    where = f" on {', '.join(hosts)}" if hosts else ""
    return (
        f"{layout.replicas} replica(s) of {layout.ipus_per_replica} IPU(s), {shares} in each of "
        f"{len(replicas)} instance(s){where}"
    )


def warn_of_ignored(arguments: argparse.Namespace) -> None:
    """Print the options that have no effect."""
    named = [name for name in arguments.ignored if getattr(arguments, name) is not None]
    if named:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        complain(PROGRAM, f"{options}: no effect, the IPUs are simulated")


def log(verbose: int, level: int, text: str) -> None:
    """Print a line of the log, in PopRun's form."""
    if verbose >= level:
        now = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        kind = "ID"[level - 1]
        line = f"{clock}.{int(now * 1000) % 1000:03} 1 POPRUN [{kind}] {text}"
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
