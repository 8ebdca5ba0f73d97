"""Collectives over PopTorch's replicas, each with the backward pass that its name says.

They are gpusim.torch's, with the order, precision and rounding of `gpusim.reduction`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor

from ... import torch as gt
from ...errors import GpusimError
from ...poptorch.axis import AXIS, inside_replicas
from ...torch import operators
from ...torch.plan import CollectiveSpec

__all__ = [
    "all_gather_cross_replica_identical_grads_in",
    "all_gather_cross_replica",
    "all_reduce_cross_replica_sum",
    "all_to_all_single_cross_replica",
]


def all_gather_cross_replica_identical_grads_in(x: Tensor, replication_factor: int) -> Any:
    """Stack the values of all replicas, for replicas with equal gradients of the result.

    Gradients are equal if everything after the call is the same on all replicas. The backward pass
    needs no communication: each replica takes its own slice of its own gradient.

    **Arguments**:

    - `x`: of any shape (*s).
    - `replication_factor`: the number of replicas.

    **Returns**: (replication_factor, *s), the same on all replicas.

    **Raises**:

    - ValueError: if replication_factor is not the number of replicas.
    - GpusimError: outside of replicas, unless replication_factor is 1.
    - TypeError: if x is not a tensor.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> gather = pea.collectives.all_gather_cross_replica_identical_grads_in
    >>> x, scale = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    >>> loss = lambda x: (scale * gather(x, 2)).sum()
    >>> gt.vmap(torch.func.grad(loss), axis_name=AXIS)(x)
    tensor([10., 20.])
    """
    if _alone("all_gather_cross_replica_identical_grads_in", x, replication_factor):
        return x.unsqueeze(0).clone()
    spec = CollectiveSpec("all_gather_cross_replica", (("axis", 0), ("tiled", False)))
    return operators.collective([x], spec, (AXIS,))[0]


def all_gather_cross_replica(x: Tensor, replication_factor: int) -> Any:
    """Stack the values of all replicas.

    In the backward pass each replica takes its slice of the all-reduced gradient. Arguments, result
    and errors are those of `all_gather_cross_replica_identical_grads_in`.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> gather = lambda x: pea.collectives.all_gather_cross_replica(x, 2)
    >>> gt.vmap(gather, axis_name=AXIS)(torch.tensor([1.0, 2.0]))
    tensor([[1., 2.],
            [1., 2.]])
    >>> grad = torch.func.grad(lambda x, scale: (scale * gather(x)).sum())
    >>> scales = torch.tensor([[1.0, 2.0], [10.0, 20.0]])  # of replicas 0 and 1
    >>> gt.vmap(grad, axis_name=AXIS)(torch.tensor([1.0, 2.0]), scales)
    tensor([11., 22.])
    """
    if _alone("all_gather_cross_replica", x, replication_factor):
        return x.unsqueeze(0).clone()
    gathered = all_gather_cross_replica_identical_grads_in(x, replication_factor)
    return all_reduce_cross_replica_sum(gathered, replication_factor, insert_in_grad_graph=True)


def all_reduce_cross_replica_sum(
    x: Tensor, replication_factor: int, insert_in_grad_graph: bool = False
) -> Any:
    """Sum over the replicas. Each replica's gradient passes through unchanged.

    That is right if everything after the call is the same on all replicas. (`gpusim.torch.psum`
    sums the gradients too, for replicas whose results are added.)

    **Arguments**:

    - `x`: of any shape.
    - `replication_factor`: the number of replicas.
    - `insert_in_grad_graph`: True exchanges the passes: the value passes through unchanged, and
      the gradients are summed.

    **Returns**: A tensor of the shape of x. In `gpusim.torch.vmap` all replicas share its memory:
    clone it before changing it in place.

    **Raises**: The errors of `all_gather_cross_replica_identical_grads_in`.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> total = lambda x: pea.collectives.all_reduce_cross_replica_sum(x, 2)
    >>> x = torch.tensor([1.0, 2.0])
    >>> gt.vmap(total, axis_name=AXIS)(x)
    tensor([3., 3.])
    >>> gt.vmap(torch.func.grad(total), axis_name=AXIS)(x)
    tensor([1., 1.])
    >>> copied = lambda x: pea.collectives.all_reduce_cross_replica_sum(x, 2, True)
    >>> gt.vmap(copied, axis_name=AXIS)(x)
    tensor([1., 2.])
    >>> gt.vmap(torch.func.grad(copied), axis_name=AXIS)(x)
    tensor([2., 2.])
    """
    if _alone("all_reduce_cross_replica_sum", x, replication_factor):
        return x.clone()
    spec = CollectiveSpec(
        "all_reduce_cross_replica_sum.backward"
        if insert_in_grad_graph
        else "all_reduce_cross_replica_sum"
    )
    return operators.collective([x], spec, (AXIS,))[0]


def all_to_all_single_cross_replica(x: Tensor, replication_factor: int) -> Any:
    """Send a block of rows to each replica, and receive one from each.

    Gradients go back the same way.

    **Arguments**:

    - `x`: (rows, *s); the number of rows is a multiple of the number of replicas.
    - `replication_factor`: the number of replicas.

    **Returns**: (rows, *s): the blocks that arrived, in the order of their senders.

    **Raises**:

    - ValueError: if the rows do not divide evenly; and the errors of
      `all_gather_cross_replica_identical_grads_in`.

    >>> import torch, gpusim.torch as gt
    >>> import gpusim.poptorch_experimental_addons as pea
    >>> from gpusim.poptorch.axis import AXIS
    >>> exchange = lambda x: pea.collectives.all_to_all_single_cross_replica(x, 2)
    >>> gt.vmap(exchange, axis_name=AXIS)(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    tensor([[1, 2, 5, 6],
            [3, 4, 7, 8]])
    """
    name = "all_to_all_single_cross_replica"
    alone = _alone(name, x, replication_factor)
    if x.ndim == 0 or x.shape[0] % replication_factor:
        raise ValueError(
            f"{name}: the leading axis of x must be a multiple of the replication_factor "
            f"{replication_factor}, got shape {tuple(x.shape)}"
        )
    return x.clone() if alone else gt.all_to_all(x, AXIS, 0, 0, tiled=True)


def _alone(name: str, x: Any, replication_factor: Any) -> bool:
    """Check the arguments. Whether the call is outside of replicas, with a factor of 1."""

    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: x must be a tensor, got {x!r:.60} of type {type(x).__name__}")
    try:
        factor = operator.index(replication_factor)
    except TypeError:
        raise TypeError(
            f"{name}: replication_factor must be an integer, got {replication_factor!r}"
        ) from None
    here = gt.axis_size(AXIS) if inside_replicas() else None
    if here is None and factor > 1:
        raise GpusimError(
            f"{name}(replication_factor={factor}) was called outside of replicas; call it in the "
            f"forward pass of a model with options.replicationFactor({factor}), or inside "
            f"gpusim.torch.vmap or pmap over axis_name={AXIS!r}"
        )
    if factor != (here or 1):
        raise ValueError(
            f"{name}: replication_factor is {factor}, but the number of replicas is {here or 1}"
        )
    return here is None
