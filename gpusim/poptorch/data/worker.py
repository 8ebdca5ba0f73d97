"""The accessor's worker process: loads elements ahead of the program.

It ends with the program, however that ends, and ends the processes that it has started.

Messages to the worker are `(epoch, slots)`: the accessor iterates over this epoch, and these slots
are free; or None: end. The worker sends elements (`send_element`), `(epoch, None, None, 0)` at the
end of an epoch, or a Failure as its last message.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import UntypedStorage

from gpusim.poptorch._logging import logger
from gpusim.poptorch.data.elements import checked, rebatched
from gpusim.poptorch.data.partition import Partition, mix
from gpusim.poptorch.data.transport import can_be_pickled, send_element
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["Failure", "Worker"]

NAME = "AsynchronousDataAccessor worker:"
WATCH = 1.0  # seconds between two checks of the parent


@dataclass(frozen=True)
class Failure:
    """Why a worker ended: a line, the worker's traceback, and the exception if it can be sent."""

    line: str
    details: str = ""
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure of a worker that ends by an exception."""
        return cls(
            line="".join(traceback.format_exception_only(error)).strip(),
            details="".join(traceback.format_exception(error)),
            pickled=pickle.dumps(error) if can_be_pickled(error) else None,
        )

    def cause(self) -> BaseException | None:
        """The exception, if it can be made again here."""
        with suppress(Exception):  # anything that its class raises
            return None if self.pickled is None else pickle.loads(self.pickled)
        return None


def own_group() -> None:
    """Leave Ctrl-C to the program, and lead a group that can be killed with what it starts."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # processes of a fork server would not belong to the group
    multiprocessing.set_start_method("fork", force=True)


def end_with(parent: BaseProcess) -> None:
    """Kill this process and those it has started as soon as the program has ended."""
    starter = os.getppid()  # the program, or the server that forks for it
    while parent.is_alive() and os.getppid() == starter:
        parent.join(WATCH)
    os.killpg(0, signal.SIGKILL)


class Stopped(Exception):
    """The accessor wants nothing more, or has gone."""


@contextmanager
def connected() -> Iterator[None]:
    """Raise Stopped for a closed connection. The dataset's own errors look the same."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise Stopped from error


@dataclass
class Worker:
    """Loads a dataset, epoch after epoch, as far as slots are free.

    - `payload`: returns the dataset.
    - `slots`: the number of elements to load before the accessor is iterated.
    - `load_indefinitely`: load the next epoch before it is iterated.
    - `rebatched_size`: cut batches anew to this size; `drop_last`: drop the last one if it is
      smaller; `samples`: the dataset yields entries of batches.
    - `seed`: seeds PyTorch, NumPy and Python, together with the epoch.
    - `log_level`: of PopTorch's logger.
    """

    payload: Callable[[], Any]
    slots: int
    load_indefinitely: bool
    rebatched_size: int | None
    drop_last: bool
    samples: bool
    seed: int
    log_level: int

    def run(self, connection: Connection, inherited: Connection | None) -> None:
        """Run the process.

        **Arguments**:

        - `connection`: to the accessor.
        - `inherited`: the accessor's end of it, if this process has been forked with it.
        """
        own_group()
        if inherited is not None:
            inherited.close()
        # processes that the dataset forks would keep it open when this process ends
        os.register_at_fork(after_in_child=connection.close)
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=end_with, args=(parent,), name="parent's end", daemon=True).start()
        logger.setLevel(self.log_level)
        logger.debug("AsynchronousDataAccessor worker process: %d", os.getpid())
        torch.set_num_threads(1)  # as PyTorch's own workers: the cores are the model's
        self._connection = connection
        try:
            self._serve()
        except BaseException as error:
            with suppress(OSError):  # the accessor has gone
                connection.send(Failure.of(error))
        else:
            logger.debug(f"{NAME} clean exit")
        connection.close()

    def _serve(self) -> None:
        """Load until the accessor says stop. poptorch.Error for an empty dataset."""
        self._dataset = self.payload()
        self._free = deque(range(self.slots))
        self._memories: dict[int, UntypedStorage] = {}
        self._wanted = 0  # the epoch that is iterated
        self._ahead = True  # whether to load an epoch that is not iterated yet
        self._elements: Iterator[Any] | None = None
        self._begin(0)
        try:
            while True:
                self._await_room()
                self._load()
        except Stopped:
            logger.debug(f"{NAME} ready to exit: checking parent is ready")
            self._elements = self._dataset = None  # ends the processes of a DataLoader

    def _begin(self, epoch: int) -> None:
        self._epoch, self._loaded, self._elements = epoch, 0, None

    def _await_room(self) -> None:
        while True:
            may_load = self._free and (self._ahead or self._epoch <= self._wanted)
            with connected():
                if may_load and not self._connection.poll():
                    return
                message = self._connection.recv()
            if message is None:
                raise Stopped
            self._wanted, slots = message
            self._free.extend(slots)
            if self._wanted > self._epoch:
                if self._loaded:
                    logger.debug(f"{NAME} reset command received. Creating a new iterator")
                self._begin(self._wanted)

    def _load(self) -> None:
        if self._elements is None:
            self._elements = self._iterator()
        try:
            element = next(self._elements)
        except StopIteration:
            self._finish()
            return
        slot = self._free.popleft()
        with connected():
            send_element(self._connection, self._epoch, slot, self._memories, element)
        self._loaded += 1

    def _iterator(self) -> Iterator[Any]:
        seed(mix(self.seed, self._epoch))
        sampler = getattr(self._dataset, "sampler", None)
        if isinstance(sampler, Partition):
            sampler.set_epoch(self._epoch)
        values = iterate(self._dataset)
        if self._epoch:
            logger.debug(f"{NAME} the iterator has been reset")
        if self.rebatched_size is None:
            return map(checked, values)
        return rebatched(values, self.rebatched_size, self.drop_last, self.samples)

    def _finish(self) -> None:
        logger.debug(f"{NAME} end of dataset reached")
        if not self._epoch and not self._loaded:
            raise createPoptorchError("The Dataset is empty")
        with connected():
            self._connection.send((self._epoch, None, None, 0))
        # an empty epoch takes no slot: without end, the worker would begin one after the other
        self._ahead = self.load_indefinitely and self._loaded > 0
        if self._ahead:
            logger.debug(f"{NAME} end of dataset reached. Creating a new iterator")
        else:
            logger.debug(
                f"{NAME} end of dataset reached signalled to host: waiting for command from host"
            )
        self._begin(self._epoch + 1)


def iterate(dataset: Any) -> Iterator[Any]:
    """Iterate over a dataset; one without an iterator is indexed up to its length."""
    if hasattr(type(dataset), "__iter__") or not hasattr(type(dataset), "__len__"):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def seed(value: int) -> None:
    """Seed all generators, as PyTorch's workers do: epochs do not depend on each other."""
    random.seed(value)
    torch.manual_seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value % 2**32)
