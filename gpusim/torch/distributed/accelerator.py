"""The CPU in the role of the GPUs that a script asks for.

In a launch with `device="cpu"` each rank has as many devices "cuda" as its node has ranks, and all
of them are the host:

- `CpuAsCuda`, a function mode of the rank's thread, reads device arguments. A tensor that is moved
  to "cuda", or from it, is copied as it would be, and says that it is on the CPU.
- `cpu_as_accelerator` replaces functions of torch.cuda and torch.accelerator. Scripts and their
  libraries get the answers of a machine with GPUs. torch's own modules are told that there is none,
  so that they run as they do on the CPU.
- Whatever is neither answered nor without effect on the CPU is refused by name.

It all holds in the threads of ranks only, and ends with the launch.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import DefaultDeviceType

from .private import autocast_module, core, has_gpu, parse_to, replace, serialization
from .wire import frames_of

__all__ = ["CpuAsCuda", "asks_for_gpu", "cpu_as_accelerator"]

CASTS = (
    "torch.autocast('cuda') under device='cpu' casts what autocast('cpu') casts. The two lists of "
    "operations differ, so dtypes of intermediate results may differ from a GPU's"
)
SEEDS = (
    "torch.cuda.manual_seed under device='cpu' seeds the one generator that torch has there, which "
    "draws for the CPU too. On a GPU the CPU's draws would go on as before"
)
CPU = torch.device("cpu")

_local = threading.local()
_warned: set[str] = set()


def _mode() -> CpuAsCuda | None:
    """The calling rank's devices; None in threads that are no rank of such a launch."""
    found: CpuAsCuda | None = getattr(_local, "mode", None)
    return found


def _rank() -> CpuAsCuda:
    found = _mode()
    assert found is not None
    return found


def _warn(message: str, stacklevel: int) -> None:
    """Warn once in a launch."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)


class CpuAsCuda(TorchFunctionMode):
    """A block in which the calling thread is a rank that has GPUs, all of them the host.

    **Arguments**: `count`, the number of devices.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.current = 0

    def __enter__(self) -> CpuAsCuda:
        _local.mode = self
        self.default_stream = self.stream = Stream()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _local.mode = None

    def index(self, device: Any = None) -> int:
        """The number of a device; RuntimeError for one that is not there, as in CUDA."""
        if device is None:
            return self.current
        if not isinstance(device, int):
            device = torch.device(device)
            if device.type != "cuda":
                raise ValueError(f"expected a device 'cuda', got {device}")
            device = self.current if device.index is None else device.index
        if not 0 <= device < self.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: cuda:{device}, where the rank's node has "
                f"{self.count} (LOCAL_WORLD_SIZE)"
            )
        found: int = device
        return found

    def is_played(self, device: Any) -> bool:
        """Whether an argument names a GPU."""
        if isinstance(device, int) and not isinstance(device, bool):
            played = True
        elif isinstance(device, str):
            played = device.partition(":")[0] == "cuda"
        else:
            played = isinstance(device, torch.device) and device.type == "cuda"
        if played:
            self.index(device)
        return played

    def on_cpu(self, device: Any) -> Any:
        """The CPU for a GPU; anything else as it is."""
        return CPU if self.is_played(device) else device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in SPECIAL:
            return self._serve(function, args, kwargs or {})
        if not kwargs:
            return function(*args)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if device is None or not self.is_played(device):
            return function(*args, **kwargs)
        found = function(*args, **{**kwargs, "device": CPU})
        if function in SHARING:
            found = found.clone()
        return _mark(found)

    def _serve(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tensor.to, cuda and cpu, which copy between two devices; and what Module.to reads."""
        if function is torch.device:
            if len(args) == 1 and isinstance(args[0], int):
                return torch.device("cuda", args[0])
            return function(*args, **kwargs)
        if function is Tensor.is_pinned:
            return False
        if function is Tensor.pin_memory:
            return args[0]
        if function is Tensor.cpu:
            found = function(*args, **kwargs)
            return found.clone() if found is args[0] and _asked_by_script(2) else found
        first = 0 if function is parse_to else 1
        device = args[first] if len(args) > first else kwargs.get("device")
        if function is Tensor.cuda:
            self.index(device)
            tensor, rest = args[0], args[2:]
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
            if rest:
                kwargs["non_blocking"] = rest[0]
            found = tensor.to(CPU, **kwargs)
        elif not self.is_played(device):
            found = function(*args, **kwargs)
            if function is Tensor.to and found is args[0] and str(device) == "cpu":
                return found.clone() if _asked_by_script(2) else found
            return found
        else:
            if len(args) > first:
                args = (*args[:first], CPU, *args[first + 1 :])
            else:
                kwargs = {**kwargs, "device": CPU}
            found = function(*args, **kwargs)
            if function is parse_to:
                return torch.device("cuda", self.index(device)), *found[1:]
        if found is args[0] and not _is_marked(found):
            found = found.clone()
        return _mark(found)

    # What scripts ask torch.cuda and torch.accelerator

    def set_device(self, device: Any) -> None:
        if isinstance(device, int) and device < 0:  # no effect, as in torch
            return
        self.current = self.index(device)

    def check(self, device: Any = None) -> None:
        self.index(device)

    def get_rng_state(self, device: Any = "cuda") -> Tensor:
        self.index(device)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device: Any = "cuda") -> None:
        self.index(device)
        torch.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [torch.get_rng_state()] * self.count

    def set_rng_state_all(self, new_states: Any) -> None:
        torch.set_rng_state(list(new_states)[self.current])

    def manual_seed(self, seed: int) -> None:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(int(seed))
        if not torch.equal(before, torch.get_rng_state()):
            _warn(SEEDS, 3)

    def current_stream(self, device: Any = None) -> Stream:
        self.index(device)
        return self.stream

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream

    def get_device_module(self, device: Any = None) -> Any:
        return getattr(torch, "cuda" if device is None else torch.device(device).type)


def asks_for_gpu(error: BaseException | None) -> bool:
    """Whether a program's error may be that it found no GPU where torch has none.

    >>> asks_for_gpu(AssertionError("Torch not compiled with CUDA enabled"))
    True
    """
    if error is None or has_gpu() or "communication hook" in str(error):  # of DDP, for NCCL alone
        return False
    frames = frames_of(error)
    own = [f for f in frames if f"{os.sep}site-packages{os.sep}torch{os.sep}" not in f.filename]
    last = own[-1].line or "" if own else ""
    if "NoneType" in str(error) and own:  # of torch.accelerator.current_accelerator()
        return "accelerator" in "".join(linecache.getlines(own[-1].filename))
    return bool(GPU.search(str(error)) or GPU.search(last))


GPU = re.compile(r"cuda|nvidia|accelerator|\bgpus?\b", re.IGNORECASE)


#: Functions that take a device without its name, or have to do with devices without one.
SPECIAL = {
    torch.device,
    parse_to,
    *(getattr(Tensor, name) for name in ("to", "cuda", "cpu", "is_pinned", "pin_memory")),
}

#: Functions whose result may share the memory of their argument, where a GPU's would not.
SHARING = {torch.as_tensor, torch.asarray}


def _mark(found: Any) -> Any:
    """Note that a tensor's memory is a GPU's, so that moving it there again is no copy."""
    if type(found) in (Tensor, torch.nn.Parameter) and found.layout == torch.strided:
        found.untyped_storage().gpusim_on_cuda = True
    return found


def _is_marked(found: Any) -> bool:
    if type(found) not in (Tensor, torch.nn.Parameter) or found.layout != torch.strided:
        return False
    return getattr(found.untyped_storage(), "gpusim_on_cuda", False)


def _asked_by_script(frames: int) -> bool:
    """Whether the function `frames` above is not torch's, except for modules that are moved."""
    name = sys._getframe(frames + 1).f_globals.get("__name__") or ""
    return name.partition(".")[0] != "torch" or name == "torch.nn.modules.module"


class _Played:
    """A class of torch.cuda's, or its stand-in in the threads of ranks."""

    genuine: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.genuine(*args, **kwargs) if _mode() is None else object.__new__(cls)


class Stream(_Played):
    """A stream of work that is always done."""

    genuine: Any = torch.cuda.Stream

    def __init__(self, device: Any = None, priority: int = 0, **ids: Any) -> None:
        self.device = torch.device("cuda", _rank().index(device))
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        """There is nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        """There is nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """All work is done."""

    def query(self) -> bool:
        return True


class Event(_Played):
    """A point in a stream, and the host's time when it was recorded, as work is done at once."""

    genuine: Any = torch.cuda.Event

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess:
            _refuse("torch.cuda.Event(interprocess=True)")
        self.enable_timing, self.time = enable_timing, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """All work is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of the host."""
        events = self, end_event
        if not all(event.enable_timing and event.time for event in events):
            raise ValueError("Both events must be created with enable_timing=True, and recorded")
        return (end_event.time - self.time) * 1e3


class StreamContext(_Played):
    """A block in which another stream is the current one; None changes nothing."""

    genuine: Any = torch.cuda.StreamContext

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.mode = _rank()
        self.before = self.mode.stream
        self.mode.stream = self.stream or self.before

    def __exit__(self, *raised: object) -> None:
        self.mode.stream = self.before


class DeviceContext(_Played):
    """A block in which another device is the current one; None changes nothing."""

    genuine: Any = torch.cuda.device

    def __init__(self, device: Any) -> None:
        self.mode = _rank()
        self.idx = self.mode.index(device)

    def __enter__(self) -> None:
        self.before, self.mode.current = self.mode.current, self.idx

    def __exit__(self, *raised: object) -> None:
        self.mode.current = self.before


class DeviceIndex(DeviceContext):
    """torch.accelerator's name for it."""

    genuine: Any = torch.accelerator.device_index


class _GeneratorType(type):
    """The type of `Generator`: torch's own is final, and its instances are generators."""

    def __call__(cls, device: Any = "cpu") -> Any:
        mode = _mode()
        return _genuine_generator(device if mode is None else mode.on_cpu(device))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _genuine_generator)


class Generator(metaclass=_GeneratorType):
    """torch.Generator, whose device may be "cuda"."""


_genuine_generator = torch.Generator

KINDS = {
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "device": DeviceContext,
}


def _refuse(what: str) -> Any:
    raise NotImplementedError(
        f"{what} is not simulated by device='cpu' (gpusim torchrun --device cpu), where the CPU "
        "plays the GPUs; it needs a GPU"
    )


def _nothing(mode: CpuAsCuda, *args: Any, **kwargs: Any) -> None:
    return None


def _zero(mode: CpuAsCuda, device: Any = None) -> int:
    mode.index(device)
    return 0


Played = Callable[..., Any]  # of the rank's CpuAsCuda and the function's own arguments

BOTH: dict[str, Played] = {
    "is_available": lambda mode: True,
    "device_count": lambda mode: mode.count,
    "synchronize": CpuAsCuda.check,
    "current_stream": CpuAsCuda.current_stream,
    "set_stream": CpuAsCuda.set_stream,
    "empty_cache": _nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "reset_peak_memory_stats": CpuAsCuda.check,
    "reset_accumulated_memory_stats": CpuAsCuda.check,
}
CUDA: dict[str, Played] = {
    **BOTH,
    "init": _nothing,
    "is_initialized": lambda mode: True,
    "current_device": lambda mode: mode.current,
    "set_device": CpuAsCuda.set_device,
    "get_device_name": lambda mode, device=None: f"CPU as cuda:{mode.index(device)} (gpusim)",
    "get_device_capability": lambda mode, device=None: (_zero(mode, device), 0),
    "get_arch_list": lambda mode: [],
    "is_bf16_supported": lambda mode, including_emulation=True: True,
    "is_tf32_supported": lambda mode: False,
    "is_current_stream_capturing": lambda mode: False,
    "ipc_collect": _nothing,
    "reset_max_memory_allocated": CpuAsCuda.check,
    "reset_max_memory_cached": CpuAsCuda.check,
    "stream": lambda mode, stream: StreamContext(stream),
    "default_stream": lambda mode, device=None: mode.default_stream,
    "manual_seed": CpuAsCuda.manual_seed,
    "manual_seed_all": CpuAsCuda.manual_seed,
    "seed": lambda mode: torch.default_generator.seed(),
    "seed_all": lambda mode: torch.default_generator.seed(),
    "initial_seed": lambda mode: torch.initial_seed(),
    "get_rng_state": CpuAsCuda.get_rng_state,
    "set_rng_state": CpuAsCuda.set_rng_state,
    "get_rng_state_all": CpuAsCuda.get_rng_state_all,
    "set_rng_state_all": CpuAsCuda.set_rng_state_all,
}
ACCELERATOR: dict[str, Played] = {
    **BOTH,
    "current_accelerator": lambda mode, check_available=False: torch.device("cuda"),
    "current_device_index": lambda mode: mode.current,
    "current_device_idx": lambda mode: mode.current,
    "set_device_index": CpuAsCuda.set_device,
    "set_device_idx": CpuAsCuda.set_device,
    "empty_host_cache": _nothing,
}

#: What torch's own modules are told.
TO_TORCH = {"is_available": False, "device_count": 0, "current_accelerator": None}

#: Modules of torch that pass on a script's question.
ASKING: dict[str, set[str]] = {
    "torch.distributed.distributed_c10d": {*TO_TORCH},
    "torch.cuda.amp.common": {"is_available"},
    "torch.amp.autocast_mode": {"is_bf16_supported"},
    "torch.random": {"get_rng_state", "set_rng_state"},
}

#: Names that are replaced by classes, or left as they are.
LEFT = {*KINDS, "device_index", "CudaError", "DeferredCudaCallError", "cudaStatus", "check_error"}


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """A block in which threads inside a CpuAsCuda find GPUs."""
    with ExitStack() as stack:
        _warned.clear()
        cuda: Any = torch.cuda
        for module, table in ((cuda, CUDA), (torch.accelerator, ACCELERATOR), (cuda.nccl, {})):
            for name in table.keys() & vars(module).keys():
                replace(stack, module, name, _answered(module, name, table[name]))
            for name in {*module.__all__, "version"} - table.keys() - LEFT:
                refused = _refused(module, name)
                if refused is not None:
                    replace(stack, module, name, refused)
        for name, kind in KINDS.items():
            replace(stack, cuda, name, kind)
        replace(stack, torch.accelerator, "device_index", DeviceIndex)
        replace(stack, torch, "Generator", Generator)
        if hasattr(torch.get_device_module, "cache_clear"):  # of what torch's modules are told
            stack.callback(torch.get_device_module.cache_clear)
        functions: tuple[tuple[Any, str, Played], ...] = (
            (torch, "get_device_module", CpuAsCuda.get_device_module),
            (Tensor, "record_stream", _nothing),
            *((cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark")),
        )
        for owner, name, played in functions:
            replace(stack, owner, name, _answered(owner, name, played))
        accelerator = _answered(core, "_get_accelerator", lambda mode: CPU, everyone=True)
        replace(stack, core, "_get_accelerator", accelerator)
        replace(stack, DefaultDeviceType, "_default_device_type", "cpu")
        for owner, name, rewritten, signature in REWRITTEN:
            new = _rewriting(getattr(owner, name), signature, rewritten)
            replace(stack, owner, name, new)
        for name, both in (("__enter__", _enter_both), ("__exit__", _exit_both)):
            genuine = getattr(torch.autocast, name)
            replace(stack, torch.autocast, name, both(genuine))
        yield


def _answered(owner: Any, name: str, played: Played, everyone: bool = False) -> Any:
    """A function that answers a rank's script by `played`, and all others as it does."""
    genuine = getattr(owner, name)

    @functools.wraps(genuine)
    def function(*args: Any, **kwargs: Any) -> Any:
        mode = _mode()
        if mode is None:
            return genuine(*args, **kwargs)
        if not everyone:
            asking = sys._getframe(1).f_globals.get("__name__") or ""
            if asking.partition(".")[0] == "torch" and name not in ASKING.get(asking, ()):
                return TO_TORCH[name] if name in TO_TORCH else genuine(*args, **kwargs)
        return played(mode, *args, **kwargs)

    return function


def _refused(module: ModuleType, name: str) -> Any:
    """A function or class that refuses to serve a rank's script; None for other attributes."""
    if name.endswith(("Tensor", "Storage")):  # torch's error names them
        return None
    genuine: Any = getattr(module, name, None)
    what = f"{module.__name__}.{name}"
    if inspect.isroutine(genuine):
        return _answered(module, name, lambda mode, *args, **kwargs: _refuse(what))
    if not inspect.isclass(genuine):
        return None

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return genuine(*args, **kwargs) if _mode() is None else _refuse(what)

    return type(name, (genuine,), {"__new__": new})


def _rewriting(function: Any, signature: inspect.Signature, rewritten: dict[str, Rewrite]) -> Any:
    """A function that gets other values of these arguments from a rank."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _mode()
        if mode is None:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for name, rewrite in rewritten.items():
            bound.arguments[name] = rewrite(mode, bound.arguments.get(name))
        return function(*bound.args, **bound.kwargs)

    return call


def _as_none(mode: CpuAsCuda, device: Any) -> Any:
    return None if mode.is_played(device) else device


def _as_location(mode: CpuAsCuda, location: Any) -> Any:
    return "cpu" if mode.is_played(location) else location


def _as_type(mode: CpuAsCuda, device_type: Any) -> Any:
    return "cpu" if device_type == "cuda" else device_type


def _as_device(mode: CpuAsCuda, device: Any) -> Any:
    return CPU if device is None else mode.on_cpu(device)


def _as_no_devices(mode: CpuAsCuda, devices: Any) -> Any:
    if devices is None or len(devices) > 1:  # an error of DDP's own
        return devices
    return [device for device in devices if not mode.is_played(device)] or None


Rewrite = Callable[[CpuAsCuda, Any], Any]

_ARGUMENTS: tuple[tuple[Any, str, dict[str, Rewrite]], ...] = (
    (torch, "set_default_device", {"device": _as_none}),
    (serialization, "default_restore_location", {"location": _as_location}),
    (autocast_module, "_cast", {"device_type": _as_type}),
    (DeviceMesh, "__init__", {"device_type": _as_type}),
    (FullyShardedDataParallel, "__init__", {"device_id": _as_device}),
    (
        DistributedDataParallel,
        "__init__",
        {"device_ids": _as_no_devices, "output_device": _as_none},
    ),
)

#: Functions, how their arguments are rewritten, and their signatures.
REWRITTEN = [
    (owner, name, rewritten, inspect.signature(getattr(owner, name)))
    for owner, name, rewritten in _ARGUMENTS
]


def _enter_both(enter: Any) -> Any:
    """autocast("cuda") of a rank enters the CPU's as well."""

    @functools.wraps(enter)
    def call(self: Any) -> Any:
        found = enter(self)
        if _mode() is not None and self.device == "cuda":
            if self._enabled:
                _warn(CASTS, 2)
            other = torch.autocast(
                "cpu", self.fast_dtype, self._enabled, cache_enabled=self._cache_enabled
            )
            other.__enter__()
            vars(self).setdefault("gpusim_cpus", []).append(other)
        return found

    return call


def _exit_both(leave: Any) -> Any:
    @functools.wraps(leave)
    def call(self: Any, *raised: Any) -> Any:
        others = vars(self).get("gpusim_cpus")
        if others:
            others.pop().__exit__(*raised)
        return leave(self, *raised)

    return call
