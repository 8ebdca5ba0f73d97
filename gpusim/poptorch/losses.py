"""Losses: identity_loss, and the search for the loss of a model that is to be differentiated.

Every loss of torch.nn.functional and every identity_loss is a mark. A mark is absorbed if another
one depends on it; exactly one must remain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..torch.private import DisableTorchFunction, storage_key, untransformed
from .blocks.placement import current_recorder
from .poptorch_core import compiler_error

__all__ = ["LossFinder", "identity_loss"]

#: torch.nn.functional's losses; some versions of torch have fewer.
FUNCTIONAL = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "linear_cross_entropy",
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
    "triplet_margin_with_distance_loss",
)
#: Those that are functions of torch itself too.
OF_TORCH = (
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "margin_ranking_loss",
    "poisson_nll_loss",
    "triplet_margin_loss",
)
LOSSES: dict[Callable[..., Any], str] = {
    getattr(torch, name): name for name in OF_TORCH if hasattr(torch, name)
} | {getattr(functional, name): name for name in FUNCTIONAL if hasattr(functional, name)}

NO_LOSS = "Couldn't find a loss in graph!"
SEVERAL = (
    "Multiple independent losses found in graph. Graph must have one final loss. "
    "Wrap final graph loss in poptorch.identity_loss."
)

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "none": torch.clone,  # a new tensor, so that the mark is not on its operand
}


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark a tensor as a loss of the model. The last loss of a model is differentiated.

    **Arguments**

    - `x`: the loss, of any shape.
    - `reduction`: "sum", "mean" or "none"; AssertionError for anything else. With "none" the loss
      keeps its shape, and the sum of its elements is differentiated.

    **Returns**

    The reduced loss. Outside of models nothing is marked.

    >>> import torch
    >>> identity_loss(torch.tensor([1.0, 2.0]), reduction="mean")
    tensor(1.5000)
    >>> identity_loss(torch.tensor([1.0, 2.0]), reduction="max")
    Traceback (most recent call last):
    ...
    AssertionError: Unsupported reduction type!
    """
    if reduction not in REDUCTIONS:
        raise AssertionError("Unsupported reduction type!")
    finder = _finder.get()
    if finder is None:
        return REDUCTIONS[reduction](x)
    x = finder.substitute(x)  # as the mode does for functions of torch, which it does not see here
    with DisableTorchFunction():
        result = REDUCTIONS[reduction](x)
    finder.mark("identity_loss", [x], result)
    recorder = current_recorder()
    if recorder is not None:
        recorder.record(identity_loss, [x], [result])
    return result


@dataclass
class Mark:
    """One loss.

    **Attributes**:

    - `name`: the function that computed it.
    - `value`: its result.
    - `absorbed`: whether another loss depends on it.
    """

    name: str
    value: Tensor
    absorbed: bool = False


class LossFinder:
    """The losses of one run of a model, and the tensors that depend on them.

    Tensors are identified by their memory, so that views and in-place changes are followed.

    **Arguments**:

    - `substitute`: gives the replica's tensor for one of the model.
    """

    def __init__(self, substitute: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.substitute = substitute
        self.marks: list[Mark] = []
        self._upon: dict[int, tuple[Any, frozenset[int]]] = {}  # memory -> losses it depends on

    def record(self, function: Any, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Record a call of a function of torch."""
        found = [*results]
        name = LOSSES.get(function)
        if name is not None and found:
            self.mark(name, operands, found[0])
        elif self._upon:
            upon = self._losses(operands)
            if upon:
                self._note(found, upon)

    def mark(self, name: str, operands: Iterable[Tensor], result: Tensor) -> None:
        """Record a loss."""
        upon = self._losses(operands)
        for number in upon:
            self.marks[number].absorbed = True
        self.marks.append(Mark(name, untransformed(result)))
        self._note([result], upon | {len(self.marks) - 1})

    def final(self) -> Tensor:
        """The one loss that no other depends on.

        **Raises**:

        - Error: if there is none or more than one.
        """
        remaining = [mark.value for mark in self.marks if not mark.absorbed]
        if len(remaining) == 1:
            return remaining[0]
        raise compiler_error(SEVERAL if remaining else NO_LOSS)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record the marks of identity_loss inside the block."""
        token = _finder.set(self)
        try:
            yield
        finally:
            _finder.reset(token)

    def _losses(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        upon: frozenset[int] = frozenset()
        if self._upon:
            for tensor in tensors:
                upon |= self._upon.get(_memory(tensor)[0], (None, frozenset()))[1]
        return upon

    def _note(self, tensors: Iterable[Tensor], upon: frozenset[int]) -> None:
        for tensor in tensors:
            key, storage = _memory(tensor)
            before = self._upon.get(key, (None, frozenset()))[1]
            # with a reference to the storage, so that no other one gets its key
            self._upon[key] = storage, before | upon


def _memory(tensor: Tensor) -> tuple[int, Any]:
    tensor = untransformed(tensor)
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # a sparse tensor
        return id(tensor), tensor
    return storage_key(storage), storage


_finder: ContextVar[LossFinder | None] = ContextVar("gpusim losses", default=None)
