"""What poptorch_experimental_addons's collectives do, simulated in one process: values of all
replicas (replicas, *s) in, and out; and the same of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import gpusim.poptorch_experimental_addons as pea

Operation = Callable[[Tensor, int], Tensor]


def copies(x: Tensor) -> Tensor:
    """What is the same on all replicas, (replicas, *s) -> (replicas, replicas, *s)."""
    return torch.stack([x] * len(x))


def sums(x: Tensor) -> Tensor:
    total = x[0].clone()
    for own in x[1:]:
        total += own
    return torch.stack([total] * len(x))


def exchanged(x: Tensor) -> Tensor:
    blocks = [own.chunk(len(x)) for own in x]
    return torch.stack([torch.cat([sent[r] for sent in blocks]) for r in range(len(x))])


def own_parts(ct: Tensor) -> Tensor:
    return torch.stack([ct[r, r] for r in range(len(ct))])


class Simulated(NamedTuple):
    """An operation; its values and its gradients on all replicas' values at once."""

    operation: Operation
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Tensor]


def inserted(x: Tensor, replication_factor: int) -> Tensor:
    found: Tensor = pea.collectives.all_reduce_cross_replica_sum(
        x, replication_factor, insert_in_grad_graph=True
    )
    return found


SIMULATED = {
    "all_reduce": Simulated(pea.collectives.all_reduce_cross_replica_sum, sums, lambda ct: ct),
    "all_reduce in the backward pass": Simulated(inserted, lambda x: x, sums),
    "all_gather": Simulated(
        pea.collectives.all_gather_cross_replica, copies, lambda ct: own_parts(sums(ct))
    ),
    "all_gather of identical gradients": Simulated(
        pea.collectives.all_gather_cross_replica_identical_grads_in, copies, own_parts
    ),
    "all_to_all": Simulated(pea.collectives.all_to_all_single_cross_replica, exchanged, exchanged),
}
