"""A rank's devices: a function mode that reads device arguments and keeps track of tensors.

The mode sees each call of torch that Python makes in the rank's thread. It

- gives torch the CPU for a device argument that names a GPU,
- copies tensors that a real program would move between devices, and marks where results live
  (`marks`): on the GPU that an argument lives on, unless the call says otherwise,
- answers `x.device`, `x.is_cuda`, `x.get_device()` and `x.type()` from the mark,
- lets functions on a GPU draw from the GPU's generator (`generators`).

torch's own modules are told that tensors are on the CPU, so that they run as they do there, except
for those of `TOLD`, which move tensors between devices themselves.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..private import OPERATIONS, device_constructors, function_modes, parse_to
from .attention import attention
from .batch_norm import KERNELS
from .generators import DRAWS, RANDOM, GpuGenerators, draws, position
from .marks import ON_CPU, mark, mark_all, mark_of, mark_of_all
from .watching import HOST_READS, StreamWatch

__all__ = [
    "CPU",
    "SHARING",
    "WRAPPED",
    "CpuAsCuda",
    "Numbers",
    "current_mode",
    "forget_warnings",
    "is_told",
    "rank_mode",
    "warn",
]

CPU = torch.device("cpu")

#: Modules of torch that get a script's answers, as what they do depends on the device.
TOLD = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed._state_dict_utils",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor._api",
    "torch.distributed.utils",
    "torch.nn.modules._functions",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.module",
    "torch.random",
    "torch.utils.checkpoint",
)
#: Modules of these that work as on the CPU.
UNTOLD = {"torch.distributed.checkpoint.filesystem"}
#: Single functions of these. Hooks of saved tensors run inside of torch's calls, where this mode
#: does not see them, and outside: they get one answer in both.
UNTOLD_FUNCTIONS = {
    ("torch.utils.checkpoint", "_default_meta_extractor"),
}
#: Single functions of other modules that get a script's answers.
TOLD_FUNCTIONS = {
    ("torch.optim.optimizer", "_process_value_according_to_param_policy"),
}
#: Modules of function modes, and of the wrappers of gpusim equal and of the check, which pass on
#: the calls of others.
PASSING = {
    "torch.overrides",
    "torch.utils._device",
    f"{__package__}.one_gpu",
    *(f"gpusim.tools.equal.{name}" for name in ("calls", "data", "patches", "tracing")),
}
CHECKS = "gpusim.torch.distributed.checks."
#: What stands in the place of torch's functions while a program is checked, and torch's own: torch
#: gives modes the function that it finds by its name.
WRAPPED: dict[Any, Any] = {}

_local = threading.local()
_warned: set[str] = set()
_told: dict[str, bool] = {}


def current_mode() -> CpuAsCuda | None:
    """The calling rank's devices; None in threads that are no rank of such a launch."""
    result: CpuAsCuda | None = getattr(_local, "mode", None)
    return result


def rank_mode() -> CpuAsCuda:
    """The calling rank's devices, in code that only ranks call."""
    result = current_mode()
    assert result is not None
    return result


def warn(message: str) -> None:
    """Warn once in a launch, at the line of the code that calls torch."""
    if message in _warned:
        return
    _warned.add(message)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__") or ""
        if name.partition(".")[0] not in ("torch", "gpusim", "contextlib"):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def forget_warnings() -> None:
    """Let the next launch warn again."""
    _warned.clear()


def is_told(frames: int) -> bool:
    """Whether the function `frames` above the caller gets the answers of a machine with GPUs."""
    frame: Any = sys._getframe(frames + 1)
    name = frame.f_globals.get("__name__") or ""
    while name in PASSING or name.startswith(CHECKS):
        frame = frame.f_back
        name = frame.f_globals.get("__name__") or ""
    told = _told.get(name)
    if told is None:
        own = name.partition(".")[0] in ("torch", "gpusim")
        told = not own or any(name == each or name.startswith(each + ".") for each in TOLD)
        told = told and name not in UNTOLD
        _told[name] = told
    function = name, frame.f_code.co_name
    return function in TOLD_FUNCTIONS or (told and function not in UNTOLD_FUNCTIONS)


class Numbers:
    """A rank's GPUs by their numbers, as its program names them.

    **Arguments**: `count`, the number of GPUs of the rank's node.
    """

    player: torch.device  # which plays all of them

    def __init__(self, count: int) -> None:
        self.count = count
        self.current = 0
        self.default: int | None = None  # the GPU of torch.set_default_device

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
        result: int = device
        return result

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

    def gpu_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's GPU; None for tensors elsewhere."""
        raise NotImplementedError  # by the class that knows where tensors are

    def parse_to(self, function: Any, args: Any, kwargs: Any) -> Any:
        """How Module.to reads its arguments: it moves each tensor by itself then."""
        device = args[0] if args else kwargs.get("device")
        if isinstance(device, Tensor):
            number = self.gpu_of(device)
            result = function(*args, **kwargs)
            return result if number is None else (torch.device("cuda", number), *result[1:])
        if not self.is_played(device):
            return function(*args, **kwargs)
        if args:
            result = function(self.player, *args[1:], **kwargs)
        else:
            result = function(**{**kwargs, "device": self.player})
        return torch.device("cuda", self.index(device)), *result[1:]


class CpuAsCuda(Numbers, TorchFunctionMode):
    """A block in which the calling thread is a rank that has GPUs, all of them the host.

    **Arguments**: `count`, the number of devices; `seed_of`, the seed that the generator of each
    starts with; `make_stream` makes a stream of the current device.
    """

    player = CPU
    stream: Any  # a `standins.Stream`, as is the default
    default_stream: Any

    def __init__(
        self, count: int, seed_of: Callable[[int], int], make_stream: Callable[[], Any]
    ) -> None:
        Numbers.__init__(self, count)
        TorchFunctionMode.__init__(self)
        self.make_stream = make_stream
        self.ranges = 0  # of nvtx
        #: The GPU of the backward pass that runs: tensors of unknown origin live there.
        self.backward: int | None = None
        self.generators = GpuGenerators(count, seed_of)
        #: Whether an operator runs that copies between devices: a clone, here.
        self.is_moving = False
        #: What hears of streams, where the program is checked.
        self.stream_watch: StreamWatch | None = None

    def __enter__(self) -> CpuAsCuda:
        _local.mode = self
        self.default_stream = self.stream = self.make_stream()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _local.mode = None

    def run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the autograd engine under this mode, which torch takes off while it serves a call.

        Hooks, checkpoints and functions of the script run in it. Gradients come from C++ without
        a mark.
        """
        before, self.backward = self.backward, mark_of_all(args)
        stream_watch = self.stream_watch
        if stream_watch is not None:
            stream_watch.backward_begins()
        under = any(mode is self for mode in function_modes())
        if not under:
            TorchFunctionMode.__enter__(self)
        try:
            return engine(*args, **kwargs)
        finally:
            if not under:
                TorchFunctionMode.__exit__(self, None, None, None)
            self.backward = before
            if stream_watch is not None:
                stream_watch.backward_ends()

    def synchronize(self, device: Any = None, what: str = "torch.cuda.synchronize()") -> None:
        """Let the host wait for a device, whose work is done."""
        self.index(device)
        if self.stream_watch is not None:
            self.stream_watch.host_waits(None, what)

    def mark_of(self, tensor: Tensor) -> int | None:
        """Where a tensor lives, as far as it is known."""
        index = mark_of(tensor)
        return self.backward if index is None and tensor.layout == torch.strided else index

    def gpu_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's GPU; None for tensors elsewhere."""
        index = self.mark_of(tensor)
        return None if index == ON_CPU or tensor.is_meta else index

    def mark_of_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Where the result of a call with these arguments lives, as far as it is known."""
        index = mark_of_all((*args, *kwargs.values()) if kwargs else args)
        return self.backward if index is None else index

    # Device arguments

    def on_cpu(self, device: Any) -> Any:
        """The CPU for a GPU; anything else as it is."""
        return CPU if self.is_played(device) else device

    # Calls of torch

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if WRAPPED:
            function = WRAPPED.get(function, function)
        if not kwargs:
            if function not in OTHERS and type(function) not in OPERATIONS:
                return self._compute(function, args, {}, None)
            kwargs = {}
        serve = SERVED.get(function)
        if serve is not None:
            return serve(self, function, args, kwargs)
        index: int | None = None
        pins = bool(kwargs.get("pin_memory"))
        if pins:
            kwargs, index = {**kwargs, "pin_memory": False}, ON_CPU
        device = kwargs.get("device")
        if device is None and function in CONSTRUCTORS:
            index = ON_CPU if self.default is None else self.default
            device = None if self.default is None else torch.device("cuda", self.default)
        if device is not None:
            if self.is_played(device):
                index = self.index(device)
                kwargs = {**kwargs, "device": CPU}
            elif _is_cpu(device) and is_told(1):
                index = ON_CPU
        if function in SHARING:
            return self._share(function, args, kwargs, index)
        result = self._call(function, args, kwargs, index)
        if pins and self.stream_watch is not None:
            self.stream_watch.pinned(result, True)
        return result

    def _call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None
    ) -> Any:
        """Call a function whose result lives on a device, or where its arguments do."""
        if not draws(function) or kwargs.get("generator") is not None:
            return self._compute(function, args, kwargs, index)
        if index is None:
            index = self.mark_of_all(args, kwargs)
        if index is not None and index != ON_CPU:
            with self.generators.drawing(index):
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if index is not None:
            mark_all(result, index)
        return result

    def _compute(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None
    ) -> Any:
        """The same of a function that is not known to draw random numbers."""
        before = position()
        result = function(*args, **kwargs)
        kind = type(result)
        if kind is Tensor:
            own = mark_of(result)  # of results in the memory of an argument
            if own is not None:
                index = own
            elif index is None:
                index = self.mark_of_all(args, kwargs)
            if own is None and index is not None:
                mark_all(result, index)
        elif kind is not torch.Size and isinstance(result, Tensor | list | tuple):
            if index is None:
                index = self.mark_of_all(args, kwargs)
            if index is not None:
                mark_all(result, index)
        else:
            return result
        if before != position():
            given = kwargs.get("generator") is not None
            if index not in (None, ON_CPU) and not given and not isinstance(function, FunctionType):
                warn(DRAWS.format(name=getattr(function, "__name__", str(function))))
        return result

    def _share(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None
    ) -> Any:
        """as_tensor and asarray, whose result shares the memory of an argument on its device."""
        source = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        before = mark_of(source) if isinstance(source, Tensor) else ON_CPU
        result = function(*args, **kwargs)
        if index is None or (index == ON_CPU and before is None and kwargs.get("device") is None):
            index = before
        if index is None:
            return result
        if (before != index and index != ON_CPU) or before not in (ON_CPU, None, index):
            result = result.clone()
        mark_all(result, index)
        return result

    # Calls that copy, or that ask where a tensor is

    def _move(self, source: Tensor, result: Any, index: int, at_once: bool = True) -> Any:
        """The result of moving a tensor to a device: a copy, unless it is there."""
        before = self.mark_of(source)
        if result is source and before != index:
            self.is_moving = True
            try:
                result = result.clone()
            finally:
                self.is_moving = False
        mark(result, index)
        if self.stream_watch is not None and before != index:
            self.stream_watch.moved(source, result, before, index, at_once)
        return result

    def _to(self, function: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        target = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("other"))
        index: int | None = None
        if isinstance(target, Tensor):
            index = self.mark_of(target) if is_told(2) else None
        elif self.is_played(target):
            index = self.index(target)
            if len(args) > 1:
                args = source, CPU, *args[2:]
            else:
                kwargs = {**kwargs, "device": CPU}
        elif _is_cpu(target) and is_told(2):
            index = ON_CPU
        result = function(*args, **kwargs)
        if index is None:
            before = self.mark_of(source)
            if before is not None:
                mark_all(result, before)
            return result
        # .to(device, dtype, non_blocking, copy) and .to(other, non_blocking, copy)
        flags = [each for each in args[2:] if isinstance(each, bool)]
        at_once = not (kwargs.get("non_blocking") or (flags and flags[0]))
        return self._move(source, result, index, at_once)

    def _cuda(self, function: Any, args: Any, kwargs: Any) -> Any:
        source, *rest = args
        named = dict(kwargs)
        device = rest.pop(0) if rest else named.pop("device", None)
        if rest:
            named["non_blocking"] = rest[0]
        index = self.index(device)
        at_once = not named.get("non_blocking")
        return self._move(source, Tensor.to(source, CPU, **named), index, at_once)

    def _cpu(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if self.mark_of(args[0]) is None and not is_told(2):
            return result
        return self._move(args[0], result, ON_CPU)

    def _type(self, function: Any, args: Any, kwargs: Any) -> Any:
        """x.type(), and x.type("torch.cuda.FloatTensor")."""
        source = args[0]
        wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
        if wanted is None:
            name = function(source)
            if self.gpu_of(source) is None or not is_told(2):
                return name
            return name.replace("torch.", "torch.cuda.", 1)
        name = wanted if isinstance(wanted, str) else getattr(wanted, "gpusim_name", "")
        if name.startswith("torch.cuda."):
            result = function(source, name.replace("torch.cuda.", "torch.", 1))
            return self._move(source, result, self.current)
        on_cpu = isinstance(wanted, str) or not isinstance(wanted, torch.dtype)
        result = function(*args, **kwargs)
        before = ON_CPU if on_cpu and is_told(2) else self.mark_of(source)
        return result if before is None else self._move(source, result, before)

    def _device(self, function: Any, args: Any, kwargs: Any) -> Any:
        index = self.gpu_of(args[0])
        if index is not None and is_told(2):
            return torch.device("cuda", index)
        return function(*args, **kwargs)

    def _is_cuda(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.gpu_of(args[0]) is not None and is_told(2):
            return True
        return function(*args, **kwargs)

    def _is_cpu(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.gpu_of(args[0]) is not None and is_told(2):
            return False
        return function(*args, **kwargs)

    def _get_device(self, function: Any, args: Any, kwargs: Any) -> Any:
        index = self.gpu_of(args[0])
        return index if index is not None and is_told(2) else function(*args, **kwargs)

    def _set_data(self, function: Any, args: Any, kwargs: Any) -> Any:
        """x.data = y: memory of unknown origin belongs to the device that x was on."""
        index = self.mark_of(args[0])
        if index is not None and isinstance(args[1], Tensor) and self.mark_of(args[1]) is None:
            mark(args[1], index)
        return function(*args, **kwargs)

    def _make_device(self, function: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], int) and not isinstance(args[0], bool):
            return torch.device("cuda", args[0])
        return function(*args, **kwargs)

    def _is_pinned(self, function: Any, args: Any, kwargs: Any) -> bool:
        return False

    def _pin_memory(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.stream_watch is not None:
            self.stream_watch.pinned(args[0], False)
        return args[0]

    def _copy(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = self._call(function, args, kwargs, None)
        if self.stream_watch is not None:
            source = args[1] if len(args) > 1 else kwargs["src"]
            late = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self.stream_watch.copied(args[0], source, not late)
        return result

    def _read_by_host(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = self._call(function, args, kwargs, None)
        if self.stream_watch is not None:
            tensor = args[0] if args else kwargs.get("input")
            self.stream_watch.host_reads(tensor, getattr(function, "__name__", "unique"))
        return result

    def _attend(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = attention(*args, **kwargs)
        return self._call(function, args, kwargs, None) if result is NotImplemented else result

    def _batch_norm(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._call(KERNELS[function], args, kwargs, None)


def _is_cpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).partition(":")[0] == "cpu"


#: Functions that make tensors on the default device.
CONSTRUCTORS = frozenset([*device_constructors(), torch.from_numpy, torch.frombuffer])

#: Functions whose result may share the memory of their argument, where a GPU's would not.
SHARING = {torch.as_tensor, torch.asarray}

_properties: Any = Tensor

#: Functions that take a device without its name, or have to do with devices without one.
SERVED: dict[Any, Callable[..., Any]] = {
    torch.device: CpuAsCuda._make_device,
    parse_to: CpuAsCuda.parse_to,
    Tensor.to: CpuAsCuda._to,
    Tensor.cuda: CpuAsCuda._cuda,
    Tensor.cpu: CpuAsCuda._cpu,
    Tensor.type: CpuAsCuda._type,
    Tensor.get_device: CpuAsCuda._get_device,
    torch.get_device: CpuAsCuda._get_device,
    Tensor.is_pinned: CpuAsCuda._is_pinned,
    Tensor.pin_memory: CpuAsCuda._pin_memory,
    Tensor.copy_: CpuAsCuda._copy,
    **dict.fromkeys(HOST_READS, CpuAsCuda._read_by_host),
    _properties.device.__get__: CpuAsCuda._device,
    _properties.is_cuda.__get__: CpuAsCuda._is_cuda,
    _properties.is_cpu.__get__: CpuAsCuda._is_cpu,
    _properties.data.__set__: CpuAsCuda._set_data,
    torch.nn.functional.scaled_dot_product_attention: CpuAsCuda._attend,
    **dict.fromkeys(KERNELS, CpuAsCuda._batch_norm),
}

#: All functions that take more than a look at their results.
OTHERS = frozenset([*SERVED, *CONSTRUCTORS, *SHARING, *RANDOM])
