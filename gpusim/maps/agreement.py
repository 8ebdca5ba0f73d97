"""The agreement of instances that share an axis, before a collective runs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.dispatch import OperandKind, agreed
from ..runtime.world import MAIN_TAG
from .axis_environment import AxisEntry
from .lockstep import channel, sharded_axis
from .scheduler import enclosing_replica

if TYPE_CHECKING:
    from .rendezvous import Contribution

#: Values of at most this many bytes are compared between instances where they must be equal.
SMALL_VALUE = 4096


def kind_of(operand: Any) -> OperandKind:
    """The dtype and shape that one replica sees of an operand."""
    if not isinstance(operand, tuple):
        return OperandKind(f"Python {type(operand).__name__}", ())
    data, axes = operand
    return OperandKind(str(data.dtype), tuple(data.shape[len(axes) :]))


def agreement(contribution: Contribution) -> AbstractContextManager[None] | None:
    """A block that runs when all instances that share an axis make this call.

    **Raises**, on entering: CollectiveMismatchError, InstanceError where they do not.
    """
    shared = sharded_axis(contribution.entries)
    return None if shared is None else _agreed(contribution, shared)


@contextmanager
def _agreed(contribution: Contribution, shared: AxisEntry) -> Iterator[None]:
    assert shared.sharding is not None
    names = contribution.names
    over = repr(names[0]) if len(names) == 1 else repr(names)
    values = [_replicated(o, shared) for operands in contribution.leaves for o in operands]
    terms = {**contribution.terms(), "values of what all replicas share": values}
    thread = enclosing_replica()
    agreeing = agreed(
        shared.sharding.world,
        terms,
        over=f" over {over}",
        line=f" at {contribution.line}",
        tag=channel(contribution.enclosing, contribution.entries),
        # Where one replica runs at a time it keeps its slot, so that all takes the same path
        # always; instances that meet in another order must learn it, or they would wait for each
        # other.
        within=MAIN_TAG if thread is not None and thread.call.scheduler.one_at_a_time else None,
    )
    if thread is None:
        with agreeing:
            yield
    else:
        with thread.without_slot(), agreeing:
            yield


def _replicated(operand: Any, shared: AxisEntry) -> Any:
    """The checksum of a small operand that does not vary along the instances' axis.

    (Python numbers of threads may differ.)
    """
    if not isinstance(operand, tuple):
        return operand if shared.index is None else None
    data, axes = operand
    if shared in axes or shared.index is not None or not isinstance(data, np.ndarray):
        return None
    return zlib.crc32(data.tobytes()) if data.nbytes <= SMALL_VALUE else None
