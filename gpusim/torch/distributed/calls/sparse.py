"""The all-reduce of sparse tensors, such as gradients of `Embedding(sparse=True)` under DDP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..memory import Array

if TYPE_CHECKING:
    from .arguments import Arguments
    from .exchange import RankWork

__all__ = ["add_rows", "all_reduce_sparse"]


def all_reduce_sparse(
    group: Any, check: Arguments, tensors: Sequence[Tensor], operator: str
) -> RankWork:
    """Post the all-reduce of sparse tensors, a list of them as one.

    The ranks' tensors have other numbers of elements. So each rank posts its indices and values,
    and memory for as many as a dense tensor has, and takes what is there when it waits.

    **Raises**: the engine's exception for operators other than SUM, and for engines without it.
    """
    first = tensors[0]
    if not check.rules.sparse or first.layout != torch.sparse_coo:
        check.fail(f"tensors must be dense, got one of layout {first.layout}")
    if operator != "SUM":
        check.fail(
            "unsupported reduction operation: all_reduce of sparse tensors only works with "
            f"ReduceOp.SUM, got ReduceOp.{operator}"
        )
    check.dtype(first)
    with torch.no_grad():
        total = first
        for tensor in tensors[1:]:
            total = total + tensor
        total = total.coalesce()
        indices, values = total.indices().contiguous(), total.values().contiguous()
        rows = math.prod(first.shape[: first.sparse_dim()])
        found = [
            indices.new_empty(1),
            indices.new_empty(indices.shape[0], rows),
            values.new_empty(rows, *values.shape[1:]),
        ]
    work: RankWork = group.allreduce_sparse(found, [indices, values], list(first.shape))

    def finish() -> None:
        with torch.no_grad():
            count = int(found[0])
            result = torch.sparse_coo_tensor(
                found[1][:, :count].clone(),
                found[2][:count].clone(),
                first.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            for tensor in tensors:
                tensor.copy_(result)

    work._outputs = list(tensors)
    work.finish = finish
    return work


def add_rows(parts: Sequence[tuple[Array, Array]], shape: Sequence[int]) -> tuple[Array, Array]:
    """The sum of the ranks' rows, in the ranks' order, which is gloo's.

    **Arguments**: `parts` are each rank's indices (axes, rows), without repetition, and its values
    (rows, ...); `shape` the tensors'.

    **Returns**: the indices, sorted, and values of the sum.
    """
    axes = tuple(shape[: parts[0][0].shape[0]])
    keys = [
        np.ravel_multi_index(tuple(indices), axes) if indices.size else np.zeros(0, np.int64)
        for indices, _ in parts
    ]
    present = np.unique(np.concatenate(keys)).astype(np.int64)
    values = parts[0][1]
    total = np.zeros((len(present), *values.shape[1:]), values.dtype)
    seen = np.zeros(len(present), bool)
    for own, (_, added) in zip(keys, parts, strict=True):
        rows = np.searchsorted(present, own)
        known = seen[rows]
        total[rows[~known]] = added[~known]  # zero would become that of a sum
        total[rows[known]] += added[known]
        seen[rows] = True
    return np.stack(np.unravel_index(present, axes)), total
