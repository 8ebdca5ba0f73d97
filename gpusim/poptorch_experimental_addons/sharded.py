"""Products of sharded matrices, named {left}{right}{result}.

`rep` is a matrix that is the same on all replicas. Of `row` and `col` matrices each replica has a
block of rows or columns.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .collectives import all_gather_cross_replica, all_reduce_cross_replica_sum

__all__ = ["colrowrep_sharded_matmul", "repcolcol_sharded_matmul", "rowcolrow_sharded_matmul"]


def rowcolrow_sharded_matmul(
    X: Tensor, Y: Tensor, replication_factor: int, num_chunks: int = 1
) -> Any:
    """Multiply rows by columns, into rows. The columns are gathered, one chunk at a time.

    **Arguments**:

    - `X`: the replica's rows (m, k) of the left matrix (R m, k).
    - `Y`: the replica's columns (k, n) of the right matrix (k, R n).
    - `replication_factor`: R.
    - `num_chunks`: the number of chunks in which the k rows of Y are gathered. More chunks take
      less memory.

    **Returns**: The replica's rows (m, R n) of the product.

    **Raises**:

    - ValueError: for shapes that do not match, or if num_chunks does not divide k; and the errors
      of the collectives.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> X, Y = torch.arange(8.0).reshape(4, 2), torch.arange(12.0).reshape(2, 6)
    >>> product = lambda X, Y: pea.sharded.rowcolrow_sharded_matmul(X, Y, 2, num_chunks=2)
    >>> columns = Y.reshape(2, 2, 3).transpose(0, 1)
    >>> rows = gt.vmap(product, axis_name=AXIS)(X.reshape(2, 2, 2), columns)
    >>> torch.equal(rows.reshape(4, 6), X @ Y)
    True
    """
    _check_matrices("rowcolrow_sharded_matmul", X, Y)
    inner = X.shape[1]
    if num_chunks < 1 or inner % num_chunks:
        raise ValueError(
            f"rowcolrow_sharded_matmul: num_chunks must divide the {inner} columns of X, got "
            f"{num_chunks}"
        )
    width = inner // num_chunks
    parts = []
    for first in range(0, inner or 1, width or 1):
        gathered = all_gather_cross_replica(Y[first : first + width], replication_factor)
        columns = gathered.movedim(0, 1).reshape(width, replication_factor * Y.shape[1])
        parts.append(X[:, first : first + width] @ columns)
    return sum(parts[1:], start=parts[0])


def repcolcol_sharded_matmul(X: Tensor, Y: Tensor, replication_factor: int) -> Any:
    """Multiply a whole matrix by columns, into columns. Gradients of X are summed.

    **Arguments**:

    - `X`: (m, k), the same on all replicas.
    - `Y`: the replica's columns (k, n) of the right matrix (k, R n).
    - `replication_factor`: R.

    **Returns**: The replica's columns (m, n) of the product.

    **Raises**:

    - ValueError: for shapes that do not match; and the errors of the collectives.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> X, Y = torch.arange(8.0).reshape(4, 2), torch.arange(12.0).reshape(2, 6)
    >>> product = lambda X, Y: pea.sharded.repcolcol_sharded_matmul(X, Y, 2)
    >>> columns = Y.reshape(2, 2, 3).transpose(0, 1)
    >>> found = gt.vmap(product, in_dims=(None, 0), out_dims=1, axis_name=AXIS)(X, columns)
    >>> torch.equal(found.reshape(4, 6), X @ Y)
    True
    """
    _check_matrices("repcolcol_sharded_matmul", X, Y)
    return all_reduce_cross_replica_sum(X, replication_factor, insert_in_grad_graph=True) @ Y


def colrowrep_sharded_matmul(X: Tensor, Y: Tensor, replication_factor: int) -> Any:
    """Multiply columns by rows. The result, on all replicas, is the sum of their products.


    **Arguments**:

    - `X`: the replica's columns (m, k) of the left matrix (m, R k).
    - `Y`: the replica's rows (k, n) of the right matrix (R k, n).
    - `replication_factor`: R.

    **Returns**: The product (m, n), the same on all replicas.

    **Raises**:

    - ValueError: for shapes that do not match; and the errors of the collectives.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> X, Y = torch.arange(8.0).reshape(2, 4), torch.arange(12.0).reshape(4, 3)
    >>> product = lambda X, Y: pea.sharded.colrowrep_sharded_matmul(X, Y, 2)
    >>> columns, rows = X.reshape(2, 2, 2).transpose(0, 1), Y.reshape(2, 2, 3)
    >>> found = gt.vmap(product, out_dims=None, axis_name=AXIS)(columns, rows)
    >>> torch.equal(found, X @ Y)
    True
    """
    _check_matrices("colrowrep_sharded_matmul", X, Y)
    return all_reduce_cross_replica_sum(X @ Y, replication_factor)


def _check_matrices(name: str, X: Tensor, Y: Tensor) -> None:
    if X.ndim != 2 or Y.ndim != 2 or X.shape[1] != Y.shape[0]:
        raise ValueError(
            f"{name} needs matrices X (m, k) and Y (k, n), got shapes {tuple(X.shape)} and "
            f"{tuple(Y.shape)}"
        )
