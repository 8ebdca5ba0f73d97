"""Planned calls: what a rank's process says once of a call that it makes again and again.

The first such call is a message with all there is to say, which both ends keep as a plan under a
number. The next ones name the number, and where in the shared memory their tensors are.

**Invariant.** A plan is found by its key, and the key has all that the message has, and all that
the parent does depends on: the group, the method, each argument's type and value, each tensor's
dtype and shape, the options' fields, the limit, the program's line. What a key cannot have is not
planned: tensors with strides of their own, or of subclasses, without elements or without memory;
factors of PREMUL_SUM, numbers with a fraction. So a plan is never stale.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ..private import bindings
from .messages import address_of

__all__ = [
    "CALL",
    "CALLED",
    "PLANS",
    "Plan",
    "Planned",
    "answer_of",
    "answered",
    "is_within",
    "key_of",
]

PLANS = 4096
"""How many plans a process has; then it forgets them all, and their numbers begin again."""

CALL = struct.Struct("<BIQQ")
"""A planned call: its kind, the plan, the call's number, and where its memory starts."""

CALLED, ANSWERED = 1, 2
"""Kinds of brief messages. JSON, the other messages, begins with a brace."""

ANSWER = struct.Struct("<BI")
"""The answer to a planned call: its kind, and how many works are complete, without an error."""

WORK = struct.Struct("<Qi")
"""A complete work: its number, and the rank that sent a message to it."""

TENSORS = (torch.Tensor, torch.nn.Parameter)
PLAIN = (bool, int, str, type(None))
OPERATORS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
FIELDS = ("asyncOp", "reduceOp", "rootRank", "rootTensor")

#: The types of options, and the fields that a call depends on. A barrier's time-out is its limit.
OPTIONS: dict[type, tuple[str, ...]] = {
    kind: tuple(name for name in FIELDS if hasattr(kind, name))
    for kind in (
        bindings.AllToAllOptions,
        bindings.AllgatherOptions,
        bindings.AllreduceCoalescedOptions,
        bindings.AllreduceOptions,
        bindings.BarrierOptions,
        bindings.BroadcastOptions,
        bindings.GatherOptions,
        bindings.ReduceOptions,
        bindings.ReduceScatterOptions,
        bindings.ScatterOptions,
    )
}

METHODS = frozenset(
    [
        "_allgather_base",
        "_reduce_scatter_base",
        "all_gather_single",
        "all_gather_single_coalesced",
        "all_to_all_single",
        "allgather",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "barrier",
        "broadcast",
        "gather",
        "recv",
        "recv_anysource",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "scatter",
        "send",
    ]
)
"""The methods whose calls can be planned: all that return a work of their tensors."""


class Unplanned(Exception):
    """An argument that no key can have."""


class Planned(NamedTuple):
    """A plan, as the rank's process keeps it.

    **Attributes**: `size` are the bytes of the call's memory. `read` and `written` are the tensors
    to copy, each with its place among the call's tensors, its start and its bytes. `outputs` are
    the places of the work's results.
    """

    number: int
    size: int
    read: Sequence[tuple[int, int, int]]
    written: Sequence[tuple[int, int, int]]
    outputs: Sequence[int]


def key_of(method: str, args: Sequence[Any], tensors: list[Tensor]) -> Any:
    """The part of a plan's key that a call's arguments make; their tensors are put into the list.

    **Returns**: None if the call cannot be planned.
    """
    if method not in METHODS:
        return None
    try:
        return method, *[_key(each, tensors) for each in args]
    except Unplanned:
        return None


def _key(value: Any, tensors: list[Tensor]) -> Any:
    kind = type(value)
    if kind in TENSORS:
        if (
            not value.is_cpu
            or value.layout is not torch.strided
            or not value.is_contiguous()
            or not value.numel()
            or value.is_conj()
            or value.is_neg()
        ):
            raise Unplanned
        tensors.append(value)
        return value.dtype, value.shape
    if kind in PLAIN:
        return kind, value  # True and 1 are equal
    if kind is list or kind is tuple:
        return kind, *[_key(each, tensors) for each in value]
    if kind in OPERATORS:
        return kind, _operator(value)
    fields = OPTIONS.get(kind)
    if fields is None:
        raise Unplanned
    return kind, *[_key(getattr(value, name), tensors) for name in fields]


def _operator(value: Any) -> int:
    """The number of an operator; each PREMUL_SUM may have another factor."""
    number: int = getattr(value, "op", value).value
    if number == PREMUL_SUM:
        raise Unplanned
    return number


_factors: Any = dist.ReduceOp.RedOpType  # whose stub lacks it
PREMUL_SUM: int = _factors.PREMUL_SUM.value


def answered(complete: Sequence[tuple[int, int]], title: str) -> bytes:
    """The answer to a planned call, as bytes: works that are complete, and the call's title."""
    works = [WORK.pack(*each) for each in complete]
    return b"".join([ANSWER.pack(ANSWERED, len(works)), *works, title.encode()])


def answer_of(content: bytes) -> tuple[list[tuple[int, int]], str]:
    """The arguments that `answered` was called with."""
    _, count = ANSWER.unpack_from(content)
    end = ANSWER.size + count * WORK.size
    return list(WORK.iter_unpack(content[ANSWER.size : end])), content[end:].decode()


class Plan:
    """A plan, as the parent keeps it: a message, and the calls that were made by it.

    **Attributes**: `calls` has what the parent has made for calls in the memory at a start. It is
    emptied when the memory is another.
    """

    KEPT = 16

    def __init__(
        self,
        group: Any,
        site: str,
        method: str,
        arguments: dict[str, Any],
        kinds: Sequence[Any],
        start: int,
        chooses_here: bool,
        wait: bool,
        limit: float | None,
    ) -> None:
        self.group, self.site, self.method, self.arguments = group, site, method, arguments
        self.chooses_here, self.wait, self.limit = chooses_here, wait, limit
        self.kinds = [(name, shape, strides, at - start) for name, shape, strides, at in kinds]
        self.calls: dict[int, Callable[[], Any]] = {}

    def keep(self, start: int, call: Callable[[], Any]) -> None:
        """Keep what posts the call in the memory at a start once more."""
        if len(self.calls) >= self.KEPT:
            self.calls.clear()
        self.calls[start] = call


def is_within(part: Any, memory: mmap.mmap) -> bool:
    """Whether all arrays of a rank's part are in this memory, so that none is a copy."""
    first = address_of(memory)
    return _is_between(part, first, first + len(memory))


def _is_between(part: Any, first: int, end: int) -> bool:
    if isinstance(part, np.ndarray):
        start = part.__array_interface__["data"][0]
        return first <= start < end
    if isinstance(part, (list, tuple)):
        return all(_is_between(each, first, end) for each in part)
    return part is None or isinstance(part, (bool, int))
