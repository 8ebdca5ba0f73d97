"""A run as its ranks' traces show it: tensors by step and name, and what is no tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gpusim.tools.equal.traces import Event, Trace

from .wholes import Whole, whole_of

__all__ = ["Key", "Run"]

Key = tuple[str, str, str, str]
"""A tensor: its kind, outermost module, name, and leaf of an optimizer's state."""


class Run:
    """One run of the script."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ranks = trace.ranks
        self.ends = [own.end for own in trace.by_rank]
        self._events: dict[int, dict[Key, dict[int, list[Event]]]] = {}
        for rank in trace.by_rank:
            for event in rank.events:
                key = event.kind, event.root, event.name, event.leaf
                by_rank = self._events.setdefault(event.step, {}).setdefault(key, {})
                if event.count == 0:
                    by_rank.setdefault(rank.rank, []).append(event)
        self.wholes = functools.lru_cache(4096)(self._whole)

    @property
    def steps(self) -> int:
        """The steps of an optimizer that all ranks have made."""
        return min(int(end.get("steps") or 0) for end in self.ends)

    @property
    def left_out(self) -> bool:
        """Whether the trace had not room for all."""
        return any(end.get("left_out") for end in self.ends)

    def keys(self, step: int) -> list[Key]:
        """The tensors of a step in the order of the program."""
        return list(self._events.get(step, {}))

    def _whole(self, step: int, key: Key) -> Whole | None:
        events = self._events.get(step, {}).get(key)
        return None if not events else whole_of(events)

    def of_step(self, name: str, step: int) -> Iterator[tuple[int, Any]]:
        """The rank, and what it says of a step under a name, of ranks that say it."""
        for rank, end in enumerate(self.ends):
            steps = end.get(name) or []
            if step < len(steps):
                yield rank, steps[step]

    def of_rank(self, name: str) -> Iterator[tuple[int, Any]]:
        """The rank, and what it says under a name."""
        for rank, end in enumerate(self.ends):
            yield rank, end.get(name) or {}

    def known(self, name: str) -> set[str]:
        """The words that any rank has under a name."""
        return {word for end in self.ends for word in end.get(name) or ()}

    def site(self, label: str) -> str:
        """Where a kind of state was put in last."""
        for end in self.ends:
            found: str = (end.get("sites") or {}).get(label, "")
            if found:
                return found
        return ""
