"""What is done with a model whose code runs: operations of PopTorch depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

__all__ = ["Phase", "entered", "phase"]


@dataclass(frozen=True)
class Phase:
    """What is done with a model.

    Attributes:
        training: whether it is trained.
        compiling: whether it is being compiled: its code may run, but for its shapes only.
        options: PopTorch's options, or None.
    """

    training: bool
    compiling: bool
    options: Any


_phase: ContextVar[Phase | None] = ContextVar("gpusim phase of a model", default=None)


def phase() -> Phase | None:
    """What is done with the model that runs; None outside of models that replicas run.

    >>> phase() is None
    True
    """
    return _phase.get()


@contextmanager
def entered(now: Phase) -> Iterator[None]:
    """A block in which that is done."""
    token = _phase.set(now)
    try:
        yield
    finally:
        _phase.reset(token)
