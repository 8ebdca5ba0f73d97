"""Checks of tensors and conversions of arguments that the functions of ops share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._definition import check_same
from ..dtypes import dtype
from ..errors import UndefinedValue
from ..graph import Graph
from ..tensor import Tensor, TensorSpec
from ._stacked import normal_axes
from .casts import cast

__all__ = [
    "cast_if_needed",
    "check_in_graph",
    "check_tensor_ipu_and_tile_set",
    "convert_optional_dtype",
    "convert_optional_float",
    "convert_optional_int",
    "convert_optional_int64_list",
    "handle_negative_axis",
]


def cast_if_needed(t: Tensor, data_type: dtype) -> Tensor:
    """`t` itself if it has the dtype, else a cast of it."""
    return t if t.dtype is data_type else cast(t, data_type)


def check_in_graph(graph: Graph, *args: Tensor, **tensors: Tensor) -> None:
    """Check that values are tensors of `graph`; keywords are the names for messages.

    **Raises**:

    - TypeError: if a value is not a Tensor.
    - ValueError: if a tensor is in another graph.
    """
    if args:
        raise Exception("Internal error: please specify all tensors as keyword arguments.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"The input `{name}` is not a Tensor. Type: {type(tensor)}. Value: {tensor}."
            )
        if tensor not in graph:
            raise ValueError(f"The input tensor `{name}` is not in the current Graph {graph.name}.")


def check_tensor_ipu_and_tile_set(*args: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError if tensors are known to lie on different IPUs or tile sets."""
    if args:
        raise Exception("Internal error: please specify all tensors as keyword arguments.")
    for what, attribute in (("IPUs", "ipu"), ("tile sets", "tile_set")):
        check_same(what, [(name, _place(each, attribute)) for name, each in tensors.items()])


def _place(tensor: Tensor, attribute: str) -> Any:
    try:
        return getattr(tensor, attribute)
    except UndefinedValue:
        return None


def handle_negative_axis(t: Tensor, axis: int) -> int:
    """The axis counted from the front; a negative axis counts from the end.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     handle_negative_axis(popxl.constant([[1.0]]), -1)
    1
    """
    return axis if axis >= 0 else len(t.shape) + axis


def one_axis(t: Tensor, axis: int) -> int:
    """The axis counted from the front; ValueError if `t` has no such axis."""
    return normal_axes(axis, t.rank)[0]


def check_integers(spec: TensorSpec, name: str = "indices") -> None:
    """Raise TypeError if a tensor of indices does not hold integers."""
    if not spec.dtype.is_int:
        raise TypeError(f"{name} must be integers, but they are {spec.dtype.name}")


# PopART's bindings need objects for optional values; here a value stands for itself.


def convert_optional_float(v: float | None) -> float | None:
    """A number as float; None stays None."""
    return None if v is None else float(v)


def convert_optional_int(v: int | None) -> int | None:
    """A number as int; None stays None."""
    return None if v is None else int(v)


def convert_optional_dtype(dt: dtype | None) -> dtype | None:
    """The dtype, or None."""
    return dt


def convert_optional_int64_list(l: Sequence[int] | None) -> list[int] | None:  # noqa: E741  PopXL's name
    """Numbers as a list of ints; None stays None."""
    return None if l is None else [int(number) for number in l]
