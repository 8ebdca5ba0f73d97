"""Which samples each step takes, by the indices that DataLoaders read, or by their elements.

A loader may be ahead of the program (accelerate's), and a program that skips takes batches that it
does not train on. So a batch counts as the model is called: the one whose memory or elements the
model is given, else the one that was delivered last.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import dataloader

from gpusim.tools.equal.tracing import leaves
from gpusim.torch.private import FETCHERS

__all__ = ["Batch", "Samples", "digest"]

AHEAD = 4
"""Batches that are kept until the model is called with one of them."""


def digest(tensor: Tensor) -> str:
    """A short name of a tensor's elements."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    data = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=6).hexdigest()


@dataclass(eq=False)
class Batch:
    """A batch that a loader has delivered: of which iterator, and its samples."""

    iterator: int
    samples: list[Any]
    memory: set[int] = field(default_factory=set)
    elements: set[str] = field(default_factory=set)
    kept: Any = None


class Samples:
    """Notes the samples of each step. Owner: the rank's main thread."""

    def __init__(self, random_state: Callable[[], dict[str, str]]) -> None:
        self._random_state = random_state
        #: Of each iterator over a DataLoader, whether it has come to its end.
        self.ended: list[bool] = []
        #: Names of generators from which datasets draw in this process.
        self.draws: set[str] = set()
        self._delivered: deque[Batch] = deque(maxlen=AHEAD)

    def install(self, stack: ExitStack) -> None:
        """Patch torch's iterators and what fetches samples, until the stack ends."""
        kind: Any = dataloader._BaseDataLoaderIter
        make, following, reset = kind.__init__, kind._next_index, kind._reset
        advance = kind.__next__
        samples = self

        def __init__(self: Any, *args: Any, **named: Any) -> None:
            samples._begin(self)
            make(self, *args, **named)

        def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:
                samples._begin(self)
            reset(self, loader, first_iter)

        def _next_index(self: Any) -> Any:
            index = following(self)
            self._gpusim_indices.append(index if isinstance(index, list | int) else plain(index))
            return index

        def __next__(self: Any) -> Any:
            number = self._gpusim_number
            try:
                batch = advance(self)
            except StopIteration:
                samples.ended[number] = True
                raise
            indices = self._gpusim_indices.popleft() if self._gpusim_indices else None
            samples._deliver(number, indices, batch)
            return batch

        for owner, name, value in (
            (kind, "__init__", __init__),
            (kind, "_reset", _reset),
            (kind, "_next_index", _next_index),
            (kind, "__next__", __next__),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        for fetcher in FETCHERS:
            stack.callback(setattr, fetcher, "fetch", fetcher.fetch)
            setattr(fetcher, "fetch", self._fetching(fetcher.fetch))  # noqa: B010  # mypy: a method

    def _fetching(self, real: Any) -> Any:
        def fetch(fetcher: Any, index: Any) -> Any:
            before = self._random_state()
            result = real(fetcher, index)
            after = self._random_state()
            self.draws |= {name for name in after if after[name] != before[name]}
            return result

        return fetch

    def _begin(self, iterator: Any) -> None:
        iterator._gpusim_number = len(self.ended)
        iterator._gpusim_indices = deque()
        self.ended.append(False)

    def _deliver(self, number: int, indices: Any, batch: Any) -> None:
        tensors = [tensor for _, tensor in leaves(batch)]
        known = flat(indices)
        if not known:  # an IterableDataset's: the elements name the samples
            known = rows(tensors)
        self._delivered.append(
            Batch(
                number,
                known,
                {tensor.untyped_storage().data_ptr() for tensor in tensors},
                {digest(tensor) for tensor in tensors},
                tensors,
            )
        )

    def taken(self, given: Any) -> tuple[int, list[Any], str]:
        """The samples of a call of the model with `given`: iterator, samples, and all elements.

        The iterator is -1 for a model that is given elements of no loader's.
        """
        tensors = [tensor for _, tensor in leaves(given) if tensor.dim() and tensor.numel()]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        whole = hashlib.blake2b(digest_size=6)
        for each in local:
            whole.update(digest(each).encode())
        batch = self._batch_of(local)
        if batch is None:
            return -1, rows(local), whole.hexdigest()
        if batch.samples is not None and batch in self._delivered:
            while self._delivered and self._delivered[0] is not batch:
                self._delivered.popleft()
        return batch.iterator, batch.samples, whole.hexdigest()

    def _batch_of(self, tensors: list[Tensor]) -> Batch | None:
        memory = {each.untyped_storage().data_ptr() for each in tensors}
        for batch in self._delivered:
            if batch.memory & memory:
                return batch
        elements = {digest(each) for each in tensors if each.numel() > 1}
        for batch in self._delivered:
            if batch.elements & elements:
                return batch
        return self._delivered[-1] if self._delivered else None


def flat(indices: Any) -> list[Any]:
    """The indices of a batch; none for an IterableDataset's, which are None."""
    if isinstance(indices, list | tuple):
        return [each for part in indices for each in flat(part)]
    if indices is None:
        return []
    return [indices if isinstance(indices, int | str) else str(indices)]


def rows(tensors: Iterable[Tensor]) -> list[str]:
    """Names of the rows of tensors that have the same number, by their elements."""
    tensors = [each for each in tensors if each.dim()]
    if not tensors:
        return []
    size = tensors[0].shape[0]
    same = [each for each in tensors if each.shape[0] == size]

    def names() -> Iterator[str]:
        for n in range(size):
            yield hashlib.blake2b(
                "".join(digest(each[n]) for each in same).encode(), digest_size=6
            ).hexdigest()

    return list(names())


def plain(index: Any) -> Any:
    """Indices as JSON has them."""
    if isinstance(index, str) or index is None:
        return index
    return [plain(each) for each in index] if isinstance(index, Iterable) else int(index)
