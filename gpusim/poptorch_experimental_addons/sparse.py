"""Products with block-sparse matrices."""

from __future__ import annotations

from ._impl.sparse import (
    StaticSparseLinear,
    StaticSparseMatrix,
    block_coo_spmm,
    block_coo_spmm_gs,
    block_coo_spmm_ipu,
    block_coo_to_dense,
    block_coo_transpose,
    magnitude_prune,
)

__all__ = [
    "block_coo_transpose",
    "block_coo_to_dense",
    "block_coo_spmm",
    "block_coo_spmm_gs",
    "block_coo_spmm_ipu",
    "StaticSparseMatrix",
    "StaticSparseLinear",
    "magnitude_prune",
]
