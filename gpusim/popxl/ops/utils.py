"""What functions that make ops share: checks of their tensors, and arguments in one form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._ops.stacked import normal_axes
from ..dtypes import dtype
from ..errors import UndefinedValue
from ..graph import Graph
from ..tensor import Tensor

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
    if t.dtype is data_type:
        return t
    from .cast import cast

    return cast(t, data_type)


def check_in_graph(graph: Graph, *args: Tensor, **tensors: Tensor) -> None:
    """Refuse what is no tensor of `graph`; the tensors are given by their arguments' names.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for a tensor of another graph.
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
    """Refuse tensors that lie on different IPUs or tile sets, as far as it is known; ValueError."""
    if args:
        raise Exception("Internal error: please specify all tensors as keyword arguments.")
    for what, attribute in (("IPUs", "ipu"), ("tile sets", "tile_set")):
        known = [(name, _place(tensor, attribute)) for name, tensor in tensors.items()]
        known = [(name, place) for name, place in known if place is not None]
        for name, place in known[1:]:
            first, expected = known[0]
            if place != expected:
                raise ValueError(
                    f"The input tensors `{first}` and `{name}` are located on different {what}: "
                    f"{expected} != {place}."
                )


def _place(tensor: Tensor, attribute: str) -> Any:
    try:
        return getattr(tensor, attribute)
    except UndefinedValue:
        return None


def handle_negative_axis(t: Tensor, axis: int) -> int:
    """The axis counted from the front, also where a negative one counts from the end.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     handle_negative_axis(popxl.constant([[1.0]]), -1)
    1
    """
    return axis if axis >= 0 else len(t.shape) + axis


def reduced_axes(axis: int | Iterable[int] | None, keepdims: bool) -> dict[str, Any]:
    """The attributes of a reduction."""
    axes = axis if axis is None or isinstance(axis, int) else tuple(axis)
    return {"axes": axes, "keepdims": bool(keepdims)}


def one_axis(t: Tensor, axis: int) -> int:
    """An axis of `t` counted from the front; ValueError where `t` has none of that number."""
    return normal_axes(axis, t.rank)[0]


# PopART's bindings want objects for values that may be missing; here they are their own.


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
