"""All bugs, and the correct configurations: of the programs here, and of libraries."""

from __future__ import annotations

from tests.equal import data_bugs, other_bugs, tensor_bugs
from tests.equal.bug import Bug

__all__ = ["BUGS", "CORRECT", "LIBRARIES"]

BUGS: tuple[Bug, ...] = (*tensor_bugs.BUGS, *data_bugs.BUGS, *other_bugs.BUGS)
CORRECT: tuple[tuple[str, int], ...] = (
    *tensor_bugs.CORRECT,
    *data_bugs.CORRECT,
    *other_bugs.CORRECT,
)
#: Programs of `tests/frameworks`, in its environment, with options of `gpusim equal`.
LIBRARIES: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
