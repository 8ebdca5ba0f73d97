"""How the ranks of a launch have ended: what a launch whose ranks may die gives back."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from ....errors import GpusimError
from .plans import Fault

__all__ = ["Ending", "Endings"]


@dataclass(frozen=True)
class Ending:
    """The end of one rank's process.

    **Attributes**:

    - `code`: its exit code, or minus the number of the signal that ended it.
    - `error`, `message`, `traceback`: the exception that its program did not catch, if any: the
      name of its type, its text, and the whole as Python shows it.
    - `by_agent`: whether the agent has ended it, as another rank had failed or none could go on.
    - `calls`, `site`: how many calls it had posted, and where its program made the last one.
    - `place`: how many ranks had ended before.
    """

    rank: int
    code: int
    error: str = ""
    message: str = ""
    traceback: str = ""
    by_agent: bool = False
    calls: int = 0
    site: str = ""
    place: int = 0

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty without one."""
        return signal.Signals(-self.code).name if self.code < 0 else ""

    def __str__(self) -> str:
        """How it ended, in words that follow the rank's name."""
        if self.code < 0:
            return f"was ended by {self.signal}{' of the agent' if self.by_agent else ''}"
        if self.error and self.error != "SystemExit":
            return f"raised {self.error}{f': {self.message}' if self.message else ''}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True)
class Endings:
    """How all ranks of a launch have ended.

    **Attributes**:

    - `ranks` has the end of each rank, and `order` the ranks in the order in which they ended.
    - `error` is the error that ended all, such as a DeadlockError where no rank could go on and no
      limit would have ended that; else None.
    - `happened` are the faults that came, and `left` those of this start that did not, with why.
    - `results` are the values that the ranks' functions returned; None where it did not end well.
    """

    ranks: tuple[Ending, ...]
    order: tuple[int, ...]
    error: GpusimError | None = None
    happened: tuple[Fault, ...] = ()
    left: tuple[tuple[Fault, str], ...] = ()
    results: list[Any] = field(default_factory=list)

    @property
    def root(self) -> Ending | None:
        """The rank that failed first; None if none has."""
        ended = (self.ranks[rank] for rank in self.order)
        return next((each for each in ended if each.code and not each.by_agent), None)

    @property
    def well(self) -> bool:
        """Whether each rank ended with exit code 0."""
        return self.error is None and not any(each.code for each in self.ranks)
