"""The private interface of torch, as far as gpusim.torch.distributed uses it for ranks' groups.

What each has to do is shown by `tests/torch/test_private_distributed.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ...errors import GpusimError
from ...startup import gpusim_ranks
from .private import (
    DeviceMesh,
    bindings,
    c10d,
    c10d_logger,
    core,
    dispatcher,
    dist,
    meeting,
    redistribute,
    replace,
    spawning,
)

__all__ = [
    "GROUP_MAKER",
    "RanksWorld",
    "groups_of",
    "is_registered",
    "leave_groups",
    "ranks_as_threads",
    "stores_are_met",
]

GROUP_MAKER = (c10d, "_new_group_with_tag")
"""Where torch keeps the function by which new_group, and all that calls it, makes a group."""


class RanksWorld(threading.local):
    """torch's record of a process's groups, for each rank's thread its own.

    torch keeps it in `distributed_c10d._world`, "an experimental extension point to override it".
    Whatever attributes it has there, each rank has a fresh one of the same type. A thread that a
    rank has started sees the rank's, which `of_starter` finds. Others see the process's own.
    """

    ranks = itertools.count(1)

    def __init__(
        self, original: Any, of_starter: Callable[[], dict[str, Any] | None] = lambda: None
    ) -> None:
        vars(self).update(original=original, of_starter=of_starter)  # in each thread that uses it

    def enter(self) -> dict[str, Any]:
        """Give the calling thread a record of its own, and return it."""
        names = [n for n, v in vars(type(self.original)).items() if isinstance(v, property)]
        for name in names:
            if name != "pg_config_info":  # made from the others
                value = getattr(self.original, name)
                vars(self)[name] = None if name == "default_pg" else type(value)()
        vars(self)["rank"] = next(self.ranks)
        return vars(self)

    def leave(self) -> None:
        """Forget the calling thread's record."""
        original, of_starter = self.original, self.of_starter
        vars(self).clear()
        vars(self).update(original=original, of_starter=of_starter)

    def _record(self) -> dict[str, Any] | None:
        own = vars(self)
        found: dict[str, Any] | None = own if "rank" in own else own["of_starter"]()
        return found

    def is_rank(self) -> bool:
        """Whether the calling thread is a rank's own, or one that a rank has started."""
        return self._record() is not None

    def __getattr__(self, name: str) -> Any:
        record = self._record() or {}
        return record[name] if name in record else getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        record = self._record()
        if record is not None:
            record[name] = value
        else:
            setattr(self.original, name, value)

    @property
    def pg_config_info(self) -> Any:
        return type(self.original).pg_config_info.fget(self)


@contextmanager
def ranks_as_threads(
    rendezvous: Callable[..., Any],
    admit: Callable[..., None],
    of_starter: Callable[[], dict[str, Any] | None],
) -> Iterator[RanksWorld]:
    """A block in which the threads that enter the world are ranks, with groups of their own.

    **Arguments**:

    - `rendezvous`: what `init_process_group` calls with its URL, rank and world size instead of
      torch's own; it returns an iterator over one (store, rank, world size).
    - `admit`: called with the size, the rank and the backend of each group before it is made.
    - `of_starter`: finds the record of the rank that has started the calling thread; else None.
    """
    world = RanksWorld(c10d._world, of_starter)
    make_group, torchs_rendezvous = c10d._new_process_group_helper, c10d.rendezvous
    make_mesh, split_group = DeviceMesh.__init__, c10d.split_group
    torchs_timeout, torchs_start = c10d._get_default_timeout, spawning.start_processes

    def make(size: int, rank: int, ranks: list[int], backend: str, *rest: Any, **named: Any) -> Any:
        if not world.is_rank():
            return make_group(size, rank, ranks, backend, *rest, **named)
        names = {name.rpartition(":")[2].lower() for name in backend.split(",")}
        for name in names:
            if hasattr(c10d.Backend, "_ensure_backend_registered"):  # since 2.14: of packages
                c10d.Backend._ensure_backend_registered(name)
            if name not in c10d.Backend.backend_type_map:
                raise AssertionError(f"Unknown backend type {name}")  # as torch says it
        theirs = {name for name in names if is_registered(name)}
        if theirs == names:
            return make_group(size, rank, ranks, backend, *rest, **named)
        if theirs:
            raise GpusimError(
                f"init_process_group: backend={backend!r}: {', '.join(sorted(theirs))} is a "
                "backend that the program registered, the others are simulated; a group has "
                "either"
            )
        if size == -1:  # of "mpi", as mpirun knows it
            store, rank, size = next(rendezvous(rank, size))
            rest = (dist.PrefixStore("default_pg", store), *rest[1:])
        # PyTorch 2.14 checks in C++, in front of its own backends; simulated calls pass by that.
        if os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1" and hasattr(bindings, "NanCheckHook"):
            raise NotImplementedError("TORCH_DIST_NAN_CHECK=1 has no effect on simulated ranks")
        admit(size, rank, ranks, backend)
        device = named.pop("device_id", None)
        group, store = make_group(size, rank, ranks, "gpusim", *rest, **named)
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            group.made_by(store)
            world.pg_map[group] = (backend, world.pg_map[group][1])
            world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(backend)))
            if device is not None:
                group.bound_device_id = device
        return group, store

    def meet(url: Any, rank: int = -1, world_size: int = -1, **named: Any) -> Any:
        if not world.is_rank():
            return torchs_rendezvous(url, rank, world_size, **named)
        return rendezvous(rank, world_size)

    def init_mesh(mesh: Any, *given: Any, **named: Any) -> None:
        make_mesh(mesh, *given, **named)
        # Caches of DTensor find a rank's own place by its mesh. Meshes are equal only if this is.
        if world.is_rank():
            mesh._thread_id = world.rank

    def timeout_of(backend: str) -> Any:
        """torch's own of NCCL warns where torch is built without it. Here time-outs do nothing."""
        return c10d.default_pg_timeout if world.is_rank() else torchs_timeout(backend)

    def start_processes(*args: Any, **named: Any) -> Any:
        if (
            world.is_rank() and gpusim_ranks.VARIABLE not in os.environ
        ):  # else they may become ranks
            warnings.warn(
                "the processes that torch.multiprocessing starts are not simulated ranks; if they "
                "are to be ranks, use `gpusim run`, or call gpusim.torch.distributed.launch(f, n, "
                "args) in place of spawn(f, args, n)",
                RuntimeWarning,
                stacklevel=3,
            )
        return torchs_start(*args, **named)

    def describe(name: str, *args: Any, **named: Any) -> dict[str, Any]:
        """For torch's log of errors, which asks NCCL for its version where a script names NCCL."""
        group = named.get("group") or named.get("process_group")
        if group is not None and not isinstance(group, dist.ProcessGroup) and dist.is_initialized():
            dist.get_backend(group)  # raises ValueError: the group is not one of the rank's
        return {"func_name": name}

    def split(*args: Any, **named: Any) -> Any:
        return (_split if world.is_rank() else split_group)(*args, **named)

    with ExitStack() as stack:
        stack.callback(redistribute._gen_transform_infos.cache_clear)  # which hold ranks' meshes
        stack.callback(redistribute._planner_cache.clear)
        replace(stack, c10d, "_world", world)
        replace(stack, c10d, "_new_process_group_helper", make)
        replace(stack, c10d, "rendezvous", meet)
        replace(stack, c10d, "_get_default_timeout", timeout_of)
        replace(stack, spawning, "start_processes", start_processes)
        replace(stack, torch.multiprocessing, "start_processes", start_processes)
        replace(stack, c10d, "split_group", split)
        replace(stack, c10d, "_process_group_name", _group_name)
        replace(stack, dist, "split_group", split)
        replace(stack, c10d, "_maybe_attach_flight_recorder", lambda *args: None)  # calls in C++
        replace(stack, c10d_logger, "_get_msg_dict", describe)
        replace(stack, DeviceMesh, "__init__", init_mesh)
        replace(stack, sys, "excepthook", sys.excepthook)  # which init_process_group wraps
        bindings._set_thread_isolation_mode(True)
        stack.callback(bindings._set_thread_isolation_mode, False)
        yield world


@contextmanager
def stores_are_met() -> Iterator[list[str]]:
    """A block in which torch's rendezvous of tcp://, env:// and file:// connects no processes.

    It reads rank and world size as ever, and the list has a name for where they meet: the port,
    which is one on all addresses of a machine, or the file.
    """
    keys: list[str] = []

    def tcp(host: str, port: int, *rest: Any, **named: Any) -> Any:
        if not 0 <= port < 2**16:
            raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
        keys.append(f"port {port}")
        return dist.HashStore()

    def file(path: str, *rest: Any) -> Any:
        keys.append(f"file {os.path.realpath(path)}")
        return dist.HashStore()

    with ExitStack() as stack:
        replace(stack, meeting, "_create_c10d_store", tcp)
        replace(stack, meeting, "FileStore", file)
        yield keys


def is_registered(name: str) -> bool:
    """Whether a program or a library registered the backend of this name, and not torch itself."""
    plugin = c10d.Backend._plugins.get(name.upper())
    if plugin is None or name == "gpusim":
        return False
    # Since 2.14 torch's own ones are among them.
    return getattr(plugin.creator_fn, "__module__", "") != c10d.__name__


_SPLITTING = inspect.getsource(c10d.split_group)


def _split(
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **named: Any,
) -> Any:
    """torch's split_group, whose own has C++ split the communicators of an accelerator."""
    parent = parent_pg or dist.group.WORLD
    members = dist.get_process_group_ranks(parent)
    split_ranks = split_ranks or [[]]
    for split in split_ranks:
        if (
            not split
            or len(set(split)) < len(split)
            or not 0 <= min(split) <= max(split) < len(members)
        ):
            raise ValueError(
                f"split_group: split_ranks={split_ranks}: expected lists of different ranks of the "
                f"parent group, from 0 to {len(members) - 1}"
            )
    mine = next((split for split in split_ranks if parent.rank() in split), None)
    parent.splits += 1
    if mine is None:
        c10d._process_group_name(split_ranks[0], use_hashed_name=True)
        # It counts the group, in versions of torch that return the first of these:
        absent = "return GroupMember.NON_GROUP_MEMBER" in _SPLITTING
        return c10d.GroupMember.NON_GROUP_MEMBER if absent else None
    ranks = [members[index] for index in mine]
    token = _split_name.set(f"{parent.group_name}:split:{parent.splits}:{sorted(ranks)}")
    try:
        return dist.new_group(
            ranks,
            timeout,
            pg_options=parent.options if pg_options is None else pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
            # Sorted is the default, and all that versions before 2.13 have.
            **({} if "sorted(split_group)" in _SPLITTING else {"sort_ranks": False}),
            **named,
        )
    finally:
        _split_name.reset(token)


# torch's name of a split group counts the groups of the rank. NCCL's split matches the ranks by a
# colour, so that counts may differ between them; simulated ranks are matched by the name.
_split_name: ContextVar[str] = ContextVar("gpusim.torch.distributed.split_name")
_torchs_group_name = c10d._process_group_name


def _group_name(ranks: Any, use_hashed_name: bool) -> Any:
    """The name of a new group: that of the split which makes it, else torch's."""
    text = _split_name.get("")
    if not text:
        return _torchs_group_name(ranks, use_hashed_name)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def leave_groups() -> None:
    """Forget the calling rank's groups, as the end of a process does."""
    bindings._unregister_all_process_groups()
    # Caches of the thread, which hold the rank's meshes.
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    core._clear_DTensor_sharding_propagator_cache()


@contextmanager
def groups_of(record: dict[str, Any]) -> Iterator[None]:
    """A block in which C++ finds a rank's groups by their names in a thread that it started."""
    _forget_groups_of_thread()  # which may work for several ranks
    for group, name in list(record.get("pg_names", {}).items()):
        bindings._register_process_group(name, group)
    try:
        yield
    finally:
        _forget_groups_of_thread()


def _forget_groups_of_thread() -> None:
    """Nothing is done after the launch: what C++ knows then are the process's groups."""
    if isinstance(c10d._world, RanksWorld):
        bindings._unregister_all_process_groups()
