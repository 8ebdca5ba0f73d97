"""`create_random_seed`, `split_random_seed`: seeds made of seeds."""

from __future__ import annotations

from .. import dtypes
from .._ops import random
from .._ops.definition import add_op
from ..tensor import Tensor, constant

__all__ = ["create_random_seed", "split_random_seed"]


def create_random_seed(seed: Tensor, modifier: Tensor) -> Tensor:
    """A seed made of another and a number: other numbers give unrelated seeds.

    **Arguments**

    - `seed`: (2,) of uint32.
    - `modifier`: a scalar integer.

    ValueError for others.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     seed = popxl.constant([42, 7], popxl.uint32)
    ...     popxl.ops.create_random_seed(seed, popxl.constant(3, popxl.uint32))
    Tensor[modified_seed popxl.dtypes.uint32 (2,)]
    """
    if seed.shape != (2,) or seed.dtype is not dtypes.uint32:
        raise ValueError(f"seed Tensor must be shape=(2,) dtype=uint32. Provided {seed}")
    made = add_op(random.MODIFY_RANDOM_SEED, [seed, modifier], output_names=["modified_seed"])
    return made[0]


def split_random_seed(seed: Tensor, n: int = 2) -> tuple[Tensor, ...]:
    """`n` unrelated seeds made of one; ValueError where that is no seed tensor.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     len(popxl.ops.split_random_seed(popxl.constant([42, 7], popxl.uint32), 3))
    3
    """
    return tuple(create_random_seed(seed, constant(i, dtypes.uint32)) for i in range(n))
