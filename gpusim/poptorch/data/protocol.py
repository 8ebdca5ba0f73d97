"""What an accessor and its worker process say to each other, and what the worker is told to do.
Data go through the ring; these are short and say where it is."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

__all__ = ["End", "Failure", "Filled", "Iterate", "Release", "Settings", "Stop"]


@dataclass(frozen=True)
class Settings:
    """What the worker does.

    - `buffer_size`: how many slots the ring has.
    - `load_indefinitely`: go on to the next epoch unasked.
    - `early_preload`: fill the ring before anybody asks.
    - `rebatched_size`: cut batches anew to this size; `drop_last`: and drop the last one if it is
      smaller; `samples`: what the dataset yields are no batches.
    - `seed`: of PyTorch's, NumPy's and Python's generators, with the epoch.
    - `log_level`: of PopTorch's logger.
    """

    buffer_size: int
    load_indefinitely: bool
    early_preload: bool
    rebatched_size: int | None
    drop_last: bool
    samples: bool
    seed: int
    log_level: int


# ---------------------------------------------------------------- to the worker


@dataclass(frozen=True)
class Iterate:
    """Somebody iterates over this epoch: leave an earlier one, and load as far as there is room."""

    epoch: int


@dataclass(frozen=True)
class Release:
    """A slot may be written again."""

    slot: int


@dataclass(frozen=True)
class Stop:
    """End the process."""


# ---------------------------------------------------------------- from the worker


@dataclass(frozen=True)
class Filled:
    """There is an element of this epoch in a slot.

    - `outline`: pickled, if it differs from the last one.
    - `memory`: of how many bytes the slot is, if its memory is new, which then follows.
    """

    epoch: int
    slot: int
    outline: bytes | None
    memory: int | None


@dataclass(frozen=True)
class End:
    """This epoch has no more elements."""

    epoch: int


@dataclass(frozen=True)
class Failure:
    """The worker has ended by an exception: as a line, as a traceback, and itself if possible."""

    line: str
    details: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """As it is to be told."""
        line = "".join(traceback.format_exception_only(error)).strip()
        details = "".join(traceback.format_exception(error))
        return cls(line, details, pickled(error))

    def cause(self) -> BaseException | None:
        """The exception, if it can be made again here."""
        if self.pickled is None:
            return None
        try:
            made: Any = pickle.loads(self.pickled)
        except Exception:  # what an exception's class raises when made from its arguments
            return None
        return made if isinstance(made, BaseException) else None


def pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # whatever its class, or what it holds, raises
        return None
    return data
