"""After `import gpusim.aliases`, `import poptorch` and `import popdist` import gpusim's modules.

They are the same module objects, including submodules. It is also a pytest plugin, `pytest -p
gpusim.aliases`; `gpusim run script.py` imports it first.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from gpusim.module_alias import alias_of

__all__ = ["NAMES", "aliased", "install", "stand_in"]

NAMES = ("poptorch", "popdist", "poptorch_experimental_addons", "popxl", "popart")
STAND_INS = str(Path(__file__).parent / "standins")


class AliasWarning(UserWarning):
    """An installed package and gpusim's have the same name."""


def aliased() -> tuple[str, ...]:
    """The names that gpusim has a module for.

    >>> {"poptorch", "popdist"} <= set(aliased()) <= set(NAMES)
    True
    """
    return tuple(name for name in NAMES if find_spec(f"gpusim.{name}") is not None)


class Finder(MetaPathFinder):
    """Finds gpusim's module for a name and for the names below it."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in NAMES:
            return None
        try:
            return alias_of(f"gpusim.{fullname}", fullname)
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("gpusim."):
                raise  # gpusim has the module, and a dependency is missing
            return None  # the package above it is missing, or has no modules


def install() -> None:
    """Make the names mean gpusim's modules in this process, and in those that it starts.

    An AliasWarning says if this hides an installed package. A package that is already imported
    stays what it is, also with an AliasWarning. Does nothing the second time.
    """
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    for name in aliased():
        if name in sys.modules:
            origin = getattr(sys.modules[name], "__file__", None)
            if not is_stand_in(origin):
                warn(f"{name} was imported before gpusim.aliases, from {origin}: it stays")
        elif found := PathFinder.find_spec(name, [p for p in sys.path if p != STAND_INS]):
            warn(f"{name} means gpusim.{name}; the one installed at {found.origin} is hidden")
    sys.meta_path.insert(0, Finder())
    if STAND_INS not in sys.path:  # for processes that multiprocessing starts
        sys.path.insert(1, STAND_INS)
    paths = os.environ.get("PYTHONPATH", "")
    if STAND_INS not in paths.split(os.pathsep):  # for all others
        os.environ["PYTHONPATH"] = STAND_INS + (os.pathsep + paths if paths else "")


def stand_in(name: str) -> None:
    """Put gpusim's module where the import system will look, for the files in `standins`.

    ModuleNotFoundError if gpusim does not have the module.
    """
    if name not in NAMES:
        return  # the file itself is imported, as gpusim.standins.poptorch
    if name not in aliased():
        raise ModuleNotFoundError(f"No module named {name!r}: gpusim has none yet", name=name)
    sys.modules[name] = importlib.import_module(f"gpusim.{name}")


def warn(text: str) -> None:
    warnings.warn(text, AliasWarning, stacklevel=3)


def is_stand_in(origin: str | None) -> bool:
    return origin is not None and str(Path(origin).parent) == STAND_INS


install()
