"""The kernels of SyncBatchNorm, which torch has for GPUs only, on the CPU.

SyncBatchNorm makes its collectives in Python, and calls these for what is between them: each
rank's statistics, the statistics of all ranks together, and both halves of the backward pass. Sums
are in float32, or float64 for float64, as on GPUs. Their order is the CPU's, so last bits may
differ from a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS"]


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in the dtype that sums are in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _along(channels: Tensor, like: Tensor) -> Tensor:
    """A value for each channel, in the shape that broadcasts to a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))


def _others(batch: Tensor) -> list[int]:
    """The dimensions of a batch but that of its channels."""
    return [0, *range(2, batch.dim())]


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean of each channel, and 1 / sqrt(variance + eps)."""
    variance, mean = torch.var_mean(_wide(input), _others(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The statistics of all ranks' batches together, of each rank's and its number of values.

    Ranks are joined one after another. Running statistics are updated in place, with the unbiased
    variance.
    """
    mean, invstd, counts = _wide(mean), _wide(invstd), _wide(counts)
    total = torch.zeros_like(counts[:1])
    average, squares = torch.zeros_like(mean[:1]), torch.zeros_like(mean[:1])
    for rank in range(len(mean)):
        count, here = counts[rank : rank + 1], mean[rank : rank + 1]
        deviation = (invstd[rank : rank + 1] ** -2 - eps) * count
        both = total + count
        squares = squares + deviation + (average - here) ** 2 * (total * count / both)
        average = total / both * average + count / both * here
        total = both
    average, squares = average.view(-1), squares.view(-1)
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * _wide(running_mean) + momentum * average)
    if running_var is not None:
        unbiased = squares / (total - 1)
        running_var.copy_((1 - momentum) * _wide(running_var) + momentum * unbiased)
    return average, torch.rsqrt(squares / total + eps)


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """(input - mean) * invstd * weight + bias, in the dtype of the input."""
    result = (_wide(input) - _along(mean, input)) * _along(invstd, input)
    if weight is not None:
        result = result * _along(_wide(weight), input)
    if bias is not None:
        result = result + _along(_wide(bias), input)
    return result.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Sums over a rank's batch: of dy, of dy * (x - mean), and the gradients of weight and bias."""
    dy = _wide(grad_out)
    sum_dy = dy.sum(_others(input))
    sum_dy_xmu = (dy * (_wide(input) - _along(mean, input))).sum(_others(input))
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype) if bias_g else None,
    )


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of a rank's input, of all ranks' sums and numbers of values."""
    total = count.sum().to(mean.dtype)
    scale = invstd if weight is None else invstd * _wide(weight)
    slope = invstd**2 * (_wide(sum_dy_xmu) / total)
    deviation = (_wide(input) - _along(mean, input)) * _along(slope, input)
    result = _wide(grad_out) - _along(_wide(sum_dy) / total, input) - deviation
    return (result * _along(scale, input)).to(input.dtype)


_torch: Any = torch

#: torch's functions, and what they do on the CPU.
KERNELS: dict[Any, Callable[..., Any]] = {
    getattr(_torch, function.__name__): function
    for function in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
}
