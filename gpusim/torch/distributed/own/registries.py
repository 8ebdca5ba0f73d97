"""Registries that a process has once, where ranks are threads of it.

Modules are imported once, so that all ranks share what modules keep: this is why `gpusim torchrun`
runs ranks as processes. Where ranks are threads, what can be a rank's own is made so here: states
of libraries that are known to keep the rank there, torch's number of threads between operators, and
which warnings were shown. What cannot, as torch's operators, is refused by name.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch

from ....errors import GpusimError
from ....platforms import after_fork
from ..private import MAKING, REGISTERING, SHARED_STATES, replace, unpickler
from .imports import when_imported
from .threads import is_importing, rank_of_thread

__all__ = [
    "CURE",
    "is_of_shared_modules",
    "operators_made_once",
    "own_memory_of_warnings",
    "own_numbers_of_threads",
    "own_states_of_classes",
    "own_states_of_libraries",
    "refuse_registrations",
    "set_safe_globals",
    "share_safe_globals_of_imports",
]

CURE = "run ranks as processes: gpusim torchrun without --threads, or launch(..., processes=True)"

LIBRARIES = {"accelerate.state": "_shared_state"}
"""Modules whose classes keep the state of a process in an attribute of this name."""

SHARED = re.compile(
    r"\b(already|not)( \w+)? (initiali[sz]ed|registered|defined|set|set up)\b"
    r"|must be initiali[sz]ed|registered (twice|before)|duplicate registration"
    r"|signal only works in main thread",
    re.IGNORECASE,
)
OWN = re.compile(r"default process group")
"""torch's errors about a rank's own groups, which ranks that are threads do not share."""


def is_of_shared_modules(error: BaseException) -> bool:
    """Whether a rank's error may come from state of modules that ranks that are threads share.

    >>> is_of_shared_modules(AssertionError("tensor model parallel group is already initialized"))
    True
    >>> is_of_shared_modules(KeyError("weights"))
    False
    """
    text = str(error)
    return bool(SHARED.search(text)) and not OWN.search(text.lower())


# States of classes


class _OwnOfRank:
    """An attribute of a class whose value, a container, each rank has to itself."""

    def __init__(self, value: Any) -> None:
        self.process, self.empty = value, copy.copy(value)
        self.empty.clear()
        self.ranks: dict[int, Any] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        rank = rank_of_thread()
        if rank is None:
            return self.process
        if rank.index not in self.ranks:
            self.ranks[rank.index] = copy.copy(self.empty)
        return self.ranks[rank.index]


def own_states_of_classes(stack: ExitStack) -> None:
    """Give each rank the states of torch's classes that are known to keep some."""
    for owner, name in SHARED_STATES:
        _make_own(stack, owner, name)


def own_states_of_libraries(stack: ExitStack) -> None:
    """Give each rank the states of `LIBRARIES`, also of one that is imported later."""

    def make_own(module: ModuleType) -> None:
        for owner in list(vars(module).values()):
            if isinstance(owner, type) and owner.__module__ == module.__name__:
                _make_own(stack, owner, LIBRARIES[module.__name__])

    when_imported(stack, LIBRARIES, make_own)


def _make_own(stack: ExitStack, owner: Any, name: str) -> None:
    value = vars(owner).get(name)
    if isinstance(value, (dict, set)):
        replace(stack, owner, name, _OwnOfRank(value))


# torch.library

#: Modules of which torch.library consists.
ITSELF = ("torch.library", "torch._library", "torch._custom_op", "functools", "contextlib")


def refuse_registrations(stack: ExitStack) -> None:
    """Refuse operators that a rank's program registers, by name."""
    for owner, names in REGISTERING:
        for name in names:
            replace(stack, owner, name, _refusing(name, getattr(owner, name)))


def _refusing(name: str, register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def refuse(*given: Any, **named: Any) -> Any:
        if rank_of_thread() is not None and _is_programs(sys._getframe(1)):
            what = "torch.library's " + ("Library" if name == "__init__" else name)
            raise GpusimError(
                f"{what}: operators are registered for the process, which ranks that are threads "
                f"share; {CURE}. A module that the program imports may register operators"
            )
        return register(*given, **named)

    return refuse


def _is_programs(frame: FrameType | None) -> bool:
    """Whether the program of a rank registers an operator: neither torch itself, nor an import."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith((*ITSELF, __name__)):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").startswith("torch."):
        return False
    return not is_importing(frame)


# torch.ops

_making = threading.RLock()
"""Held while an operator of torch.ops is made."""


def _forget_holder() -> None:
    global _making  # another thread of the parent may hold it
    _making = threading.RLock()


after_fork(_forget_holder)


@contextmanager
def operators_made_once() -> Iterator[None]:
    """A block in which threads that run at once get the same operators from torch.ops.

    torch makes an operator when it is asked for it first. Two threads that ask at once make two of
    them, and the one that is kept last frees the other, whose address C++ may have kept: under a
    dispatch mode, such as the check's, torch crashes then.
    """
    with ExitStack() as stack:
        for owner in MAKING:
            replace(stack, owner, "__getattr__", _once(owner.__getattr__))
        yield


def _once(make: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @functools.wraps(make)
    def __getattr__(owner: Any, name: str) -> Any:
        with _making:
            made = vars(owner)
            return made[name] if name in made else make(owner, name)

    return __getattr__


# Safe globals of torch.load, which an import adds once for all ranks

#: What modules have added in the course of their imports. Read and written in turns.
_of_imports: set[Any] = set()


def set_safe_globals(names: set[Any]) -> None:
    """Set those of the rank that has the turn, with those of imports."""
    both = names if names >= _of_imports else names | _of_imports
    unpickler._marked_safe_globals_set = both


def share_safe_globals_of_imports(stack: ExitStack) -> None:
    """Let all ranks have what a module adds while it is imported."""
    add = unpickler._add_safe_globals

    def add_safe_globals(names: list[Any]) -> None:
        if rank_of_thread() is not None and is_importing():
            _of_imports.update(names)
        add(names)

    replace(stack, unpickler, "_add_safe_globals", add_safe_globals)


# Numbers of threads


def own_numbers_of_threads(stack: ExitStack) -> None:
    """Let each rank set the number of threads, and once that between operators.

    torch keeps the first by the thread, but a new thread starts with what any other has set last.
    """
    compute: dict[int, int] = {}
    set_number, get_number = torch.set_num_threads, torch.get_num_threads
    set_interop, get_interop = torch.set_num_interop_threads, torch.get_num_interop_threads
    interop: dict[int, int] = {}

    def set_num_threads(threads: int) -> None:
        set_number(threads)
        rank = rank_of_thread()
        if rank is not None:
            compute[rank.index] = threads

    def get_num_threads() -> int:
        rank = rank_of_thread()
        return get_number() if rank is None else compute.get(rank.index) or get_number()

    def set_num_interop_threads(threads: int) -> None:
        rank = rank_of_thread()
        if rank is None or not isinstance(threads, int) or threads < 1:
            return set_interop(threads)  # which raises for what is wrong
        if rank.index in interop:
            raise RuntimeError(
                "Error: cannot set number of interop threads after parallel work has started or "
                "set_num_interop_threads called"
            )
        interop[rank.index] = threads
        return None

    def get_num_interop_threads() -> int:
        rank = rank_of_thread()
        return get_interop() if rank is None else interop.get(rank.index) or get_interop()

    for function in (
        set_num_threads,
        get_num_threads,
        set_num_interop_threads,
        get_num_interop_threads,
    ):
        replace(stack, torch, function.__name__, function)


# Warnings


class _Shown:
    """The warnings of a module that a rank has shown, under the filters that it had."""

    def __init__(self) -> None:
        self.registry: dict[Any, Any] = {}
        self.keys: set[tuple[str, Any, int]] = set()
        self.filters: list[Any] = []


def own_memory_of_warnings(stack: ExitStack) -> None:
    """Show a warning once in each rank, as in each process, and not once in all.

    Python remembers in a module's `__warningregistry__` what it has shown of the module, and
    forgets it when filters change, which a turn does.
    """
    show = warnings.warn
    memory: dict[tuple[int, int], _Shown] = {}

    def warn(
        message: Any, category: Any = None, stacklevel: int = 1, *given: Any, **named: Any
    ) -> None:
        rank = rank_of_thread()
        frame: FrameType | None = sys._getframe(1)
        for _ in range(stacklevel - 1):
            frame = None if frame is None else frame.f_back
        if rank is None or frame is None or named.get("skip_file_prefixes"):
            return show(message, category, stacklevel + 1, *given, **named)
        space, name = frame.f_globals, "__warningregistry__"
        shown = memory.setdefault((rank.index, id(space)), _Shown())
        if shown.filters != warnings.filters:
            shown.filters = list(warnings.filters)
            shown.keys.clear()
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        key = str(message), kind, frame.f_lineno
        if key in shown.keys:
            return None
        shared = space.get(name)
        space[name] = shown.registry
        try:
            return show(message, category, stacklevel + 1, *given, **named)
        finally:
            if shown.registry.get(key):
                shown.keys.add(key)
            if shared is None:
                space.pop(name, None)
            else:
                space[name] = shared

    replace(stack, warnings, "warn", warn)
