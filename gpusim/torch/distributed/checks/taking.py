"""Functions that compute means: losses, means of tensors, and sums that are divided."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .digests import local_part
from .here import replace

if TYPE_CHECKING:
    from .watch import Watch

__all__ = ["install"]

LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)


@functools.cache
def _signature(real: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(real)


def _loss(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    result = real(*args, **named)
    if not isinstance(result, Tensor) or result.dim() or local_part(result) is not result:
        return result
    given = _signature(real).bind(*args, **named)
    given.apply_defaults()
    own = given.arguments
    if own.get("size_average") is not None or own.get("reduce") is not None:
        return result
    with watch.busy(), torch.no_grad():
        count = _count(own)
    if own["reduction"] in ("mean", "batchmean"):
        watch.means.see_mean(result, count)
    elif own["reduction"] == "sum":
        watch.means.see_sum(result, int(count))
    return result


def _count(own: dict[str, Any]) -> float:
    """Over how many elements a loss is the mean; with weights, the sum of theirs."""
    first = next(each for each in own.values() if isinstance(each, Tensor))
    target = own.get("target")
    if own.get("reduction") == "batchmean":
        return float(first.shape[0]) if first.dim() else 1.0
    if "ignore_index" not in own or target is None or target.is_floating_point():
        return float(first.numel())
    used = target != own["ignore_index"]
    weight = own.get("weight")
    if weight is None or own["reduction"] == "sum":
        return float(used.sum())
    return float(weight[target[used]].sum())


def _mean(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    result = real(*args, **named)
    tensor = args[0] if args else named.get("input")
    if isinstance(tensor, Tensor) and isinstance(result, Tensor) and not result.dim():
        watch.means.see_average(tensor)
        watch.means.see_mean(result, tensor.numel())
    return result


def _sum(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    result = real(*args, **named)
    tensor = args[0] if args else named.get("input")
    if isinstance(tensor, Tensor) and isinstance(result, Tensor) and not result.dim():
        watch.means.see_sum(result, tensor.numel())
    return result


def _divide(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    result = real(*args, **named)
    if len(args) > 1 and isinstance(result, Tensor) and not result.dim():
        watch.means.see_division(result, args[0], args[1])
    return result


def install(stack: ExitStack) -> None:
    """Watch them."""
    for name in LOSSES:
        replace(stack, functional, name, _loss)
    for owner in (Tensor, torch):
        replace(stack, owner, "mean", _mean)
        replace(stack, owner, "sum", _sum)
        replace(stack, owner, "div", _divide)
    for name in ("__truediv__", "__itruediv__", "div_"):
        replace(stack, Tensor, name, _divide)
