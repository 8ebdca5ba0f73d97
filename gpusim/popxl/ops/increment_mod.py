"""`increment_mod`, `increment_mod_`: counting that begins again at a limit."""

from __future__ import annotations

from .._ops import elementwise
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["increment_mod", "increment_mod_"]


def increment_mod(t: Tensor, increment: float, modulus: float) -> Tensor:
    """``(t + increment) % modulus``, in the dtype of `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.increment_mod(popxl.constant([3], popxl.uint32), 1, 4)
    Tensor[incrementmod_out popxl.dtypes.uint32 (1,)]
    """
    attributes = {"increment": increment, "modulus": modulus}
    return add_op(elementwise.INCREMENT_MOD, [t], attributes)[0]


def increment_mod_(t: Tensor, increment: float, modulus: float) -> Tensor:
    """`increment_mod` in place: `t` changes, and the result is the same memory.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.increment_mod_(popxl.variable([3], popxl.uint32), 1, 4)
    Tensor[incrementmodinplace_out popxl.dtypes.uint32 (1,)]
    """
    attributes = {"increment": increment, "modulus": modulus}
    return add_op(elementwise.INCREMENT_MOD_INPLACE, [t], attributes)[0]
