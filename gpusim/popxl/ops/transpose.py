"""`transpose`, `transpose_`: the axes of a tensor in another order."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["transpose", "transpose_"]


def transpose(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """The axes of `t` in another order, by default the reverse one.

    ValueError for what is no permutation of the axes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.transpose(popxl.constant([[1.0, 2.0, 3.0]]))
    Tensor[transpose_out popxl.dtypes.float32 (3, 1)]
    """
    return add_op(shapes.TRANSPOSE, [t], {"permutation": _order(t, permutation)})[0]


def transpose_(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """`transpose` as a view: what changes it changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.transpose_(popxl.constant([[1.0, 2.0, 3.0]]), (1, 0))
    Tensor[transposeinplace_out popxl.dtypes.float32 (3, 1)]
    """
    return add_op(shapes.TRANSPOSE_INPLACE, [t], {"permutation": _order(t, permutation)})[0]


def _order(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    if permutation is None:
        return tuple(range(t.rank))[::-1]
    order = tuple(axis + t.rank if axis < 0 else axis for axis in permutation)
    found = tuple(axis for axis in order if axis >= t.rank)
    if found:
        raise ValueError(
            f"Values in permutation must be less than the tensor's rank {t.rank}. Found {found}"
        )
    return order
