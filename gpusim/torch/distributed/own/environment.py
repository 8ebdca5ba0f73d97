"""os.environ, which belongs to the rank whose thread reads or writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from .threads import rank_of_thread

__all__ = ["encoded", "own_environments", "process_environments"]


def encoded(variables: Mapping[str, str]) -> dict[Any, Any]:
    """Variables as os.environ keeps them: bytes, and texts with names in capitals on Windows."""
    kept: Any = os.environ
    return {kept.encodekey(name): kept.encodevalue(text) for name, text in variables.items()}


def process_environments() -> list[Any]:
    """os.environ, and os.environb where there is one. Both have the same data."""
    return [getattr(os, name) for name in ("environ", "environb") if hasattr(os, name)]


class _RankEnvironments(MutableMapping[bytes, bytes]):
    """The data of os.environ: each rank's own in its threads, else the process's."""

    def __init__(self, process: MutableMapping[bytes, bytes]) -> None:
        self.process = process

    def _own(self, changed: bytes | None = None) -> MutableMapping[bytes, bytes]:
        # At each access: the same object serves all threads. Threads that a rank has started see
        # its own.
        rank = rank_of_thread()
        if rank is None:
            return self.process
        if changed is not None:
            rank.own_names.add(changed)
            # What C has to be told with a turn has changed. In turns only: free ranks do not
            # export, and the dictionary stays empty.
            rank.launch.changes.clear()
        return rank.environment

    def __getitem__(self, name: bytes) -> bytes:
        return self._own()[name]

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self._own(name)[name] = value

    def __delitem__(self, name: bytes) -> None:
        del self._own(name)[name]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


@contextmanager
def own_environments() -> Iterator[None]:
    """A block in which os.environ belongs to the rank."""
    both = process_environments()
    data = both[0]._data
    for environment in both:
        environment._data = _RankEnvironments(data)
    try:
        yield
    finally:
        for environment in both:
            environment._data = data
