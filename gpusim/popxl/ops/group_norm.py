"""`group_norm`, `layer_norm`: norms of a sample's channels."""

from __future__ import annotations

from .._ops import normalisation
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["group_norm", "layer_norm"]


def group_norm(
    t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-05
) -> Tensor:
    """Each group of a sample's channels with mean 0 and variance 1, times `weight`, plus `bias`.

    **Arguments**

    - `t`: (N, C, ...), the channels on axis 1.
    - `weight`, `bias`: (C,).
    - `num_groups`: into how many groups of neighbours the channels are split.
    - `eps`: added to the variance.

    Shape and dtype as `t`; statistics are made in float32. ValueError for other shapes, or groups
    that the channels do not split into.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, ones = popxl.constant(np.zeros((2, 6))), popxl.constant(np.ones(6))
    ...     popxl.ops.group_norm(t, ones, ones, num_groups=3)
    Tensor[groupnormalization_out popxl.dtypes.float32 (2, 6)]
    """
    attributes = {"num_groups": num_groups, "epsilon": float(eps)}
    return add_op(normalisation.GROUP_NORM, [t, weight, bias], attributes)[0]


def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-05) -> Tensor:
    """`group_norm` with all channels in one group.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, ones = popxl.constant(np.zeros((2, 6))), popxl.constant(np.ones(6))
    ...     popxl.ops.layer_norm(t, ones, ones)
    Tensor[groupnormalization_out popxl.dtypes.float32 (2, 6)]
    """
    return group_norm(t, weight, bias, num_groups=1, eps=eps)
