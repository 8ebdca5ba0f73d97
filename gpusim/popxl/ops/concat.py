"""`concat`, `concat_`: tensors one after the other along an axis."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import shapes
from .._ops.definition import Definition, add_op
from ..tensor import Tensor
from .utils import one_axis

__all__ = ["concat", "concat_"]


def concat(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """The tensors one after the other along an axis.

    **Arguments**: `ts`: tensors of one dtype, whose shapes differ in `axis` alone.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that differ elsewhere, no tensors, or an axis that they have not.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.concat([popxl.constant([1.0, 2.0]), popxl.constant([3.0])])
    Tensor[concat_out popxl.dtypes.float32 (3,)]
    """
    return _concat(shapes.CONCAT, ts, axis)


def concat_(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """The tensors one after the other, as a view: what changes it changes them.

    Arguments and errors as `concat`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.concat_([popxl.constant([[1.0]]), popxl.constant([[3.0]])], axis=1)
    Tensor[concatinplace_out popxl.dtypes.float32 (1, 2)]
    """
    return _concat(shapes.CONCAT_INPLACE, ts, axis)


def _concat(definition: Definition, ts: Iterable[Tensor], axis: int) -> Tensor:
    tensors = list(ts)
    if not tensors:
        raise ValueError("concat needs one tensor at least")
    types_ = [t.dtype for t in tensors]
    if any(dtype is not types_[0] for dtype in types_):
        raise TypeError(f"All inputs to a concat operation must have the same type: {types_}")
    return add_op(definition, tensors, {"axis": one_axis(tensors[0], axis)})[0]
