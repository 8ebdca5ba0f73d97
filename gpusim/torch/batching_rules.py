"""Batching rules for operators of torch whose own rules give other results than a loop, or take far
longer than a call for all replicas.

They replace torch's in all vmaps of the process once `gpusim.torch` is imported. A test compares
all of torch's in-place, indexing and reduction operators with a loop, and shows which rules are
needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .private import VmapTransform, below_batching, decomposed, innermost_vmap

__all__ = ["RULES", "install"]

aten = torch.ops.aten

NEW_SHAPE = (
    "vmap: {0}_ gives a tensor another shape in place, which the tensors of a vmap cannot have. "
    "Use the result of {0} instead"
)


def _index_put_(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """index_put_ by way of index_put. Torch's rule transposes if the first indices are None."""
    return x.copy_(aten.index_put(x, indices, values, accumulate))


def _squeeze_(x: Tensor) -> Tensor:
    """squeeze_ one dimension at a time. Torch's rule removes a mapped one of size 1 too."""
    for dim in reversed(range(x.dim())):
        x.squeeze_(dim)
    return x


def _as_strided_(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Refuse: torch's rule leaves the tensor as it is."""
    raise RuntimeError(NEW_SHAPE.format("as_strided"))


def _added(product: Callable[[Tensor, Tensor], Tensor], *, drops: bool) -> Callable[..., Tensor]:
    """A rule for beta * x + alpha * product: torch's multiplies NaNs by 0, and integers by floats.

    `drops` says whether torch ignores factors of a product with alpha 0.
    """

    def rule(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        if not x.is_floating_point() and not x.is_complex():
            beta, alpha = int(beta), int(alpha)
        result = product(a, b)
        if alpha == 0 and drops and x.dtype in (torch.float32, torch.float64):
            result = torch.zeros_like(result)
        elif alpha != 1:
            result = alpha * result
        if beta == 0:
            return result
        return (x if beta == 1 else beta * x) + result

    return rule


def _in_place(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: x.copy_(rule(x, *args, **kwargs))


PRODUCTS = {
    "addmv": _added(torch.mv, drops=True),
    "addmm": _added(torch.mm, drops=True),
    "addbmm": _added(lambda a, b: torch.bmm(a, b).sum(0, dtype=a.dtype), drops=True),
    "baddbmm": _added(torch.bmm, drops=False),
}

COUNTED = 2**24  # ones that a sum of floats counts exactly
MEAN = 1  # of torch's numbers of a loss's reduction; 0 is "none"


def _nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """The losses of all replicas' samples by one call. Torch gathers, and scatters in the backward
    pass, in a dozen operations on tensors with all classes."""
    if weight is not None:
        return decomposed[aten.nll_loss_forward.default](x, target, weight, reduction, ignored)
    vmap = innermost_vmap()
    assert vmap is not None
    samples, classes, shape = _samples(vmap, x, target)
    with below_batching():
        losses, _ = aten.nll_loss_forward(samples, classes, None, 0, ignored)
        if not reduction:
            found, total = losses.view(shape), losses.new_zeros(vmap.size)
        else:
            apart = vmap.size, len(classes) // vmap.size
            exact = losses.dtype if apart[1] <= COUNTED else torch.int64
            total = (classes != ignored).view(apart).sum(1, dtype=exact).to(losses.dtype)
            found = losses.view(apart).sum(1)
            found = found / total if reduction == MEAN else found
    return vmap.wrap(found), vmap.wrap(total)


def _nll_loss_backward(
    cotangent: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> Tensor:
    if weight is not None:
        arguments = (cotangent, x, target, weight, reduction, ignored, total)
        return decomposed[aten.nll_loss_backward.default](*arguments)
    vmap = innermost_vmap()
    assert vmap is not None
    samples, classes, shape = _samples(vmap, x, target)
    each = _whole(vmap, cotangent / total if reduction == MEAN else cotangent)
    unread = _whole(vmap, total).select(0, 0)  # where each sample has its own cotangent
    with below_batching():
        apart = vmap.size, len(classes) // vmap.size
        each = each.view(vmap.size, 1).expand(apart) if reduction else each
        found = aten.nll_loss_backward(each.flatten(), samples, classes, None, 0, ignored, unread)
        found = found.view(*shape, samples.shape[1])
    return vmap.wrap(found)


def _samples(
    vmap: VmapTransform, x: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The samples of all replicas (samples, classes), their classes (samples,), and the shape of
    their losses, (replicas, samples of one) or (replicas,)."""
    scores, classes = _whole(vmap, x), _whole(vmap, target)
    with below_batching():
        return scores.reshape(-1, scores.shape[-1]), classes.flatten(), tuple(scores.shape[:-1])


def _whole(vmap: VmapTransform, x: Tensor) -> Tensor:
    """A tensor with all replicas in front."""
    below, dim = vmap.unwrap(x)
    with below_batching():
        return below.expand(vmap.size, *below.shape) if dim is None else below.movedim(dim, 0)


#: By the operator's name.
RULES: dict[str, Callable[..., Any]] = {
    "index_put_": _index_put_,
    "squeeze_": _squeeze_,
    "as_strided_": _as_strided_,
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
    **PRODUCTS,
    **{f"{name}_": _in_place(rule) for name, rule in PRODUCTS.items()},
}

_library = torch.library.Library("aten", "IMPL")

#: What lets a rule replace one that Python has installed: an argument that is True by itself since
#: PyTorch 2.12, and that earlier versions lack or set to False.
REPLACES: dict[str, Any] = {"allow_override": True}


def install() -> None:
    """Replace torch's rules, some of which it installs itself at the first vmap."""
    torch.func.vmap(torch.clone)(torch.empty(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a rule that is replaced
        for name, rule in RULES.items():
            _library.impl(name, rule, "FuncTorchBatched", **REPLACES)
