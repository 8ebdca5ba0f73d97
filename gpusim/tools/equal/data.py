"""Indices of the batches that DataLoaders read, and the same batches for the reference.

Where a program reads by rank (a DistributedSampler, accelerate's shards), the reference on one rank
would see a part of the global batch. So the candidate runs first and its ranks' indices are noted.
In the reference the sampler's batches are replaced by those of all ranks, one behind the other;
ranks that read the same (those of tensor parallelism) count once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.utils.data import dataloader

__all__ = ["Loaders"]


class Loaders:
    """Notes or replaces the batches of each iterator over a DataLoader, in the order of creation.

    Owner: the rank's main thread.
    """

    def __init__(self, batches: str) -> None:
        #: Of each iterator: the indices of its batches.
        self.read: list[list[Any]] = []
        #: len() of loaders, in the order in which it was asked.
        self.lengths: list[int] = []
        self._given = json.loads(Path(batches).read_text(encoding="utf-8")) if batches else None
        self._numbers: dict[int, int] = {}

    def install(self, stack: ExitStack) -> None:
        """Patch torch's iterators, until the stack ends."""
        kind: Any = dataloader._BaseDataLoaderIter
        make, following = kind.__init__, kind._next_index
        length: Any = dataloader.DataLoader.__len__
        loaders = self

        def __init__(self: Any, *args: Any, **named: Any) -> None:
            self._gpusim_number = len(loaders.read)
            loaders.read.append([])
            make(self, *args, **named)

        def _next_index(self: Any) -> Any:
            number = self._gpusim_number
            index = following(self)
            own = loaders.read[number]
            if loaders._given is not None and number < len(loaders._given["batches"]):
                given = loaders._given["batches"][number]
                if len(own) >= len(given):
                    raise StopIteration
                index = given[len(own)]
            own.append(index if isinstance(index, list | int) else _plain(index))
            return index

        def __len__(self: Any) -> int:
            found: int = length(self)
            if loaders._given is not None and len(loaders.lengths) < len(loaders._given["lengths"]):
                found = loaders._given["lengths"][len(loaders.lengths)]
            loaders.lengths.append(found)
            return found

        for owner, name, value in (
            (kind, "__init__", __init__),
            (kind, "_next_index", _next_index),
            (dataloader.DataLoader, "__len__", __len__),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)


def _plain(index: Any) -> Any:
    return [_plain(each) for each in index] if isinstance(index, Iterable) else int(index)
