"""AsynchronousDataAccessor: iterate over a dataset that another process loads."""

from __future__ import annotations

from typing import Any, Self

import torch

from gpusim.poptorch.data.asynchronous_worker import AsynchronousWorker
from gpusim.poptorch.enums import SharingStrategy
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["AsynchronousDataAccessor"]

TWICE = (
    "The DataLoader already uses an AsynchronousDataAccessor internally. Either use the existing "
    "one or set mode='poptorch.DataLoaderMode.Sync' in the DataLoader."
)


class AsynchronousDataAccessor:
    """Loads a dataset in another process, ahead of the program, into shared memory.

    The tensors of an element are valid until the next one is asked for: clone those that you keep.
    Structures (tuples, dictionaries, types that have a custom argument parser) stay what they are.

    **Arguments**:

    - `dataset`: a dataset, a DataLoader, or any iterable whose elements consist of tensors.
    - `buffer_size`: the number of elements in memory, including the one in use.
    - `miss_sleep_time_in_ms`: checked, without effect. PopTorch's worker sleeps so long when the
      buffer is full; here it waits until there is room.
    - `load_indefinitely`: go on to the next epoch as soon as one has been loaded.
    - `early_preload`: fill the buffer at once; otherwise load one element until it is iterated.
    - `sharing_strategy`: how the process is started and gets the dataset. Fork inherits it. The
      others pickle it, and need the program's entry guarded by `if __name__ == "__main__":`.
      ForkServer and FileSystem copy it; SharedMemory moves its tensors to shared memory.
    - `rebatched_size`: cut batches, of any sizes, anew to this size. What a Dataset yields is one
      entry of a batch. The last batch, if smaller, is dropped, unless the dataset is a
      poptorch.DataLoader with `drop_last=False`.

    **Raises**:

    - poptorch.Error: if the worker fails to load a first element, also of an empty dataset; and for
      a DataLoader that has an accessor.
    - AssertionError: for a `rebatched_size` of 1, and for an iterable dataset whose DataLoader
      keeps incomplete batches that are not rebatched. The iteration raises it, with the reason,
      when the dataset raises or the worker dies.

    >>> dataset = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    >>> accessor = AsynchronousDataAccessor(dataset, sharing_strategy=SharingStrategy.Fork)
    >>> len(accessor), [element.tolist() for element in accessor]
    (2, [[0, 1], [2, 3]])
    >>> accessor.terminate()
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        if not isinstance(buffer_size, int) or buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size!r}: expected a number of at least 1")
        if miss_sleep_time_in_ms < 0:
            raise ValueError(
                f"miss_sleep_time_in_ms={miss_sleep_time_in_ms!r}: expected at least 0"
            )
        assert rebatched_size is None or rebatched_size > 1, (
            "rebatched_size must be None or greater than 1"
        )
        if getattr(dataset, "_accessor", None) is not None:
            raise createPoptorchError(TWICE)
        assert rebatched_size is not None or not getattr(dataset, "_incomplete_batches", False), (
            "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
            "specified too."
        )
        self._dataset, self._rebatched_size = dataset, rebatched_size
        self._worker = AsynchronousWorker(
            buffer_size,
            miss_sleep_time_in_ms,
            dataset,
            load_indefinitely,
            early_preload,
            sharing_strategy,
            rebatched_size,
        )

    def terminate(self) -> None:
        """End the worker process. The accessor cannot be iterated any more."""
        self._worker.terminate()

    def __len__(self) -> int:
        """The number of elements of an epoch. TypeError if the dataset has no length."""
        size = self._rebatched_size
        if size is None or getattr(self._dataset, "_rebatched", False):
            return len(self._dataset)
        whole, rest = divmod(entries(self._dataset), size)
        return whole + (rest > 0 and not getattr(self._dataset, "_drop_last", True))

    def __iter__(self) -> Self:
        self._worker.resetIterator()
        return self

    def __next__(self) -> Any:
        worker = self._worker
        if not worker.iterating:
            worker.resetIterator()
        worker.releaseElement()
        while not worker.endOfFile():
            element = worker.acquireElementIfAvailable()
            if element is not None:
                return element
            worker.wait()
        worker.assertNoError()
        raise StopIteration


def entries(dataset: Any) -> int:
    """The number of entries in all batches of a dataset."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_size is None:
        return len(dataset)
    if dataset.drop_last:
        return len(dataset) * dataset.batch_size
    iterable = isinstance(dataset.dataset, torch.utils.data.IterableDataset)
    return len(dataset.dataset if iterable else dataset.sampler)  # type: ignore[arg-type]  # or TypeError
