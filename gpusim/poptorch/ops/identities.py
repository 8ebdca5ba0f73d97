"""Operations that return what they are given: they say something to PopTorch's compiler."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..poptorch_core import createPoptorchError
from .operation import operation

__all__ = ["nop", "recomputationCheckpoint", "set_available_memory"]


@operation
def nop(tensor: Tensor) -> Tensor:
    """The tensor itself, by an operation that is never taken out of the graph.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error for what is none.

    >>> import torch
    >>> nop(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            f"nop must take a torch.tensor argument. {type(tensor)} is not supported."
        )
    return tensor.clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The tensors themselves, marked to be kept for the backward pass and not computed again.

    Everything is kept here, so nothing changes.

    **Arguments**

    - `tensors`: one or more, or one list or tuple of them; ValueError for anything else.

    **Returns**

    A tensor for a tensor, a tuple for several, a list for a list.

    >>> import torch
    >>> recomputationCheckpoint(torch.ones(2))
    tensor([1., 1.])
    >>> recomputationCheckpoint(torch.ones(1), torch.zeros(1))
    (tensor([1.]), tensor([0.]))
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return type(tensors[0])(_checkpoint(tensor) for tensor in tensors[0])
    found = tuple(_checkpoint(tensor) for tensor in tensors)
    return found[0] if len(found) == 1 else found


def _checkpoint(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError("All inputs must be tensors")
    return recomputation_checkpoint(tensor)


@operation
def recomputation_checkpoint(tensor: Tensor) -> Tensor:
    return tensor.clone()


@operation
def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor itself: how much memory the operation that made it may take has no effect here.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error for what is none.
    - `available_memory_proportion`: from 0 to 1, else a ValueError.

    >>> import torch
    >>> set_available_memory(torch.eye(2) @ torch.ones(2), 0.2)
    tensor([1., 1.])
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            "You may only set available memory for torch.tensor values. "
            f"{type(tensor)} is not supported."
        )
    if not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            "set_available_memory: available_memory_proportion must be from 0 to 1, got "
            f"{available_memory_proportion}"
        )
    return tensor.clone()
