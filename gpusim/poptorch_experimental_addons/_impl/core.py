"""Proxies of gradients, distances, and the precision of small floating-point formats.

Formats are rounded by gpusim.quantise_fpx. In stochastic rounding each replica has its own random
bits.
"""

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

__all__ = [
    "autograd_proxy",
    "distance_matrix",
    "quantise_fpx",
    "quantise_fpx_grad",
    "quantise_fpx_ste",
]


def distance_matrix(tensor1: Tensor, tensor2: Tensor, p: int) -> Tensor:
    """The p-norms of the differences of all pairs of vectors, in little memory.

    **Arguments**:

    - `tensor1`: M vectors (M, K) of a floating-point dtype.
    - `tensor2`: N vectors (N, K) of the same.
    - `p`: 1 or 2.

    **Returns**: (M, N) in their dtype; float16 and bfloat16 are computed in float32 and rounded
    once. The gradient between vectors that are equal is 0, and for p = 1 so is that of equal
    components.

    **Raises**:

    - NotImplementedError: for another p.
    - ValueError: for tensors of other dimensions, or vectors of different lengths.
    - TypeError: for dtypes that differ, or are not floating-point ones.

    >>> import torch
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> a, b = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    >>> pea.distance_matrix(a, b, p=2)
    tensor([[5.],
            [4.]])
    >>> pea.distance_matrix(a, b, p=1)
    tensor([[7.],
            [4.]])
    """
    if p not in (1, 2):
        raise NotImplementedError("distance_matrix implemented only for p=1,2")
    if tensor1.dim() != 2 or tensor2.dim() != 2:
        raise ValueError(
            f"distance_matrix requires 2-dimensional inputs `tensor1` (dim = {tensor1.dim()}) "
            f"and `tensor2` (dim = {tensor2.dim()})"
        )
    if tensor1.shape[-1] != tensor2.shape[-1]:
        raise ValueError(
            "distance_matrix requires rightmost dimension of same size for `tensor1` "
            f"({tensor1.shape[-1]}) and `tensor2` ({tensor2.shape[-1]})"
        )
    dtype = tensor1.dtype
    if dtype != tensor2.dtype or not dtype.is_floating_point:
        raise TypeError(
            "distance_matrix requires one floating-point dtype for `tensor1` and `tensor2`, got "
            f"{dtype} and {tensor2.dtype}"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # By differences, as on an IPU. By products, the default for many vectors, digits would cancel.

    exact = "donot_use_mm_for_euclid_dist"
    found = torch.cdist(tensor1.to(wide), tensor2.to(wide), p=float(p), compute_mode=exact)
    return found.to(dtype)


# ---------------------------------------------------------------- autograd_proxy


def autograd_proxy(fwd: Tensor, proxy: Tensor) -> Tensor:
    """The value of `fwd`; the gradient goes to `proxy`.

    **Arguments**:

    - `fwd`: of any shape; it gets no gradient.
    - `proxy`: of the same shape; its value is not used.

    **Returns**: A tensor with the bits of `fwd`.

    **Raises**:

    - ValueError: for shapes that differ.

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
    """The derivative and the batching rule of the operator below."""

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
def _fake_proxied(fwd: Tensor, proxy: Tensor) -> Tensor:
    return fwd.clone()


_proxied.register_autograd(Proxy.backward, setup_context=Proxy.setup_context)
_proxied.register_vmap(Proxy.vmap)
_autograd_proxy = graph_operator(
    "autograd_proxy(Tensor fwd, Tensor proxy) -> Tensor", _proxied, transformed=Proxy.apply
)


# ---------------------------------------------------------------- quantise_fpx

WIDEST = {"exponent": 8, "mantissa": 23}
WIDEST_ON_IPU = {"exponent": 5, "mantissa": 10}
"""The largest numbers of bits of a format: those of float32, and on an IPU those of float16."""


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

    **Arguments**:

    - `x`: of any shape and floating-point dtype.
    - `exponent_bits`: 1 to 8; in a PopTorch model to 5.
    - `mantissa_bits`: 0 to 23; in a PopTorch model to 10.
    - `rounding`: "nearest" or "stochastic". Each replica and call has its own random bits: those
      of `gpusim.rng` for torch's seed, or those of `gpusim.torch.seeds.seeded`.
    - `fwd`: whether the value is quantised.
    - `bwd`: True quantises the gradient. False passes it through unchanged: a straight-through
      estimator. None: there is no gradient.

    **Returns**: A new tensor of the shape and dtype of x.

    **Raises**:

    - ValueError: for another rounding or other widths.
    - TypeError: for a dtype that is not a floating-point one.

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
    """Quantise the value and pass the gradient through: a straight-through estimator.

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
    """Pass the value through and quantise the gradient.

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
    """The derivative and the batching rule of the operator below."""

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
        """Values without random bits can be quantised as one."""
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
    """Quantise each of the values along the first `lead` dimensions of `x` by itself.

    `seeds` are (*lead, 2): of the forward and the backward pass. None rounds to nearest.
    """

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
            rounded = roundings.quantise_fpx(value, *bits, "stochastic", seed=seed, axis_name=())
            row.copy_(as_tensor(rounded))
    return out.reshape(x.shape)


@_quantised.register_fake
def _fake_quantised(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_quantised.register_autograd(Quantise.backward, setup_context=Quantise.setup_context)
_quantised.register_vmap(Quantise.vmap)
_quantise = graph_operator(f"quantise_fpx{SCHEMA}", _quantised, transformed=Quantise.apply)
