"""quantise_fpx and its variants: values, gradients or both in the precision of a small format,
by gpusim.quantise_fpx. Replicas that round stochastically have random bits of their own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import rounding as roundings
from ...poptorch.axis import inside_replicas
from ...torch.graph_operators import graph_operator
from ...torch.seeds import seeds
from ...torch.stacked import batched
from ...torch.tensors import as_array, as_tensor, on_stream_of

__all__ = ["quantise_fpx", "quantise_fpx_grad", "quantise_fpx_ste"]

WIDEST = {"exponent": 8, "mantissa": 23}
WIDEST_ON_IPU = {"exponent": 5, "mantissa": 10}
"""How many bits a format may have: those of float32, and on an IPU those of float16."""


def quantise_fpx(
    x: Tensor,
    exponent_bits: int,
    mantissa_bits: int,
    rounding: str = "stochastic",
    fwd: bool = True,
    bwd: bool | None = None,
) -> Tensor:
    """Quantise to a small floating-point format without changing the dtype.

    The format has 1 + exponent_bits + mantissa_bits bits; `gpusim.quantise_fpx` says which values.

    Args:
        x: of any shape and floating-point dtype.
        exponent_bits: 1 to 8; in a PopTorch model to 5.
        mantissa_bits: 0 to 23; in a PopTorch model to 10.
        rounding: "nearest" or "stochastic". Random bits are another replica's and another call's
            own: those of `gpusim.rng` for torch's seed, or those of `gpusim.torch.seeds.seeded`.
        fwd: whether the value is quantised.
        bwd: what becomes of the gradient. None: there is none; False: it stays as it is, which
            makes this a straight-through estimator; True: it is quantised.

    Returns:
        A new tensor of the shape and dtype of x.

    Raises:
        ValueError: for another rounding, or widths outside these.
        TypeError: for a dtype that is not a floating-point one.

    Example:
        >>> import torch
        >>> import gpusim.poptorch_experimental_addons as pea
        >>> x = torch.tensor([0.2, 1.3, -7.0], requires_grad=True)
        >>> y = pea.quantise_fpx(x, 2, 1, rounding="nearest", bwd=True)
        >>> y.detach()
        tensor([ 0.2500,  1.5000, -3.0000])
        >>> y.backward(torch.tensor([0.3, 0.8, 10.0]))
        >>> x.grad
        tensor([0.2500, 0.7500, 3.0000])
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"Expected quantise(rounding=?) to be 'nearest' or 'stochastic', actual '{rounding}'"
        )
    widest = WIDEST_ON_IPU if inside_replicas() else WIDEST
    roundings._check_bits("exponent", exponent_bits, 1, widest["exponent"])
    roundings._check_bits("mantissa", mantissa_bits, 0, widest["mantissa"])
    if not x.is_floating_point():
        raise TypeError(f"quantise_fpx: x is of {x.dtype}, expected a floating-point dtype")
    drawn = seeds(2) if rounding == "stochastic" and (fwd or bwd) else None
    found: Tensor = _quantise(x, drawn, 0, exponent_bits, mantissa_bits, fwd, bwd)
    return found


def quantise_fpx_ste(
    x: Tensor, exponent_bits: int, mantissa_bits: int, rounding: str = "stochastic"
) -> Tensor:
    """`quantise_fpx` of the value, and the gradient as it is: a straight-through estimator.

    Example:
        >>> import torch
        >>> import gpusim.poptorch_experimental_addons as pea
        >>> x = torch.tensor(1.3, requires_grad=True)
        >>> y = pea.quantise_fpx_ste(x, 2, 1, rounding="nearest")
        >>> (0.8 * y).backward()
        >>> y.item(), x.grad
        (1.5, tensor(0.8000))
    """
    return quantise_fpx(x, exponent_bits, mantissa_bits, rounding, fwd=True, bwd=False)


def quantise_fpx_grad(
    x: Tensor, exponent_bits: int, mantissa_bits: int, rounding: str = "stochastic"
) -> Tensor:
    """The value as it is, and `quantise_fpx` of the gradient.

    Example:
        >>> import torch
        >>> import gpusim.poptorch_experimental_addons as pea
        >>> x = torch.tensor(1.25, requires_grad=True)
        >>> y = pea.quantise_fpx_grad(x, 2, 1, rounding="nearest")
        >>> (0.8 * y).backward()
        >>> y.item(), x.grad
        (1.25, tensor(0.7500))
    """
    return quantise_fpx(x, exponent_bits, mantissa_bits, rounding, fwd=False, bwd=True)


class Quantise(torch.autograd.Function):
    """How the operator below is differentiated and batched."""

    @staticmethod
    def forward(x: Tensor, seeds: Tensor | None, lead: int, *how: Any) -> Any:
        return _quantised(x, seeds, lead, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, seeds, ctx.lead, *ctx.bits, _, ctx.bwd = inputs
        ctx.save_for_backward(*([] if seeds is None else [seeds]))

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        found = cotangent if ctx.bwd is not None else None
        if ctx.bwd:
            (own,) = [seeds.flip(-1) for seeds in ctx.saved_tensors] or [None]
            found = Quantise.apply(cotangent, own, ctx.lead, *ctx.bits, True, None)
        return found, None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, seeds: Tensor | None, lead: int, *how: Any
    ) -> Any:
        """Values that share no random bits can be quantised as one."""
        x = batched(x, in_dims[0], info.batch_size)
        if seeds is None:
            return Quantise.apply(x, None, 0, *how), 0
        seeds = batched(seeds, in_dims[1], info.batch_size)
        return Quantise.apply(x, seeds, lead + 1, *how), 0


SCHEMA = (
    "(Tensor x, Tensor? seeds, int lead, int exponent_bits, int mantissa_bits, bool fwd, bool? bwd)"
    " -> Tensor"
)


@torch.library.custom_op("gpusim::quantised_fpx", mutates_args=(), schema=SCHEMA)
def _quantised(
    x: Tensor,
    seeds: Tensor | None,
    lead: int,
    exponent_bits: int,
    mantissa_bits: int,
    fwd: bool,
    bwd: bool | None,
) -> Tensor:
    """`x` has `lead` dimensions of values that are quantised each by itself, with the seeds
    (*lead, 2) of the forward and the backward pass; None is to nearest."""
    if not fwd:
        return x.clone(memory_format=torch.contiguous_format)
    bits = (exponent_bits, mantissa_bits)
    with on_stream_of([x]):
        values = as_array(x)
        if seeds is None:
            return as_tensor(roundings.quantise_fpx(values, *bits, "nearest"))
        count, own = math.prod(x.shape[:lead]), x.shape[lead:]
        out = x.new_empty((count, *own))
        chosen = seeds[..., 0].reshape(count).tolist()
        for row, value, seed in zip(out, values.reshape(count, *own), chosen, strict=True):
            row.copy_(as_tensor(roundings.quantise_fpx(value, *bits, "stochastic", seed=seed)))
    return out.reshape(x.shape)


@_quantised.register_fake
def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_quantised.register_autograd(Quantise.backward, setup_context=Quantise.setup_context)
_quantised.register_vmap(Quantise.vmap)
_quantise = graph_operator(f"quantise_fpx{SCHEMA}", _quantised, transformed=Quantise.apply)
