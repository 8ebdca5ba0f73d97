"""The operands of calls: tensors' memory as what is read and what is written, in one order.

A call takes tensors by their memory, whose order may be another than that of their elements, or by
their elements: `arguments.Layout` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....twins import HALVES
from ..memory import Array, array_of, bits_of, kind_of
from .folds import multiplied

__all__ = [
    "addends",
    "copied",
    "in_memory",
    "in_order_of_memory",
    "member_of",
    "packed",
    "result_like",
]


def packed(tensor: Tensor, what: str) -> Array:
    """A tensor's memory in its own order, as engines fold it; complex numbers as pairs.

    **Raises**: TypeError for a tensor with gaps: NCCL refuses it, gloo takes what is in them.
    """
    return _as_pairs(_without_gaps(array_of(tensor, what), what))


def addends(tensor: Tensor, what: str) -> Array:
    """A tensor's elements in logical order, as one block; complex numbers as pairs.

    It is a copy if the tensor is not contiguous.
    """
    array = array_of(tensor, what)
    return _as_pairs(array if array.flags.c_contiguous else array.copy(order="C"))


def in_memory(tensor: Tensor, what: str) -> Array:
    """A tensor's memory as bits, flat and in its own order. **Raises**: as `packed`."""
    return _without_gaps(bits_of(tensor, what), what).reshape(-1)


def in_order_of_memory(tensor: Tensor, what: str) -> tuple[Array, list[int] | None]:
    """A tensor as one block with the order of memory of its clone; complex numbers as pairs.

    It is a copy if the tensor has gaps, or repeats elements.

    **Returns**: the block, and its axes in this order; None if this is the logical order.
    """
    array = array_of(tensor, what)
    if array.flags.c_contiguous:
        return _as_pairs(array), None
    axes = _axes_of_clone(tensor)
    block = array.transpose(axes)
    return _as_pairs(block if block.flags.c_contiguous else block.copy(order="C")), axes


def _axes_of_clone(tensor: Tensor) -> list[int]:
    """The axes in the order of memory that torch gives to a clone, slowest first.

    An axis of stride 0 stays where it is between the others: torch sorts by insertion.
    """
    strides, shape = tensor.stride(), tensor.shape
    axes = list(reversed(range(tensor.dim())))
    for start in range(1, len(axes)):
        at = start
        for other in reversed(range(start)):
            one, two = axes[other], axes[at]
            if not strides[one] or not strides[two]:
                continue
            if (strides[one], shape[one]) > (strides[two], shape[two]):
                axes[other], axes[at] = two, one
                at = other
            elif strides[one] < strides[two]:
                break
    return axes[::-1]


def copied(arrays: Sequence[Array]) -> list[Array]:
    """Copies with the same order of memory."""
    return [array.copy(order="K") for array in arrays]


def result_like(target: Array, result: Array) -> Array:
    """A result of pairs as complex numbers, if the target has them; in the target's shape."""
    if target.dtype.kind == "c":
        whole = result.reshape(*target.shape, 2)
        if not whole.flags.c_contiguous:
            whole = whole.copy(order="C")
        return whole.view(target.dtype).reshape(target.shape)
    return result.reshape(target.shape)


def _as_pairs(array: Array) -> Array:
    if array.dtype.kind != "c":
        return array
    return array.reshape(*array.shape, 1).view(array.real.dtype)


def _without_gaps(array: Array, what: str) -> Array:
    """The array with its axes in the order of its memory."""
    if not array.flags.c_contiguous:
        axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        result = array.transpose(axes)
        if not result.flags.c_contiguous:
            steps = tuple(stride // array.itemsize for stride in array.strides)
            raise TypeError(
                f"{what}: expected a tensor without gaps in its memory, got shape "
                f"{list(array.shape)} with strides {steps}; use contiguous()"
            )
        return result
    return array


def member_of(tensor: Tensor, array: Array, op: Any, name: str, what: str) -> Array:
    """The array of a tensor as what is added: for a PREMUL_SUM a copy, times the rank's factor.

    **Raises**: TypeError as NCCL's backend: for other dtypes, and for a factor of another one; and
    for an operator that complex numbers lack.
    """
    if tensor.is_complex() and name not in ("SUM", "AVG"):
        raise TypeError(f"{what}: ReduceOp.{name} is not defined for {tensor.dtype}")
    if name != "PREMUL_SUM":
        return array
    factor = op.__getstate__()[1]  # an attribute only from PyTorch 2.13 on
    if array.dtype.name not in HALVES:
        raise TypeError(f"{what}: PREMUL_SUM is for {', '.join(HALVES)}; got {tensor.dtype}")
    if isinstance(factor, Tensor):
        if factor.dtype != tensor.dtype:
            raise TypeError(
                f"{what}: expected a factor of PREMUL_SUM that is a number, or one element of "
                f"{tensor.dtype}; got {kind_of(factor)!r}"
            )
        factor = factor.item()
    return multiplied(array, factor)
