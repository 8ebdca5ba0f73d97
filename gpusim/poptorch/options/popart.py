"""PopART's session options, which programs set by name; most have no effect without an IPU."""

from __future__ import annotations

import copy
from typing import Any, Self

from gpusim.poptorch.options.base import FROZEN, items

__all__ = ["_PopartOptions"]


class _PopartOptions:
    """PopART's own options, by its names: `Options()._Popart.set("autoRecomputation", 3)`.

    Names and types of values are checked when a model is compiled, as in PopTorch. `options` is
    the dictionary. AttributeError once it is frozen.
    """

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: dict[str, Any] = {}
        self.set("instrumentWithHardwareCycleCounter", False)
        self.set("rearrangeAnchorsOnHost", False)

    def checkIsFrozen(self, option: str | None = None) -> None:
        """AttributeError if the options were passed to an executor or a DataLoader."""
        if option != "_is_frozen" and self._is_frozen:
            raise AttributeError(FROZEN)

    def set(self, key: str, value: Any) -> Self:
        """Set one of PopART's options."""
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def merge(self, key: str, values: dict[str, Any]) -> Self:
        """Set some keys of an option that is a dictionary, and keep the others."""
        return self.set(key, {**self.options.get(key, {}), **values})

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Set Poplar's engine options."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Which of PopART's rewrites are on, by name; `level` says what the others do."""
        assert isinstance(level, int)
        assert isinstance(patterns, dict)
        self.set("patterns_level", level)
        return self.set("patterns", patterns)

    def __deepcopy__(self, memory: dict[int, Any]) -> _PopartOptions:
        copied = _PopartOptions()
        memory[id(self)] = copied
        copied.options = copy.deepcopy(self.options, memory)
        return copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _PopartOptions):
            return NotImplemented
        return self.options == other.options

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({items(self.options)})"
