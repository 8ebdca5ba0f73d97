"""Triton's kernels where the CPU plays GPUs: those of a GPU are refused as they are launched.

Modules that define kernels are imported as on a machine with GPUs. With TRITON_INTERPRET=1 Triton
runs them on the host by itself; of an autotuned kernel the first configuration runs, as there is
nothing to measure. Threads outside of ranks have Triton's own behaviour.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from ..own.imports import when_imported
from ..private import replace
from .devices import current_mode, rank_mode

__all__ = ["triton_on_cpu"]


def triton_on_cpu(stack: ExitStack) -> None:
    """Change Triton until the stack ends, whether it is imported already or later."""
    changes: dict[str, Callable[[ExitStack, Any], None]] = {
        "triton.runtime.autotuner": _change_autotuner,
        "triton.runtime.driver": _change_driver,
        "triton.runtime.jit": _change_jit,
    }

    def change(module: ModuleType) -> None:
        changes[module.__name__](stack, module)

    when_imported(stack, changes, change)


def _change_jit(stack: ExitStack, module: Any) -> None:
    _in_ranks(stack, module.JITFunction, "run", lambda kernel, *args, **kwargs: _refuse(kernel))


def _change_autotuner(stack: ExitStack, module: Any) -> None:
    def first(autotuner: Any, *args: Any, config: Any, **kwargs: Any) -> list[float]:
        kernel = autotuner.fn
        while hasattr(kernel, "run") and hasattr(kernel, "fn") and hasattr(kernel.fn, "run"):
            kernel = kernel.fn
        if isinstance(kernel, module.JITFunction):
            _refuse(kernel)
        return [0.0]  # of all configurations: `min` takes the first

    _in_ranks(stack, module.Autotuner, "_bench", first)


def _change_driver(stack: ExitStack, module: Any) -> None:
    config = type(module.driver)
    genuine = config.active

    def active(driver: Any) -> Any:
        return genuine.fget(driver) if current_mode() is None else _Driver()

    replace(stack, config, "active", property(active))


class _Driver:
    """Triton's driver for a rank: it says which GPU is current."""

    def get_current_device(self) -> int:
        return rank_mode().current

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_target(self) -> Any:
        """A GPU without a compute capability, as `torch.cuda.get_device_capability` has it."""
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 0, 32)

    def __getattr__(self, name: str) -> Any:
        raise _Lacking(f"triton's driver.active.{name} {_NEEDS}")


class _Lacking(NotImplementedError, AttributeError):
    """An attribute that needs a GPU; `hasattr` says that it is not there."""


_NEEDS = "needs a GPU, and device='cpu' (gpusim torchrun --device cpu) lets the host play them"
_INSTEAD = (
    "; set TRITON_INTERPRET=1 to have Triton interpret kernels on the host, or let the program go "
    "its way without them"
)


def _refuse(kernel: Any) -> Any:
    """Raise the error of a kernel that is launched."""
    code = getattr(getattr(kernel, "fn", None), "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    name = getattr(kernel, "__name__", "?")
    raise NotImplementedError(f"the launch of the Triton kernel {name}{where} {_NEEDS}{_INSTEAD}")


def _in_ranks(stack: ExitStack, owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a method for ranks."""
    genuine = getattr(owner, name)

    @functools.wraps(genuine)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (genuine if current_mode() is None else new)(*args, **kwargs)

    replace(stack, owner, name, called)
