"""ops.collectives: reductions and gathers over the replicas, and over the IPUs of one."""

from __future__ import annotations

from .all_reduce import (
    all_reduce,
    all_reduce_identical_grad_inputs,
    all_reduce_identical_inputs,
)
from .collectives import CollectiveOps, to_collective_op
from .replicated_all_gather import replicated_all_gather
from .replicated_all_reduce import replicated_all_reduce, replicated_all_reduce_
from .replicated_reduce_scatter import (
    replica_sharded_slice,
    replicated_reduce_scatter,
    replicated_slice,
)

__all__ = [
    "CollectiveOps",
    "all_reduce",
    "all_reduce_identical_grad_inputs",
    "all_reduce_identical_inputs",
    "replica_sharded_slice",
    "replicated_all_gather",
    "replicated_all_reduce",
    "replicated_all_reduce_",
    "replicated_reduce_scatter",
    "replicated_slice",
    "to_collective_op",
]
