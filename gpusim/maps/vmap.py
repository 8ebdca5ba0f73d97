"""vmap: all replicas in lockstep, one batched operation for each operation of the function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import trees
from .arguments import (
    check_axis_size,
    check_in_axes,
    check_out_axes,
    enter,
    leave,
    part_company,
    read_arguments,
)
from .frames import (
    AxisName,
    bound,
    local_axis_size,
    lockstep_environment,
    new_frames,
    outermost_share,
)


def vmap(
    f: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    axis_name: AxisName = None,
    axis_size: int | None = None,
) -> Callable[..., Any]:
    """Run `f` for many replicas at once, as one batched computation.

    Inside `f` each array argument is a MappedArray: it looks like one replica's array and stands
    for all of them. NumPy functions work on it, and `gpusim.lax`'s collectives over `axis_name`.

    Args:
        f: a function of pytrees of arrays that returns a pytree of arrays.
        in_axes: which axis of each argument counts the replicas: an int for all of them, None for
            'the same on every replica', or a tuple with an entry for each positional argument, each
            an int, None or a tree prefix of them. Keyword arguments are mapped along axis 0.
        out_axes: where the replicas' axis goes in the results, as int or tree prefix of the
            results; None returns a value that is the same on every replica once.
        axis_name: a name for the axis, for collectives.
        axis_size: the number of replicas, needed only when no argument is mapped.

    Returns:
        A function with the arguments of `f`. Results that alias an argument or each other are
        read-only.

    Raises:
        TypeError: for in_axes of another type, or results that are no arrays.
        ValueError: for in_axes that do not fit the arguments, sizes that differ, out_axes that do
            not fit the results.

    Example:
        >>> import numpy as np, gpusim
        >>> from gpusim import lax
        >>> share = gpusim.vmap(lambda x: x / lax.psum(x, "i"), axis_name="i")
        >>> share(np.array([1.0, 2.0, 5.0]))
        array([0.125, 0.25 , 0.625])
    """
    if not callable(f):
        raise TypeError(f"vmap needs a function, but got {f!r:.60}")
    in_axes = check_in_axes("vmap", in_axes)
    check_out_axes("vmap", out_axes)
    axis_size = check_axis_size("vmap", axis_size)

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        size = local_axis_size("vmap", axis_size)
        arguments = read_arguments("vmap", in_axes, size, args, kwargs)
        share = outermost_share("vmap", arguments.size)
        (frame,) = new_frames((axis_name,), (arguments.size,), share=share)
        with bound((frame,)):
            leaves = [
                enter(leaf, axis, frame)
                for leaf, axis in zip(arguments.leaves, arguments.axes, strict=True)
            ]
            results, structure = trees.flatten(arguments.call(f, leaves))
            places = trees.broadcast_prefix(
                out_axes, trees.unflatten(structure, results), "vmap out_axes"
            )
            results = [
                leave(leaf, axis, frame, "vmap") for leaf, axis in zip(results, places, strict=True)
            ]
        if not lockstep_environment():
            results = part_company(results)
        return trees.unflatten(structure, results)

    return mapped
