"""The arguments of a group's method, as the check sees them: what is read and what is written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..calls.reductions import name_of, operator_of

__all__ = ["Given", "given_of", "replaced"]

OPERATIONS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "recv_anysource": "recv",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
"""The names of torch.distributed's functions, where a group's method has another."""

REDUCTIONS = frozenset(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"])


@dataclass
class Given:
    """The arguments of a call, by their roles.

    **Attributes**: `arguments` are those of the method, by name, and `args` and `named` the same as
    they were passed. `written` are the tensors that the
    call writes on this rank, `only_read` those that it reads alone; `reads_written` says that it
    reads what it writes. `root` and `peer` are ranks in the group, or None.
    """

    operation: str
    arguments: dict[str, Any]
    written: list[Tensor]
    only_read: list[Tensor]
    reads_written: bool
    is_async: bool
    root: int | None
    peer: int | None
    tag: int
    op: str
    args: list[Any]
    named: dict[str, Any]

    @property
    def read(self) -> list[Tensor]:
        """All tensors that the call reads."""
        return [*self.only_read, *(self.written if self.reads_written else ())]


@functools.cache
def _signature(post: Callable[..., Any]) -> tuple[inspect.Signature, tuple[str, ...]]:
    signature = inspect.signature(post)
    return signature, tuple(signature.parameters)[1:]


def given_of(
    group: Any, method: str, post: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]
) -> Given:
    """The arguments of a method that posts a call."""
    signature, names = _signature(post)
    if named or len(args) > len(names):
        arguments = dict(signature.bind(group, *args, **named).arguments)
        del arguments["self"]
    else:
        arguments = dict(zip(names, args, strict=False))
    operation = OPERATIONS.get(method, method)
    written: list[Tensor] = []
    read: list[Tensor] = []
    for name, value in arguments.items():
        if name == "tensors":
            (read if operation == "send" else written).extend(tensors_in(value))
        elif name.startswith("output") and "split" not in name:
            written += tensors_in(value)
        elif name.startswith("input") and "split" not in name:
            read += tensors_in(value)
    opts = arguments.get("opts", arguments.get("root"))
    root = _root_of(arguments, opts, operation)
    if operation == "broadcast" and root == group.rank():
        chosen = getattr(opts, "rootTensor", 0)  # of a list, all of which get its values
        read = written[chosen : chosen + 1]
        written = [each for place, each in enumerate(written) if place != chosen]
    elif operation == "reduce" and root is not None and root != group.rank():
        read, written = written, []
    return Given(
        operation,
        arguments,
        written,
        read,
        operation in ("all_reduce", "reduce") and "outputs" not in arguments,
        bool(getattr(opts, "asyncOp", True)) and operation != "monitored_barrier",
        root,
        arguments.get("to", arguments.get("source")),
        arguments.get("tag") or 0,
        name_of(operator_of(opts)) if operation in REDUCTIONS else "",
        list(args),
        dict(named),
    )


def _root_of(arguments: dict[str, Any], opts: Any, operation: str) -> int | None:
    if operation not in ("broadcast", "reduce", "gather", "scatter"):
        return None
    root = arguments.get("root", opts)
    found = root if isinstance(root, int) else getattr(root, "rootRank", None)
    return 0 if found is None else int(found)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument, and of lists in it."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def replaced(value: Any, by: dict[int, Tensor]) -> Any:
    """An argument with other tensors, by the identities of those it has."""
    if isinstance(value, Tensor):
        return by.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [replaced(each, by) for each in value]
    return value
