"""The per-replica route: any function at all, called once per replica, and the switches that show
or force it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from .. import trees
from ..libraries import on_device
from .frames import Axes, union
from .mapped_array.array import MappedArray, unpack, wrap

logger = logging.getLogger("gpusim.maps")


class Switches(NamedTuple):
    """Whether every function takes the per-replica route, and whether those that take it are
    named."""

    force: bool
    report: bool


def _environment_flag(name: str) -> bool:
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false", "no", "off")


_switches: ContextVar[Switches | None] = ContextVar("gpusim per-replica switches", default=None)


def switches() -> Switches:
    """The switches in force: the innermost `per_replica_route`, else the environment's."""
    chosen = _switches.get()
    if chosen is None:
        chosen = Switches(
            _environment_flag("GPUSIM_FORCE_PER_REPLICA"),
            _environment_flag("GPUSIM_REPORT_PER_REPLICA"),
        )
        _switches.set(chosen)
    return chosen


@contextmanager
def per_replica_route(*, force: bool | None = None, report: bool | None = None) -> Iterator[None]:
    """Show or force the slow route of vmap and shard_map, in which a function runs once per
    replica.

    NumPy functions without a batched rule take it by themselves. The results are the same bits.

    Args:
        force: send every function on this route (to compare a batched rule with it).
        report: name each function that takes it, with the number of calls and the line that
            called it, as a warning of the logger ``gpusim.maps``.

    The environment variables GPUSIM_FORCE_PER_REPLICA and GPUSIM_REPORT_PER_REPLICA set to 1 do the
    same for a whole process.

    Example:
        >>> import numpy as np, gpusim
        >>> with gpusim.per_replica_route(force=True):
        ...     gpusim.vmap(np.sort)(np.array([[3, 1], [4, 2]]))
        array([[1, 3],
               [2, 4]])
    """
    now = switches()
    chosen = Switches(
        now.force if force is None else bool(force), now.report if report is None else bool(report)
    )
    token = _switches.set(chosen)
    try:
        yield
    finally:
        _switches.reset(token)


INNER_ROOMS = (
    "gpusim.collectives",
    "gpusim.formats",
    "gpusim.groups",
    "gpusim.lax",
    "gpusim.maps",
    "gpusim.random",
    "gpusim.reduction",
    "gpusim.rounding",
    "gpusim.torch",
    "gpusim.trees",
    "fallback",
)
"""Where errors are gpusim's own, and code that messages do not point at."""

LIBRARIES = ("numpy.", "optree", "ml_dtypes", "torch.")
"""What gpusim's code and users' code alike call into."""


def caller() -> str:
    """file:line of the nearest frame outside gpusim's inner rooms and NumPy."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(INNER_ROOMS + LIBRARIES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


def name_of(function: Callable[..., Any]) -> str:
    """numpy.linalg.svd, for messages."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__name__", repr(function))
    return f"{module}.{name}" if module else name


def _read_only(data: Any) -> Any:
    if isinstance(data, np.ndarray) and data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return data


def _whole(leaf: Any) -> Any:
    return _read_only(leaf._data) if isinstance(leaf, MappedArray) else leaf


def _wrap_unmapped(leaf: Any) -> Any:
    known = isinstance(leaf, (np.ndarray, np.generic)) or on_device(leaf)
    return wrap(leaf, ()) if known else leaf


def _part(leaf: Any, axes: Axes, place: tuple[int, ...]) -> Any:
    """What one replica holds of `leaf`: `place` is its index on each of `axes`."""
    if not isinstance(leaf, MappedArray):
        return leaf
    where = tuple(place[axes.index(frame)] for frame in leaf._axes)
    return _read_only(leaf._data[(*where, ...)] if leaf.ndim else leaf._data[where])


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

    Raises:
        ValueError: when the replicas' results differ in structure, shape or dtype.
    """
    leaves, structure, axes = mapped_leaves((args, kwargs))
    if not axes:
        plain_args, plain_kwargs = trees.unflatten(structure, [_whole(leaf) for leaf in leaves])
        return trees.map(_wrap_unmapped, function(*plain_args, **plain_kwargs))
    name = name or name_of(function)
    sizes = tuple(frame.size for frame in axes)
    if switches().report:
        logger.warning("%s ran once per replica (%d calls) at %s", name, np.prod(sizes), caller())
    results = []
    for place in np.ndindex(*sizes):
        parts = [_part(leaf, axes, place) for leaf in leaves]
        plain_args, plain_kwargs = trees.unflatten(structure, parts)
        results.append(function(*plain_args, **plain_kwargs))
    return stack_results(name, results, axes)


def stack_results(name: str, results: list[Any], axes: Axes) -> Any:
    """One tree of MappedArrays over `axes` from the replicas' trees of plain results."""
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
    sizes = tuple(frame.size for frame in axes)
    return trees.unflatten(structure, [_stack(name, column, axes, sizes) for column in columns])


def _stack(name: str, column: list[Any], axes: Axes, sizes: tuple[int, ...]) -> Any:
    first = column[0]
    on_a_gpu = on_device(first)
    if not on_a_gpu and not isinstance(first, (np.ndarray, np.generic, bool, int, float, complex)):
        if all(type(leaf) is type(first) and leaf == first for leaf in column):
            return first
        raise ValueError(
            f"{name} gave replicas different results that are no arrays: {first!r} and others; "
            "run it under gpusim.pmap"
        )
    arrays = column if on_a_gpu else [np.asarray(leaf) for leaf in column]
    for array in arrays:
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"{name} gave replicas results of different shape or dtype: {arrays[0].shape} "
                f"{arrays[0].dtype} and {array.shape} {array.dtype}; values of one shape are "
                f"needed "
                "(np.where instead of selecting by a mask), or gpusim.pmap, where shapes may "
                "differ "
                "inside the function"
            )
    stacked = np.stack(arrays).reshape(sizes + arrays[0].shape)
    return wrap(stacked, axes)
