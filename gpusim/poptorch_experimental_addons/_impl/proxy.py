"""autograd_proxy: the value of one tensor, and the gradient of another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...torch.graph_operators import graph_operator
from ...torch.stacked import batched

__all__ = ["autograd_proxy"]


def autograd_proxy(fwd: Tensor, proxy: Tensor) -> Tensor:
    """The value of `fwd`, whose gradient goes to `proxy`.

    Args:
        fwd: of any shape; it gets no gradient.
        proxy: of the same shape; its value does not matter.

    Returns:
        A tensor of the bits of `fwd`.

    Raises:
        ValueError: for shapes that differ.

    Example:
        >>> import torch
        >>> import gpusim.poptorch_experimental_addons as pea
        >>> x = torch.tensor(5.7, requires_grad=True)
        >>> y = pea.autograd_proxy(torch.round(x), 3 * x)
        >>> y.backward()
        >>> y.item(), x.grad
        (6.0, tensor(3.))
    """
    if fwd.shape != proxy.shape:
        raise ValueError(
            "autograd_proxy expects both arguments to have the same shape, actual:"
            f"fwd.shape: {fwd.shape}, proxy.shape: {proxy.shape}"
        )
    found: Tensor = _autograd_proxy(fwd, proxy)
    return found


class Proxy(torch.autograd.Function):
    """How the operator below is differentiated and batched."""

    @staticmethod
    def forward(fwd: Tensor, proxy: Tensor) -> Any:
        return _proxied(fwd, proxy)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, cotangent.to(ctx.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], fwd: Tensor, proxy: Tensor) -> Any:
        dims = zip((fwd, proxy), in_dims, strict=True)
        return Proxy.apply(*(batched(x, dim, info.batch_size) for x, dim in dims)), 0


@torch.library.custom_op(
    "gpusim::proxied", mutates_args=(), schema="(Tensor fwd, Tensor proxy) -> Tensor"
)
def _proxied(fwd: Tensor, proxy: Tensor) -> Tensor:
    return fwd.clone()


@_proxied.register_fake
def _fake(fwd: Tensor, proxy: Tensor) -> Tensor:
    return fwd.clone()


_proxied.register_autograd(Proxy.backward, setup_context=Proxy.setup_context)
_proxied.register_vmap(Proxy.vmap)
_autograd_proxy = graph_operator(
    "autograd_proxy(Tensor fwd, Tensor proxy) -> Tensor", _proxied, transformed=Proxy.apply
)
