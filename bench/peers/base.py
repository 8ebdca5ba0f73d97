"""A peer prepares a case, runs it, and gives samples of its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bench.cases import Case
from bench.timing import timed

Samples = dict[int, list[float]]  # by replica


class Unserved(Exception):
    """A peer does not take part in a case; the message is the reason that the table gives."""


class Peer(ABC):
    """One way to carry a case out."""

    name: str
    #: Whether it runs in another process.
    elsewhere: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, case: Case) -> None:
        """Put the inputs where they are used and compile; `Unserved` with the reason why not."""

    @abstractmethod
    def run(self, repeats: int) -> list[float]:
        """The seconds of each of some calls."""

    @abstractmethod
    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        """Some elements of the results of some replicas."""

    @abstractmethod
    def release(self) -> None:
        """Free the case's memory."""

    def needs_bytes(self, case: Case) -> int:
        """The memory that it will take, about: each replica's input and result in its own."""
        return case.separate_bytes

    def close(self) -> None:
        """End processes and threads, if any."""
        return


class LocalPeer(Peer):
    """A peer in this process, on arrays in NumPy's memory; its subclass makes the call."""

    def __init__(self) -> None:
        self._call: Callable[[], Any] | None = None
        self._mapped = False

    @abstractmethod
    def operation(self, case: Case) -> Callable[[], Any]:
        """The timed function. It returns the result: stacked if it is mapped, otherwise once."""

    def prepare(self, case: Case) -> None:
        self._call, self._mapped = self.operation(case), case.mapped

    def run(self, repeats: int) -> list[float]:
        assert self._call is not None
        return timed(self._call, repeats)

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        assert self._call is not None
        result = self._call()
        return {
            replica: pick(result[replica] if self._mapped else result, positions)
            for replica in replicas
        }

    def release(self) -> None:
        self._call = None

    def needs_bytes(self, case: Case) -> int:
        count = case.replicas if case.mapped else 1
        return case.input_bytes + count * case.result_size * case.dtype.itemsize


def pick(result: Any, positions: list[int]) -> list[float]:
    """These elements of a result, in C order, as Python numbers."""
    array: NDArray[Any] = np.asarray(result)
    index = np.unravel_index(np.asarray(positions), array.shape)
    return np.asarray(array[index], np.float64).tolist()
