"""Attributes that appear on an optimizer after it was set for the first time, and mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .._logging import logger
from .base import DEFAULTS

__all__ = ["AttributeTracker"]

#: torch's own, and what groups have beside values.
TORCHS = ("defaults", "state", "param_groups", "params", "param_names", "variable_attrs")


class AttributeTracker:
    """Remembers what the first optimizer had, and reports what later ones have beside that.

    **Arguments**

    - `relaxed`: report to the debug log; a warning otherwise. Each is reported once.
    """

    def __init__(self, relaxed: bool = False) -> None:
        self.kind = ""
        self._report = logger.debug if relaxed else logger.warning
        self._known: dict[str, set[str]] | None = None
        self._said: set[str] = set()

    def check(self, optimizer: Any) -> None:
        """Look at the optimizer, its defaults and its groups; the first one is only remembered."""
        groups = optimizer.param_groups
        of_groups = set(optimizer.defaults).union(*groups) - set(TORCHS)
        if self._known is None:
            self._known = {"group": of_groups, "optimizer": set(attributes(optimizer))}
            return
        self._look("default group variable", self._known["group"], optimizer.defaults)
        self._look("optimizer attribute", self._known["optimizer"], attributes(optimizer))
        for number, group in enumerate(groups):
            self._look(f"group {number} attribute", self._known["group"], group)

    def forget(self) -> None:
        """The next optimizer is the first one."""
        self._known = None

    def _look(self, what: str, known: set[str], provided: Iterable[str]) -> None:
        extra = [name for name in provided if name not in known and name not in TORCHS]
        if extra:
            self._once(
                self._report, f"Ignoring unexpected {what} in {self.kind} optimizer: {extra}"
            )

    def warn(self, message: str) -> None:
        """A warning, relaxed or not, unless it was given before."""
        self._once(logger.warning, message)

    def _once(self, report: Callable[[str], None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            report(message)


def attributes(optimizer: Any) -> list[str]:
    """Those that nothing reads; what starts with an underscore is somebody's own affair."""
    read = {"host_state_is_dirty", "ipu_state_is_dirty", *TORCHS, *DEFAULTS}
    return [name for name in optimizer.__dict__ if not name.startswith("_") and name not in read]
