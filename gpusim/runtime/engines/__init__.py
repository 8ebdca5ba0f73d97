"""Engines: they move data between instances, and do nothing else.
MPI moves it between processes on CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

__all__ = ["Buffer", "Engine", "Pending", "Processes", "interruption", "while_waiting"]

#: A C-contiguous array of any dtype, and the instance that it goes to or comes from.
Buffer = tuple[NDArray[Any], int]

#: What a thread that waits for other instances calls now and then; it raises to end the wait.
interruption: ContextVar[Callable[[], None] | None] = ContextVar(
    "gpusim interruption", default=None
)


@contextmanager
def while_waiting(look: Callable[[], None]) -> Iterator[None]:
    """Have the waits in this block call `look` too."""
    before = interruption.get()

    def both() -> None:
        if before is not None:
            before()
        look()

    token = interruption.set(both)
    try:
        yield
    finally:
        interruption.reset(token)


class Pending(Protocol):
    """An exchange under way."""

    def awaited(self) -> Sequence[int]:
        """The instances without which it does not end."""

    def wait(self) -> None:
        """Return when all that was to be received is there, and what was sent may be changed.

        Raises `gpusim.InstanceError` when an instance that takes part is gone.
        """


class Engine(Protocol):
    """What a World needs in order to reach its other instances."""

    instances: int
    instance: int

    def prepare(self, array: NDArray[Any]) -> None:
        """Be ready to move arrays like this one; all instances call it at the same point."""

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Pending:
        """Begin to send and receive.

        Between two instances, buffers of one tag arrive in the order in which they are sent; sender
        and receiver agree on their sizes beforehand. Tags are integers from 0 to 2**22 - 1.
        """

    def all_reduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        """The engine's own all-reduce of one array from each instance, with its own bits.

        TypeError for a dtype or operator that the engine does not know.
        """

    def barrier(self) -> None:
        """Return when all instances have called it."""

    def abort(self, message: str) -> None:
        """Say why, and end all instances at once; does not return."""

    def close(self) -> None:
        """Give the engine's resources back; no instance may use it any more."""


@runtime_checkable
class Processes(Engine, Protocol):
    """An engine whose instances are processes that learn how the others end."""

    broken: bool  # whether an exchange has failed, so that the next ones would not fit

    def name_instances(self, names: Sequence[str], context: Callable[[int], str]) -> None:
        """How messages are to call the instances, and what more to say when one is gone."""

    def fail(self, error: BaseException) -> None:
        """Let the others know that this instance takes part no more; does not wait for them."""

    def overhear(self, instance: int, tags: Callable[[int], bool]) -> NDArray[Any] | None:
        """Take the first message of an instance for which nobody here waits, if its tag is one of
        these."""
