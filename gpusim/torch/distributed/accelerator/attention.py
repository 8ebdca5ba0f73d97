"""Attention of DTensors, by the operations that GPUs have for it.

On a GPU, scaled_dot_product_attention of DTensors becomes one of two operations of aten,
`_scaled_dot_product_flash_attention` or `_scaled_dot_product_efficient_attention`. DTensor knows
how their results are sharded, and context parallelism how ranks exchange keys and values. The
CPU's own operation is known to neither. So DTensors go the way that they go on a GPU, and while
ranks run those operations have kernels on the CPU, which are that of the CPU's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..private import aten, attention_kernels, is_dtensor

__all__ = ["KERNELS", "attention", "attention_on_cpu"]

_sdpa: Any = torch.nn.functional.scaled_dot_product_attention
_backends: Any = torch.backends.cuda


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention of DTensors as on a GPU; NotImplemented for other tensors."""
    if not any(is_dtensor(each) for each in (query, key, value)):
        return NotImplemented
    if dropout_p == 0 and not enable_gqa:
        half = query.dtype in (torch.float16, torch.bfloat16)
        if half and attn_mask is None and _backends.flash_sdp_enabled():
            flash = aten._scaled_dot_product_flash_attention
            return flash(query, key, value, 0.0, is_causal, False, scale=scale)[0]
        # Under gpusim equal float64 stands for float32, which the kernel takes.
        narrow = query.dtype != torch.float64 or torch.float32 is torch.float64
        if narrow and _backends.mem_efficient_sdp_enabled():
            log_sum = any(each.requires_grad for each in (query, key, value))
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, attn_mask, log_sum, 0.0, is_causal, scale=scale)[0]
    if not _backends.math_sdp_enabled():
        raise RuntimeError(
            f"No available kernel. Aborting execution. (attention of {query.dtype} DTensors with "
            f"dropout_p={dropout_p}, enable_gqa={enable_gqa}, where sdpa_kernel allows neither "
            "math nor a kernel that takes them)"
        )
    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool, scale: float | None
) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"attention with dropout_p={dropout_p} has no kernel on the CPU (device='cpu')"
        )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten._scaled_dot_product_flash_attention."""
    _no_dropout(dropout_p)
    output, log_sum = _forward(query, key, value, None, is_causal, scale)
    seed = torch.zeros(2, dtype=torch.uint64)
    unused = torch.zeros((), dtype=torch.uint64)
    debug = query.new_empty(0)
    return output, log_sum, None, None, query.shape[2], key.shape[2], seed, unused, debug


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: Any,
    max_k: Any,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Any:
    _no_dropout(dropout_p)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten._scaled_dot_product_efficient_attention."""
    _no_dropout(dropout_p)
    output, log_sum = _forward(query, key, value, attn_bias, is_causal, scale)
    offset = torch.zeros((), dtype=torch.int64)
    return output, log_sum, offset, offset.clone()


def _efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    _no_dropout(dropout_p)
    if grad_input_mask[3]:
        raise NotImplementedError(
            "the gradient of attn_mask has no kernel on the CPU (device='cpu'); use "
            "sdpa_kernel(SDPBackend.MATH)"
        )
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out_,
        query,
        key,
        value,
        out,
        logsumexp,
        0.0,
        is_causal,
        attn_mask=attn_bias,
        scale=scale,
    )
    return *gradients, None


#: Operations of aten, and their kernels on the CPU.
KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


@contextmanager
def attention_on_cpu() -> Iterator[None]:
    """A block in which the GPUs' operations for attention have kernels on the CPU."""
    with attention_kernels(KERNELS):
        yield
