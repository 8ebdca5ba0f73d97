"""The private interface of torch, as far as gpusim.torch.distributed uses it.

A torch that lacks one of these names fails here, on import. What each has to do
is shown by `tests/torch/test_private_distributed.py`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from torch.nn.parallel import _functions
from torch.utils import _device, _python_dispatch

__all__ = [
    "ATTRIBUTES",
    "FLAGS",
    "LOCKS",
    "OPERATIONS",
    "PrintOptions",
    "ProcessGroup",
    "REGISTERING",
    "SHARED_STATES",
    "aten",
    "attention_kernels",
    "autocast_module",
    "bindings",
    "c10d",
    "copies",
    "core",
    "device_constructors",
    "dist",
    "engines",
    "function_modes",
    "functional",
    "generator_memory",
    "generator_position",
    "has_gpu",
    "has_mode",
    "is_dtensor",
    "is_random_operation",
    "is_fake",
    "is_wrapper",
    "mend_mode_key",
    "parse_to",
    "profiler",
    "put_mode_below",
    "replace",
    "saves_in_thread",
    "serialization",
    "take_mode_out",
    "unpickler",
    "tensor_inside",
    "without_dynamo",
    "without_function_modes",
    "without_modes",
]

#: Functional collectives, which DTensor calls.
functional = _functional

# Functions there have the default argument group=group.WORLD, which is bound on import: it has to
# be None then, and not one rank's group.
# torch warns of its own torch.jit.script there, which would fail a program run with -W error.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    for _name in ("nn.functional", "optim.zero_redundancy_optimizer"):
        importlib.import_module(f"torch.distributed.{_name}")

c10d: Any = _c10d  # whose functions are replaced
dist: Any = _dist
c10d_logger: Any = _c10d_logger
bindings: Any = _bindings  # of which torch types a part
eval_frame: Any = _eval_frame
C = TypeVar("C", bound=type)
copies: Any = _functions  # between GPUs
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


#: Attributes that torch keeps for the process, and that are a rank's own in turns, by their owner.
#: Each has the name of what sets it: a context in most cases, inside of which a rank may wait.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "torch.__future__": {
        "_overwrite_module_params_on_conversion": (
            "torch.__future__.set_overwrite_module_params_on_conversion"
        ),
        "_swap_module_params_on_conversion": (
            "torch.__future__.set_swap_module_params_on_conversion"
        ),
    },
    "torch._tensor_str": {"PRINT_OPTS": "torch.set_printoptions"},
    "torch._weights_only_unpickler": {
        "_marked_safe_globals_set": "torch.serialization.add_safe_globals"
    },
    "torch.autograd.graph": {
        "_allow_mutation_on_saved_tensors_enabled": (
            "torch.autograd.graph.allow_mutation_on_saved_tensors"
        )
    },
    "torch.backends.mha": {"_is_fastpath_enabled": "torch.backends.mha.set_fastpath_enabled"},
    "torch.distributed._shard.api": {
        "_CURRENT_PROCESS_GROUP": "load_with_process_group of sharded tensors"
    },
    "torch.distributed.checkpoint.planner:SavePlanner": dict.fromkeys(
        (
            "_cached_all_plans",
            "_cached_final_save_plan",
            "_cached_global_plan",
            "_cached_metadata",
            "_cached_save_plan",
        ),
        "torch.distributed.checkpoint.DefaultSavePlanner",
    ),
    "torch.distributed.tensor:DTensor._op_dispatcher": {
        "_custom_op_handlers": "torch.distributed.tensor.parallel.loss_parallel"
    },
    "torch.nn.functional": {
        "scaled_dot_product_attention": "torch.distributed.tensor.experimental.context_parallel"
    },
    "torch.nn.modules.module": {
        f"_global_{name}": "register_module_*_hook of torch.nn.modules.module"
        for name in (
            "backward_hooks",
            "backward_pre_hooks",
            "buffer_registration_hooks",
            "forward_hooks",
            "forward_hooks_always_called",
            "forward_hooks_with_kwargs",
            "forward_pre_hooks",
            "is_full_backward_hook",
            "module_registration_hooks",
            "parameter_registration_hooks",
        )
    },
    "torch.nn.parallel.distributed:DistributedDataParallel": {
        "_active_ddp_module": "the forward pass of DistributedDataParallel"
    },
    "torch.nn.utils.parametrize": {
        "_cache": "torch.nn.utils.parametrize.cached",
        "_cache_enabled": "torch.nn.utils.parametrize.cached",
    },
    "torch.optim.optimizer": {
        "_global_optimizer_post_hooks": "torch.optim.optimizer.register_optimizer_step_post_hook",
        "_global_optimizer_pre_hooks": "torch.optim.optimizer.register_optimizer_step_pre_hook",
    },
    "torch.utils._python_dispatch": {
        "_is_in_non_infra_torch_dispatch_mode": "modes such as FakeTensorMode",
        "_is_in_torch_dispatch_mode": "modes such as FakeTensorMode",
    },
    "torch.utils.checkpoint": {
        "_checkpoint_debug_enabled": "torch.utils.checkpoint.set_checkpoint_debug_enabled",
        "_enable_checkpoint_early_stop": "torch.utils.checkpoint.set_checkpoint_early_stop",
    },
}

#: The same of what C++ keeps: what sets it, how to read it, and how to set what was read.
FLAGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    (
        "torch.use_deterministic_algorithms",
        lambda: (
            core._get_deterministic_algorithms(),
            core._get_deterministic_algorithms_warn_only(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (
        "torch.utils.deterministic.fill_uninitialized_memory",
        core._get_deterministic_fill_uninitialized_memory,
        core._set_deterministic_fill_uninitialized_memory,
    ),
    (
        "torch.backends.cudnn.benchmark",
        core._get_cudnn_benchmark,
        core._set_cudnn_benchmark,
    ),
    (
        "torch.backends.cudnn.deterministic",
        core._get_cudnn_deterministic,
        core._set_cudnn_deterministic,
    ),
    ("torch.backends.cudnn.enabled", core._get_cudnn_enabled, core._set_cudnn_enabled),
    *(
        (f"torch.backends.cuda.enable_{name}_sdp", read, write)
        for name, read, write in (
            ("cudnn", core._get_cudnn_sdp_enabled, core._set_sdp_use_cudnn),
            ("flash", core._get_flash_sdp_enabled, core._set_sdp_use_flash),
            ("math", core._get_math_sdp_enabled, core._set_sdp_use_math),
            ("mem_efficient", core._get_mem_efficient_sdp_enabled, core._set_sdp_use_mem_efficient),
        )
    ),
    ("torch.backends.mkldnn.enabled", core._get_mkldnn_enabled, core._set_mkldnn_enabled),
    (
        "torch.nn.attention.sdpa_kernel",
        core._get_sdp_priority_order,
        core._set_sdp_priority_order,
    ),
    (
        "modes such as FakeTensorMode",
        lambda: dispatch._is_in_any_mode_without_ignore_compile_internals,
        _set_mode_flag,
    ),
    (
        "torch.autograd.set_detect_anomaly",
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

#: Locks of modules, by the module, that are held while programs run, such as compilers.
LOCKS = {
    "torch._dynamo.convert_frame": "compile_lock",
    "torch.utils.benchmark.utils.cpp_jit": "LOCK",
    "torch.utils.cpp_extension": "_BUILD_EXTENSION_LOCK",
}

#: What makes operators, as Python has them, when it is asked for them first.
MAKING: tuple[Any, ...] = (_ops._Ops, _ops._OpNamespace, _ops.OpOverloadPacket)  # __getattr__

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


def is_fake(kind: type) -> bool:
    """Whether a type's tensors have a shape alone, as those that DTensor's rules are tried on."""
    return issubclass(kind, torch._subclasses.FakeTensor)


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


def replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set an attribute until the stack ends."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, new)


def put_mode_below(mode: Any) -> None:
    """Put a dispatch mode on the calling thread's stack, below all others that are the program's.

    torch's flags, which say whether a program has modes, stay as they are.
    """
    others = _program_modes()
    for _ in others:
        core._pop_torch_dispatch_stack(None)
    for each in (mode, *others):
        core._push_on_torch_dispatch_stack(each)


def take_mode_out(mode: Any) -> None:
    """Take the mode from the calling thread's stack, wherever it is."""
    modes = _program_modes()
    for _ in modes:
        core._pop_torch_dispatch_stack(None)
    for each in modes:
        if each is not mode:
            core._push_on_torch_dispatch_stack(each)


#: A block in which function modes and subclasses do not see calls of torch.
without_function_modes: Any = core.DisableTorchFunction


def has_mode(mode: Any) -> bool:
    """Whether a dispatch mode is on the calling thread's stack."""
    count = core._len_torch_dispatch_stack()
    return any(core._get_dispatch_stack_at(place) is mode for place in range(count))


def mend_mode_key() -> None:
    """Let torch's dispatcher ask the calling thread's modes if there are any.

    A key says so beside the stack. `inference_mode` sets it back at its end, also if the stack has
    changed in between: operators would pass a mode, or fail in search of one.
    """
    for key in (core.DispatchKey.Python, core.DispatchKey.PythonTLSSnapshot):
        core._dispatch_tls_set_dispatch_key_included(key, core._len_torch_dispatch_stack() > 0)


@contextmanager
def without_modes() -> Iterator[None]:
    """A block whose operators no mode and no subclass sees, and that records no derivatives."""
    with core._DisableTorchDispatch(), core.DisableTorchFunction(), torch.no_grad():
        yield


def _program_modes() -> list[Any]:
    """The dispatch modes of the calling thread that are not torch's own, the lowest first."""
    stack = map(core._get_dispatch_stack_at, range(core._len_torch_dispatch_stack()))
    return [mode for mode in stack if getattr(mode, "_mode_key", None) is None]


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
