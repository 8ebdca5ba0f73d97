"""The private interface of torch, as far as gpusim.torch.distributed uses it.

A torch that lacks one of these names fails here, on import. What each has to do
is shown by `tests/torch/test_private_distributed.py`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch._tensor_str as _tensor_str
import torch.distributed._functional_collectives as _functional
import torch.distributed.c10d_logger as _c10d_logger
import torch.distributed.distributed_c10d as _c10d
from torch import _ops, _weights_only_unpickler
from torch import distributed as _dist
from torch import library as _library
from torch import serialization as _serialization
from torch._C import _distributed_c10d as _bindings
from torch._C._dynamo import eval_frame as _eval_frame
from torch._library import custom_ops as _custom_ops
from torch.amp import autocast_mode as _autocast_mode
from torch.autograd import profiler as _profiler
from torch.distributed.device_mesh import DeviceMesh as _DeviceMesh
from torch.distributed.fsdp import _debug_utils
from torch.distributed.tensor import DTensor as _DTensor
from torch.distributed.tensor import _redistribute
from torch.utils import _device, _python_dispatch

from ...errors import GpusimError
from ...startup import gpusim_ranks

__all__ = [
    "ATTRIBUTES",
    "FLAGS",
    "OPERATIONS",
    "PrintOptions",
    "ProcessGroup",
    "REGISTERING",
    "SHARED_STATES",
    "RanksWorld",
    "aten",
    "attention_kernels",
    "autocast_module",
    "bindings",
    "c10d",
    "core",
    "device_constructors",
    "dist",
    "engines",
    "function_modes",
    "generator_memory",
    "generator_position",
    "groups_of",
    "has_gpu",
    "is_dtensor",
    "is_random_operation",
    "is_registered",
    "is_wrapper",
    "leave_groups",
    "parse_to",
    "profiler",
    "ranks_as_threads",
    "replace",
    "saves_in_thread",
    "serialization",
    "unpickler",
    "tensor_inside",
    "stores_are_met",
    "without_dynamo",
]

# Functions there have the default argument group=group.WORLD, which is bound on import: it has to
# be None then, and not one rank's group.
for _name in ("nn.functional", "optim.zero_redundancy_optimizer"):
    importlib.import_module(f"torch.distributed.{_name}")

c10d: Any = _c10d  # whose functions are replaced
dist: Any = _dist
c10d_logger: Any = _c10d_logger
bindings: Any = _bindings  # of which torch types a part
eval_frame: Any = _eval_frame
C = TypeVar("C", bound=type)
core: Any = torch._C
DeviceMesh: Any = _DeviceMesh
dispatch: Any = _python_dispatch
dispatcher: Any = vars(_DTensor)["_op_dispatcher"]
profiler: Any = _profiler
redistribute: Any = _redistribute
meeting: Any = importlib.import_module("torch.distributed.rendezvous")  # and a function's name
spawning: Any = importlib.import_module("torch.multiprocessing.spawn")  # torch has a function there


def _set_mode_flag(on: bool) -> None:
    dispatch._is_in_any_mode_without_ignore_compile_internals = on
    dispatch.set_is_in_mode_without_ignore_compile_internals(on)


#: Attributes that torch keeps for the process, and that are a rank's own in turns. Contexts set
#: most of them, and inside of a context a rank may have to wait.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.__future__": (
        "_overwrite_module_params_on_conversion",
        "_swap_module_params_on_conversion",
    ),
    "torch._tensor_str": ("PRINT_OPTS",),
    "torch._weights_only_unpickler": ("_marked_safe_globals_set",),
    "torch.autograd.graph": ("_allow_mutation_on_saved_tensors_enabled",),
    "torch.backends.mha": ("_is_fastpath_enabled",),
    "torch.distributed._shard.api": ("_CURRENT_PROCESS_GROUP",),
    "torch.distributed.checkpoint.planner:SavePlanner": (
        "_cached_all_plans",
        "_cached_final_save_plan",
        "_cached_global_plan",
        "_cached_metadata",
        "_cached_save_plan",
    ),
    "torch.distributed.tensor:DTensor._op_dispatcher": ("_custom_op_handlers",),  # loss_parallel
    "torch.nn.functional": ("scaled_dot_product_attention",),  # context_parallel
    "torch.nn.modules.module": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_forward_pre_hooks",
        "_global_is_full_backward_hook",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    ),
    "torch.nn.parallel.distributed:DistributedDataParallel": ("_active_ddp_module",),
    "torch.nn.utils.parametrize": ("_cache", "_cache_enabled"),
    "torch.optim.optimizer": ("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
    "torch.utils._python_dispatch": (
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_torch_dispatch_mode",
    ),
    "torch.utils.checkpoint": ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
}

#: The same of what C++ keeps: how to read it, and how to set what was read.
FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (
        lambda: (
            core._get_deterministic_algorithms(),
            core._get_deterministic_algorithms_warn_only(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (
        core._get_deterministic_fill_uninitialized_memory,
        core._set_deterministic_fill_uninitialized_memory,
    ),
    (core._get_cudnn_benchmark, core._set_cudnn_benchmark),
    (core._get_cudnn_deterministic, core._set_cudnn_deterministic),
    (core._get_cudnn_enabled, core._set_cudnn_enabled),
    (core._get_cudnn_sdp_enabled, core._set_sdp_use_cudnn),
    (core._get_flash_sdp_enabled, core._set_sdp_use_flash),
    (core._get_math_sdp_enabled, core._set_sdp_use_math),
    (core._get_mem_efficient_sdp_enabled, core._set_sdp_use_mem_efficient),
    (core._get_mkldnn_enabled, core._set_mkldnn_enabled),
    (core._get_sdp_priority_order, core._set_sdp_priority_order),
    (lambda: dispatch._is_in_any_mode_without_ignore_compile_internals, _set_mode_flag),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
)
#: The type of what torch.set_printoptions changes in its place.
PrintOptions: Any = type(_tensor_str.PRINT_OPTS)

#: Attributes of classes that keep the state of a process in a container.
SHARED_STATES: tuple[tuple[Any, str], ...] = (
    (_debug_utils.SimpleProfiler, "profiling"),
    (_debug_utils.SimpleProfiler, "results"),
)

#: Methods and functions that register operators, kernels and rules with torch's dispatcher.
REGISTERING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        _library.Library,
        (
            "__init__",
            "_register_fake",
            "_register_torch_dispatch_rule",
            "define",
            "fallback",
            "impl",
        ),
    ),
    (
        _custom_ops.CustomOpDef,
        (
            "__init__",
            "register_autocast",
            "register_autograd",
            "register_fake",
            "register_kernel",
            "register_torch_dispatch",
            "register_vmap",
        ),
    ),
    (
        _library,
        (
            "custom_op",
            "define",
            "impl",
            "register_autocast",
            "register_autograd",
            "register_fake",
            "register_kernel",
            "register_torch_dispatch",
            "register_vmap",
            "triton_op",
        ),
    ),
)
REGISTERING = tuple(
    (owner, tuple(name for name in names if name in vars(owner))) for owner, names in REGISTERING
)

has_gpu = torch.cuda.is_available  # before a launch replaces it
autocast_module: Any = _autocast_mode  # _cast
serialization: Any = _serialization  # default_restore_location
unpickler: Any = _weights_only_unpickler  # _add_safe_globals

#: What Module.to reads its arguments by.
parse_to: Any = core._nn._parse_to


def generator_memory() -> ctypes.Array[ctypes.c_char] | None:
    """The state of torch's global generator as memory: reading it copies 5 times less than asking.

    It is found by its words of 32 bits, which the state that torch hands out has. Before them are
    the seed and the position, behind them normal numbers that are left over. None if it is not
    where it is looked for.
    """
    generator: Any = torch.default_generator
    words = generator.get_state().numpy()[24 : 24 + 624 * 8].view("u8").astype("u4").tobytes()
    at = ctypes.string_at(generator._cdata, 128 + len(words)).find(words)
    if at < 20:
        return None
    return (ctypes.c_char * (20 + len(words) + 24)).from_address(generator._cdata + at - 20)


def generator_position() -> Callable[[], bytes] | None:
    """A function that reads where torch's global generator is in its sequence; None as above."""
    memory = generator_memory()
    if memory is None:
        return None
    words = (ctypes.c_char * 12).from_address(ctypes.addressof(memory) + 8)
    return lambda: words.raw


aten: Any = torch.ops.aten
#: Modules that have the function by which a backward pass begins.
engines: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)


def device_constructors() -> frozenset[Any]:
    """The functions of torch that make tensors on the default device."""
    return frozenset(_device._device_constructors())


def function_modes() -> list[Any]:
    """The function modes of the calling thread, the outermost first."""
    return [core._get_function_stack_at(i) for i in range(core._len_torch_function_stack())]


@functools.lru_cache(maxsize=4096)
def _is_random(operation: Any) -> bool:
    overloads = [operation]
    if isinstance(operation, _ops.OpOverloadPacket):
        overloads = [getattr(operation, name) for name in operation.overloads()]
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def is_random_operation(function: Any) -> bool:
    """Whether one of torch.ops draws random numbers."""
    return type(function) in OPERATIONS and _is_random(function)


#: The types of torch.ops' operations.
OPERATIONS = (_ops.OpOverload, _ops.OpOverloadPacket)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor."""
    return isinstance(value, _DTensor)


def is_wrapper(kind: type) -> bool:
    """Whether a type of tensors dispatches by itself, and so need not have memory of its own."""
    method: Any = getattr(kind, "__torch_dispatch__", None)
    return method is not core._disabled_torch_dispatch_impl and kind not in (
        torch.Tensor,
        torch.nn.Parameter,
    )


def tensor_inside(wrapper: Any) -> Any:
    """The tensor that a DTensor, or the result of a functional collective, holds; else None."""
    if isinstance(wrapper, _DTensor):
        return wrapper._local_tensor
    if isinstance(wrapper, _functional.AsyncCollectiveTensor):
        return wrapper.elem
    return None


@contextmanager
def attention_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """A block in which operations of aten have these kernels on the CPU."""
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


if TYPE_CHECKING:

    class ProcessGroup:
        """torch's, whose stub lacks the constructor for groups that are written in Python."""

        def __init__(self, rank: int, size: int) -> None: ...

else:
    ProcessGroup = c10d.ProcessGroup


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
            dist.get_backend(group)  # which says that there is no such group
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
    return name != "gpusim" and name.upper() in c10d.Backend._plugins


def replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set an attribute until the stack ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, new)


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
            sort_ranks="sorted(split_group)" in _SPLITTING,
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


def saves_in_thread(function: Any) -> bool:
    """Whether it is the function by which `async_save` has another thread save."""
    module = getattr(function, "__module__", None) or ""
    return module.startswith("torch.distributed.checkpoint._async_")


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
