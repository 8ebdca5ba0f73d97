"""`python -m tests.jax.ground [--reduction TEXT] [--json] [NAME ...]` runs programs, see `--help`.

A name is a module's or a program's. Each program has a line: its name, and its outcome.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import pkgutil
import random
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, nullcontext, redirect_stdout
from typing import Any

import jax

import gpusim.jax
from tests.jax import ground
from tests.jax.ground import _results
from tests.oracles.machine_time import PATIENCE


def chosen(names: list[str], sample: int | None, seed: int) -> list[ground.Program]:
    """The programs of the names, or of all modules; of each module at most `sample`."""
    modules = [found.name for found in pkgutil.iter_modules(ground.__path__)]
    modules = [name for name in modules if not name.startswith("_")]
    wanted = names or modules
    found = []
    for name in wanted:
        module, _, rest = name.partition(".")
        if module not in modules:
            raise SystemExit(f"{module}: expected a module of tests.jax.ground")
        importlib.import_module(f"tests.jax.ground.{module}")
        of_module = [
            each for each in ground.PROGRAMS.values() if each.name.startswith(f"{module}.")
        ]
        if rest:
            of_module = [ground.PROGRAMS[name]]
        elif sample is not None and sample < len(of_module):
            of_module = random.Random(f"{seed} {module}").sample(of_module, sample)
        found += of_module
    return found


def outcome(program: ground.Program) -> dict[str, Any]:
    """Run a program. Its results, its error, its warnings and what was compiled."""
    jax.clear_caches()  # what it compiles does not depend on the programs before
    before, begun = ground.Compilations.total, time.perf_counter()
    found: dict[str, Any] = {"name": program.name, "last_bits": program.last_bits}
    with ExitStack() as stack:
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        left = stack.enter_context(_results.sums_left_to_xla())
        kept = {}
        try:
            for name, value in program.config.items():
                if name not in jax.config.values:
                    raise ground.Skip(f"this JAX has no setting {name}")
                kept[name] = jax.config.values[name]
                jax.config.update(name, value)
            found["result"] = _results.described(program.call())
            jax.effects_barrier()
        except ground.Skip as skip:
            found["skip"] = str(skip)
        except Exception as error:
            found["error"] = ground.first_line(error)
            found["traceback"] = traceback.format_exc()
        finally:
            for name, value in kept.items():
                jax.config.update(name, value)
    found["compilations"] = ground.Compilations.total - before
    unreached = [str(each.message) for each in told if each.category.__name__ == "ReductionWarning"]
    found["warnings"] = unreached
    found["sums"] = left
    found["seconds"] = round(time.perf_counter() - begun, 2)
    return found


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.jax.ground", description=__doc__)
    parser.add_argument("--reduction", metavar="TEXT", help="install gpusim with this Reduction")
    parser.add_argument("--plain", action="store_true", help="JAX alone, as without --reduction")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each program")
    parser.add_argument("--sample", type=int, help="at most so many programs of each module")
    parser.add_argument("--seed", type=int, default=0, help="which ones --sample takes")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if options.plain and options.reduction:
        parser.error("--plain and --reduction exclude each other")
    programs = chosen(options.names, options.sample, options.seed)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", ground.DEVICES)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # programs print where they do not disturb
    installing: Any = nullcontext()
    if options.reduction:
        installing = gpusim.jax.installed(options.reduction)
    failed = 0
    if options.json:
        print(json.dumps({"programs": [each.name for each in programs]}), file=out, flush=True)
    with installing, redirect_stdout(sys.stderr):
        for each in programs:
            faulthandler.dump_traceback_later(
                float(os.environ.get("GPUSIM_CHILD_SECONDS", PATIENCE)), exit=True
            )
            if options.json:
                print(json.dumps({"begins": each.name}), file=out, flush=True)
            found = outcome(each)
            failed += "error" in found
            if options.json:
                print(json.dumps(found), file=out, flush=True)
            else:
                print(*_results.lines(found), sep="\n", file=out, flush=True)
            faulthandler.cancel_dump_traceback_later()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
