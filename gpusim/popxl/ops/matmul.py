"""`matmul`, `matmul_pow2scaled`: matrix products, also of 8-bit floats."""

from __future__ import annotations

from typing import Any

from .. import dtypes
from .._ops import casts, linear
from .._ops.definition import add_op
from ..context import get_ir
from ..tensor import Tensor
from .cast import check_log2_scale

__all__ = ["matmul", "matmul_pow2scaled"]


def matmul(
    lhs: Tensor,
    rhs: Tensor,
    available_memory_proportion: float | None = None,
    output_type: dtypes.dtype | None = None,
    partials_type: dtypes.dtype | None = None,
) -> Tensor:
    """The matrix product, by NumPy's rules for ranks other than two.

    **Arguments**

    - `available_memory_proportion`: an IPU's; it changes nothing here.
    - `output_type`: the result's dtype, by default the inputs'.
    - `partials_type`: `popxl.float16` or `popxl.float32`; here sums are made in float32 or wider
      with both, and rounded once.

    Raises:
        TypeError: for different dtypes.
        ValueError: for shapes that cannot be multiplied, or another `partials_type`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     lhs, rhs = popxl.constant(np.ones((5, 2, 3))), popxl.constant(np.ones((3, 4)))
    ...     popxl.ops.matmul(lhs, rhs)
    Tensor[matmul_out popxl.dtypes.float32 (5, 2, 4)]
    """
    if partials_type is None:
        _check_option(getattr(get_ir().getSessionOptions(), "partialsTypeMatMuls", ""))
    elif partials_type not in (dtypes.float16, dtypes.float32):
        raise ValueError(f"dtype {partials_type} is not valid, must be float16 or float32")
    return add_op(linear.MATMUL, [lhs, rhs], {"output_type": output_type})[0]


def matmul_pow2scaled(
    lhs: Tensor,
    rhs: Tensor,
    log2_scale: Tensor,
    available_memory_proportion: float | None = None,
) -> Tensor:
    """The matrix product of 8-bit floats, times ``2 ** log2_scale``, as float16.

    **Arguments**: `log2_scale`: a scalar of int32, -32 to 31.

    Raises:
        TypeError: for other dtypes.
        ValueError: for a scale that is no scalar, or shapes that cannot be multiplied.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((2, 2)), popxl.float8_143)
    ...     popxl.ops.matmul_pow2scaled(t, t, popxl.constant(1, popxl.int32))
    Tensor[matmul_out popxl.dtypes.float16 (2, 2)]
    """
    if lhs.dtype not in casts.FLOAT8 or rhs.dtype not in casts.FLOAT8:
        raise TypeError(
            "Scaled matmul operands must be of dtype popxl.float8_143 or popxl.float8_152"
        )
    check_log2_scale(log2_scale)
    attributes = {"output_type": dtypes.float16}
    return add_op(linear.MATMUL_POW2SCALED, [lhs, rhs, log2_scale], attributes)[0]


def _check_option(partials_type: Any) -> None:
    if str(partials_type or "").lower() not in ("", "float", "half"):
        raise ValueError(f"str {partials_type} is not valid, must be 'float' or 'half'")
