"""pmap: every replica in a thread of its own, with tensors of its own, so that any code runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import maps as mapping
from .. import trees
from ..errors import GpusimError
from ..maps.arguments import check_axis_size
from ..maps.axis_environment import (
    AxisName,
    axis_environment,
    local_axis_size,
    outermost_sharding,
)
from .arguments import agree_on_shared, as_result, check_dims, equal_bits, read
from .axes import TensorAxis
from .private import dispatch_flags_kept

__all__ = ["pmap"]


def pmap(
    f: Callable[..., Any],
    axis_name: AxisName = None,
    *,
    in_dims: Any = 0,
    out_dims: Any = 0,
    axis_size: int | None = None,
    schedule: str = "cores",
) -> Callable[..., Any]:
    """Run `f` for many replicas, each in a thread of its own with plain tensors.

    Replicas meet in their collectives, those of the backward pass too, which therefore has to run
    inside `f` (backward(), torch.autograd.grad, torch.func.grad). It runs in the replica's thread.

    **Arguments**:

    - `f`: a function of pytrees of tensors that returns a pytree of tensors and numbers. Its
      arguments share memory with the caller's, and are leaves of their own: one that requires grad
      outside does so inside, and gets its ``.grad`` there.
    - `axis_name`: a name for the axis, for collectives.
    - `in_dims`, `out_dims`, `axis_size`: as in `vmap`; out_dims None demands equal bits.
    - `schedule`: "cores" or "one", as in `gpusim.pmap`.

    **Returns**: A function with the arguments of `f`. Its results are detached.

    **Raises**:

    - ReplicaError, CollectiveMismatchError, DeadlockError: as `gpusim.pmap`.
    - TypeError, ValueError: as `vmap`, and when results differ in tree, shape or dtype.
    - GpusimError: inside of a `vmap` of tensors, whose levels other threads do not see.

    >>> import torch, gpusim.torch as gt
    >>> def step(w, x):
    ...     loss = (w * x) ** 2 if x > 1 else w
    ...     (gradient,) = torch.autograd.grad(loss, w)
    ...     return gt.pmean(gradient, "i")
    >>> w = torch.tensor(1.0, requires_grad=True)
    >>> gt.pmap(step, "i", in_dims=(None, 0), out_dims=None)(w, torch.tensor([1.0, 2.0, 3.0]))
    tensor(9.)
    """
    if not callable(f):
        raise TypeError(f"pmap needs a function, but got {f!r:.60}")
    in_dims = check_dims("pmap", in_dims, out_dims)
    axis_size = check_axis_size("pmap", axis_size)

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        _refuse_levels()
        size = local_axis_size("pmap", axis_size)
        arguments = read("pmap", in_dims, size, args, kwargs)
        agree_on_shared("pmap", arguments, outermost_sharding("pmap", arguments.size))
        results: list[Any] = [None] * arguments.size
        modes = _modes()

        def replica(number: Any) -> None:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode())
                leaves = [
                    _part(leaf, axis, int(number))
                    for leaf, axis in zip(arguments.leaves, arguments.axes, strict=True)
                ]
                results[int(number)] = arguments.call(f, leaves)

        with dispatch_flags_kept():
            mapping.pmap(replica, axis_name, schedule=schedule)(np.arange(arguments.size))
        return _gather(results, out_dims)

    return mapped


def _refuse_levels() -> None:
    for entry in axis_environment():
        if isinstance(entry, TensorAxis):
            raise GpusimError(
                f"pmap of tensors cannot run inside a vmap of tensors (over axis {entry.name!r}): "
                "its threads do not see torch.func's levels; put pmap outside"
            )


def _modes() -> list[Callable[[], Any]]:
    """The caller's modes that torch keeps for each thread; and backward passes stay in theirs."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ]


def _part(leaf: Any, axis: int | None, index: int) -> Any:
    """One replica's part of an argument, as a leaf of its own."""
    if not isinstance(leaf, Tensor):
        return leaf
    part = leaf.detach() if axis is None else leaf.detach().select(axis, index)
    return part.requires_grad_(leaf.requires_grad)


def _gather(results: list[Any], out_dims: Any) -> Any:
    """One tree with the replicas' results stacked along out_dims."""
    first, structure = trees.flatten(results[0])
    columns = [[as_result("pmap", leaf)] for leaf in first]
    for index, result in enumerate(results[1:], start=1):
        leaves, other = trees.flatten(result)
        if other != structure:
            raise ValueError(
                f"pmap: replicas returned different trees: replica 0 {structure}, replica {index} "
                f"{other}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(as_result("pmap", leaf))
    places = trees.broadcast_prefix(out_dims, results[0], "pmap out_dims")
    stacked = [_gather_leaf(column, p) for column, p in zip(columns, places, strict=True)]
    return trees.unflatten(structure, stacked)


def _gather_leaf(column: list[Tensor], place: int | None) -> Tensor:
    first = column[0].detach()
    for index, other in enumerate(column):
        if other.shape != first.shape or other.dtype != first.dtype:
            raise ValueError(
                f"pmap: replicas returned different tensors: replica 0 {_kind(first)}, replica "
                f"{index} {_kind(other)}"
            )
        if place is None and not equal_bits(first, other):
            raise ValueError(
                f"pmap out_dims is None, but replicas 0 and {index} returned different values; "
                "only what is the same on all replicas can be returned once"
            )
    return first if place is None else torch.stack([x.detach() for x in column], place)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]}{list(x.shape)}"
