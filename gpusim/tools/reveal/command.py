"""`gpusim reveal`: write the script that reveals a cluster's order, show one, reveal one here.

Exit codes: 0; 1 if elements have no tree, or an engine failed; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpusim.files import atomic_write
from gpusim.tools.options import (
    UsageError,
    add_count,
    add_json,
    add_picture,
    add_verbosity,
    check_outputs,
    check_target,
    note,
)
from gpusim.words import count

from . import reveal_order

__all__ = ["add", "run"]

ENGINES = ("gloo", "openmpi", "mpich", "xla")
MPI_DTYPES = ("float32", "float64")

DESCRIPTION = """\
Reveals in which order an all-reduce adds, from its results alone. --write writes one script, which
needs NumPy and the engine alone, to run on a cluster; it writes order.json. --show prints such a
file, with its trees. Without either the engine of this machine that --engine names is revealed, in
real processes.
"""


def add(commands: Any) -> None:
    """Add the command to the command line's subparsers."""
    reveal = commands.add_parser(
        "reveal",
        help="reveal in which order an engine adds, from its results",
        description=DESCRIPTION,
    )
    mode = reveal.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--write", type=Path, metavar="FILE.py", help="write the script for a cluster"
    )
    mode.add_argument("--show", type=Path, metavar="FILE", help="show an order that was revealed")
    mode.add_argument("--engine", choices=ENGINES, help="reveal this engine, on this machine")
    reveal.add_argument("--force", action="store_true", help="with --write: replace a file")
    add_count(reveal, "--ranks", default=4, what="with --engine")
    reveal.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python whose engines are run as well; may be repeated",
    )
    reveal_order.add_options(reveal)
    reveal.add_argument(
        "--out",
        type=Path,
        default=Path("order.json"),
        metavar="FILE",
        help="with --engine: the file to write (default: %(default)s)",
    )
    add_json(reveal)
    add_picture(reveal)
    add_verbosity(reveal)
    reveal.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write, show or reveal; the exit code."""
    if options.force and options.write is None:
        raise UsageError("--force: expected --write FILE.py with it")
    if options.write is not None:
        return write(options)
    if options.show is not None:
        return show(options.show, options)
    return reveal(options)


def write(options: argparse.Namespace) -> int:
    """Write the script, whole or not at all."""
    path: Path = options.write
    check_target("--write", path)
    if path.exists() and not options.force:
        raise UsageError(f"--write {path}: the file is there; --force replaces it")
    from .starting import SCRIPT

    with atomic_write(path, "wb") as file:
        file.write(SCRIPT.read_bytes())
    path.chmod(0o755)
    if not options.quiet:
        print(
            f"{path}: written. On the cluster, with NumPy and the engine:\n"
            f"  torchrun --nproc-per-node 8 {path.name} --elements 4096,65536 --dtype bfloat16\n"
            f"  mpirun -n 4 python {path.name} --engine mpi --dtype float32\n"
            f"  python {path.name} --engine jax --dtype bfloat16\n"
            "It writes order.json. Here: gpusim reveal --show order.json, and "
            'gpusim.Reduction.like("order.json")'
        )
    return 0


def show(path: Path, options: argparse.Namespace) -> int:
    """Show a file."""
    from .showing import show as show_file

    check_outputs(options)
    return show_file(path, options)


def reveal(options: argparse.Namespace) -> int:
    """Reveal an engine of this machine, and show the file."""
    from ..twins.run_engines import INSTALLS, engines
    from .starting import reveal_here

    for dtype in options.dtype.split(","):
        try:
            reveal_order.format_of(dtype.strip())
        except ValueError as error:
            raise UsageError(str(error)) from None
        if options.engine in ("openmpi", "mpich") and dtype.strip() not in MPI_DTYPES:
            raise UsageError(f"--dtype {dtype}: MPI adds {' and '.join(MPI_DTYPES)}")
    for name in ("repeats", "verify"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)}: expected at least 1")
    check_target("--out", options.out)
    check_outputs(options)
    found = {engine.name: engine for engine in engines(options.python)}
    if options.engine not in found:
        here = ", ".join(found) or "none"
        raise UsageError(
            f"--engine {options.engine}: expected an engine that is installed (here: {here}): "
            f"{INSTALLS[options.engine]}; --python PATH names another Python, which may have it"
        )
    words = ["--out", str(options.out), "--quiet"][: 2 + (options.quiet or options.json)]
    for name in ("elements", "offsets"):
        words += [f"--{name}", ",".join(map(str, getattr(options, name)))]
    for name in ("dtype", "in_place", "repeats", "verify"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    note(options, f"{options.engine} on {count(options.ranks, 'rank')}")
    code = reveal_here(found[options.engine], options.ranks, words)
    if code not in (0, 1):
        return code
    if options.json or not options.quiet:
        show(options.out, options)
    return code
