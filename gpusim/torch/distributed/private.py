"""What gpusim.torch.distributed uses of torch's private interface: all of it.

A torch that lacks one of these names fails here, on import. What each has to do
is shown by `tests/torch/test_private_distributed.py`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed.distributed_c10d as _c10d
from torch._C import _distributed_c10d as _bindings
from torch._C._dynamo import eval_frame as _eval_frame
from torch.distributed.tensor import DTensor

__all__ = [
    "ProcessGroup",
    "RanksWorld",
    "get_tensor_handlers",
    "leave_groups",
    "ranks_as_threads",
    "set_tensor_handlers",
    "without_dynamo",
]

# Functions there have the default argument group=group.WORLD, which is bound on import: it has to
# be None then, and not one rank's group.
for _name in ("nn.functional", "optim.zero_redundancy_optimizer"):
    importlib.import_module(f"torch.distributed.{_name}")

c10d: Any = _c10d  # whose functions are replaced
bindings: Any = _bindings  # of which torch types a part
eval_frame: Any = _eval_frame
C = TypeVar("C", bound=type)

if TYPE_CHECKING:

    class ProcessGroup:
        """torch's, whose stub lacks the constructor for groups that are written in Python."""

        def __init__(self, rank: int, size: int) -> None: ...

else:
    ProcessGroup = c10d.ProcessGroup


class RanksWorld:
    """torch's record of a process's groups, for each rank's thread its own.

    torch keeps it in `distributed_c10d._world`, "an experimental extension point to override it".
    Whatever attributes it has there, each rank has a fresh one of the same type. Threads that are
    no rank see the process's own.
    """

    def __init__(self, original: Any) -> None:
        vars(self).update(original=original, local=threading.local())

    def enter(self) -> None:
        """Give the calling thread a record of its own."""
        names = [n for n, v in vars(type(self.original)).items() if isinstance(v, property)]
        own = {}
        for name in names:
            if name != "pg_config_info":  # made from the others
                value = getattr(self.original, name)
                own[name] = None if name == "default_pg" else type(value)()
        self.local.own = own

    def leave(self) -> None:
        """Forget the calling thread's record."""
        self.local.own = None

    def __getattr__(self, name: str) -> Any:
        own = getattr(self.local, "own", None)
        if own is None or name not in own:
            return getattr(self.original, name)
        return own[name]

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(self.local, "own", None)
        if own is None:
            setattr(self.original, name, value)
        else:
            own[name] = value

    @property
    def pg_config_info(self) -> Any:
        return type(self.original).pg_config_info.fget(self)


@contextmanager
def ranks_as_threads(
    rendezvous: Callable[..., Any], admit: Callable[..., None]
) -> Iterator[RanksWorld]:
    """A block in which the threads that enter the world are ranks, with groups of their own.

    **Arguments**:

    - `rendezvous`: what `init_process_group` calls with its URL, rank and world size instead of
      torch's own; it returns an iterator over one (store, rank, world size).
    - `admit`: called with the size, the rank and the backend of each group before it is made.
    """
    original = c10d._world, c10d._new_process_group_helper, c10d.rendezvous
    hook = sys.excepthook
    make_group = original[1]

    def make(size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **named: Any) -> Any:
        if getattr(world.local, "own", None) is None:
            return make_group(size, rank, ranks, backend, *rest, **named)
        admit(size, rank, ranks, backend)
        group, store = make_group(size, rank, ranks, "gpusim", *rest, **named)
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            world.pg_map[group] = (backend, world.pg_map[group][1])
        return group, store

    def meet(url: Any, rank: int = -1, world_size: int = -1, **named: Any) -> Any:
        if getattr(world.local, "own", None) is None:
            return original[2](url, rank, world_size, **named)
        return rendezvous(rank, world_size)

    world = RanksWorld(original[0])
    c10d._world = world
    c10d._new_process_group_helper = make
    c10d.rendezvous = meet
    bindings._set_thread_isolation_mode(True)
    try:
        yield world
    finally:
        bindings._set_thread_isolation_mode(False)
        c10d._world, c10d._new_process_group_helper, c10d.rendezvous = original
        sys.excepthook = hook  # init_process_group wraps it, once for each rank


def leave_groups() -> None:
    """Forget the calling rank's groups, as the end of a process does."""
    bindings._unregister_all_process_groups()


def get_tensor_handlers() -> dict[Any, Any]:
    """What operators of DTensors do instead, inside of `loss_parallel` and context parallelism.

    torch keeps it once for a process. `implicit_replication` is each thread's own.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def set_tensor_handlers(handlers: dict[Any, Any]) -> None:
    """Put these in place of those of now."""
    DTensor._op_dispatcher._custom_op_handlers = handlers


def without_dynamo(cls: C) -> C:
    """Keep Dynamo out of a class's methods, which C++ calls while it traces, as DDP's reducer does.

    `torch.compiler.disable` does the same, and imports all of Dynamo at the first call.
    """
    skip = eval_frame._FrameAction.SKIP  # also what the methods call
    for method in vars(cls).values():
        if inspect.isfunction(method):
            code, strategy = method.__code__, eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(code, strategy)
    return cls
