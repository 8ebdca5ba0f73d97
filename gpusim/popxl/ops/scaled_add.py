"""`scaled_add`, `scaled_add_`: sums of multiples."""

from __future__ import annotations

from typing import Any

from .._ops import elementwise
from .._ops.definition import Definition, add_op
from ..tensor import Tensor

__all__ = ["scaled_add", "scaled_add_"]


def scaled_add(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """``a * X + b * Y``, computed in float32 or wider, in the dtype of `X`.

    **Arguments**

    - `X`, `Y`: of one shape; the dtypes may differ.
    - `a`, `b`: numbers, or scalar tensors.

    ValueError for different shapes. Gradients go to `X` and `Y`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.scaled_add(popxl.constant([1.0]), popxl.constant([2.0]), b=0.5)
    Tensor[scaledadd_out popxl.dtypes.float32 (1,)]
    """
    return _scaled(elementwise.SCALED_ADD, X, Y, a, b)


def scaled_add_(X: Tensor, Y: Tensor, a: float | Tensor = 1.0, b: float | Tensor = 1.0) -> Tensor:
    """`scaled_add` in place: `X` changes, and the result is the same memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.scaled_add_(popxl.variable([1.0]), popxl.constant([2.0]), b=0.5)
    Tensor[scaledaddlhsinplace_out popxl.dtypes.float32 (1,)]
    """
    return _scaled(elementwise.SCALED_ADD_INPLACE, X, Y, a, b)


def _scaled(
    definition: Definition, X: Tensor, Y: Tensor, a: float | Tensor, b: float | Tensor
) -> Tensor:
    inputs, attributes = [X, Y], dict[str, Any]()
    for name, factor in (("a", a), ("b", b)):
        if isinstance(factor, Tensor):
            inputs.append(factor)
            attributes[name] = None
        else:
            attributes[name] = float(factor)
    return add_op(definition, inputs, attributes)[0]
