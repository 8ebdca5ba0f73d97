"""Collectives over the replicas of a PopTorch model."""

from __future__ import annotations

from ._impl.collectives import (
    all_gather_cross_replica,
    all_gather_cross_replica_identical_grads_in,
    all_reduce_cross_replica_sum,
    all_to_all_single_cross_replica,
)

__all__ = [
    "all_gather_cross_replica_identical_grads_in",
    "all_gather_cross_replica",
    "all_reduce_cross_replica_sum",
    "all_to_all_single_cross_replica",
]
