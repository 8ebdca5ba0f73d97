"""Block-sparse matrices: (row blocks, column blocks, rows, columns) in torch's COO format, with the
first two dimensions sparse.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch.private import disable_modes

__all__ = [
    "StaticSparseLinear",
    "StaticSparseMatrix",
    "block_coo_spmm",
    "block_coo_spmm_gs",
    "block_coo_spmm_ipu",
    "block_coo_to_dense",
    "block_coo_transpose",
    "magnitude_prune",
]

MODES = ("sparse_dense", "dense_sparse")


def block_coo_transpose(tensor: Tensor) -> Tensor:
    """The transpose of a block-sparse matrix.

    **Arguments**:

    - `tensor`: sparse (row blocks, column blocks, rows, columns), of 2 sparse dimensions.

    **Returns**: Sparse (column blocks, row blocks, columns, rows), coalesced.

    >>> import torch
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> blocks = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> size = (2, 3, 2, 2)
    >>> matrix = torch.sparse_coo_tensor([[0], [2]], blocks, size, check_invariants=True)
    >>> pea.sparse.block_coo_to_dense(pea.sparse.block_coo_transpose(matrix))[4:]
    tensor([[1., 3., 0., 0.],
            [2., 4., 0., 0.]])
    """
    return tensor.permute(1, 0, 3, 2).coalesce()


def block_coo_to_dense(tensor: Tensor) -> Tensor:
    """The dense array of a block-sparse one.

    **Arguments**:

    - `tensor`: sparse, with n sparse dimensions for the blocks and n dense ones inside a block.

    **Returns**: A tensor of n dimensions.

    **Raises**:

    - ValueError: if the numbers of dense and sparse dimensions differ.
    """
    rank = tensor.sparse_dim()
    if rank != tensor.dense_dim():
        raise ValueError(
            f"Block COO requires sparse_dim ({rank}) == dense_dim ({tensor.dense_dim()})"
        )
    together = [axis for block in range(rank) for axis in (block, rank + block)]
    shape = [tensor.shape[axis] * tensor.shape[rank + axis] for axis in range(rank)]
    return tensor.to_dense().permute(together).reshape(shape)


def block_coo_spmm(sparse: Tensor, dense: Tensor, mode: str) -> Tensor:
    """Multiply a block-sparse and a dense matrix.

    **Arguments**:

    - `sparse`: coalesced, (row blocks, column blocks, rows, columns).
    - `dense`: a matrix.
    - `mode`: "sparse_dense" for sparse @ dense, "dense_sparse" for dense @ sparse.

    **Returns**: The dense product, differentiable with respect to `dense` and the blocks' values.

    **Raises**:

    - ValueError: for another mode or layout, or sizes that do not match.

    >>> import torch
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> blocks = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    >>> size = (1, 2, 2, 2)  # a row of two blocks; the first is zero
    >>> matrix = torch.sparse_coo_tensor([[0], [1]], blocks, size, check_invariants=True)
    >>> pea.sparse.block_coo_spmm(matrix.coalesce(), torch.eye(4), "sparse_dense")
    tensor([[0., 0., 1., 2.],
            [0., 0., 3., 4.]])
    """
    return block_coo_spmm_gs(sparse, dense, mode)


def block_coo_spmm_gs(sparse: Tensor, dense: Tensor, mode: str) -> Tensor:
    """As `block_coo_spmm`: gathers rows, multiplies them by blocks, and scatters the sums."""
    if sparse.layout != torch.sparse_coo:
        raise ValueError(f"Expected sparse_coo `lhs`, actual layout: {sparse.layout}")
    if mode not in MODES:
        raise ValueError("Expected block_coo_spmm_gs mode either 'sparse_dense' or 'dense_sparse'")
    if mode == "dense_sparse":
        with _computed_now():
            sparse = block_coo_transpose(sparse)
        return block_coo_spmm_gs(sparse, dense.T, "sparse_dense").T
    blocks_out, blocks_in, block_out, block_in = sparse.shape
    length, count = dense.shape
    if length != blocks_in * block_in:
        raise ValueError(
            f"Block sparse input size ({blocks_in} blocks * {block_in}) does not match dense "
            f"input size ({length})"
        )
    with _computed_now():
        (to, source), values = sparse.indices().clone(), sparse.values().clone()  # no views of it
    products = values @ dense.reshape(blocks_in, block_in, count)[source]
    out = products.new_zeros(blocks_out, block_out, count).index_add(0, to, products)
    return out.reshape(blocks_out * block_out, count)


def _computed_now() -> AbstractContextManager[Any]:
    """Compute sparse matrices during a trace, as constants: graphs have no sparse tensors."""
    return disable_modes()


def block_coo_spmm_ipu(sparse: Tensor, dense: Tensor, mode: str) -> Tensor:
    """As `block_coo_spmm`, with the restrictions of an IPU. It runs on any device here.

    **Raises**:

    - ValueError: also for blocks that are not square, or another number of dimensions.
    """
    if mode not in MODES:
        raise ValueError("Expected block_coo_spmm_ipu mode either 'sparse_dense' or 'dense_sparse'")
    if sparse.layout != torch.sparse_coo:
        raise ValueError(
            "block_coo_spmm_ipu requires `sparse` to be torch.sparse_coo_tensor, actual "
            f"{sparse.layout}"
        )
    if (sparse.sparse_dim(), sparse.dense_dim()) != (2, 2):
        raise ValueError(
            "block_coo_spmm_ipu requires `sparse` to be 2D block sparse, with "
            f"sparse_dim ({sparse.sparse_dim()}) == 2, dense_dim ({sparse.dense_dim()}) == 2"
        )
    if sparse.shape[2] != sparse.shape[3]:
        raise ValueError(
            "block_coo_spmm_ipu requires square blocks i.e. shape (*, *, B, B), actual: "
            f"{sparse.shape}"
        )
    if dense.dim() != 2:
        raise ValueError(
            f"block_coo_spmm_ipu supports only 2D dense operands, actual shape: {dense.shape}"
        )
    return block_coo_spmm_gs(sparse, dense, mode)


@dataclass
class StaticSparseMatrix:
    """A block-sparse matrix that multiplies dense ones with ``@``, from either side.

    **Attributes**:

    - `matrix`: sparse, as `block_coo_spmm` takes it.

    >>> import torch
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> pruned = pea.sparse.magnitude_prune(torch.eye(4), block_size=2, density=0.5)
    >>> torch.ones(1, 4) @ pea.sparse.StaticSparseMatrix(pruned)
    tensor([[1., 1., 1., 1.]])
    """

    matrix: Tensor

    def __matmul__(self, rhs: Tensor) -> Tensor:
        return block_coo_spmm(self.matrix, rhs, mode="sparse_dense")

    def __rmatmul__(self, lhs: Tensor) -> Tensor:
        return block_coo_spmm(self.matrix, lhs, mode="dense_sparse")


class StaticSparseLinear(torch.nn.Module):
    """A linear layer without bias. Its block-sparse weight is not a parameter.

    **Arguments**:

    - `weight`: sparse, (out_features, in_features) in blocks.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, in_features) times the transpose of the weight."""
        return (StaticSparseMatrix(self.weight) @ x.T).T


def magnitude_prune(matrix: Tensor, block_size: int, density: float, ord: int = 2) -> Tensor:
    """Select the blocks of a matrix with the largest norms.

    **Arguments**:

    - `matrix`: its sizes are multiples of block_size.
    - `block_size`: the number of rows and columns of a block.
    - `density`: the largest part of the elements that stays.
    - `ord`: the matrix norm, as in torch.linalg.norm.


    **Returns**: Sparse and coalesced, (row blocks, column blocks, block_size, block_size).

    >>> import torch
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> matrix = torch.tensor([[1.0, 1.0, 0.0, 5.0], [1.0, 1.0, 0.0, 0.0]])
    >>> pruned = pea.sparse.magnitude_prune(matrix, block_size=2, density=0.5)
    >>> pea.sparse.block_coo_to_dense(pruned)
    tensor([[0., 0., 0., 5.],
            [0., 0., 0., 0.]])
    """
    rows, columns = (size // block_size for size in matrix.shape)
    blocks = matrix.reshape(rows, block_size, columns, block_size).transpose(1, 2)
    norms = torch.linalg.norm(blocks.float(), ord=ord, dim=(2, 3)).flatten()
    largest = norms.topk(int(density * matrix.nelement() / block_size**2)).indices
    places = torch.stack([largest // columns, largest % columns])
    values = blocks[places[0], places[1]]
    shape = tuple(blocks.shape)
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True).coalesce()
