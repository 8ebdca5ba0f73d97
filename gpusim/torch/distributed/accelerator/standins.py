"""The classes of torch.cuda and torch.accelerator that a rank's script finds.

Each stands in for one of torch's. In threads outside of ranks it makes torch's own, and
`isinstance` takes instances of both.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from .devices import CpuAsCuda, current_mode, rank_mode
from .marks import ON_CPU, gpu_of, mark

__all__ = [
    "AnyEvent",
    "AnyStream",
    "CudaRuntime",
    "DeviceContext",
    "DeviceIndex",
    "DeviceOf",
    "DeviceProperties",
    "Event",
    "ExternalStream",
    "Generator",
    "LegacyTensor",
    "Stream",
    "StreamContext",
    "legacy_tensor",
    "refuse",
]

_genuine_generator = torch.Generator


def refuse(name: str) -> Any:
    """Raise the error of what needs a GPU."""
    raise NotImplementedError(
        f"{name} is not simulated by device='cpu' (gpusim torchrun --device cpu), where the CPU "
        "plays the GPUs; it needs a GPU"
    )


class _Kind(type):
    """The type of stand-ins."""

    genuine: Any

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or isinstance(value, cls.genuine)


class _StandIn(metaclass=_Kind):
    """A class of torch's, or its stand-in in the threads of ranks."""

    genuine: Any = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.genuine(*args, **kwargs) if current_mode() is None else object.__new__(cls)


class AnyStream(_StandIn):
    """torch.Stream: a stream of work that is always done."""

    genuine: Any = torch.Stream

    def __init__(self, device: Any = None, priority: int = 0, **ids: Any) -> None:
        mode = rank_mode()
        self.device = torch.device("cuda", mode.index(device))
        self.device_index, self.device_type = self.device.index, 1
        self.priority = priority
        self.stream_id = self.native_handle = 0
        self.entered: list[AnyStream] = []
        self.watch, self.line = mode.stream_watch, None
        if self.watch is not None:
            self.watch.made(self, type(self) is not ExternalStream and not ids)

    def __enter__(self) -> AnyStream:
        mode = rank_mode()
        self.entered.append(mode.stream)
        mode.stream = self
        return self

    def __exit__(self, *raised: object) -> None:
        rank_mode().stream = self.entered.pop()

    def wait_event(self, event: AnyEvent) -> None:
        """Return, as there is nothing to wait for."""
        if self.watch is not None:
            self.watch.waits(self, event)

    def wait_stream(self, stream: AnyStream) -> None:
        """Return, as there is nothing to wait for."""
        if self.watch is not None:
            self.watch.waits(self, stream)

    def record_event(self, event: Any = None) -> Any:
        event = self.event_type() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return, as all work is done."""
        if self.watch is not None:
            self.watch.host_waits(self, "synchronize() of a stream")

    def query(self) -> bool:
        if self.watch is not None:
            self.watch.host_waits(self, "query() of a stream")
        return True

    @property
    def event_type(self) -> Any:
        return AnyEvent

    @property
    def cuda_stream(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class Stream(AnyStream):
    """torch.cuda.Stream."""

    genuine: Any = torch.cuda.Stream

    @property
    def event_type(self) -> Any:
        return Event


class ExternalStream(Stream):
    """torch.cuda.ExternalStream, which code of another library has made."""

    genuine: Any = torch.cuda.ExternalStream

    def __init__(self, stream_ptr: int, device: Any = None, **more: Any) -> None:
        super().__init__(device)
        self.pointer = stream_ptr

    @property
    def cuda_stream(self) -> int:
        return self.pointer


class AnyEvent(_StandIn):
    """torch.Event: a point in a stream, and the host's time then, as work is done at once."""

    genuine: Any = torch.Event

    def __init__(
        self,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        self._begin(device, enable_timing, interprocess)

    def _begin(self, device: Any, enable_timing: bool, interprocess: bool) -> None:
        if interprocess:
            refuse(f"torch.cuda.{type(self).__name__}(interprocess=True)")
        mode = rank_mode()
        self.device = torch.device("cuda", mode.index(device))
        self.enable_timing, self.time = enable_timing, 0.0
        self.watch, self.point = mode.stream_watch, None

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()
        if self.watch is not None:
            self.watch.recorded(self, stream or rank_mode().stream)

    def wait(self, stream: Any = None) -> None:
        """Return, as there is nothing to wait for."""
        if self.watch is not None:
            self.watch.waits(stream or rank_mode().stream, self)

    def synchronize(self) -> None:
        """Return, as all work is done."""
        if self.watch is not None:
            self.watch.host_waits(self, "synchronize() of an event")

    def query(self) -> bool:
        if self.watch is not None:
            self.watch.host_waits(self, "query() of an event")
        return True

    def elapsed_time(self, end_event: AnyEvent) -> float:
        """Milliseconds of the host."""
        events = self, end_event
        if not all(event.enable_timing and event.time for event in events):
            raise ValueError("Both events must be created with enable_timing=True, and recorded")
        return (end_event.time - self.time) * 1e3

    def ipc_handle(self) -> Any:
        return refuse("torch.cuda.Event.ipc_handle")


class Event(AnyEvent):
    """torch.cuda.Event."""

    genuine: Any = torch.cuda.Event

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._begin(None, enable_timing, interprocess)

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Any:
        return refuse("torch.cuda.Event.from_ipc_handle")


class StreamContext(_StandIn):
    """A block in which another stream is the current one; None changes nothing."""

    genuine: Any = torch.cuda.StreamContext

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.mode = rank_mode()
        self.before = self.mode.stream
        self.mode.stream = self.stream or self.before

    def __exit__(self, *raised: object) -> None:
        self.mode.stream = self.before


class DeviceContext(_StandIn):
    """A block in which another device is the current one; None changes nothing."""

    genuine: Any = torch.cuda.device

    def __init__(self, device: Any) -> None:
        self.mode = rank_mode()
        unchanged = isinstance(device, int) and device < 0
        self.idx = ON_CPU if unchanged else self.mode.index(device)

    def __enter__(self) -> None:
        self.before = self.mode.current
        if self.idx != ON_CPU:
            self.mode.current = self.idx

    def __exit__(self, *raised: object) -> None:
        self.mode.current = self.before


class DeviceOf(DeviceContext):
    """A block in which the device of a tensor is the current one; others change nothing."""

    genuine: Any = torch.cuda.device_of

    def __init__(self, obj: Any) -> None:
        index = gpu_of(obj) if isinstance(obj, Tensor) else None
        super().__init__(ON_CPU if index is None else index)


class DeviceIndex(DeviceContext):
    """torch.accelerator's name for it."""

    genuine: Any = torch.accelerator.device_index


class DeviceProperties:
    """torch.cuda.get_device_properties: those that the host has."""

    major = minor = 0
    is_integrated, is_multi_gpu_board = 0, 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.multi_processor_count = os.cpu_count() or 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse(f"torch.cuda.get_device_properties().{name}")

    def __repr__(self) -> str:
        memory = self.total_memory >> 20
        return (
            f"_CudaDeviceProperties(name='{self.name}', major=0, minor=0, total_memory={memory}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )


class CudaRuntime:
    """torch.cuda.cudart(): the profiler of CUDA, which has nothing to see."""

    class cudaError(int):
        success = 0

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0

    def cudaDeviceSynchronize(self) -> int:
        rank_mode().synchronize(None, "cudaDeviceSynchronize()")
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return memory_of_host(rank_mode(), device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse(f"torch.cuda.cudart().{name}")


def memory_of_host(mode: CpuAsCuda, device: Any = None) -> tuple[int, int]:
    """The bytes that are free, and all bytes, of the host's memory."""
    mode.index(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


class _GeneratorType(type):
    """The type of `Generator`: torch's own is final, and its instances are generators."""

    def __call__(cls, device: Any = "cpu") -> Any:
        mode = current_mode()
        return _genuine_generator(device if mode is None else mode.on_cpu(device))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _genuine_generator)


class Generator(metaclass=_GeneratorType):
    """torch.Generator, whose device may be "cuda"."""


class LegacyTensor(type):
    """The type of stand-ins for torch.cuda.FloatTensor and its kind."""

    genuine: Any
    on_cpu: Any
    gpusim_name: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        mode = current_mode()
        if mode is None:
            return cls.genuine(*args, **kwargs)
        result = cls.on_cpu(*args, **{name: v for name, v in kwargs.items() if name != "device"})
        if any(isinstance(each, Tensor) for each in args):
            result = result.clone()
        mark(result, mode.current)
        return result

    def __instancecheck__(cls, value: Any) -> bool:
        if isinstance(value, cls.genuine):
            return True
        on_gpu = isinstance(value, Tensor) and gpu_of(value) is not None
        return on_gpu and isinstance(value, cls.on_cpu)

    @property
    def dtype(cls) -> Any:
        return cls.genuine.dtype


def legacy_tensor(name: str) -> Any:
    """The stand-in for a tensor type of torch.cuda."""
    values = {
        "genuine": getattr(torch.cuda, name),
        "on_cpu": getattr(torch, name),
        "gpusim_name": f"torch.cuda.{name}",
        "__module__": "torch.cuda",
    }
    return LegacyTensor(name, (), values)
