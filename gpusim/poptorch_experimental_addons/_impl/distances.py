"""distance_matrix: the distances between all vectors of one set and all of another."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distance_matrix"]


def distance_matrix(tensor1: Tensor, tensor2: Tensor, p: int) -> Tensor:
    """The p-norms of all differences, which are never in memory all at once.

    Args:
        tensor1: M vectors (M, K) of a floating-point dtype.
        tensor2: N vectors (N, K) of the same.
        p: 1 or 2.

    Returns:
        (M, N) in their dtype; float16 and bfloat16 are computed in float32 and rounded once. The
        gradient between vectors that are equal is 0, and for p = 1 so is that of equal components.

    Raises:
        NotImplementedError: for another p.
        ValueError: for tensors of other dimensions, or vectors of different lengths.
        TypeError: for dtypes that differ, or are no floating-point ones.

    Example:
        >>> import torch
        >>> import gpusim.poptorch_experimental_addons as pea
        >>> a, b = torch.tensor([[0.0, 0.0], [3.0, 0.0]]), torch.tensor([[3.0, 4.0]])
        >>> pea.distance_matrix(a, b, p=2)
        tensor([[5.],
                [4.]])
        >>> pea.distance_matrix(a, b, p=1)
        tensor([[7.],
                [4.]])
    """
    if p not in (1, 2):
        raise NotImplementedError("distance_matrix implemented only for p=1,2")
    if tensor1.dim() != 2 or tensor2.dim() != 2:
        raise ValueError(
            f"distance_matrix requires 2-dimensional inputs `tensor1` (dim = {tensor1.dim()}) "
            f"and `tensor2` (dim = {tensor2.dim()})"
        )
    if tensor1.shape[-1] != tensor2.shape[-1]:
        raise ValueError(
            "distance_matrix requires rightmost dimension of same size for `tensor1` "
            f"({tensor1.shape[-1]}) and `tensor2` ({tensor2.shape[-1]})"
        )
    dtype = tensor1.dtype
    if dtype != tensor2.dtype or not dtype.is_floating_point:
        raise TypeError(
            "distance_matrix requires one floating-point dtype for `tensor1` and `tensor2`, got "
            f"{dtype} and {tensor2.dtype}"
        )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # By differences, as on an IPU; by products (the default for many vectors) it would cancel.
    exact = "donot_use_mm_for_euclid_dist"
    found = torch.cdist(tensor1.to(wide), tensor2.to(wide), p=float(p), compute_mode=exact)
    return found.to(dtype)
