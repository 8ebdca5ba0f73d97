"""Events of torch's profiler for the calls of a rank, as gloo has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..private_calls import enter_event, exit_event, is_profiling

__all__ = ["event"]

Events = list[tuple[str, Sequence[Tensor]]]
_ONE = torch.zeros(1)


@contextmanager
def event(group: Any, method: str, args: Sequence[Any]) -> Iterator[None]:
    """A block that posts a call: the profiler, if there is one, has an event of it.

    gloo's events end in its own threads, and are asynchronous therefore. They last from the call to
    its end; here to the end of the posting, which for the last rank to post has the sum in it.
    """
    if not is_profiling():
        yield
        return
    prefix = group.name()
    handles = [
        enter_event(f"{prefix}:{title}", *inputs) for title, inputs in _events(group, method, args)
    ]
    try:
        yield
    finally:
        for handle in handles:
            exit_event(handle)


def _events(group: Any, method: str, args: Sequence[Any]) -> Events:
    """The events of a call: titles without the backend, and the tensors whose shapes they have."""
    if method == "monitored_barrier":
        return _of_monitored_barrier(group)
    title, inputs = EVENTS[method]
    return [(title, tensors) for tensors in inputs(*args)]


def _first(tensors: Any, *rest: Any) -> list[Sequence[Tensor]]:
    return [[tensors] if isinstance(tensors, Tensor) else list(tensors)]


def _second(outputs: Any, inputs: Any, *rest: Any) -> list[Sequence[Tensor]]:
    return _first(inputs)


def _each(outputs: Any, inputs: Any, *rest: Any) -> list[Sequence[Tensor]]:
    """An event for each input: gloo's reduce-scatter is an all-reduce of each."""
    return [[tensor] for tensor in _flat(inputs)]


def _row(outputs: Any, inputs: Any, *rest: Any) -> list[Sequence[Tensor]]:
    return [list(_flat(inputs))]


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
        return
    for each in tensors:
        yield from _flat(each)


def _none(*args: Any) -> list[Sequence[Tensor]]:
    return [[]]


def _of_monitored_barrier(group: Any) -> Events:
    """Rank 0 hears from all others and answers them."""
    one: Sequence[Tensor] = [_ONE]
    if group.rank() > 0:
        return [("send", one), ("recv", one)]
    others = group.size() - 1
    return [("recv", one)] * others + [("send", one)] * others


EVENTS: dict[str, tuple[str, Callable[..., list[Sequence[Tensor]]]]] = {
    "all_gather_single": ("all_gather", _second),
    "all_gather_single_coalesced": ("all_gather", _second),
    "all_to_all_single": ("all_to_all", _second),
    "allgather": ("all_gather", _second),
    "allgather_coalesced": ("all_gather", _second),
    "allreduce": ("all_reduce", _first),
    "allreduce_coalesced": ("all_reduce", _first),
    "alltoall": ("all_to_all", _second),
    "barrier": ("barrier", _none),
    "broadcast": ("broadcast", _first),
    "gather": ("gather", _second),
    "recv": ("recv", _first),
    "recv_anysource": ("recvAnySource", _first),
    "reduce": ("reduce", _first),
    "reduce_scatter": ("all_reduce", _each),
    "reduce_scatter_single": ("all_reduce", _each),
    "reduce_scatter_single_coalesced": ("all_reduce", _each),
    "scatter": ("scatter", _row),
    "send": ("send", _first),
}
"""By the method of a group: the title of gloo's event, and what its inputs are."""
