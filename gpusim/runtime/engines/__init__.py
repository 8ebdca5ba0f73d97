"""Engines move data between instances: MPI between processes on CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

__all__ = ["Buffer", "Engine", "Pending", "Processes", "interruption", "while_waiting"]

#: A C-contiguous array of any dtype, and the instance that it goes to or comes from.
Buffer = tuple[NDArray[Any], int]

#: Called now and then by a thread that waits for other instances; it raises to end the wait.
interruption: ContextVar[Callable[[], None] | None] = ContextVar(
    "gpusim interruption", default=None
)


@contextmanager
def while_waiting(check: Callable[[], None]) -> Iterator[None]:
    """Make the waits in this block call `check` too."""
    before = interruption.get()

    def both() -> None:
        if before is not None:
            before()
        check()

    token = interruption.set(both)
    try:
        yield
    finally:
        interruption.reset(token)


class Pending(Protocol):
    """An exchange under way."""

    def awaited(self) -> Sequence[int]:
        """The instances that have not yet done their part."""

    def wait(self) -> None:
        """Return when everything is received, and the sent buffers may be changed.

        Raises `gpusim.InstanceError` if an instance that takes part is gone.
        """


class Engine(Protocol):
    """The connection of a World to its other instances."""

    instances: int
    instance: int

    def prepare(self, array: NDArray[Any]) -> None:
        """Get ready to move arrays like this one; all instances call it at the same point."""

    def exchange(self, sends: Sequence[Buffer], receives: Sequence[Buffer], tag: int) -> Pending:
        """Begin to send and receive.

        Between two instances, buffers of one tag arrive in the order in which they are sent. Sender
        and receiver know their sizes beforehand. Tags are integers from 0 to 2**22 - 1.
        """

    def all_reduce(self, array: NDArray[Any], op: str) -> NDArray[Any]:
        """The engine's all-reduce of one array from each instance, with the engine's bits.

        TypeError for a dtype or operator that the engine does not support.
        """

    def barrier(self) -> None:
        """Return when all instances have called it."""

    def abort(self, message: str) -> None:
        """Print the message and end all instances at once; does not return."""

    def close(self) -> None:
        """Release the engine's resources; no instance may use it afterwards."""


@runtime_checkable
class Processes(Engine, Protocol):
    """An engine whose instances are processes that learn how the others end."""

    broken: bool  # whether an exchange has failed: later ones would receive its messages

    def name_instances(self, names: Sequence[str], context: Callable[[int], str]) -> None:
        """Set the names of the instances in messages, and what a message about a lost one adds."""

    def fail(self, error: BaseException) -> None:
        """Tell the other instances that this one takes no further part; does not wait for them."""

    def receive_unexpected(self, instance: int, tags: Callable[[int], bool]) -> NDArray[Any] | None:
        """Take an instance's first message that no exchange awaits, if `tags` accepts its tag."""
