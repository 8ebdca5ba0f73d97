"""The table of all that a process has once, and each rank has to itself.

A rank that is a process has all of it from the system. A rank that is a thread has it as its row
says. So a leak between ranks is a missing row, and to mend it is to add one:

- what can be read and written gets a row that changes hands with the turn (`Attribute`, `Value`);
- what is looked up at each call gets an `install`, which makes it look at the calling thread;
- what a process can have only once is refused, by an `install` as well;
- what stays shared has a row too, which says so.

`gpusim torchrun --explain` prints the table. `tests/torch/test_own_table.py` has two ranks change
each row that changes hands.
"""

from __future__ import annotations

import builtins
import gc
import logging
import multiprocessing.context
import os
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..private import ATTRIBUTES, FLAGS
from . import registries
from .generators import GENERATORS, Generator
from .loggers import own_loggers

__all__ = ["Attribute", "Row", "TABLE", "Value", "explain", "installed", "rows"]

OWN, SHARED, REFUSED = "own", "shared", "refused"

_warnings: Any = warnings  # whose stub lacks private names
_context: Any = multiprocessing.context


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module, class or object."""

    owner: Any
    name: str
    #: Sets it where an assignment alone does not do.
    set_it: Callable[[Any], object] | None = None

    def read(self) -> Any:
        return vars(self.owner)[self.name]

    def write(self, value: Any) -> None:
        if self.set_it is None:
            setattr(self.owner, self.name, value)
        else:
            self.set_it(value)


@dataclass(frozen=True)
class Value:
    """A value that is read and written by functions."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


@dataclass(frozen=True)
class Row:
    """One thing that a process has.

    **Attributes**:

    - `name`: what it is, or the public name that sets it. Rows of one name are shown as one.
    - `kept`: how it changes hands with the turn, if it does.
    - `install`: makes it the rank's own, or refuses it, until the stack ends. For ranks that are
      threads.
    - `turns`, `free`: whether it is the rank's "own", "shared" or "refused" for ranks that are
      threads in turns, and for threads that run freely.
    """

    name: str
    kept: Attribute | Value | Generator | None = None
    install: Callable[[ExitStack], None] | None = field(default=None, kw_only=True)
    turns: str = field(default=OWN, kw_only=True)
    free: str = field(default=SHARED, kw_only=True)


def _set_filters(filters: list[Any]) -> None:
    changed = filters != _warnings.filters
    _warnings.filters = filters
    if changed:  # else warnings that were shown once are shown again
        forget = getattr(_warnings, "_filters_mutated", None)
        (forget or _warnings._filters_mutated_lock_held)()


def _set_main(module: Any) -> None:
    sys.modules["__main__"] = module


#: Attributes of torch that an assignment alone does not set.
SETTERS = {"_marked_safe_globals_set": registries.set_safe_globals}

# `free` of generators: `draws` exchanges states for as long as a draw lasts.
_RANDOM = (
    Row("torch's generator of the CPU", GENERATORS[0], free=OWN),
    Row("Python's random", GENERATORS[1], free=OWN),
    Row("NumPy's global generator", GENERATORS[2], free=OWN),
    Row("torch's generators of GPUs", free=OWN),  # read and written as tensors: see `Globals`
)

_PYTHON = (
    # By the thread: `environment`, and in C with the turn: `Launch`.
    Row("os.environ", free=OWN),
    Row("the working directory", Value(os.getcwd, os.chdir)),
    Row("sys.argv", Attribute(sys, "argv")),
    Row("__main__", Value(lambda: sys.modules["__main__"], _set_main)),
    Row("sys.stdout, sys.stderr", Attribute(sys, "stdout")),
    Row("sys.stdout, sys.stderr", Attribute(sys, "stderr")),
    Row("print", Attribute(builtins, "print")),
    *(
        Row("hooks of sys and threading", Attribute(*place))
        for place in (
            (sys, "breakpointhook"),
            (sys, "displayhook"),
            (sys, "excepthook"),
            (sys, "unraisablehook"),
            (threading, "excepthook"),
        )
    ),
    Row("filters of warnings", Attribute(warnings, "filters", _set_filters)),
    Row("filters of warnings", Attribute(warnings, "_showwarnmsg_impl")),
    Row("filters of warnings", Attribute(warnings, "showwarning")),
    Row("warnings that were shown", install=registries.own_memory_of_warnings, free=OWN),
    Row("the root logger", Attribute(logging.root, "handlers")),
    Row("the root logger", Value(lambda: logging.root.level, logging.root.setLevel)),
    Row("the root logger", Value(lambda: logging.root.manager.disable, logging.disable)),
    Row("loggers that a rank changes", install=own_loggers),
    Row("gc.enable", Value(gc.isenabled, lambda on: (gc.enable if on else gc.disable)())),
    Row("gc.set_threshold", Value(gc.get_threshold, lambda counts: gc.set_threshold(*counts))),
    Row("sys.setrecursionlimit", Value(sys.getrecursionlimit, sys.setrecursionlimit)),
    Row(
        "multiprocessing.set_start_method",
        Attribute(_context._default_context, "_actual_context"),
    ),
    # `threads`, `forks`
    Row("threads, pools and processes that a rank starts", free=OWN),
    Row("signal.signal", turns=REFUSED, free=REFUSED),  # by Python, in all but the main thread
    Row("modules, classes, and what they keep", turns=SHARED),
    Row("sys.path, atexit, the locale, umask, limits of resources", turns=SHARED),
)

_TORCH = (
    # By the thread: RanksWorld of `private_groups`.
    Row("process groups, device meshes", free=OWN),
    # By the thread, by torch itself.
    Row("grad mode, autocast, default device, inference mode", free=OWN),
    Row("casts that autocast keeps"),  # counted by `casts`
    Row("torch.set_default_dtype", Value(torch.get_default_dtype, torch.set_default_dtype)),
    *(Row(name, Value(read, write)) for name, read, write in FLAGS),
    *(
        Row(said, Attribute(pkgutil.resolve_name(owner), name, SETTERS.get(name)))
        for owner, names in ATTRIBUTES.items()
        for name, said in names.items()
    ),
    Row(
        "torch.serialization.add_safe_globals",
        install=registries.share_safe_globals_of_imports,
    ),
    Row(
        "torch.set_num_threads, torch.set_num_interop_threads",
        install=registries.own_numbers_of_threads,
        free=OWN,
    ),
    Row("FSDP's SimpleProfiler", install=registries.own_states_of_classes, free=OWN),
    Row(
        "operators of torch.library",
        install=registries.refuse_registrations,
        turns=REFUSED,
        free=REFUSED,
    ),
    # torch warns, or raises, where the old and the new way to set it are mixed, also if one reads.
    Row("torch.set_float32_matmul_precision, TF32", turns=SHARED),
    Row("torch.compile's configuration and caches", turns=SHARED),
    Row("levels of torch.autograd.forward_ad", turns=SHARED),
)

_LIBRARIES = (
    Row("states of accelerate", install=registries.own_states_of_libraries, free=OWN),
    Row("Megatron's parallel_state, and others in modules", turns=SHARED),
)

#: By the part of the process. The order of rows with an `install` is that in which they take place.
TABLE = {
    "Random numbers": _RANDOM,
    "Python": _PYTHON,
    "PyTorch": _TORCH,
    "Libraries": _LIBRARIES,
}


def rows() -> Iterator[Row]:
    """All rows of the table."""
    for part in TABLE.values():
        yield from part


@contextmanager
def installed() -> Iterator[None]:
    """A block in which ranks that are threads have what looks at the thread, or are refused it."""
    with ExitStack() as stack:
        for row in rows():
            if row.install is not None:
                row.install(stack)
        yield


EXPLANATION = """\
What a rank has to itself.

As a process, which ranks are on Linux unless --threads is given, a rank has all that a process
has. As a thread (--threads) it has what this table says: in turns, which is the default, and with
--schedule free.

own      each rank has its own, as a process has
shared   one for all ranks: what one sets, the others see
refused  an error, which names processes
"""


def explain() -> str:
    """The table as text, for `gpusim torchrun --explain`."""
    width = max(len(row.name) for row in rows()) + 4
    lines = [EXPLANATION, f"{'':{width}}{'turns':9}free"]
    for title, part in TABLE.items():
        lines.append(title)
        shown = dict.fromkeys(f"  {r.name:{width - 2}}{r.turns:9}{r.free}" for r in part)
        lines += shown
    return "\n".join(lines)
