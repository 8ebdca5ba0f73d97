"""PopXL's module paths: one module per op, as `popxl.ops.add`, where gpusim has one per family.

In PopXL a path such as `popxl.ops.add` is a module for the import system and a function as an
attribute of its package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["keep_paths"]


class Package(ModuleType):
    """A package whose functions stay its attributes when modules of their names are imported.

    The import system sets a new module as an attribute of its package. Under an alias such as
    `popxl.ops` a module is new although gpusim has imported it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and callable(self.__dict__.get(name))):
            super().__setattr__(name, value)


def keep_paths(package: str, paths: Mapping[ModuleType, str] | None = None) -> None:
    """Make a package's modules importable under further names, and keep its functions.

    **Arguments**

    - `package`: the name of the package, which calls this at the end of its `__init__`.
    - `paths`: the further names of a module, separated by spaces.

    >>> import importlib
    >>> from gpusim.popxl import ops
    >>> importlib.import_module("gpusim.popxl.ops.add") is importlib.import_module(
    ...     "gpusim.popxl.ops.sub")
    True
    >>> ops.add.__name__
    'add'
    """
    sys.modules[package].__class__ = Package
    for module, names in (paths or {}).items():
        for name in names.split():
            sys.modules[f"{package}.{name}"] = module
