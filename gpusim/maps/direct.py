"""The commonest call, a sum over the only map around, goes straight to the kernels.

Everything that the dispatcher would look at is looked at once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from gpusim import fallback
from gpusim.fallback import kernels

from ..collectives import Call, Collective, dispatch
from ..reduction import Reduction, as_reduction, current
from .axis_environment import axis_environment, diverging_axes
from .mapped_array.array import Array, MappedArray, wrap_array
from .mapped_array.memory import moves

__all__ = ["fold_directly"]


def fold_directly(call: Call, operand: MappedArray) -> MappedArray | None:
    """The result of a call that only folds one NumPy array, mapped over the one lockstep axis that
    is bound. None for all other calls, and where calls are recorded."""
    collective = call.collective
    given: Any = call.reduction  # a user's, not looked at so far
    environment = axis_environment()
    if len(environment) != 1:
        return None
    (entry,) = environment
    if type(call.axis_name) is not str or entry.name != call.axis_name or call.groups is not None:
        return None
    if entry.index is not None or entry.sharding is not None or operand._axes != environment:
        return None
    if moves or dispatch.record_call is not None or diverging_axes():
        return None
    data = operand._data
    if type(data) is not np.ndarray or not data.dtype.isnative:
        return None
    state = current()
    reduction = state.reduction if given is None else given
    if not isinstance(reduction, Reduction):
        reduction = as_reduction(given, f"{call.name or collective.name}: reduction")
    fold = _fold(collective, reduction, data.dtype, data.shape)
    if fold is None:
        return None
    return wrap_array(fold(data, state.next_calls(1) if given is None else 0), ())


@lru_cache(1024)
def _fold(
    collective: Collective[Any], reduction: Reduction, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Callable[[Array, int], Array] | None:
    """The fold as a function of the operand's data and the call number; None if there is none, or
    the Reduction is to be refused."""
    if collective.op not in (None, reduction.op):
        return None
    assert collective.fold is not None
    spec = collective.fold(reduction, shape[0], dtype)
    return None if spec is None else fallback.stacked_fold(spec, dtype, shape)


kernels.plan_caches.append(_fold.cache_clear)
