"""The program's training loop, as the check sees it: modules, backward passes, DDP and samplers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .here import replace

if TYPE_CHECKING:
    from .watch import Watch

__all__ = ["install"]


def _call_module(watch: Watch, real: Any, module: nn.Module, /, *args: Any, **named: Any) -> Any:
    if not watch.depth:
        watch.replicas.enter(module, args, named)
        watch.draws.enter(module, args, named)
    watch.depth += 1
    try:
        return real(module, *args, **named)
    finally:
        watch.depth -= 1


def _backward(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    tensors = args[0] if args else named.get("tensors", ())
    if watch.in_backward:
        return real(*args, **named)
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    watch.replicas.begin_backward([each for each in roots if isinstance(each, Tensor)])
    watch.means.begin_backward(roots, args[1:], named)
    watch.in_backward = True
    try:
        return real(*args, **named)
    finally:
        watch.in_backward = False
        watch.means.end_backward()
        watch.reading.settle()


def _grad(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    try:
        return real(*args, **named)
    finally:
        watch.reading.settle()


def _make_ddp(watch: Watch, real: Any, module: nn.Module, /, *args: Any, **named: Any) -> None:
    real(module, *args, **named)
    watch.replicas.add_ddp(module)


def _iterate(watch: Watch, real: Any, sampler: Any, /) -> Any:
    watch.replicas.add_sampler(int(sampler.num_replicas))
    return real(sampler)


def install(stack: ExitStack) -> None:
    """Watch calls of modules, backward passes, DDP and samplers."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    replace(stack, nn.Module, "__call__", _call_module)
    replace(stack, torch.autograd, "backward", _backward)
    replace(stack, torch.autograd, "grad", _grad)
    replace(stack, DistributedDataParallel, "__init__", _make_ddp)
    replace(stack, DistributedSampler, "__iter__", _iterate)
