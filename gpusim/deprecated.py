"""Documented modules that have moved: the old names work for one version, with a warning.

The old name gives the same module object as the new one, submodules included.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from gpusim.module_alias import alias_of

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
    module = vars(sys.modules[package])[name] = _load(old, MOVED[old])
    return module


def _load(old: str, new: str) -> ModuleType:
    if old in MOVED:
        text = f"{old} is now {new}; the old name goes in the next version"
        # 3: the line that imports; warnings skips frames of the import system.
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    module = import_module(new)
    for before, after in RENAMED.get(new, {}).items():
        setattr(module, before, getattr(module, after))
    return module


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
                return alias_of(name, fullname, partial(_load, fullname))
        return None
