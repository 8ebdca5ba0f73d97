"""The changes in torch while ranks have GPUs that the CPU plays."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import checkpoint

from ..private import (
    autocast_module,
    core,
    engines,
    function_modes,
    has_gpu,
    replace,
    serialization,
)
from ..tracebacks import frames_of
from .attention import attention_on_cpu
from .devices import CPU, CpuAsCuda, current_mode, forget_warnings, is_told, warn
from .kernels import triton_on_cpu
from .marks import gpu_of, mark_of_all
from .names import ACCELERATOR, CLASSES, CUDA, REFUSED, Played, nothing
from .replacing import Rewrite, install_names, restoring, rewriting, under_mode
from .standins import Generator, refuse

__all__ = ["CASTS", "asks_for_gpu", "cpu_as_accelerator"]

CASTS = (
    "torch.autocast('cuda') under device='cpu' casts what autocast('cpu') casts. The two lists of "
    "operations differ, so dtypes of intermediate results may differ from a GPU's"
)

#: What torch's own modules are told, except for those of `devices.TOLD`.
TO_TORCH = {"is_available": False, "device_count": 0, "current_accelerator": None}

#: Other modules of torch that pass on a script's question.
ASKING: dict[str, set[str]] = {
    "torch.cuda.amp.common": {"is_available"},
    "torch.amp.autocast_mode": {"is_bf16_supported"},
    "torch.distributed.distributed_c10d": {*TO_TORCH},
}

#: Modules that hold names of torch.cuda, imported by a script or by torch.
SUBMODULES = (
    "_utils amp comm gds graphs green_contexts jiterator memory nccl nvtx profiler random sparse "
    "streams tunable"
).split()


def asks_for_gpu(error: BaseException | None) -> bool:
    """Whether a program's error may be that it found no GPU, or not the one that it named.

    >>> asks_for_gpu(AssertionError("Torch not compiled with CUDA enabled"))
    True
    """
    if error is None or "communication hook" in str(error):  # of DDP, for NCCL alone
        return False
    if has_gpu():
        return "invalid device ordinal" in str(error)
    frames = frames_of(error)
    own = [f for f in frames if f"{os.sep}site-packages{os.sep}torch{os.sep}" not in f.filename]
    last = own[-1].line or "" if own else ""
    if "NoneType" in str(error) and own:  # of torch.accelerator.current_accelerator()
        return "accelerator" in "".join(linecache.getlines(own[-1].filename))
    return bool(GPU.search(str(error)) or GPU.search(last))


GPU = re.compile(r"cuda|nvidia|accelerator|\bgpus?\b", re.IGNORECASE)


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """A block in which threads inside a CpuAsCuda find GPUs."""
    with ExitStack() as stack:
        forget_warnings()
        _import_submodules()
        install_names(stack, _replacements())
        replace(stack, torch, "Generator", Generator)
        if hasattr(torch.get_device_module, "cache_clear"):  # of what torch's modules are told
            stack.callback(torch.get_device_module.cache_clear)
        functions: tuple[tuple[Any, str, Played], ...] = (
            (torch, "get_device_module", _device_module),
            (torch, "set_default_device", _set_default_device),
            (torch, "get_default_device", _get_default_device),
            (torch.backends.cuda, "is_built", lambda mode: True),
            (Tensor, "record_stream", nothing),
            (checkpoint, "get_device_states", _generator_states),
            (core, "_get_accelerator", lambda mode: torch.device("cuda")),
        )
        for owner, name, played in functions:
            replace(stack, owner, name, _answered(getattr(owner, name), name, played))
        _install_properties(stack)
        replace(stack, checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
        for engine in engines:
            run = under_mode(engine._engine_run_backward, current_mode)
            replace(stack, engine, "_engine_run_backward", run)
        check = DistributedDataParallel._passing_sync_batchnorm_handle
        replace(
            stack,
            DistributedDataParallel,
            "_passing_sync_batchnorm_handle",
            _answered(check, "", lambda mode, model, module: None, everyone=True),
        )
        for owner, name, rewritten, signature in REWRITTEN:
            new = rewriting(getattr(owner, name), signature, rewritten, current_mode)
            replace(stack, owner, name, new)
        restore = serialization.default_restore_location
        restore = restoring(restore, "gpusim_device", current_mode)
        replace(stack, serialization, "default_restore_location", restore)
        for name, both in (("__enter__", _enter_both), ("__exit__", _exit_both)):
            genuine = getattr(torch.autocast, name)
            replace(stack, torch.autocast, name, both(genuine))
        stack.enter_context(attention_on_cpu())
        triton_on_cpu(stack)
        yield


# The names of torch.cuda and torch.accelerator


def _owner(name: str) -> tuple[Any, str]:
    """The module that a name of the tables is in, and its name there; None if there is none."""
    path, _, last = name.rpartition(".")
    if path == "torch" or path.startswith("torch."):
        return sys.modules.get(path), last
    if path == "accelerator":
        return torch.accelerator, last
    return sys.modules.get(f"torch.cuda.{path}" if path else "torch.cuda"), last


def _replacements() -> dict[int, tuple[Any, Any]]:
    """By their ids: the objects of torch that are replaced, and by what."""
    result: dict[int, tuple[Any, Any]] = {}
    tables = [(name, played) for name, played in CUDA.items()]
    tables += [(f"accelerator.{name}", played) for name, played in ACCELERATOR.items()]
    for name, played in tables:
        owner, last = _owner(name)
        genuine = getattr(owner, last, None)
        if genuine is not None:
            result[id(genuine)] = genuine, _answered(genuine, last, played)
    for name, kind in CLASSES.items():
        owner, last = _owner(name)
        genuine = getattr(owner, last, None)
        if genuine is not None and id(genuine) not in result:
            result[id(genuine)] = genuine, kind
    for name in REFUSED:
        owner, last = _owner(name)
        genuine = getattr(owner, last, None)
        new = None if owner is None else _refused(genuine, f"{owner.__name__}.{last}")
        if new is not None:
            result[id(genuine)] = genuine, new
    return result


def _import_submodules() -> None:
    for name in SUBMODULES:
        try:
            importlib.import_module(f"torch.cuda.{name}")
        except ImportError:  # not in this version of torch
            continue


def _answered(genuine: Any, name: str, played: Played, everyone: bool = False) -> Any:
    """A function that answers a rank's script by `played`, and all others as it does."""

    @functools.wraps(genuine)
    def function(*args: Any, **kwargs: Any) -> Any:
        mode = current_mode()
        if mode is None:
            return genuine(*args, **kwargs)
        if not everyone and not is_told(1):
            asking = sys._getframe(1).f_globals.get("__name__")
            if name not in ASKING.get(asking or "", ()):
                if name == "_get_accelerator":
                    return CPU
                return TO_TORCH[name] if name in TO_TORCH else genuine(*args, **kwargs)
        return played(mode, *args, **kwargs)

    return function


def _refused(genuine: Any, what: str) -> Any:
    """A function or class that refuses to serve a rank's script; None for other attributes."""
    if inspect.isroutine(genuine):
        return _answered(genuine, "", lambda mode, *args, **kwargs: refuse(what))
    if not inspect.isclass(genuine):
        return None

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return genuine(*args, **kwargs) if current_mode() is None else refuse(what)

    return type(genuine.__name__, (genuine,), {"__new__": new})


class _CudaModule(ModuleType):
    """torch.cuda with attributes that differ between ranks and others."""

    @property
    def _initialized(self) -> bool:
        own: bool = vars(self)["_initialized"]
        return own or (current_mode() is not None and is_told(1))

    @_initialized.setter
    def _initialized(self, value: bool) -> None:
        vars(self)["_initialized"] = value

    @property
    def default_generators(self) -> Any:
        mode = current_mode()
        if mode is None or not is_told(1):
            return vars(self)["default_generators"]
        return mode.generators

    @default_generators.setter
    def default_generators(self, value: Any) -> None:
        vars(self)["default_generators"] = value


class _MeshType(str):
    """The device type of a mesh that a script has made for "cuda"; torch's modules read "cpu"."""


def _mesh_type() -> property:
    """DeviceMesh.device_type, whose name in the mesh differs between versions of torch."""

    def read(mesh: Any) -> str:
        own = vars(mesh)
        kind: str = own["_device_type"] if "_device_type" in own else own["device_type"]
        mode = current_mode()
        # While torch serves a call the mode is off, and tensors tell the truth too.
        told = isinstance(kind, _MeshType) and mode in function_modes() and is_told(1)
        return "cuda" if told else kind

    def write(mesh: Any, value: str) -> None:
        vars(mesh)["device_type"] = value

    return property(read, write)


def _install_properties(stack: ExitStack) -> None:
    cuda: Any = torch.cuda
    stack.callback(setattr, cuda, "__class__", type(cuda))
    cuda.__class__ = _CudaModule
    replace(stack, DeviceMesh, "device_type", _mesh_type())


# Functions


def _device_module(mode: CpuAsCuda, device: Any = None) -> Any:
    return getattr(torch, "cuda" if device is None else torch.device(device).type)


_set_genuine_default: Any = torch.set_default_device
_get_genuine_default: Any = torch.get_default_device


def _set_default_device(mode: CpuAsCuda, device: Any) -> None:
    mode.default = mode.index(device) if mode.is_played(device) else None
    _set_genuine_default(None if mode.is_played(device) else device)


def _get_default_device(mode: CpuAsCuda) -> torch.device:
    index = gpu_of(torch.empty(0))
    result: torch.device = _get_genuine_default() if index is None else torch.device("cuda", index)
    return result


def _generator_states(mode: CpuAsCuda, *args: Any) -> tuple[list[int], list[Tensor]]:
    """The generators that a checkpointed function may use: its device's, and the current one's."""
    index = mark_of_all(args)
    indices = sorted({mode.current} | ({index} if index is not None and index >= 0 else set()))
    return indices, [mode.generators[each].get_state() for each in indices]


def _as_none(mode: CpuAsCuda, device: Any) -> Any:
    return None if mode.is_played(device) else device


def _as_type(mode: CpuAsCuda, device_type: Any) -> Any:
    return "cpu" if device_type == "cuda" else device_type


def _as_mesh_type(mode: CpuAsCuda, device_type: Any) -> Any:
    return _MeshType("cpu") if device_type == "cuda" else device_type


def _as_no_devices(mode: CpuAsCuda, devices: Any) -> Any:
    if devices is None or len(devices) > 1:  # an error of DDP's own
        return devices
    return [device for device in devices if not mode.is_played(device)] or None


_ARGUMENTS: tuple[tuple[Any, str, dict[str, Rewrite]], ...] = (
    (autocast_module, "_cast", {"device_type": _as_type}),
    (DeviceMesh, "__init__", {"device_type": _as_mesh_type}),
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
        result = enter(self)
        if current_mode() is not None and self.device == "cuda":
            if self._enabled:
                warn(CASTS)
            other = torch.autocast(
                "cpu", self.fast_dtype, self._enabled, cache_enabled=self._cache_enabled
            )
            other.__enter__()
            vars(self).setdefault("gpusim_cpus", []).append(other)
        return result

    return call


def _exit_both(leave: Any) -> Any:
    @functools.wraps(leave)
    def call(self: Any, *raised: Any) -> Any:
        others = vars(self).get("gpusim_cpus")
        if others:
            others.pop().__exit__(*raised)
        return leave(self, *raised)

    return call
