"""The way of a group's calls through torch's dispatcher.

C++ and Python call a group's methods directly, past the dispatcher. Real groups dispatch each call
as an operator of `torch.ops.c10d`, where dispatch modes, tensor subclasses and the profiler see it.
Here a method looks whether one of them would: then it calls torch's own method, which dispatches
the operator, and the kernel of the operator posts the call. Otherwise it posts the call at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch import distributed as dist

from ..private import ProcessGroup, bindings
from ..private_calls import (
    is_observed,
    is_unusual,
    kernels_of_groups,
    operator_of,
    ranks_call,
)
from ..private_groups import RanksWorld
from .arguments import split_sizes
from .profiles import event

__all__ = ["dispatched", "through_dispatcher"]

C = TypeVar("C", bound=type)

SPLITS = ("output_splits", "input_splits", "output_split_sizes", "input_split_sizes")

RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods that have older names in torch, which versions before 2.13 have alone."""

METHODS = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
"""The other methods that dispatch an operator."""


def through_dispatcher(cls: C) -> C:
    """Let the methods of a group that post calls dispatch them where something looks on."""
    owners = cls.__mro__[: cls.__mro__.index(ProcessGroup)]  # the class, and what it is made of

    def posting(name: str) -> Callable[..., Any] | None:
        return next((vars(owner)[name] for owner in owners if name in vars(owner)), None)

    for name in METHODS:
        post = posting(name)
        if post is not None:
            setattr(cls, name, _dispatching(name, post))
    for new, old in RENAMED.items():
        post = posting(new) or posting(old)
        if post is None:
            continue
        name, other = (new, old) if hasattr(ProcessGroup, new) else (old, new)
        method = _dispatching(name, post)
        if hasattr(ProcessGroup, other):
            # C++ looks for a method by both names: torch's own of the other name calls ours.
            for owner in owners:
                if other in vars(owner):
                    delattr(owner, other)
        else:  # torch has the old names alone, and gpusim calls methods by the new ones
            setattr(cls, other, method)
        setattr(cls, name, method)
    return cls


def _dispatching(name: str, post: Callable[..., Any]) -> Callable[..., Any]:
    """A method that dispatches a call, or posts it directly; `post` is kept as its attribute."""
    dispatch = getattr(ProcessGroup, name)
    splits = name in ("all_to_all_single", "alltoall_base")

    def method(self: Any, *args: Any, **named: Any) -> Any:
        if splits:
            args = (*args[:2], *map(split_sizes, args[2:4]), *args[4:])
            named = {key: split_sizes(named[key]) if key in SPLITS else named[key] for key in named}
        if self.in_kernel or not (
            is_observed() or _any_unusual(args) or (named and _any_unusual(named.values()))
        ):
            return _posted(self, name, post, args, named)
        before = self.dispatched, self.posted
        self.dispatched, self.posted = (*args, *named.values()), []
        try:
            return dispatch(self, *args, **named)
        finally:
            self.dispatched, self.posted = before

    functools.update_wrapper(method, post)
    # pybind11 calls the method of the base class, and not the overriding one again, for a caller
    # that has the method's name and has the object as its first argument.
    method.__code__ = method.__code__.replace(co_name=name)
    wrapped: Any = functools.wraps(post)(method)
    wrapped.post = post
    return method


def _posted(
    group: Any, name: str, post: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """The work of a call that a method posts, under the rank's watch if it has one."""
    watch = group._rank.watch
    work = (
        post(group, *args, **named) if watch is None else watch.call(group, name, post, args, named)
    )
    if work is not None:
        work.returned_by(name, group.size(), group.name())
    return work


def _any_unusual(arguments: Iterable[Any]) -> bool:
    """Whether there is a tensor that the dispatcher treats in a way of its own."""
    for each in arguments:
        if isinstance(each, Tensor):
            if is_unusual(each):
                return True
        elif isinstance(each, (list, tuple)) and _any_unusual(each):
            return True
    return False


# Kernels. Each gets the operator's arguments without the group, and calls a method of it.


def _options(kind: Any, timeout: int = -1, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    if timeout >= 0:
        options.timeout = timedelta(milliseconds=timeout)
    return options


def _broadcast(call: Any, tensors: Any, root: int, root_tensor: int, *rest: Any) -> Any:
    options = _options(
        bindings.BroadcastOptions, *_timeout(rest), rootRank=root, rootTensor=root_tensor
    )
    return tensors, call("broadcast", tensors, options)


def _allreduce(call: Any, tensors: Any, op: Any, sparse_indices: Any, *rest: Any) -> Any:
    options = _options(bindings.AllreduceOptions, *_timeout(rest), reduceOp=call.operator(op))
    if sparse_indices is not None:
        options.sparseIndices = sparse_indices
    return tensors, call("allreduce", tensors, options)


def _allreduce_coalesced(call: Any, tensors: Any, op: Any, *rest: Any) -> Any:
    kind = bindings.AllreduceCoalescedOptions
    options = _options(kind, *_timeout(rest), reduceOp=call.operator(op))
    return call("allreduce_coalesced", tensors, options)


def _reduce(call: Any, tensors: Any, op: Any, root: int, root_tensor: int, *rest: Any) -> Any:
    chosen = {"reduceOp": call.operator(op), "rootRank": root, "rootTensor": root_tensor}
    return call("reduce", tensors, _options(bindings.ReduceOptions, *_timeout(rest), **chosen))


def _allgather(call: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    options = _options(bindings.AllgatherOptions, *_timeout(rest))
    return outputs, call("allgather", outputs, inputs, options)


def _allgather_base(call: Any, output: Any, given: Any, *rest: Any) -> Any:
    options = _options(bindings.AllgatherOptions, *_timeout(rest))
    return output, call("all_gather_single", output, given, options)


def _allgather_coalesced(call: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    return call("allgather_coalesced", outputs, inputs, bindings.AllgatherOptions())


def _allgather_tensors(call: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    return call("all_gather_single_coalesced", outputs, inputs, bindings.AllgatherOptions())


def _reduce_scatter(call: Any, outputs: Any, inputs: Any, op: Any, *rest: Any) -> Any:
    options = _options(bindings.ReduceScatterOptions, *_timeout(rest), reduceOp=call.operator(op))
    return outputs, call("reduce_scatter", outputs, inputs, options)


def _reduce_scatter_base(call: Any, output: Any, given: Any, op: Any, *rest: Any) -> Any:
    options = _options(bindings.ReduceScatterOptions, *_timeout(rest), reduceOp=call.operator(op))
    return output, call("reduce_scatter_single", output, given, options)


def _reduce_scatter_tensors(call: Any, outputs: Any, inputs: Any, op: Any, *rest: Any) -> Any:
    options = _options(bindings.ReduceScatterOptions, *_timeout(rest), reduceOp=call.operator(op))
    return call("reduce_scatter_single_coalesced", outputs, inputs, options)


def _gather(call: Any, outputs: Any, inputs: Any, root: int, *rest: Any) -> Any:
    options = _options(bindings.GatherOptions, *_timeout(rest), rootRank=root)
    return call("gather", outputs, inputs, options)


def _scatter(call: Any, outputs: Any, inputs: Any, root: int, *rest: Any) -> Any:
    options = _options(bindings.ScatterOptions, *_timeout(rest), rootRank=root)
    return outputs, call("scatter", outputs, inputs, options)


def _alltoall(call: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    options = _options(bindings.AllToAllOptions, *_timeout(rest))
    return outputs, call("alltoall", outputs, inputs, options)


def _alltoall_base(call: Any, output: Any, given: Any, received: Any, sent: Any, *rest: Any) -> Any:
    options = _options(bindings.AllToAllOptions, *_timeout(rest))
    return call("all_to_all_single", output, given, received, sent, options)


def _barrier(call: Any, tensor: Any, device_ids: Any, *rest: Any) -> Any:
    options = _options(bindings.BarrierOptions, *_timeout(rest), device_ids=list(device_ids))
    return call("barrier", options)


def _monitored_barrier(
    call: Any, tensor: Any, device_ids: Any, timeout: int, wait_all_ranks: bool
) -> None:
    limit = timedelta(milliseconds=timeout) if timeout > 0 else None
    call("monitored_barrier", limit, wait_all_ranks)


def _send(call: Any, tensors: Any, to: int, tag: int) -> Any:
    return call("send", tensors, to, tag)


def _recv(call: Any, tensors: Any, source: int, tag: int) -> Any:
    return call("recv", tensors, source, tag)


def _recv_any_source(call: Any, tensors: Any, tag: int) -> Any:
    return call("recv_anysource", tensors, tag)


def _timeout(rest: Sequence[Any]) -> Sequence[int]:
    """The time-out of the last arguments: `async_op` and, of most operators, `timeout`."""
    return rest[1:2]


KERNELS: dict[str, tuple[int, Callable[..., Any]]] = {
    "_allgather_base_": (2, _allgather_base),
    "_reduce_scatter_base_": (2, _reduce_scatter_base),
    "allgather_": (2, _allgather),
    "allgather_coalesced_": (2, _allgather_coalesced),
    "allgather_into_tensor_coalesced_": (2, _allgather_tensors),
    "allreduce_": (1, _allreduce),
    "allreduce_coalesced_": (1, _allreduce_coalesced),
    "alltoall_": (2, _alltoall),
    "alltoall_base_": (2, _alltoall_base),
    "barrier": (1, _barrier),
    "broadcast_": (1, _broadcast),
    "gather_": (2, _gather),
    "monitored_barrier_": (1, _monitored_barrier),
    "recv_": (1, _recv),
    "recv_any_source_": (1, _recv_any_source),
    "reduce_": (1, _reduce),
    "reduce_scatter_": (2, _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": (2, _reduce_scatter_tensors),
    "scatter_": (2, _scatter),
    "send": (1, _send),
}
"""The operators of torch.ops.c10d: at which argument the group stands, and the kernel."""


class _Call:
    """The group's end of one dispatched call."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def operator(self, boxed: Any) -> Any:
        """The ReduceOp of an operator's argument.

        A factor of PREMUL_SUM is not to be had from the argument, but from the method's.
        """
        op = operator_of(boxed)
        if op.name != "PREMUL_SUM":
            return dist.ReduceOp(op)
        for each in self.group.dispatched or ():
            own: Any = getattr(each, "reduceOp", each)
            if isinstance(own, dist.ReduceOp) and own == op:
                return own
        raise RuntimeError(
            "torch.ops.c10d: the operator PREMUL_SUM has a factor, which an operator's argument "
            "does not tell; call torch.distributed's functions"
        )

    def __call__(self, name: str, *args: Any) -> Any:
        """Post the call; the boxed work, or None."""
        method = getattr(type(self.group), name, None)
        post = getattr(method, "post", None) or getattr(type(self.group), RENAMED[name]).post
        before, self.group.in_kernel = self.group.in_kernel, True
        try:
            with event(self.group, name, args):
                work = _posted(self.group, name, post, args, {})
        finally:
            self.group.in_kernel = before
        if work is None:
            return None
        self.group.posted.append(work)  # C++ alone would not keep the Python object
        return work.boxed()


@contextmanager
def dispatched(group_type: type, world: RanksWorld) -> Iterator[None]:
    """A block in which the operators of torch.ops.c10d post calls for groups of this type.

    Those for other groups go to torch's own kernels.
    """

    def post(kernel: Callable[..., Any], index: int, group: Any, args: Sequence[Any]) -> Any:
        return kernel(_Call(group), *args[:index], *args[index + 1 :])

    with ranks_call(world), kernels_of_groups(group_type, KERNELS, post):
        yield
