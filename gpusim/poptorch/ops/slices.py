"""Slices whose start is a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import model_context
from .operation import operation

__all__ = ["dynamic_slice", "dynamic_update"]


@operation
def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Tensor:
    """The elements start, start + step, ... below start + size along a dimension.

    **Arguments**

    - `tensor`: of any shape; it gets gradients.
    - `dim`: the dimension.
    - `start`: an integer tensor of one element.
    - `size`: the range of the slice. In a model it must divide the dimension's size.
    - `step`: at least 1.

    **Raises**

    - IndexError if the slice leaves the tensor.
    - poptorch.Error for arguments of other types, and for sizes and steps out of range.

    >>> import torch
    >>> dynamic_slice(torch.arange(8), 0, torch.tensor(3), 4, 2)
    tensor([3, 5])
    """
    _check_tensor("dynamic_slice must take a torch.tensor input. {} is not supported.", tensor)
    _check_integer("Dimension", dim)
    _check_tensor(
        "Slice start argument to dynamic_slice must be a torch.tensor. {} is not supported.", start
    )
    _check_integer("Size", size)
    _check_integer("Step", step)
    _check_size(size)
    if step < 1:
        raise compiler_error("Slicing step must be at least 1")
    length = tensor.shape[dim]
    if model_context() is not None and length % size:
        raise compiler_error(
            f"The size of the slice ({size}) must be a factor of the slicing dimension ({length})."
        )
    return tensor.index_select(dim, _indices(start.to(tensor.device), size, step))


@operation
def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Replace the slice of a tensor that begins at `start`.

    **Arguments**

    - `input`: of any shape; elements that are not replaced get gradients.
    - `src`: the new slice: of the same dtype, and of the same shape except along `dim`.
    - `dim`: the dimension.
    - `start`: an integer tensor of one element.
    - `size`: the slice's size along that dimension.

    **Returns**

    A new tensor; `input` does not change.

    **Raises**

    - IndexError or RuntimeError if the slice leaves the tensor.
    - poptorch.Error for arguments of other types, dtypes and shapes.


    >>> import torch
    >>> dynamic_update(torch.zeros(5), torch.ones(2), 0, torch.tensor(1), 2)
    tensor([0., 1., 1., 0., 0.])
    """
    _check_tensor("dynamic_update must take a torch.tensor input. {} is not supported.", input)
    _check_integer("Dimension", dim)
    _check_tensor(
        "Slice start argument to dynamic_update must be a torch.tensor. {} is not supported.", start
    )
    _check_tensor(
        "Src argument to dynamic_update must be a torch.tensor. {} is not supported.", src
    )
    _check_integer("Size", size)
    if input.dim() != src.dim():
        raise createPoptorchError(
            f"input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    if input.dtype != src.dtype:
        raise createPoptorchError(
            f"input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})"
        )
    _check_size(size)
    expected = list(input.shape)
    expected[dim] = size
    if list(src.shape) != expected:
        raise createPoptorchError(
            f"dynamic_update: src must have the shape {tuple(expected)}, got {tuple(src.shape)}"
        )
    shape = [1] * input.dim()
    shape[dim] = size
    indices = _indices(start.to(input.device), size, 1).reshape(shape).expand(src.shape)
    return input.scatter(dim, indices, src)


def _indices(start: Tensor, size: int, step: int) -> Tensor:
    if start.is_floating_point() or start.is_complex() or start.dtype == torch.bool:
        raise compiler_error("Expected integer typed start tensor")
    if start.numel() != 1:
        raise compiler_error(
            f"Expected a start tensor of one element, got shape {tuple(start.shape)}"
        )
    return start.reshape(()).long() + torch.arange(0, size, step, device=start.device)


def _check_size(size: int) -> None:
    if size == 0:
        raise compiler_error("The start and end of a slice must be different.")
    if size < 0:
        raise compiler_error(
            "Taking a slice of a tensor with the end less than the start is not supported."
        )


def _check_tensor(text: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise createPoptorchError(text.format(type(value)))


def _check_integer(name: str, value: Any) -> None:
    if not isinstance(value, int):
        raise createPoptorchError(f"{name} must be an integer.")
