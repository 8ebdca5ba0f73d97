"""Reductions and gathers over the replicas, and over the IPUs of one replica."""

from __future__ import annotations

from ..._paths import keep_paths
from . import collectives, ipus, replicas
from .collectives import CollectiveOps, to_collective_op
from .ipus import all_reduce, all_reduce_identical_grad_inputs, all_reduce_identical_inputs
from .replicas import (
    replica_sharded_slice,
    replicated_all_gather,
    replicated_all_reduce,
    replicated_all_reduce_,
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

keep_paths(
    __name__,
    {
        collectives: "collectives",
        ipus: "all_reduce",
        replicas: "replicated_all_gather replicated_all_reduce replicated_reduce_scatter",
    },
)
