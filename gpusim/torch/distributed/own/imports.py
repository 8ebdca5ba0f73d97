"""Modules that a launch changes, whether they are imported already or later."""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

Change = Callable[[ModuleType], None]


def when_imported(stack: ExitStack, names: Collection[str], change: Change) -> None:
    """Call `change` with each of these modules: now, or when it is imported before the stack ends.

    A module is imported in the thread of the rank that asks for it first, once for all ranks.
    """
    for name in names:
        if name in sys.modules:
            change(sys.modules[name])
    finder = _Finder(names, change)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules by the finders behind it, and changes those that it is for."""

    def __init__(self, names: Collection[str], change: Change) -> None:
        self._names, self._change = names, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                run = spec.loader.exec_module
                spec.loader.exec_module = functools.partial(self._execute, run)
                return spec
        return None

    def _execute(self, run: Change, module: ModuleType) -> None:
        run(module)
        self._change(module)
