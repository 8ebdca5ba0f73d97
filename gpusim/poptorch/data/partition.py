"""The elements of a dataset that a process gets in an epoch, in order.

They are a function of seed and epoch alone, so that all processes agree without communication.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

__all__ = ["Partition", "mix"]

SHUFFLE, LEAVE_OUT = 0, 1  # uses of random numbers


class Partition(Sampler[int]):
    """One process's contiguous block of a dataset's indices, or of a permutation of them.

    **Arguments**

    - `elements`: the number of elements of the dataset.
    - `step`: the number of elements that a process consumes at once.
    - `drop_last`: True gives every process equally many whole steps, and leaves the rest out;
      False gives every process all but equally many elements, the first ones one more.
    - `process`, `processes`: the number of this process, and of all.
    - `seed`: elements are shuffled, anew in every epoch; None keeps their order.

    With `drop_last`, the next epoch uses the elements that an epoch leaves out (if a process's
    share is not smaller). In the dataset's order, odd epochs leave out the first elements and even
    ones the last; shuffled, every element is left out equally often.

    Each iteration is the next epoch; `set_epoch` chooses another.

    >>> share = Partition(7, step=2, drop_last=True, process=1, processes=3)
    >>> list(share), list(share), list(share)
    ([2, 3], [3, 4], [2, 3])
    >>> [list(Partition(7, step=2, drop_last=False, process=p, processes=3)) for p in range(3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """

    def __init__(
        self,
        elements: int,
        *,
        step: int,
        drop_last: bool,
        process: int = 0,
        processes: int = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.elements, self.seed, self.epoch = elements, seed, 0
        if drop_last:
            share = step * (elements // (step * processes))
            self.begin, self.end = process * share, (process + 1) * share
            self.left_out = elements - processes * share
        else:
            share, more = divmod(elements, processes)
            self.begin = process * share + min(process, more)
            self.end = self.begin + share + (process < more)
            self.left_out = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, counted from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.end - self.begin

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch  # a generator: PyTorch makes iterators that it never starts
        self.epoch += 1
        yield from self.order(epoch)[self.begin : self.end].tolist()

    def order(self, epoch: int) -> Tensor:
        """The indices that all processes together use in an epoch."""
        used = self.elements - self.left_out
        if self.seed is None:
            return torch.arange(used) + epoch % 2 * self.left_out
        window = (torch.arange(self.left_out) + epoch * self.left_out) % max(self.elements, 1)
        out = permutation(self.elements, self.seed, LEAVE_OUT)[window]
        kept = torch.ones(self.elements, dtype=torch.bool)
        kept[out] = False
        return kept.nonzero().flatten()[permutation(used, self.seed, SHUFFLE, epoch)]


def permutation(length: int, *key: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(mix(*key)))


def mix(*key: int) -> int:
    """Mix several numbers to a seed; each of them changes all of it.

    >>> mix(0, 1) != mix(1, 0)
    True
    """
    unsigned = [number % 2**64 for number in key]
    return int(np.random.SeedSequence(unsigned).generate_state(1, np.uint64)[0] >> np.uint64(1))
