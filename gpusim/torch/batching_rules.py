"""Batching rules for operators of torch whose own rules give other results than a loop.

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

#: By the operator's name.
RULES: dict[str, Callable[..., Tensor]] = {
    "index_put_": _index_put_,
    "squeeze_": _squeeze_,
    "as_strided_": _as_strided_,
    **PRODUCTS,
    **{f"{name}_": _in_place(rule) for name, rule in PRODUCTS.items()},
}

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace torch's rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a rule that is replaced
        for name, rule in RULES.items():
            _library.impl(name, rule, "FuncTorchBatched")
