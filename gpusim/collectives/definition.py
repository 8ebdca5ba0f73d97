"""The rules of a collective that the dispatcher reads, and a call of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..groups import Groups
from ..reduction import Reduction, ReductionLike
from .kernels import FoldSpec

AxisName = Hashable
AxisIndexGroups = Sequence[Sequence[int]] | None

#: One operand or result: the shape of one replica's value, and its dtype.
ShapeDtype = tuple[tuple[int, ...], np.dtype[Any]]


class Definition:
    """The rules of a collective, without a way to call it; `record.Collective` describes each."""

    name: str
    key: str
    local: Callable[..., Any] | None
    distributed: Callable[..., Any] | None
    result: Callable[..., list[ShapeDtype]] | None
    operands: int
    operand_names: tuple[str, ...]
    folds: bool
    moves: bool
    groups: str | None
    replicated: bool
    scalar: Callable[[Any, int], Any] | None
    identity: Callable[[np.dtype[Any]], Any] | None
    op: str | None
    fold: Callable[[Reduction, int, np.dtype[Any]], FoldSpec | None] | None


class Call(NamedTuple):
    """One call of a collective, in the terms of a single replica.

    **Arguments**: `collective` is the record, `operands` are what the caller passed for them,
    `axis_name` and `groups` (axis_index_groups, or a `Groups`) say which replicas take part,
    `reduction` is the one given, or None, and `parameters` are the other arguments by name. `name`
    is the caller's name for it, which callers compare; None is the collective's.
    """

    collective: Definition
    operands: tuple[Any, ...]
    axis_name: AxisName
    groups: AxisIndexGroups | Groups = None
    reduction: ReductionLike | None = None
    parameters: Mapping[str, Any] = {}
    name: str | None = None
