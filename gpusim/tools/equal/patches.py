"""Functions of torch's that are replaced in a traced rank: those that no hook of torch's sees.

They are replaced before the program's first line, so that `from torch.nn.utils import ...` has them
too.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad

from .settings import Settings

__all__ = ["Watcher", "patched", "trials_are_paused"]

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
ALIASES = {
    "float64": ("float32", "float"),
    "wide": ("float32", "float", "bfloat16", "float16", "half"),
}
"""Names of dtypes that mean float64, by `Settings.dtype`."""


class Watcher(Protocol):
    """The work of a tracer when a function is called."""

    settings: Settings
    paused: bool

    def on_loss(self, loss: Tensor) -> None: ...
    def on_clip(self, parameters: Sequence[Tensor]) -> None: ...
    def on_norm(self, norm: Any) -> None: ...
    def on_bits(self, tensor: Tensor, digest: str) -> None: ...
    def note(self, text: str) -> None: ...


@contextmanager
def patched(tracer: Watcher) -> Iterator[None]:
    """A block in which the functions are replaced."""
    with ExitStack() as stack:
        _losses(tracer, stack)
        _norms(tracer, stack)
        _dropouts(tracer, stack)
        _compile(tracer, stack)
        if tracer.settings.dtype in ALIASES:
            _widen(tracer.settings.dtype, stack)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _losses(tracer: Watcher, stack: ExitStack) -> None:
    method, function = Tensor.backward, torch.autograd.backward
    inside = [False]

    @functools.wraps(method)
    def backward(self: Tensor, gradient: Any = None, *args: Any, **named: Any) -> None:
        if gradient is None and not inside[0]:
            tracer.on_loss(self)
        inside[0] = True
        try:
            method(self, gradient, *args, **named)
        finally:
            inside[0] = False

    @functools.wraps(function)
    def backward_all(tensors: Any, grad_tensors: Any = None, *args: Any, **named: Any) -> None:
        if grad_tensors is None and not inside[0]:
            for each in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if isinstance(each, Tensor):
                    tracer.on_loss(each)
        function(tensors, grad_tensors, *args, **named)

    _replace(stack, Tensor, "backward", backward)
    _replace(stack, torch.autograd, "backward", backward_all)


def _norms(tracer: Watcher, stack: ExitStack) -> None:
    real = clip_grad.clip_grad_norm_

    @functools.wraps(real)
    def clip_grad_norm_(parameters: Any, *args: Any, **named: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        tracer.on_clip(given)
        norm = real(given, *args, **named)
        tracer.on_norm(norm)
        return norm

    by_norm: Any = nn.utils.clip_grads_with_norm_

    @functools.wraps(by_norm)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **named: Any
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        tracer.on_clip(given)
        tracer.on_norm(torch.as_tensor(total_norm))
        by_norm(given, max_norm, total_norm, *args, **named)

    for owner in (clip_grad, nn.utils):
        _replace(stack, owner, "clip_grad_norm_", clip_grad_norm_)
    _replace(stack, nn.utils, "clip_grads_with_norm_", clip_grads_with_norm_)
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    method = Fsdp.clip_grad_norm_

    @functools.wraps(method)
    def clip_method(self: Any, *args: Any, **named: Any) -> Any:
        tracer.on_clip(list(self.parameters()))
        norm = method(self, *args, **named)
        tracer.on_norm(norm)
        return norm

    _replace(stack, Fsdp, "clip_grad_norm_", clip_method)


def _dropouts(tracer: Watcher, stack: ExitStack) -> None:
    """Let dropout keep all elements; what it draws is digested, and drawn as ever."""
    for name in DROPOUTS:
        _replace(stack, functional, name, _kept(tracer, getattr(functional, name)))
    _replace(stack, torch, "dropout", _kept(tracer, torch.dropout))
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def without_dropout(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        given = list(args)
        p = given[1] if len(given) > 1 else named.get("dropout_p", 0.0)
        if p:
            if len(given) > 1:
                given[1] = 0.0
            else:
                named["dropout_p"] = 0.0
            tracer.note("dropout of attention is switched off")
            tracer.on_bits(query, _digest(torch.rand(64, dtype=torch.float64)))
        return attention(query, key, value, *given, **named)

    _replace(stack, functional, "scaled_dot_product_attention", without_dropout)


def _kept(tracer: Watcher, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(real)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, *args: Any, **named: Any):  # type: ignore[no-untyped-def]
        p, training = named.pop("p", p), named.pop("training", named.pop("train", training))
        if not training or not 0 < p < 1:
            return real(input, p, training, *args, **named)
        with torch.no_grad():
            mask = real(torch.ones_like(input), p, True)
        local = mask.to_local() if hasattr(mask, "to_local") else mask
        tracer.note("dropout is switched off, its random bits are compared")
        tracer.on_bits(input, _digest(local != 0))
        return input * 1

    return dropout


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().cpu().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _compile(tracer: Watcher, stack: ExitStack) -> None:
    """Let torch.compile hand back what it is given: hooks see no modules in compiled code."""

    def compile(model: Any = None, *args: Any, **named: Any) -> Any:
        tracer.note("torch.compile is left out")
        return model if model is not None else lambda given: given

    def compile_module(self: nn.Module, *args: Any, **named: Any) -> None:
        tracer.note("torch.compile is left out")

    _replace(stack, torch, "compile", compile)
    _replace(stack, nn.Module, "compile", compile_module)


def _widen(dtype: str, stack: ExitStack) -> None:
    """Let the names of narrower dtypes mean float64."""
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)
    for name in ALIASES[dtype]:
        _replace(stack, torch, name, torch.float64)
        if name not in ("float32", "float16"):
            for owner in (Tensor, nn.Module):
                if hasattr(owner, name):
                    _replace(stack, owner, name, owner.double)
    _replace(stack, Tensor, "type", _typed(Tensor.type))
    kinds = (np.float32, *((np.float16,) if dtype == "wide" else ()))
    for name in ("from_numpy", "tensor", "as_tensor"):
        _replace(stack, torch, name, _of_wide(getattr(torch, name), kinds))
    for kind in ("FloatTensor", *(("HalfTensor", "BFloat16Tensor") if dtype == "wide" else ())):
        _replace(stack, torch, kind, torch.DoubleTensor)


TRIALS = ("_prepare_forward_infra", "_prepare_backward_infra")
"""Methods of pipelining's stages that run a stage once, on anything, for the shapes."""


def trials_are_paused(tracer: Watcher) -> None:
    """Pause the tracer in torch's trial runs of a pipeline's stages, if pipelining is imported."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return
    if getattr(module, "gpusim_pauses", None) is tracer:
        tracer.paused = tracer.paused and _in_trial()
        return
    vars(module)["gpusim_pauses"] = tracer
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    for kind in kinds:
        for name in TRIALS:
            if name in vars(kind):
                setattr(kind, name, _pausing(tracer, vars(kind)[name]))
    tracer.paused = _in_trial()  # the first call may come out of one that is not replaced yet


def _in_trial() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in TRIALS:
        frame = frame.f_back
    return frame is not None


def _pausing(tracer: Watcher, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def trial(*args: Any, **named: Any) -> Any:
        tracer.paused = True
        try:
            return real(*args, **named)
        finally:
            tracer.paused = False

    return trial


def _of_wide(real: Any, kinds: tuple[type, ...]) -> Any:
    """A function that makes a tensor of an array: of a wide one."""

    @functools.wraps(real)
    def make(data: Any, *args: Any, **named: Any) -> Any:
        narrow = isinstance(data, np.ndarray | np.generic) and data.dtype.type in kinds
        return real(data.astype(np.float64) if narrow else data, *args, **named)

    return make


def _typed(real: Any) -> Any:
    """`Tensor.type`, by whose text programs ask for float32.

    Torch looks the method up by its name where a function mode is on, so the mode that plays GPUs
    does not know this one: the device is said here.
    """

    @functools.wraps(real)
    def type(self: Tensor, dtype: Any = None, *args: Any, **named: Any) -> Any:
        if dtype is None:
            name = real(self).replace("DoubleTensor", "FloatTensor")
            cuda = self.is_cuda and ".cuda." not in name
            return name.replace("torch.", "torch.cuda.", 1) if cuda else name
        if isinstance(dtype, str):
            self = self.cuda() if ".cuda." in dtype else self
            dtype = dtype.replace("FloatTensor", "DoubleTensor").replace(".cuda.", ".")
        return real(self, dtype, *args, **named)

    return type
