"""vmap: all replicas in lockstep on torch.func.vmap, with a name for the axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import trees
from ..maps.arguments import check_axis_size
from ..maps.axis_environment import (
    AxisName,
    extend_axis_environment,
    local_axis_size,
    outermost_sharding,
)
from .arguments import agree_on_shared, as_result, check_dims, read, take_replicated
from .axes import TensorAxis
from .private import vmap_flat

__all__ = ["vmap"]


def vmap(
    f: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    *,
    axis_name: AxisName = None,
    axis_size: int | None = None,
    randomness: str = "error",
) -> Callable[..., Any]:
    """Run `f` for many replicas at once: torch.func.vmap, with a name for collectives.

    It composes with all of torch.func, inside and outside (grad, vjp, jvp, another vmap), and with
    autograd. Gradients are those of the sum of all replicas' results: what goes into a psum on one
    replica has a share in the results of all.

    **Arguments**:

    - `f`: a function of pytrees of tensors that returns a pytree of tensors and numbers.
    - `in_dims`: which dimension of each argument counts the replicas: an int for all of them, None
      for 'the same on every replica', or a tuple with an entry for each positional argument, each
      an int, None or a tree prefix of them. Keyword arguments are mapped along dimension 0.
    - `out_dims`: where the replicas' dimension goes in the results, as int or tree prefix of the
      results; None returns a value that is the same on every replica once.
    - `axis_name`: a name for the axis.
    - `axis_size`: the number of replicas, needed only when no argument is mapped.
    - `randomness`: torch.func.vmap's: what torch's own random functions do, "error", "same" or
      "different".

    **Returns**: A function with the arguments of `f`.

    **Raises**:

    - TypeError: for in_dims of another type, mapped arguments that are not tensors, results that
      are neither tensors nor numbers.
    - ValueError: for in_dims that do not fit the arguments, sizes that differ, and out_dims that
      do not fit the results.

    >>> import torch, gpusim.torch as gt
    >>> def loss(w, x):  # of the global batch: the mean over the replicas
    ...     return gt.pmean((w * x) ** 2, "i")
    >>> w, x = torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0])
    >>> step = gt.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="i")
    >>> step(w, x)
    tensor([ 2.,  8., 18.])
    """
    if not callable(f):
        raise TypeError(f"vmap needs a function, but got {f!r:.60}")
    in_dims = check_dims("vmap", in_dims, out_dims)
    axis_size = check_axis_size("vmap", axis_size)

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        size = local_axis_size("vmap", axis_size)
        arguments = read("vmap", in_dims, size, args, kwargs)
        sharding = outermost_sharding("vmap", arguments.size)
        agree_on_shared("vmap", arguments, sharding)
        structure: Any = None
        places: list[int | None] = []

        def replica(marker: Tensor, *leaves: Any) -> tuple[Tensor, ...]:
            nonlocal structure, places
            with extend_axis_environment(
                (TensorAxis(axis_name, arguments.size, sharding, marker),)
            ):
                results, structure = trees.flatten(arguments.call(f, [*leaves]))
            if out_dims is None or type(out_dims) is int:
                places = [out_dims] * len(results)
            else:
                whole = trees.unflatten(structure, results)
                places = trees.broadcast_prefix(out_dims, whole, "vmap out_dims")
            return tuple([as_result("vmap", result, marker.device) for result in results])

        device = next((x.device for x in arguments.leaves if isinstance(x, Tensor)), None)
        marker = torch.arange(arguments.size, dtype=torch.int32, device=device)
        dims, leaves = (0, *arguments.axes), (marker, *arguments.leaves)
        stacked = vmap_flat(replica, dims, arguments.size, randomness, leaves)
        found = [
            take_replicated("vmap", x, axis_name) if place is None else moved(x, place)
            for x, place in zip(stacked, places, strict=True)
        ]
        return trees.unflatten(structure, found)

    return mapped


def moved(stacked: Tensor, place: int) -> Tensor:
    """The replicas' dimension, which is the first, at `place`."""
    return stacked.movedim(0, place) if place else stacked
