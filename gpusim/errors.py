"""The exceptions that are gpusim's own; every other error has the type JAX or NumPy gives it."""

from __future__ import annotations

import sys


class GpusimError(RuntimeError):
    """An error of a replicated program without a counterpart in an ordinary one."""


class CollectiveMismatchError(GpusimError):
    """Replicas met in one rendezvous with calls that do not fit together."""


class ReplicaError(GpusimError):
    """A replica's own code raised; the exception is this one's ``__cause__``.

    >>> ReplicaError(3)
    ReplicaError('replica 3 raised an exception')
    >>> ReplicaError(3, "replica 3 of axis 'i' divided by zero").index
    3
    """

    def __init__(self, index: int, message: str | None = None) -> None:
        super().__init__(f"replica {index} raised an exception" if message is None else message)
        self.index = index  #: the replica whose code raised

    def __reduce__(self) -> tuple[type[ReplicaError], tuple[int, str]]:
        # Exceptions are pickled by their args; this one's args hold the message alone.
        return type(self), (self.index, str(self))


class DeadlockError(GpusimError):
    """Some replicas wait in a collective that the others can no longer reach."""


class InstanceError(GpusimError):
    """Another instance of the World is gone, has failed or has left, and this one needs it.

    >>> InstanceError(3, "instance 3 is gone").instance
    3
    """

    def __init__(self, instance: int, message: str) -> None:
        super().__init__(message)
        self.instance = instance  #: the instance that is missing

    def __reduce__(self) -> tuple[type[InstanceError], tuple[int, str]]:
        return type(self), (self.instance, str(self))


class ReplicaIndexError(ValueError, IndexError):
    """A replica number that is out of range.

    It is an IndexError because JAX raises one, and a ValueError because the number is an argument;
    NumPy's AxisError is both for the same reasons.
    """


JAX_NOTE = (
    "jax.lax works on JAX's own devices, and this is a replica or rank of gpusim's, where "
    "gpusim.lax works. `gpusim jaxrun --devices N SCRIPT` runs a JAX program on fake devices, and "
    "docs/testing.md has tests on them"
)


def explain(error: BaseException) -> None:
    """Add a note to the NameError that jax.lax raises in a replica, for an axis of gpusim's."""
    if not isinstance(error, NameError) or "unbound axis name" not in str(error):
        return
    if JAX_NOTE in getattr(error, "__notes__", ()):
        return
    trace, module = error.__traceback__, ""
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    if not module.startswith("gpusim.") and "jax" in sys.modules:
        error.add_note(JAX_NOTE)
