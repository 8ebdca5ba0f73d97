"""`batch_norm_inference`: the norm of a batch, by statistics that are given."""

from __future__ import annotations

from .._ops import normalisation
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["batch_norm_inference"]


def batch_norm_inference(
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float = 1e-05,
    momentum: float = 0.9,
) -> Tensor:
    """``scale * (t - mean) / sqrt(var + epsilon) + bias``, for each channel.

    **Arguments**

    - `t`: (N, C, ...), the channels on axis 1.
    - `scale`, `bias`, `mean`, `var`: one element for each channel.
    - `momentum`: of running statistics, which inference does not change.

    ValueError for other shapes. Gradients go to `t`, `scale` and `bias`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     ones = popxl.constant(np.ones(3, np.float32))
    ...     t = popxl.constant(np.zeros((2, 3, 4), np.float32))
    ...     popxl.ops.batch_norm_inference(t, ones, ones, ones, ones)
    Tensor[batchnormalization_out popxl.dtypes.float32 (2, 3, 4)]
    """
    attributes = {"epsilon": float(epsilon), "momentum": float(momentum)}
    return add_op(normalisation.BATCH_NORM, [t, scale, bias, mean, var], attributes)[0]
