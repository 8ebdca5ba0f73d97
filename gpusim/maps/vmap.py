"""vmap: all replicas run in lockstep; each operation of the function is one batched operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import trees
from .agreement import agree_on_arguments, agree_on_results
from .arguments import (
    check_axis_size,
    check_in_axes,
    check_out_axes,
    enter,
    leave,
    own_results,
    read_arguments,
    result_axes,
)
from .axis_environment import (
    AxisEntry,
    AxisName,
    axis_environment,
    extend_axis_environment,
    local_axis_size,
    lockstep_axes,
    outermost_sharding,
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

    **Arguments**:

    - `f`: a function of pytrees of arrays that returns a pytree of arrays.
    - `in_axes`: the mapped axis of each argument: an int for all of them, None for arguments that
      are the same on every replica, or a tuple with an entry for each positional argument, each an
      int, None or a tree prefix of them. Keyword arguments are mapped along axis 0.
    - `out_axes`: the position of the mapped axis in the results, as int or tree prefix of the
      results; None returns a value that is the same on every replica once.
    - `axis_name`: a name for the axis, for collectives.
    - `axis_size`: the number of replicas, needed only if no argument is mapped.

    **Returns**: A function with the arguments of `f`. The caller owns its results: they are
    writable and share no memory with the arguments or each other.

    **Raises**:

    - TypeError: if in_axes have another type, or results are not arrays.
    - ValueError: if in_axes do not fit the arguments, sizes differ, or out_axes do not fit the
      results.

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
        size = axis_size if axis_size is None else local_axis_size("vmap", axis_size)
        arguments = read_arguments("vmap", in_axes, size, args, kwargs)
        enclosing = axis_environment()
        sharding = None if enclosing else outermost_sharding("vmap", arguments.size)
        if sharding is not None:
            agree_on_arguments("vmap", arguments.shared(), sharding)
        entry = AxisEntry(axis_name, arguments.size, len(enclosing), sharding=sharding)
        outer = bool(enclosing) and bool(lockstep_axes())
        with extend_axis_environment((entry,)):
            leaves = []
            for leaf, axis in zip(arguments.leaves, arguments.axes, strict=True):
                leaves.append(enter(leaf, axis, entry))
            values, structure = trees.flatten(arguments.call(f, leaves))
            axes = result_axes("vmap", out_axes, values, structure)
            results = []
            for value, axis in zip(values, axes, strict=True):
                results.append(leave(value, axis, entry, outer, "vmap"))
            if sharding is not None:
                once = [r for r, axis in zip(results, axes, strict=True) if axis is None]
                agree_on_results("vmap's results for out_axes=None", once, sharding)
        return trees.unflatten(structure, own_results(results, arguments.leaves))

    return mapped
