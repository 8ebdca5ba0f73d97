"""Module specs by which another name gives a module that exists; imports nothing of gpusim."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["alias_of", "share"]


def share(name: str, alias: str) -> None:
    """Have the modules below the package `alias` be those below `name`, the same objects."""

    class Finder(MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None = None, target: Any = None
        ) -> ModuleSpec | None:
            if not fullname.startswith(f"{alias}."):
                return None
            return alias_of(name + fullname.removeprefix(alias), fullname)

    sys.meta_path.insert(0, Finder())  # before the path's, which would load them again


def alias_of(
    name: str, alias: str, load: Callable[[str], ModuleType] = import_module
) -> ModuleSpec | None:
    """A spec by which `import alias` gives the module `name`, the same object.

    **Arguments**:

    - `load`: imports the module.

    **Returns**: the spec; None if there is no module `name`.
    """
    real = find_spec(name)
    if real is None:
        return None
    package = real.submodule_search_locations is not None
    return ModuleSpec(alias, _Loader(name, load), origin=real.origin, is_package=package)


class _Loader(Loader):
    """Gives a module, which keeps its own name, spec and loader."""

    def __init__(self, name: str, load: Callable[[str], ModuleType]) -> None:
        self._name, self._load = name, load

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._load(self._name)
        self._spec = module.__spec__  # the import system replaces it with `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`, which runs the code of `__main__`."""
        real = find_spec(self._name)
        get_code: Callable[[str], Any] | None = getattr(real and real.loader, "get_code", None)
        return get_code(self._name) if get_code else None
