"""One real GPU in the role of all GPUs that a script asks for.

In a launch with `device="cuda"` each rank has as many devices "cuda" as its node has ranks, and all
of them are the machine's first GPU. Memory, kernels, streams and events are real; only *numbers*
are mapped:

- A device argument that names cuda:k, for a k of the node's, reaches torch as cuda:0.
- A tensor keeps the number that it was made or moved with, as an attribute of its storage, and
  `x.device` and `x.get_device()` answer with it. Tensors without one are on the rank's current GPU.
- Functions of torch.cuda and torch.accelerator that take a device get the real one. Those that
  count GPUs or choose the current one answer for the rank.

Scripts, their libraries and the modules of `devices.TOLD` are told numbers. The other modules of
torch are told the truth, cuda:0, since what they do happens below this mode too, where nothing maps
a number. All of it holds in the threads of ranks only, and ends with the launch.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..private import copies, engines, function_modes, parse_to, replace, serialization
from .devices import SHARING, WRAPPED, Numbers, is_told
from .names import ACCELERATOR, CUDA
from .replacing import install_names, restoring, rewriting, under_mode

__all__ = ["OneGpu", "one_gpu_as_many", "out_of_memory"]

REAL = torch.device("cuda", 0)
_NAME = "gpusim_number"  # of a storage's Python object, which lives as long as the storage does
_local = threading.local()

#: Of the function that gives the stream in which torch copies from one GPU to another.
STREAM_SIGNATURE = inspect.signature(copies._get_stream)

#: Modules whose own calls are made of numbers that are mapped already.
_BELOW = ("torch.cuda", "torch.accelerator", "gpusim.")


def current() -> OneGpu | None:
    """The calling rank's GPUs; None in threads that are no rank of such a launch."""
    result: OneGpu | None = getattr(_local, "mode", None)
    return result


class OneGpu(Numbers, TorchFunctionMode):
    """A block in which the calling thread is a rank that has GPUs, all of them the first.

    **Arguments**: `count`, the number of GPUs of the rank's node.
    """

    player = REAL

    def __init__(self, count: int) -> None:
        Numbers.__init__(self, count)
        TorchFunctionMode.__init__(self)
        self.chosen = False  # whether the rank has named a GPU: what torch calls initialised

    def __enter__(self) -> OneGpu:
        _local.mode = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        _local.mode = None

    def real(self, device: Any) -> Any:
        """The real GPU for an argument that names one of the rank's; anything else as it is."""
        if device is None or not self.is_played(device):
            return device
        self.chosen = True
        return REAL.index if isinstance(device, int) else REAL

    def number_of(self, tensor: Tensor) -> int:
        """The number of the GPU that a tensor on the real one lives on."""
        number = _number(tensor)
        if number is not None:
            return number
        return self.current if self.default is None else self.default

    def gpu_of(self, tensor: Tensor) -> int | None:
        return self.number_of(tensor) if tensor.is_cuda else None

    def run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the autograd engine under this mode, which torch takes off while it serves a call.

        Hooks, checkpoints and functions of the script run in it.
        """
        if any(mode is self for mode in function_modes()):
            return engine(*args, **kwargs)
        TorchFunctionMode.__enter__(self)
        try:
            return engine(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    # Calls of torch

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        function = WRAPPED.get(function, function)
        serve = SERVED.get(function)
        if serve is not None:
            return serve(self, function, args, kwargs)
        number: int | None = None
        if self.is_played(kwargs.get("device")):
            number = self._named(kwargs["device"], 1)
            kwargs = {**kwargs, "device": self.real(kwargs["device"])}
        result = function(*args, **kwargs)
        if number is None:
            return _marked_as(result, args, kwargs)
        if function in SHARING:  # which a GPU shares with itself only
            source = args[0] if args else kwargs.get("data", kwargs.get("obj"))
            return self._moved(source, result, number)
        _mark_all(result, number)
        return result

    def _named(self, device: Any, frames: int) -> int | None:
        """The number that the function `frames` above names; None for the truth, of torch's own."""
        number = self.index(device)
        return number if number or is_told(frames + 1) else None

    def _moved(self, source: Any, result: Any, number: int | None) -> Any:
        """The result of moving a value to a GPU: a copy, unless it is on that one."""
        if number is None or not isinstance(result, Tensor):
            return result
        if isinstance(source, Tensor) and source.is_cuda:
            if result is source and self.number_of(source) == number:
                return result
            if _storage(result) is _storage(source):
                result = result.clone()
        _mark_all(result, number)
        return result

    def _to(self, function: Any, args: Any, kwargs: Any) -> Any:
        source, *rest = args
        target = rest[0] if rest else kwargs.get("device", kwargs.get("other"))
        number = None
        if isinstance(target, Tensor):
            number = self.gpu_of(target)
        elif self.is_played(target):
            number = self._named(target, 2)
            if rest:
                rest[0] = self.real(target)
            else:
                kwargs = {**kwargs, "device": self.real(target)}
        result = function(source, *rest, **kwargs)
        if number is None:
            return _marked_as(result, (source,), {})
        return self._moved(source, result, number)

    def _cuda(self, function: Any, args: Any, kwargs: Any) -> Any:
        source, *rest = args
        named = dict(kwargs)
        device = rest.pop(0) if rest else named.pop("device", None)
        number = self._named(self.current if device is None else device, 2)
        self.chosen = True
        return self._moved(source, function(source, REAL, *rest, **named), number)

    def _device(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if result.type == "cuda" and _sees_numbers(2):
            return torch.device("cuda", self.number_of(args[0]))
        return result

    def _get_device(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return self.number_of(args[0]) if result >= 0 and _sees_numbers(2) else result

    def _set_data(self, function: Any, args: Any, kwargs: Any) -> Any:
        """x.data = y: memory without a number belongs to the GPU that x was on."""
        number = _number(args[0])
        if number is not None and isinstance(args[1], Tensor) and _number(args[1]) is None:
            _mark_all(args[1], number)
        return function(*args, **kwargs)


def _sees_numbers(frames: int) -> bool:
    """Whether the function `frames` above the caller is told a GPU's number, and not the truth."""
    name = sys._getframe(frames + 1).f_globals.get("__name__") or ""
    return not name.startswith("gpusim.") and is_told(frames + 1)


_properties: Any = Tensor

SERVED: dict[Any, Callable[..., Any]] = {
    parse_to: OneGpu.parse_to,
    Tensor.to: OneGpu._to,
    Tensor.cuda: OneGpu._cuda,
    Tensor.get_device: OneGpu._get_device,
    torch.get_device: OneGpu._get_device,
    _properties.device.__get__: OneGpu._device,
    _properties.data.__set__: OneGpu._set_data,
}


# Numbers of tensors


def _storage(tensor: Tensor) -> Any:
    """A tensor's storage; None for tensors without one, as sparse ones and subclasses that wrap."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _number(tensor: Tensor) -> int | None:
    return getattr(_storage(tensor), _NAME, None)


def _mark_all(result: Any, number: int) -> None:
    """Give the tensors of a call's result a number, if they are on a GPU and have none."""
    if isinstance(result, Tensor):
        storage = _storage(result)
        if storage is not None and result.is_cuda and getattr(storage, _NAME, None) is None:
            setattr(storage, _NAME, number)
    elif isinstance(result, list | tuple) and type(result) is not torch.Size:
        for each in result:
            _mark_all(each, number)


def _marked_as(result: Any, args: Any, kwargs: Any) -> Any:
    """A call's result, which lives where its arguments do."""
    if isinstance(result, Tensor | list | tuple) and type(result) is not torch.Size:
        number = _number_of_all((*args, *kwargs.values()))
        if number is not None:
            _mark_all(result, number)
    return result


def _number_of_all(values: Any) -> int | None:
    for value in values:
        found = None
        if isinstance(value, Tensor):
            found = _number(value)
        elif type(value) in (list, tuple):
            found = _number_of_all(value)
        if found is not None:
            return found
    return None


# The names of torch.cuda and torch.accelerator


@contextmanager
def _gpu(mode: OneGpu, device: Any) -> Iterator[None]:
    """torch.cuda.device: a block in which another GPU is the current one; None changes nothing."""
    before = mode.current
    if device is not None and not (isinstance(device, int) and device < 0):
        mode.current = mode.index(device)
    try:
        yield
    finally:
        mode.current = before


def _gpu_of(mode: OneGpu, obj: Any) -> Any:
    on_gpu = isinstance(obj, Tensor) and obj.is_cuda
    return _gpu(mode, mode.number_of(obj) if on_gpu else None)


def _set_device(mode: OneGpu, device: Any) -> None:
    CUDA["set_device"](mode, device)
    mode.chosen = True


def _real_generator() -> Any:
    return torch.cuda.default_generators[REAL.index]


def _rng_states(mode: OneGpu) -> list[Tensor]:
    return [_real_generator().get_state()] * mode.count


def _set_rng_states(mode: OneGpu, new_states: Any) -> None:
    for number, state in enumerate(new_states):
        if number == mode.current:
            _real_generator().set_state(state)


#: What is answered for a rank. A rank has one generator, and it is that of all of its GPUs.
ANSWERS: dict[str, Callable[..., Any]] = {
    "torch.cuda.device_count": lambda mode: mode.count,
    "torch.cuda.current_device": lambda mode: mode.current,
    "torch.cuda.is_initialized": lambda mode: mode.chosen,
    "torch.cuda.set_device": _set_device,
    "torch.cuda.device": _gpu,
    "torch.cuda._DeviceGuard": _gpu,
    "torch.cuda.device_of": _gpu_of,
    "torch.cuda.can_device_access_peer": CUDA["can_device_access_peer"],
    "torch.cuda._get_device_index": CUDA["_get_device_index"],
    "torch.cuda._exchange_device": CUDA["_exchange_device"],
    "torch.cuda._maybe_exchange_device": CUDA["_maybe_exchange_device"],
    "torch.cuda.get_rng_state": lambda mode, device="cuda": _real_generator().get_state(),
    "torch.cuda.set_rng_state": lambda mode, new_state, device="cuda": (
        _real_generator().set_state(new_state) and None
    ),
    "torch.cuda.get_rng_state_all": _rng_states,
    "torch.cuda.set_rng_state_all": _set_rng_states,
    "torch.accelerator.device_count": lambda mode: mode.count,
    "torch.accelerator.current_device_index": ACCELERATOR["current_device_index"],
    "torch.accelerator.current_device_idx": ACCELERATOR["current_device_idx"],
    "torch.accelerator.set_device_index": _set_device,
    "torch.accelerator.set_device_idx": _set_device,
    "torch.accelerator.device_index": _gpu,
}
#: Answers that all modules of torch get: they choose a rank's GPU for it.
FOR_ALL = {"set_device", "set_device_index", "set_device_idx", "device", "_DeviceGuard"}
#: And those that a mesh of devices gets.
FOR_MESHES = {"device_count", "is_initialized"}
DEVICES = ("device", "device_index")  # parameters


def _tells(name: str, frames: int) -> bool:
    """Whether the function `frames` above the caller gets a rank's answer."""
    module = sys._getframe(frames + 1).f_globals.get("__name__") or ""
    if module.startswith(_BELOW):
        return False
    if name in FOR_ALL or (name in FOR_MESHES and module == "torch.distributed.device_mesh"):
        return True
    return is_told(frames + 1)


def _answered(genuine: Any, name: str) -> Any:
    """A function or class that answers a rank by `ANSWERS`, and all others as it does."""
    answer, last = ANSWERS[name], name.rpartition(".")[2]

    def serve(args: Any, kwargs: Any) -> Any:
        mode = current()
        if mode is None:
            return genuine(*args, **kwargs)
        if _tells(last, 2):
            return answer(mode, *args, **kwargs)
        if last == "device" and args:  # of torch.cuda.Stream, which has a script's argument
            return genuine(mode.real(args[0]))
        return genuine(*args, **kwargs)

    if inspect.isclass(genuine):

        class Kind(type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                return serve(args, kwargs)

            def __instancecheck__(cls, value: Any) -> bool:  # which torch asks
                return isinstance(value, genuine)

        return Kind(last, (), {"__doc__": genuine.__doc__, "__module__": genuine.__module__})

    @functools.wraps(genuine)
    def function(*args: Any, **kwargs: Any) -> Any:
        return serve(args, kwargs)

    return function


def _mapped(genuine: Any, signature: inspect.Signature) -> Any:
    """A function whose device arguments reach torch as the real GPU."""

    @functools.wraps(genuine)
    def function(*args: Any, **kwargs: Any) -> Any:
        mode = current()
        module = sys._getframe(1).f_globals.get("__name__") or ""
        if mode is None or not (args or kwargs) or module.startswith(_BELOW):
            return genuine(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for name in DEVICES:
            if name in bound.arguments:
                bound.arguments[name] = mode.real(bound.arguments[name])
        return genuine(*bound.args, **bound.kwargs)

    return function


def _replacements() -> dict[int, tuple[Any, Any]]:
    """By their ids: the objects of torch that are replaced, and by what."""
    result: dict[int, tuple[Any, Any]] = {}
    for path in ANSWERS:
        module, _, name = path.rpartition(".")
        genuine = getattr(sys.modules[module], name, None)
        if genuine is not None:
            result[id(genuine)] = genuine, _answered(genuine, path)
    for module in ("cuda", "cuda.memory", "cuda.random", "accelerator", "accelerator.memory"):
        for name, genuine in vars(sys.modules[f"torch.{module}"]).items():
            if name.startswith("_") or id(genuine) in result or not inspect.isfunction(genuine):
                continue
            signature = inspect.signature(genuine)
            if any(parameter in signature.parameters for parameter in DEVICES):
                result[id(genuine)] = genuine, _mapped(genuine, signature)
    return result


# Other functions and classes


def _generator_type(genuine: Any) -> Any:
    """torch.Generator, whose device may be any of a rank's GPUs."""

    class Kind(type):
        def __call__(cls, device: Any = "cpu") -> Any:
            mode = current()
            return genuine(device if mode is None else mode.real(device))

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, genuine)

    return Kind("Generator", (), {"__doc__": "torch.Generator.", "__module__": "torch"})


def _default_device(genuine: Any) -> Any:
    @functools.wraps(genuine)
    def set_default_device(device: Any) -> None:
        mode = current()
        if mode is not None:
            mode.default = mode.index(device) if mode.is_played(device) else None
            device = mode.real(device)
        genuine(device)

    return set_default_device


def _tagged(genuine: Any) -> Any:
    """The place of a storage as torch.save writes it."""

    @functools.wraps(genuine)
    def location_tag(storage: Any) -> Any:
        mode, tag = current(), genuine(storage)
        if mode is None or tag != str(REAL):
            return tag
        return f"cuda:{getattr(storage, _NAME, mode.current)}"

    return location_tag


def _as_real(mode: OneGpu, device: Any) -> Any:
    return mode.real(device)


@contextmanager
def one_gpu_as_many() -> Iterator[None]:
    """A block in which threads inside a OneGpu find as many GPUs as their node has ranks."""
    with ExitStack() as stack:
        install_names(stack, _replacements())
        replace(stack, torch, "Generator", _generator_type(torch.Generator))
        replace(stack, torch, "set_default_device", _default_device(torch.set_default_device))
        restore = restoring(serialization.default_restore_location, _NAME, current)
        replace(stack, serialization, "default_restore_location", restore)
        replace(stack, serialization, "location_tag", _tagged(serialization.location_tag))
        for engine in engines:
            run = under_mode(engine._engine_run_backward, current)
            replace(stack, engine, "_engine_run_backward", run)
        streams = rewriting(copies._get_stream, STREAM_SIGNATURE, {"device": _as_real}, current)
        replace(stack, copies, "_get_stream", streams)
        yield


def out_of_memory(error: BaseException, ranks: int) -> str:
    """The end of an error's message where a rank's GPU has no memory left; "" for other errors."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        return ""
    return (
        f"; the {ranks} ranks of this launch share the memory of one GPU (device='cuda'): fewer "
        "ranks, smaller batches, or device='cpu'"
    )
