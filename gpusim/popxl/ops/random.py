"""`random_uniform`, `random_normal`: random numbers from a seed tensor."""

from __future__ import annotations

from collections.abc import Iterable

from .. import dtypes
from .._ops import random
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["random_normal", "random_uniform"]


def random_uniform(
    seed_tensor: Tensor,
    shape: Iterable[int],
    low: float = 0.0,
    high: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Numbers that are equally likely between two limits.

    **Arguments**

    - `seed_tensor`: (2,) of uint32; replicas with equal seeds draw the same numbers.
    - `low`, `high`: the least number, and the one that none reaches.
    - `dtype`: float16 or float32.

    Raises:
        ValueError: for another seed tensor.
        TypeError: for another dtype.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.random_uniform(popxl.constant([42, 7], popxl.uint32), (2, 3))
    Tensor[randomuniform_out popxl.dtypes.float32 (2, 3)]
    """
    attributes = {"shape": tuple(shape), "low": low, "high": high, "dtype": dtype}
    return add_op(random.RANDOM_UNIFORM, [seed_tensor], attributes)[0]


def random_normal(
    seed_tensor: Tensor,
    shape: Iterable[int],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: dtypes.dtype = dtypes.float32,
) -> Tensor:
    """Numbers of a normal distribution.

    **Arguments**: `mean`, `std`: its mean and standard deviation; the others and the errors are
    those of `random_uniform`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.random_normal(seed, (2, 3), dtype=popxl.float16)
    Tensor[randomnormal_out popxl.dtypes.float16 (2, 3)]
    """
    attributes = {"shape": tuple(shape), "mean": mean, "std": std, "dtype": dtype}
    return add_op(random.RANDOM_NORMAL, [seed_tensor], attributes)[0]
