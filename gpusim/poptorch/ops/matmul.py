"""Matrix products that PopTorch computes in several parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..enums import MatMulSerializationMode
from ..poptorch_core import createPoptorchError
from .operation import operation

__all__ = ["serializedMatMul"]


@operation
def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """The product of two matrices. It is one product here, with the rounding of torch.matmul.

    **Arguments**

    - `lhs`, `rhs`: (m, n) and (n, p), or batches of them.
    - `mode`: what would be split: m (InputChannels), n (ReducingDim), p (OutputChannels), or
      nothing (Disabled).
    - `factor`: into how many parts, which must divide that dimension; 0 is one part. poptorch.Error
      for others.
    - `keep_precision`: in which dtype partial products would be added. There are none.

    AssertionError for a mode, factor or keep_precision of another type.

    >>> import torch
    >>> lhs, rhs = torch.ones(2, 4), torch.arange(8.0).reshape(4, 2)
    >>> serializedMatMul(lhs, rhs, MatMulSerializationMode.ReducingDim, factor=2)
    tensor([[12., 16.],
            [12., 16.]])
    """
    assert isinstance(keep_precision, bool), f"keep_precision={keep_precision!r} is no bool"
    assert isinstance(factor, int), f"factor={factor!r} is no integer"
    assert isinstance(mode, MatMulSerializationMode), f"mode={mode!r} is no MatMulSerializationMode"
    if mode is not MatMulSerializationMode.Disabled:
        _check_factor(lhs, rhs, mode, factor)
    return torch.matmul(lhs, rhs)


def _check_factor(lhs: Tensor, rhs: Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise createPoptorchError(
            f"serializedMatMul needs matrices, got shapes {tuple(lhs.shape)} and {tuple(rhs.shape)}"
        )
    split = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }[mode]
    if factor < 0 or (factor and split % factor):
        raise createPoptorchError(
            f"serializedMatMul: factor must divide the {split} of the dimension that {mode} splits,"
            f" got {factor}"
        )
