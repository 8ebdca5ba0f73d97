"""`onehot`: classes as rows of zeros with a one."""

from __future__ import annotations

import math

from .._ops import shapes
from .._ops.definition import add_op
from ..tensor import Constant, Tensor

__all__ = ["onehot"]


def onehot(t: Tensor, num_classes: Tensor, values: Tensor, axis: int) -> Tensor:
    """Each class of `t` as a row along a new axis: one value in its place, another elsewhere.

    **Arguments**

    - `t`: integers; negative classes count from the last.
    - `num_classes`: the length of the new axis, a constant.
    - `values`: (2,): the value elsewhere and that of the class, as ONNX's OneHot has them.
    - `axis`: where the new axis goes; -1 is behind all others.

    Raises:
        TypeError: for a number of classes that is no constant.
        ValueError: for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     classes = popxl.constant(3, popxl.int32)
    ...     values = popxl.constant([0.0, 1.0])
    ...     popxl.ops.onehot(popxl.constant([0, 2], popxl.int32), classes, values, axis=-1)
    Tensor[onehot_out popxl.dtypes.float32 (2, 3)]
    """
    if not isinstance(num_classes, Constant) or math.prod(num_classes.shape) != 1:
        raise TypeError(
            f"num_classes decides a shape, so it must be a constant of one element, not "
            f"{num_classes}"
        )
    attributes = {"axis": axis, "num_classes": int(num_classes._data.item())}
    return add_op(shapes.ONE_HOT, [t, num_classes, values], attributes)[0]
