"""The per-replica fallback: any function, called once per replica on plain arrays."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import repeat
from typing import Any

import numpy as np

from ... import trees
from ...libraries import as_bits, call_on_bits, copy_array, on_device, owner, to_library_of
from ..axis_environment import Axes, diverging_where, lockstep_axes, union
from ..call_site import call_site
from .align import expand, lead
from .array import Array, MappedArray, is_scalar, read_only, unpack, wrap, wrap_array
from .memory import address, count_write, in_order, is_writable, strided
from .settings import fallback_settings

logger = logging.getLogger("gpusim.maps")


def name_of(function: Callable[..., Any]) -> str:
    """numpy.linalg.svd, for messages."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", repr(function))
    return f"{module}.{name}" if module else name


def _wrap_unmapped(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return wrap(leaf, ())
    return wrap_array(leaf, ()) if isinstance(leaf, np.ndarray) or on_device(leaf) else leaf


def _parts(leaf: Any, axes: Axes, sizes: tuple[int, ...]) -> Iterable[Any]:
    """Each replica's part of `leaf`, in the order of the replicas: scalars, or views.

    Views are writable if the leaf is and no other replica has the same part.
    """
    if not isinstance(leaf, MappedArray):
        return repeat(leaf, math.prod(sizes))
    data, own = unpack(leaf)
    if own != axes:
        data = read_only(expand(data, own, axes))
    if leaf.ndim == 0 and not (axes and is_scalar(leaf)):
        place = () if is_scalar(leaf) else (...,)
        return [data[(*replica, *place)] for replica in np.ndindex(*sizes)]
    parts: list[Any] = [data]
    for _ in axes:  # not reshape, which copies some layouts
        parts = [part for block in parts for part in block]
    return parts


def mapped_leaves(tree: Any) -> tuple[list[Any], Any, Axes]:
    """The leaves of `tree` with their structure, and the axes over which they are mapped
    together."""
    leaves, structure = trees.flatten(tree)
    axes: Axes = ()
    for leaf in leaves:
        if isinstance(leaf, MappedArray):
            axes = union(axes, unpack(leaf)[1])
    return leaves, structure, axes


def call_per_replica(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None = None,
) -> Any:
    """function(*args, **kwargs) for every replica in turn, the results stacked.

    **Raises**:

    - ValueError: when the replicas' results differ in structure, shape or dtype.
    """
    leaves, structure, axes = mapped_leaves((args, kwargs))
    count_write()  # the function may write into its arguments
    if diverging_where() is None:
        return _call(function, leaves, structure, axes, args, kwargs, name)
    ready = [_as_argument(leaf) for leaf in leaves]
    written = [x for x in ready if isinstance(x, MappedArray) and is_writable(unpack(x)[0])]
    before = values_of(written)
    args, kwargs = trees.unflatten(structure, ready)
    try:
        return _call(function, ready, structure, axes, args, kwargs, name)
    finally:
        restore_discarded(written, before)


def _as_argument(leaf: Any) -> Any:
    """`leaf`, read-only if a function could not change it on some of the replicas only."""
    if not isinstance(leaf, MappedArray) or is_scalar(leaf):
        return leaf
    data, own = unpack(leaf)
    return (
        leaf if set(unpack(diverging_where())[1]) <= set(own) else wrap_array(read_only(data), own)
    )


def values_of(arrays: Sequence[MappedArray]) -> list[Array]:
    """Copies of the values of arrays that are written next."""
    return [copy_array(unpack(array)[0]) for array in arrays]


def restore_discarded(arrays: Sequence[MappedArray], values: Sequence[Array]) -> None:
    """Put `values` back where replicas do not take the branch or loop that wrote the arrays."""
    for array, kept in zip(arrays, values, strict=True):
        data, own = unpack(array)
        discarded = to_library_of(data, lead(~diverging_where(), own, array.ndim))
        np.copyto(as_bits(data), as_bits(kept), "no", discarded)


def _call(
    function: Callable[..., Any],
    leaves: list[Any],
    structure: Any,
    axes: Axes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None,
) -> Any:
    if not axes:
        plain_args, plain_kwargs = trees.unflatten(
            structure, [part for leaf in leaves for part in _parts(leaf, (), ())]
        )
        return trees.map(_wrap_unmapped, function(*plain_args, **plain_kwargs))
    name = name or name_of(function)
    sizes = tuple(entry.size for entry in axes)
    if fallback_settings().report:
        logger.warning(
            "%s ran once per replica (%d calls) at %s", name, math.prod(sizes), call_site()
        )
    columns = [_parts(leaf, axes, sizes) for leaf in leaves]
    if not kwargs and len(args) == len(leaves) and all(map(operator.is_, args, leaves)):
        results = list(map(function, *columns))
    else:
        results = []
        for parts in zip(*columns, strict=True):
            plain_args, plain_kwargs = trees.unflatten(structure, list(parts))
            results.append(function(*plain_args, **plain_kwargs))
    sources = [x for x in leaves if isinstance(x, MappedArray) and not is_scalar(x)]
    return stack_results(name, results, axes, sources)


def per_replica(f: Callable[..., Any]) -> Callable[..., Any]:
    """Call `f` once per replica, on plain arrays: for code that takes no MappedArrays.

    Inside vmap and shard_map it is the way to functions of other libraries that convert their
    arguments to NumPy's arrays, to np.vectorize, and to Python code that branches on values. It
    costs what a loop over the replicas costs.

    **Arguments**:

    - `f`: a function of pytrees of arrays that returns a pytree of arrays. Its arguments are
      scalars, and views of each replica's arrays. It must not call collectives.

    **Returns**: A function with the arguments of `f`, whose results are the results of all
    replicas. Outside of vmap and shard_map it is `f`.

    **Raises**:

    - TypeError: if `f` is not callable.
    - ValueError: if the replicas' results differ in structure, shape or dtype.

    >>> import math, numpy as np, gpusim
    >>> gpusim.vmap(lambda x: 2 * gpusim.per_replica(math.gamma)(x))(np.array([3.0, 4.0, 5.0]))
    array([ 4., 12., 48.])
    """
    if not callable(f):
        raise TypeError(f"per_replica needs a function, but got {f!r:.60}")

    @wraps(f)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call_per_replica(f, args, kwargs) if lockstep_axes() else f(*args, **kwargs)

    return called


def stack_results(
    name: str, results: list[Any], axes: Axes, sources: Sequence[MappedArray] = ()
) -> Any:
    """One tree of MappedArrays over `axes` from the replicas' trees of plain results.

    Results that are views of the replicas' parts of `sources` become views of those.
    """
    if all(kind is np.ndarray or issubclass(kind, np.generic) for kind in set(map(type, results))):
        return _stack(name, results, axes, sources)
    first_leaves, structure = trees.flatten(results[0])
    columns = [[leaf] for leaf in first_leaves]
    for result in results[1:]:
        leaves, other = trees.flatten(result)
        if other != structure:
            raise ValueError(
                f"{name} gave replicas results of different structure: {structure} and {other}; "
                "run it under gpusim.pmap"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    return trees.unflatten(structure, [_stack(name, column, axes, sources) for column in columns])


def _stack(name: str, column: list[Any], axes: Axes, sources: Sequence[MappedArray]) -> Any:
    first = column[0]
    sizes = tuple(entry.size for entry in axes)
    on_a_gpu = on_device(first)
    if not on_a_gpu and not isinstance(first, (np.ndarray, np.generic, bool, int, float, complex)):
        if all(type(leaf) is type(first) and leaf == first for leaf in column):
            return first
        raise ValueError(
            f"{name} gave replicas different results that are not arrays: {first!r} and others; "
            "run it under gpusim.pmap"
        )
    kinds = set(map(type, column))
    if isinstance(first, np.generic) and first.dtype.kind in "biufc" and len(kinds) == 1:
        return wrap(np.array(column, first.dtype).reshape(sizes), axes)
    arrays = column if on_a_gpu or kinds == {np.ndarray} else list(map(np.asarray, column))
    shape, dtype = arrays[0].shape, arrays[0].dtype
    for array in arrays:
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} gave replicas results of different shape or dtype: {arrays[0].shape} "
                f"{arrays[0].dtype} and {array.shape} {array.dtype}; values of one shape are "
                "needed (np.where instead of selecting by a mask), or gpusim.pmap, where shapes "
                "may differ inside the function"
            )
    shared = isinstance(first, np.ndarray) or on_a_gpu
    viewed = [x for x in sources if shared and owner(first) is owner(x._data)]
    for source in viewed:
        view = _common_view(arrays, source, axes)
        if view is not None:
            return view
    stacked = call_on_bits(np.stack, arrays) if on_a_gpu else np.stack(arrays)
    stacked = stacked.reshape(sizes + shape)
    if viewed or (isinstance(first, np.ndarray) and not first.flags.writeable):
        stacked = read_only(stacked)  # a copy of what NumPy returns a view of
    return wrap_array(stacked, axes) if shared else wrap(stacked, axes)


def _common_view(parts: list[Any], source: MappedArray, axes: Axes) -> MappedArray | None:
    """The view of `source` whose parts the given views of its parts are; None if there is none."""
    data, own = unpack(source)
    first, base = parts[0], owner(data)
    sizes = tuple(entry.size for entry in axes)
    offsets = set()
    for replica, part in zip(np.ndindex(*sizes), parts, strict=True):
        where = tuple(replica[axes.index(entry)] for entry in own)
        offsets.add(address(part) - address(data[(*where, ...)]))
        if part.strides != first.strides:
            return None
    if len(offsets) > 1 or data.size == 0 or first.dtype.hasobject:
        return None
    offset = address(data) + offsets.pop() - address(base)
    shape, strides = (*data.shape[: len(own)], *first.shape), data.strides[: len(own)]
    view = strided(in_order(base), first.dtype, shape, (*strides, *first.strides), offset)
    return wrap_array(view if is_writable(first) else read_only(view), own)
