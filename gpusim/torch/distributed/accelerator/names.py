"""Each public name of torch.cuda, its submodules and torch.accelerator: what a rank's script gets.

`CUDA` and `ACCELERATOR` are the tables. A name is

- played: a function of the rank's devices and the call's arguments, or a class,
- without effect: `nothing`, or `check` where a device is checked,
- refused by name: `REFUSED`,
- torch's own: `LEFT`.

Names of submodules are written with the submodule (`nvtx.mark`), unless torch.cuda has the same
object. `tests/torch/test_accelerator_names.py` fails for a name that is in no table.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .devices import CpuAsCuda
from .standins import (
    AnyEvent,
    AnyStream,
    CudaRuntime,
    DeviceContext,
    DeviceIndex,
    DeviceOf,
    DeviceProperties,
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    legacy_tensor,
    memory_of_host,
)

__all__ = [
    "ACCELERATOR",
    "CLASSES",
    "CUDA",
    "LEFT",
    "NVTX",
    "REFUSED",
    "Played",
    "check",
    "nothing",
]

Played = Callable[..., Any]  # of the rank's CpuAsCuda and the function's own arguments


def nothing(mode: CpuAsCuda, *args: Any, **kwargs: Any) -> None:
    """Have no effect."""


def check(mode: CpuAsCuda, device: Any = None) -> None:
    """Have no effect on a device that is there."""
    mode.index(device)


def _zero(mode: CpuAsCuda, device: Any = None) -> int:
    mode.index(device)
    return 0


def _set_device(mode: CpuAsCuda, device: Any) -> None:
    if not isinstance(device, int) or device >= 0:  # others have no effect, as in torch
        mode.current = mode.index(device)
        if isinstance(mode, CpuAsCuda) and mode.stream_watch is not None:
            mode.stream_watch.chose_device()


def _device_index(
    mode: CpuAsCuda, device: Any, optional: bool = False, allow_cpu: bool = False
) -> int:
    if allow_cpu and device is not None and not isinstance(device, int):
        if torch.device(device).type == "cpu":
            return -1
    if device is None and not optional:
        raise ValueError(
            f"Expected a torch.device with a specified index or an integer, but got:{device}"
        )
    return mode.index(device)


def _exchange_device(mode: CpuAsCuda, device: int) -> int:
    before = mode.current
    _set_device(mode, device)
    return before if device >= 0 else -1


# Generators


def _get_rng_state(mode: CpuAsCuda, device: Any = "cuda") -> Tensor:
    state: Tensor = mode.generators[mode.index(device)].get_state()
    return state


def _set_rng_state(mode: CpuAsCuda, new_state: Tensor, device: Any = "cuda") -> None:
    mode.generators[mode.index(device)].set_state(new_state)


def _set_rng_state_all(mode: CpuAsCuda, new_states: Any) -> None:
    for index, state in enumerate(new_states):
        mode.generators[index].set_state(state)


def _manual_seed(mode: CpuAsCuda, seed: int) -> None:
    mode.generators[mode.current].manual_seed(int(seed))


def _manual_seed_all(mode: CpuAsCuda, seed: int) -> None:
    mode.generators.seed_all(int(seed))


def _seed_all(mode: CpuAsCuda) -> None:
    mode.generators.seed_all(mode.generators[mode.current].seed())


# Memory, which is the host's


def _memory_stats(mode: CpuAsCuda, device: Any = None) -> OrderedDict[str, int]:
    """The keys that torch gives, with the memory that is in use: 0."""
    mode.index(device)
    kinds = "allocated", "current", "freed", "peak"
    pooled = (
        "active active_bytes allocated_bytes allocation inactive_split inactive_split_bytes "
        "requested_bytes reserved_bytes segment"
    )
    pools = "all", "large_pool", "small_pool"
    keys = [f"{name}.{pool}.{kind}" for name in pooled.split() for pool in pools for kind in kinds]
    keys += [f"oversize_{name}.{kind}" for name in ("allocations", "segments") for kind in kinds]
    keys += ["max_split_size", "num_alloc_retries", "num_device_alloc", "num_device_free"]
    keys += ["num_ooms", "num_sync_all_streams"]
    return OrderedDict((key, 0) for key in sorted(keys))


def _nested_memory_stats(mode: CpuAsCuda, device: Any = None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in _memory_stats(mode, device).items():
        *parents, name = key.split(".")
        inside = result
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[name] = value
    return result


def _memory_summary(mode: CpuAsCuda, device: Any = None, abbreviated: bool = False) -> str:
    return f"cuda:{mode.index(device)} is the host (gpusim, device='cpu'): 0 bytes are in use"


def _memory_snapshot(mode: CpuAsCuda, *args: Any, **kwargs: Any) -> list[Any]:
    return []


def _snapshot(mode: CpuAsCuda, *args: Any, **kwargs: Any) -> dict[str, Any]:
    traces: list[list[Any]] = [[] for _ in range(mode.count)]
    return {"segments": [], "device_traces": traces, "allocator_settings": {}}


def _dump_snapshot(mode: CpuAsCuda, filename: Any = "dump_snapshot.pickle", **named: Any) -> None:
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(mode), file)


# Ranges of nvtx


def _range_push(mode: CpuAsCuda, msg: Any, *args: Any) -> int:
    mode.ranges += 1
    return mode.ranges - 1


def _range_pop(mode: CpuAsCuda, *args: Any) -> int:
    mode.ranges -= 1
    return mode.ranges


@contextlib.contextmanager
def _block() -> Iterator[None]:
    yield


def _check_error(mode: CpuAsCuda, res: int) -> None:
    if int(res) != 0:
        raise RuntimeError(f"CUDA error {int(res)}")


def _call(mode: CpuAsCuda, function: Callable[[], Any], **named: Any) -> None:
    function()


def _name(mode: CpuAsCuda, device: Any = None) -> str:
    return f"CPU as cuda:{mode.index(device)} (gpusim)"


BOTH: dict[str, Played] = {
    "is_available": lambda mode: True,
    "device_count": lambda mode: mode.count,
    "synchronize": lambda mode, device=None: mode.synchronize(device),
    "current_stream": lambda mode, device=None: (mode.index(device), mode.stream)[1],
    "set_stream": lambda mode, stream: setattr(mode, "stream", stream or mode.stream),
    "empty_cache": nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "memory_stats": _memory_stats,
    "reset_peak_memory_stats": check,
    "reset_accumulated_memory_stats": check,
}
NVTX: dict[str, Played] = {
    "mark": nothing,
    "range": lambda mode, msg, *args, **kwargs: _block(),
    "range_push": _range_push,
    "range_pop": _range_pop,
    "range_start": lambda mode, msg: 0,
    "range_end": nothing,
}
CUDA: dict[str, Played] = {
    **BOTH,
    **{f"nvtx.{name}": played for name, played in NVTX.items()},
    # Devices
    "init": nothing,
    "is_initialized": lambda mode: True,
    "current_device": lambda mode: mode.current,
    "set_device": _set_device,
    "get_device_name": _name,
    "get_device_capability": lambda mode, device=None: (_zero(mode, device), 0),
    "get_device_properties": lambda mode, device=None: DeviceProperties(_name(mode, device)),
    "can_device_access_peer": lambda mode, device, peer: mode.index(device) != mode.index(peer),
    "get_arch_list": lambda mode: [],
    "get_gencode_flags": lambda mode: "",
    "is_bf16_supported": lambda mode, including_emulation=True: True,
    "is_tf32_supported": lambda mode: False,
    "is_current_stream_capturing": lambda mode: False,
    "get_sync_debug_mode": lambda mode: 0,
    "set_sync_debug_mode": nothing,
    "cudart": lambda mode: CudaRuntime(),
    "check_error": _check_error,
    # Streams
    "stream": lambda mode, stream: StreamContext(stream),
    "default_stream": lambda mode, device=None: (mode.index(device), mode.default_stream)[1],
    "get_stream_from_external": lambda mode, pointer, device=None: ExternalStream(pointer, device),
    # Generators
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed_all,
    "seed": lambda mode: mode.generators[mode.current].seed() and None,
    "seed_all": _seed_all,
    "initial_seed": lambda mode: mode.generators[mode.current].initial_seed(),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda mode: [each.get_state() for each in mode.generators],
    "set_rng_state_all": _set_rng_state_all,
    # Memory
    "ipc_collect": nothing,
    "memory_cached": _zero,
    "max_memory_cached": _zero,
    "reset_max_memory_allocated": check,
    "reset_max_memory_cached": check,
    "mem_get_info": memory_of_host,
    "memory_stats_as_nested_dict": _nested_memory_stats,
    "memory_summary": _memory_summary,
    "memory_snapshot": _memory_snapshot,
    "host_memory_stats": lambda mode: OrderedDict(),
    "host_memory_stats_as_nested_dict": lambda mode: {},
    "reset_accumulated_host_memory_stats": nothing,
    "reset_peak_host_memory_stats": nothing,
    "get_allocator_backend": lambda mode: "native",
    "get_per_process_memory_fraction": lambda mode, device=None: 1.0 + _zero(mode, device),
    "set_per_process_memory_fraction": lambda mode, fraction, device=None: check(mode, device),
    # Profiler and tunable operations
    "profiler.start": nothing,
    "profiler.stop": nothing,
    "profiler.profile": lambda mode: _block(),
    "tunable.is_enabled": lambda mode: False,
    "tunable.tuning_is_enabled": lambda mode: False,
    "tunable.record_untuned_is_enabled": lambda mode: False,
    "nccl.is_available": lambda mode, tensors: False,
    "gds.is_available": lambda mode: False,
    # Private, in use by public code
    "_lazy_init": nothing,
    "_lazy_call": _call,
    "_is_compiled": lambda mode: True,
    "_sleep": nothing,
    "_get_device_index": _device_index,
    "_utils._get_device_index": _device_index,
    "_exchange_device": _exchange_device,
    "_maybe_exchange_device": _exchange_device,
    "_get_generator": lambda mode, device: mode.generators[mode.index(device)],
    "memory._record_memory_history": nothing,
    "memory._snapshot": _snapshot,
    "memory._dump_snapshot": _dump_snapshot,
    "memory._set_allocator_settings": nothing,
}
ACCELERATOR: dict[str, Played] = {
    **BOTH,
    "current_accelerator": lambda mode, check_available=False: torch.device("cuda"),
    "current_device_index": lambda mode: mode.current,
    "current_device_idx": lambda mode: mode.current,
    "set_device_index": _set_device,
    "set_device_idx": _set_device,
    "empty_host_cache": nothing,
    "get_memory_info": memory_of_host,
}

_TENSORS = [
    f"{kind}Tensor"
    for kind in "BFloat16 Bool Byte Char Double Float Half Int Long Short".split()
    if hasattr(torch.cuda, f"{kind}Tensor")
]

#: Classes that are played; torch.cuda's unless another module is named.
CLASSES: dict[str, Any] = {
    "torch.Stream": AnyStream,
    "torch.Event": AnyEvent,
    "torch.accelerator.device_index": DeviceIndex,
    "Stream": Stream,
    "ExternalStream": ExternalStream,
    "Event": Event,
    "StreamContext": StreamContext,
    "device": DeviceContext,
    "_DeviceGuard": DeviceContext,
    "device_of": DeviceOf,
    **{name: legacy_tensor(name) for name in _TENSORS},
}

#: What needs a GPU; torch.cuda's, and torch.accelerator's where it has the same name.
REFUSED = frozenset(
    """
    CUDAGraph graph graph_pool_handle make_graphed_callables export_dot export_graph_data
    CUDAPluggableAllocator MemPool use_mem_pool change_current_allocator caching_allocator_alloc
    caching_allocator_delete caching_allocator_disabled caching_allocator_enable
    GreenContext current_blas_handle current_solver_handle
    clock_rate device_memory_used list_gpu_processes memory_usage power_draw temperature utilization
    comm.broadcast comm.broadcast_coalesced comm.gather comm.reduce_add comm.reduce_add_coalesced
    comm.scatter
    gds.GdsFile gds.gds_deregister_buffer gds.gds_register_buffer
    jiterator._create_jit_fn jiterator._create_multi_output_jit_fn
    nccl.all_gather nccl.all_reduce nccl.broadcast nccl.init_rank nccl.reduce nccl.reduce_scatter
    nccl.unique_id nccl.version
    tunable.enable tunable.get_filename tunable.get_max_tuning_duration
    tunable.get_max_tuning_iterations tunable.get_results tunable.get_rotating_buffer_size
    tunable.get_validators tunable.mgpu_tune_gemm_in_file tunable.read_file
    tunable.record_untuned_enable tunable.set_filename tunable.set_max_tuning_duration
    tunable.set_max_tuning_iterations tunable.set_numerical_check_tolerances
    tunable.set_rotating_buffer_size tunable.tune_gemm_in_file tunable.tuning_enable
    tunable.get_cublaslt_requested_algo_count tunable.set_cublaslt_requested_algo_count
    accelerator.Graph accelerator.get_device_capability
    """.split()
)

#: torch's own. Storage types and sparse tensor types fail with torch's errors.
LEFT = frozenset(
    """
    CudaError DeferredCudaCallError OutOfMemoryError AcceleratorError cudaStatus
    default_generators has_half has_magma
    amp graph_annotations graphs jiterator memory nccl nvtx profiler random sparse streams tunable
    graph_annotations.clear_kernel_annotations graph_annotations.get_kernel_annotations
    graph_annotations.is_available graph_annotations.mark_kernels
    graphs.register_graph_capture_end_hook graphs.register_graph_capture_start_hook
    graphs.register_graph_destroy_hook graphs.register_graph_instantiate_hook
    graphs.register_graph_replay_end_hook graphs.register_graph_replay_start_hook
    ComplexDoubleStorage ComplexFloatStorage BFloat16Storage BoolStorage ByteStorage CharStorage
    DoubleStorage FloatStorage HalfStorage IntStorage LongStorage ShortStorage
    sparse.BFloat16Tensor sparse.ByteTensor sparse.CharTensor sparse.DoubleTensor
    sparse.FloatTensor sparse.HalfTensor sparse.IntTensor sparse.LongTensor sparse.ShortTensor
    amp.GradScaler amp.amp_definitely_not_available amp.autocast amp.custom_bwd amp.custom_fwd
    """.split()
)
