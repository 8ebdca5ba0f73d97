"""AsynchronousDataAccessor: iterates over a dataset that another process loads."""

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
    """Loads a dataset in a process of its own, ahead of the program, into a ring of shared memory.

    The tensors that an iteration yields lie in the ring. They are valid until the next ones are
    asked for: clone those that are to be kept. Structures (tuples, dictionaries, types that have a
    custom argument parser) stay what they are.

    **Arguments**

    - `dataset`: a dataset, a DataLoader, or any iterable whose elements consist of tensors.
    - `buffer_size`: how many elements the ring holds.
    - `miss_sleep_time_in_ms`: how long PopTorch's worker sleeps when the ring is full. Here it is
      woken as soon as there is room.
    - `load_indefinitely`: go on to the next epoch as soon as one has been loaded.
    - `early_preload`: fill the ring at once; otherwise there is one element until it is iterated.
    - `sharing_strategy`: how the process is started and gets the dataset. Fork inherits it; others
      need it pickled, and the program's entry guarded by `if __name__ == "__main__":`. ForkServer
      and FileSystem copy it, by a pipe and an unnamed file; SharedMemory moves its tensors to
      shared memory.
    - `rebatched_size`: batches are cut anew to this size; the dataset's own are of any size, 1 in
      the ordinary case. What a Dataset yields is one entry of a batch. The last one, if smaller,
      is dropped, unless the dataset is a poptorch.DataLoader that says otherwise.

    poptorch.Error if the worker does not load a first element, for an empty dataset too, and for a
    DataLoader that has an accessor; AssertionError for a size of 1, and for iterable datasets whose
    DataLoader keeps incomplete batches that are not rebatched.

    When the dataset raises, or the worker dies, the iteration is an AssertionError that tells why.

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
        """How many elements an epoch has. TypeError where the dataset does not say."""
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
    """How many entries all batches of a dataset have together."""
    if not isinstance(dataset, torch.utils.data.DataLoader) or dataset.batch_size is None:
        return len(dataset)
    if dataset.drop_last:
        return len(dataset) * dataset.batch_size
    iterable = isinstance(dataset.dataset, torch.utils.data.IterableDataset)
    return len(dataset.dataset if iterable else dataset.sampler)  # type: ignore[arg-type]  # or TypeError
