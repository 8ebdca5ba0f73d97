"""Documented modules that have moved: the old names work for one version, with a warning.

The old name gives the same module object as the new one, submodules included.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["install"]

MOVED = {
    "gpusim.activity": "gpusim.runtime.activity",
    "gpusim.cli": "gpusim.tools.cli",
    "gpusim.engines": "gpusim.runtime.engines",
    "gpusim.environment": "gpusim.runtime.environment",
    "gpusim.launch": "gpusim.tools.launch",
    "gpusim.mapping": "gpusim.maps",
    "gpusim.timetable": "gpusim.poptorch.schedule",
    "gpusim.twins.asking": "gpusim.tools.twins.run_engines",
    "gpusim.twins.inferring": "gpusim.tools.twins.inferring",
}
# Names that modules had, by the module's name of today.
RENAMED = {
    "gpusim.poptorch.schedule": {"Stage": "PipelineStage", "Timetable": "PipelineSchedule"},
    "gpusim.poptorch.schedule.tasks": {"Stage": "PipelineStage", "Timetable": "PipelineSchedule"},
    "gpusim.tools.twins.run_engines": {"Case": "Request", "ask": "run"},
}
LOGGERS = {"gpusim.mapping": "gpusim.maps"}


def install() -> None:
    """Make the old names importable, and attributes of the packages they were in."""
    sys.meta_path.insert(0, _Finder())  # before the path's: that would load submodules twice
    for package in {old.rpartition(".")[0] for old in MOVED}:
        vars(import_module(package))["__getattr__"] = partial(_attribute, package)
    for old, new in LOGGERS.items():  # handlers of the old logger get the records of the new one
        logging.getLogger(new).parent = logging.getLogger(old)


def _attribute(package: str, name: str) -> ModuleType:
    old = f"{package}.{name}"
    if old not in MOVED:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    _warn(old, MOVED[old])
    module = vars(sys.modules[package])[name] = _load(MOVED[old])
    return module


def _load(name: str) -> ModuleType:
    module = import_module(name)
    for old, new in RENAMED.get(name, {}).items():
        setattr(module, old, getattr(module, new))
    return module


def _warn(old: str, new: str) -> None:
    text = f"{old} is now {new}; the old name goes in the next version"
    # 3: the line that imports; warnings skips frames of the import system.
    warnings.warn(text, DeprecationWarning, stacklevel=3)


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        for old, new in MOVED.items():
            if fullname == old or fullname.startswith(f"{old}."):
                name = new + fullname.removeprefix(old)
                real = find_spec(name)
                if real is None:
                    return None
                package = real.submodule_search_locations is not None
                loader = _Loader(fullname, name)
                return ModuleSpec(fullname, loader, origin=real.origin, is_package=package)
        return None


class _Loader(Loader):
    """Gives the old name the new module, which keeps its own name, spec and loader."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self.old in MOVED:
            _warn(self.old, self.new)
        module = _load(self.new)
        self.spec = module.__spec__  # the import system is about to put the old name's there
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`, which runs `__main__` of a package."""
        real = find_spec(self.new)
        get_code: Callable[[str], Any] | None = getattr(real and real.loader, "get_code", None)
        return get_code(self.new) if get_code else None
