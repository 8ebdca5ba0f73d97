"""A replica's part in a rendezvous, and the terms that all parts have to agree on."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..collectives.dispatch import OperandKind, Resolved, describe
from .axis_environment import Axes, AxisEntry, AxisName
from .streams import Arrival

__all__ = ["Contribution", "kind_of"]


@dataclass(frozen=True)
# Made in the replica's own thread, and then read by the one that arrives last, which computes for
# all. Nothing changes it in between. Operands are the replica's arrays themselves, not copies: the
# replica waits, so that they are not written while they are read.
class Contribution:
    """One replica's part in a rendezvous.

    **Attributes**: the call, the names of its axes and their entries, the operands of each leaf,
    the enclosing axes, the structure of the tree, `line`, where it is called, if instances share an
    axis, and `arrival`, of a replica on a GPU.
    """

    call: Resolved
    names: tuple[AxisName, ...]
    entries: list[AxisEntry]
    leaves: list[list[Any]]
    enclosing: Axes
    structure: Any
    line: str = ""
    arrival: Arrival | None = None

    @property
    def threaded_axes(self) -> Axes:
        """The threaded axes that the collective spans, outermost first."""
        return tuple(f for f in self.enclosing if f.index is not None and f in self.entries)

    def terms(self) -> dict[str, Any]:
        """All that must be the same on all replicas, by its name in error messages."""
        return describe(
            self.call,
            [kind_of(operand) for operands in self.leaves for operand in operands],
            axis_name=self.names,
            **{
                "axes around": tuple((entry.name, entry.total) for entry in self.enclosing),
                "tree": self.structure,
            },
        )


def kind_of(operand: Any) -> OperandKind:
    """The dtype and shape that one replica sees of an operand."""
    if not isinstance(operand, tuple):
        return OperandKind(f"Python {type(operand).__name__}", ())
    data, axes = operand
    return OperandKind(_name(data.dtype), tuple(data.shape[len(axes) :]))


_name = functools.cache(str)  # of dtypes, which takes a microsecond
