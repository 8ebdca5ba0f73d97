"""What gpusim.torch.distributed uses of torch's private interface: all of it.

A torch that lacks one of these names fails here, on import. What each has to do
is shown by `tests/torch/test_private_distributed.py`.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as _c10d
from torch._C import _distributed_c10d as _bindings
from torch.autograd import profiler as _profiler
from torch.distributed.device_mesh import DeviceMesh as _DeviceMesh
from torch.distributed.tensor import DTensor as _DTensor
from torch.distributed.tensor import _redistribute
from torch.utils import _python_dispatch

from ...errors import GpusimError

__all__ = [
    "ATTRIBUTES",
    "FLAGS",
    "ProcessGroup",
    "RanksWorld",
    "leave_groups",
    "ranks_as_threads",
]

# Functions there have the default argument group=group.WORLD, which is bound on import: it has to
# be None then, and not one rank's group.
for _name in ("nn.functional", "optim.zero_redundancy_optimizer"):
    importlib.import_module(f"torch.distributed.{_name}")

c10d: Any = _c10d  # whose functions are replaced
bindings: Any = _bindings  # of which torch types a part
core: Any = torch._C
DeviceMesh: Any = _DeviceMesh
dispatch: Any = _python_dispatch
dispatcher: Any = vars(_DTensor)["_op_dispatcher"]
profiler: Any = _profiler
redistribute: Any = _redistribute


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
    "torch.autograd.graph": ("_allow_mutation_on_saved_tensors_enabled",),
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

    ranks = itertools.count(1)

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
        self.local.own, self.local.rank = own, next(self.ranks)

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
    hook, make_mesh = sys.excepthook, DeviceMesh.__init__
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

    def init_mesh(mesh: Any, *given: Any, **named: Any) -> None:
        make_mesh(mesh, *given, **named)
        # Caches of DTensor find a rank's own place by its mesh. Meshes are equal only if this is.
        if getattr(world.local, "own", None) is not None:
            mesh._thread_id = world.local.rank

    profilers = profiler._prepare_profiler, profiler._enable_profiler, profiler._disable_profiler
    profiling: list[int] = []  # the rank that does

    def claim(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*given: Any, **named: Any) -> Any:
            me = getattr(world.local, "rank", 0)
            if profiling and profiling != [me]:  # two would end the process, in C++
                raise GpusimError(
                    "torch's profiler: another rank profiles now, and a process has one profiler; "
                    "profile on one rank, or without collectives inside"
                )
            profiling[:] = [me]
            return start(*given, **named)

        return begin

    def end_profiler(*given: Any, **named: Any) -> Any:
        profiling.clear()
        return profilers[2](*given, **named)

    world = RanksWorld(original[0])
    profiler._prepare_profiler, profiler._enable_profiler = map(claim, profilers[:2])
    profiler._disable_profiler = end_profiler
    c10d._world = world
    c10d._new_process_group_helper = make
    c10d.rendezvous = meet
    DeviceMesh.__init__ = init_mesh
    bindings._set_thread_isolation_mode(True)
    try:
        yield world
    finally:
        bindings._set_thread_isolation_mode(False)
        c10d._world, c10d._new_process_group_helper, c10d.rendezvous = original
        DeviceMesh.__init__ = make_mesh
        profiler._prepare_profiler, profiler._enable_profiler = profilers[:2]
        profiler._disable_profiler = profilers[2]
        sys.excepthook = hook  # init_process_group wraps it, once for each rank
        redistribute._gen_transform_infos.cache_clear()  # which hold the ranks' meshes
        redistribute._planner_cache.clear()


def leave_groups() -> None:
    """Forget the calling rank's groups, as the end of a process does."""
    bindings._unregister_all_process_groups()
    # Caches of the thread, which hold the rank's meshes.
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    core._clear_DTensor_sharding_propagator_cache()
