"""The accessor's worker process: loads elements ahead of the program, into the ring.
It ends with the program, however that ends, and takes with it the processes that it started."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from gpusim.poptorch._logging import logger
from gpusim.poptorch.data.elements import Element, element, rebatched
from gpusim.poptorch.data.parcel import Parcel
from gpusim.poptorch.data.partition import Partition, mix
from gpusim.poptorch.data.protocol import End, Failure, Filled, Iterate, Release, Settings, Stop
from gpusim.poptorch.data.ring import Slot
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["run"]

NAME = "AsynchronousDataAccessor worker:"
WATCH = 1.0  # seconds between two looks at who the parent is


def run(connection: Connection, other: Connection | None, parcel: Parcel, cfg: Settings) -> None:
    """What the process does.

    **Arguments**

    - `connection`: to the accessor; `other`: its end, if this process has been forked with it.
    - `parcel`: the dataset; `cfg`: what to do with it.
    """
    own_group()
    if other is not None:
        other.close()
    # processes that the dataset forks would keep it open when this one is no more
    os.register_at_fork(after_in_child=connection.close)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=end_with, args=(parent,), name="parent's end", daemon=True).start()
    logger.setLevel(cfg.log_level)
    logger.debug("AsynchronousDataAccessor worker process: %d", os.getpid())
    torch.set_num_threads(1)  # as PyTorch's own workers: the cores are the model's
    try:
        Worker(connection, parcel.open(), cfg).run()
    except Unheard:
        pass
    except BaseException as error:
        tell(connection, error)
    else:
        logger.debug(f"{NAME} clean exit")
    connection.close()


def own_group() -> None:
    """Ctrl-C is for the program; and what this process starts can be ended together with it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # processes of a fork server would not belong to the group
    multiprocessing.set_start_method("fork", force=True)


def end_with(parent: BaseProcess) -> None:
    """End this process and those it has started, once the program is no more."""
    starter = os.getppid()  # the program, or the server that forks for it
    while parent.is_alive() and os.getppid() == starter:
        parent.join(WATCH)
    os.killpg(0, signal.SIGKILL)


def tell(connection: Connection, error: BaseException) -> None:
    try:
        connection.send(Failure.of(error))
    except OSError:
        pass  # nobody listens any more


class Stopped(Exception):
    """The accessor wants no more."""


class Unheard(Exception):
    """The accessor is no more. (EOFError and ConnectionError may be the dataset's own.)"""


class Worker:
    """Goes through the dataset, epoch by epoch, as far as the ring has room."""

    def __init__(self, connection: Connection, dataset: Any, cfg: Settings) -> None:
        self._connection, self._dataset, self._cfg = connection, dataset, cfg
        self._slots = [Slot() for _ in range(cfg.buffer_size)]
        self._free = deque(range(cfg.buffer_size))
        self._outline = b""
        self._epoch, self._elements = 0, None
        self._loaded = 0  # elements of this epoch
        self._asked = cfg.early_preload  # to load more than one element
        self._waits = False  # for being asked for the next epoch

    _elements: Iterator[Element] | None

    def run(self) -> None:
        """Until it is told to stop. poptorch.Error if there are no elements at all."""
        try:
            while True:
                self._await_room()
                self._load()
        except Stopped:
            logger.debug(f"{NAME} ready to exit: checking parent is ready")
            self._elements = self._dataset = None  # ends the processes of a DataLoader

    # ---------------------------------------------------------------- commands

    def _await_room(self) -> None:
        while (command := self._hear(wait=not self._may_load())) is not None:
            self._obey(command)

    def _hear(self, wait: bool) -> Iterate | Release | Stop | None:
        try:
            return self._connection.recv() if self._connection.poll(None if wait else 0) else None
        except (EOFError, OSError) as error:
            raise Unheard from error

    def _say(self, message: Filled | End, memory: Slot | None = None) -> None:
        try:
            self._connection.send(message)
            if memory is not None:
                memory.send(self._connection, os.getppid())
        except OSError as error:
            raise Unheard from error

    def _may_load(self) -> bool:
        first = self._epoch == 0 and not self._loaded
        return bool(self._free) and not self._waits and (self._asked or first)

    def _obey(self, command: Iterate | Release | Stop) -> None:
        if isinstance(command, Stop):
            raise Stopped
        if isinstance(command, Release):
            self._free.append(command.slot)
            return
        self._asked = True
        self._waits = self._waits and command.epoch < self._epoch
        if command.epoch > self._epoch:
            if self._loaded:
                logger.debug(f"{NAME} reset command received. Creating a new iterator")
            self._next(command.epoch)

    # ---------------------------------------------------------------- loading

    def _load(self) -> None:
        if self._elements is None:
            self._elements = self._begin()
        try:
            loaded = next(self._elements)
        except StopIteration:
            self._finish()
        else:
            self._publish(loaded)

    def _begin(self) -> Iterator[Element]:
        seed(mix(self._cfg.seed, self._epoch))
        sampler = getattr(self._dataset, "sampler", None)
        if isinstance(sampler, Partition):
            sampler.set_epoch(self._epoch)
        values = iter_of(self._dataset)
        if self._epoch:
            logger.debug(f"{NAME} the iterator has been reset")
        cfg = self._cfg
        if cfg.rebatched_size is None:
            return map(element, values)
        return rebatched(values, cfg.rebatched_size, cfg.drop_last, cfg.samples)

    def _publish(self, loaded: Element) -> None:
        outline = loaded.outline()
        data = bytes(ForkingPickler.dumps(outline))
        number = self._free.popleft()
        slot = self._slots[number]
        grown = slot.write(loaded, outline)
        self._say(
            Filled(
                self._epoch,
                number,
                data if data != self._outline else None,
                slot.size if grown else None,
            ),
            slot if grown else None,
        )
        self._outline = data
        self._loaded += 1

    def _finish(self) -> None:
        logger.debug(f"{NAME} end of dataset reached")
        if not self._epoch and not self._loaded:
            raise createPoptorchError("The Dataset is empty")
        self._say(End(self._epoch))
        # after an epoch without elements nothing would hold it back
        self._waits = not self._cfg.load_indefinitely or not self._loaded
        if self._waits:
            logger.debug(
                f"{NAME} end of dataset reached signalled to host: waiting for command from host"
            )
        else:
            logger.debug(f"{NAME} end of dataset reached. Creating a new iterator")
        self._next(self._epoch + 1)

    def _next(self, epoch: int) -> None:
        self._epoch, self._loaded, self._elements = epoch, 0, None


def iter_of(dataset: Any) -> Iterator[Any]:
    """What the dataset yields; one that has no iterator is indexed as far as its length says."""
    if hasattr(type(dataset), "__iter__") or not hasattr(type(dataset), "__len__"):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def seed(value: int) -> None:
    """As PyTorch's workers do, lest an epoch depend on how far the last one was loaded."""
    random.seed(value)
    torch.manual_seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value % 2**32)
