"""The methods of Tensor that add ops: operators, indexing, transpose, reshape, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index as as_index
from types import FunctionType
from typing import Any

import numpy as np

from .. import dtypes
from ..tensor import Tensor, constant
from ..typing_ import is_numbers
from ..utils import to_numpy
from .arithmetic import abs, add, add_, div, fmod, mul, negate, pow, sub
from .copies import detach, detach_, identity, ipu_copy
from .indexing import gather
from .linear import matmul
from .logical import greater, logical_and, logical_not, logical_or, where
from .shapes import flatten, flatten_, reshape, reshape_, squeeze, transpose, transpose_
from .slicing import slice as slice_op
from .slicing import subsample

__all__ = ["Operators", "install"]

Binary = Callable[[Any, Any], Tensor]


def operand(tensor: Tensor, other: Any) -> Tensor | None:
    """The other operand; numbers become a constant of the tensor's dtype. None for other values.

    **Raises**: ValueError: for numbers of zero elements.
    """
    if isinstance(other, Tensor):
        return other
    if not is_numbers(other):
        return None
    numbers = to_numpy(other, tensor.dtype)
    if numbers.size == 0:
        raise ValueError(
            "The value has 0 elements - this is most likely a mistake. If not, initialise the "
            "tensor explicitly before using in an operation. For example: `popxl.variable([])`. "
            f"Type: {type(other)}. Value: {other}"
        )
    return constant(numbers, tensor.dtype)


def operator(function: Binary) -> Binary:
    """A method for an operator whose tensor is on the left."""

    def apply(self: Tensor, other: Any) -> Tensor:
        right = operand(self, other)
        return NotImplemented if right is None else function(self, right)

    return apply


def reflected(function: Binary) -> Binary:
    """A method for an operator whose tensor is on the right."""

    def apply(self: Tensor, other: Any) -> Tensor:
        left = operand(self, other)
        return NotImplemented if left is None else function(left, self)

    return apply


class Operators:
    """The methods that `install` gives to Tensor. For a type checker they are its base class."""

    @property
    def T(self: Any) -> Tensor:
        """The tensor with its axes reversed."""
        return transpose(self)

    @property
    def T_(self: Any) -> Tensor:
        """The tensor with its axes reversed, as a view."""
        return transpose_(self)

    def transpose(self: Any, permutation: Iterable[int] | None = None) -> Tensor:
        """Permute the axes; by default reverse them."""
        return transpose(self, permutation)

    def transpose_(self: Any, permutation: Iterable[int] | None = None) -> Tensor:
        """Permute the axes, as a view; by default reverse them."""
        return transpose_(self, permutation)

    def reshape(self: Any, shape: Iterable[int]) -> Tensor:
        """Change the shape; one axis may be -1."""
        return reshape(self, shape)

    def reshape_(self: Any, shape: Iterable[int]) -> Tensor:
        """Change the shape, as a view; one axis may be -1."""
        return reshape_(self, shape)

    def flatten(self: Any) -> Tensor:
        """Merge all axes into one."""
        return flatten(self)

    def flatten_(self: Any) -> Tensor:
        """Merge all axes into one, as a view."""
        return flatten_(self)

    def detach(self: Any) -> Tensor:
        """Copy the values and stop the gradient."""
        return detach(self)

    def detach_(self: Any) -> Tensor:
        """Stop the gradient, as a view."""
        return detach_(self)

    def diag(self: Any) -> Tensor:
        """The diagonal of a matrix; ValueError for other ranks."""
        if self.rank != 2:
            raise ValueError("Diag expected a 2d tensor.")
        count = min(self.shape)
        return subsample(flatten(self[:count, :count]), count + 1)

    def copy_to_ipu(self: Any, destination: int, source: int | None = None) -> Tensor:
        """Copy the tensor to another IPU of the replica."""
        return ipu_copy(self, destination, source)

    def __getitem__(self: Any, key: Any) -> Tensor:
        """`t[key]`: integers and slices, also several; an array or tensor of integers; or a mask.

        A mask, a bool tensor or array, gives `t` with zeros where it is false: shapes cannot depend
        on values.

        **Raises**:

        - TypeError: for any other key.
        - IndexError: for an integer out of range, or too many of them.
        """
        if isinstance(key, (list, np.ndarray)) and np.asarray(key).dtype.kind in "biu":
            key = constant(np.asarray(key))
        if isinstance(key, Tensor) and key.dtype is dtypes.bool:
            return where(key, self, constant(0, self.dtype))
        if isinstance(key, Tensor) and key.dtype.is_int:
            return gather(self, key)
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(each, slice) or is_integer(each) for each in keys):
            raise TypeError(
                "Only integers, slices (`:`), integer tensors and boolean tensors are valid "
                f"indices. Not a valid Type: {type(key)}. Value: {key}."
            )
        return by_slices(self, keys)

    def __neg__(self: Any) -> Tensor:
        return negate(self)

    def __invert__(self: Any) -> Tensor:
        return logical_not(self)

    def __abs__(self: Any) -> Tensor:
        return abs(self)

    __add__, __radd__ = operator(add), reflected(add)
    __sub__, __rsub__ = operator(sub), reflected(sub)
    __mul__, __rmul__ = operator(mul), reflected(mul)
    __truediv__, __rtruediv__ = operator(div), reflected(div)
    __matmul__, __rmatmul__ = operator(matmul), reflected(matmul)
    __pow__, __rpow__ = operator(pow), reflected(pow)
    __mod__, __rmod__ = operator(fmod), reflected(fmod)
    __and__, __rand__ = operator(logical_and), reflected(logical_and)
    __or__, __ror__ = operator(logical_or), reflected(logical_or)
    __gt__, __lt__ = operator(greater), reflected(greater)
    __iadd__ = operator(add_)


def is_integer(value: Any) -> bool:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def by_slices(t: Tensor, keys: tuple[Any, ...]) -> Tensor:
    """One slice op for all keys, then a squeeze of the axes with an integer."""
    if len(keys) > t.rank:
        raise IndexError(f"{len(keys)} indices are too many for {t}")
    bounds: list[tuple[int | None, int | None, int | None]] = []
    dropped: list[int] = []
    for axis, key in enumerate(keys):
        if isinstance(key, slice):
            bounds.append((key.start, key.stop, key.step))
            continue
        size, position = t.shape[axis], as_index(key)
        if not -size <= position < size:
            raise IndexError(f"index {position} is out of range for axis {axis} of {t}")
        bounds.append((position % size, position % size + 1, 1))
        dropped.append(axis)
    if not dropped and all(key == slice(None) for key in keys):
        return identity(t)
    starts, stops, steps = (list(each) for each in zip(*bounds, strict=True))
    cut = slice_op(t, starts, stops, steps, list(range(len(keys))))
    return squeeze(cut, dropped) if dropped else cut


def copy_from_ipu(self: Tensor, dst: int, src: int) -> Tensor:
    """Copy the tensor to another IPU. It is on no IPU by itself, so `src` is required."""
    return ipu_copy(self, dst, src)


def install(tensor: type[Tensor], *sources: type[Tensor]) -> None:
    """Give a class the methods of `Operators`, and classes of tensors that no op makes theirs."""
    for name, member in vars(Operators).items():
        if isinstance(member, (FunctionType, property)):
            setattr(tensor, name, member)
    for source in sources:  # with the signature that PopXL has for them
        source.copy_to_ipu = copy_from_ipu  # type: ignore[assignment, method-assign]
