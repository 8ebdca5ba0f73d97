"""pmap: each replica runs in its own thread on plain arrays, so that any Python code works."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from gpusim.fallback.threads import cores

from .. import reduction as reductions
from .. import trees
from ..errors import GpusimError, ReplicaError, explain
from ..libraries import call_on_bits, copy_array, first_unlike, on_device
from .agreement import agree_on_arguments, agree_on_results
from .arguments import (
    MapArguments,
    as_array,
    check_axis_size,
    check_in_axes,
    check_out_axes,
    read_arguments,
    read_only,
)
from .axis_environment import (
    Axes,
    AxisName,
    Sharding,
    extend_axis_environment,
    local_axis_size,
    lockstep_axes,
    new_axes,
    outermost_sharding,
)
from .call_site import GPUSIM_MODULES, LIBRARIES
from .clock import Clock
from .mapped_array.align import common_axes, lead_full, sizes
from .mapped_array.array import Array, MappedArray, unpack, wrap_array
from .scheduler import PmapCall, Scheduler, enclosing_replica
from .streams import StreamSlots, check_devices, gpus_of_replicas, move
from .workers import check_thread_count

SCHEDULES = ("cores", "one")


def pmap(
    f: Callable[..., Any],
    axis_name: AxisName = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    devices: Sequence[Any] | None = None,
    axis_size: int | None = None,
    schedule: str = "cores",
) -> Callable[..., Any]:
    """Run `f` for many replicas, each in a thread of its own with plain arrays.

    vmap needs operations that it can batch. pmap runs any Python: branches on values, shapes that
    differ inside `f`, other libraries. Replicas meet in collectives over `axis_name`; replicas that
    do not make the same call, or never arrive, are an error and never a hang.

    **Arguments**:

    - `f`: a function of pytrees of arrays that returns a pytree of arrays. Its array arguments are
      read-only (``x.copy()`` is the way out).
    - `axis_name`: a name for the axis, for collectives.
    - `in_axes`, `out_axes`, `axis_size`: as in `vmap`; out_axes=None demands equal bits of all
      replicas.
    - `devices`: where replicas run, each on a stream of its own: numbers of GPUs, IPUs and
      Placements of `gpusim.devices`, "cpu" or "host". They repeat if there are fewer than
      replicas. Array arguments are moved there. None: where the arguments are.
    - `schedule`: "cores" lets as many replicas run at once as there are cores; "one" runs exactly
      one at a time, each up to its next collective, in replica order, so that a program takes the
      same path every time. A pmap inside a pmap follows the outer one's schedule.

    **Returns**: A function with the arguments of `f`.

    **Raises**:

    - ReplicaError: if a replica's own code raises; the exception is its cause, and `index` is the
      replica's. The others are ended.
    - CollectiveMismatchError: if replicas meet in calls that differ; it names both.
    - DeadlockError: if replicas wait for others that have returned.
    - GpusimError: if the machine does not have a thread for each replica of a named axis.
    - ValueError: if results differ in tree, shape or dtype, or (out_axes=None) in bits; and as
      vmap.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> def f(x):
    ...     total = lax.psum(x, "i")
    ...     return total if x > 2 else -x
    >>> gpusim.pmap(f, "i")(np.array([1, 2, 3, 4]))
    array([-1, -2, 10, 10])
    """
    if not callable(f):
        raise TypeError(f"pmap needs a function, but got {f!r:.60}")
    if schedule not in SCHEDULES:
        raise ValueError(f"pmap schedule must be one of {SCHEDULES}, but got {schedule!r}")
    in_axes = check_in_axes("pmap", in_axes)
    check_out_axes("pmap", out_axes)
    axis_size = check_axis_size("pmap", axis_size)
    check_devices(devices)

    @functools.wraps(f)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        size = local_axis_size("pmap", axis_size)
        arguments = read_arguments("pmap", in_axes, size, args, kwargs)
        if axis_name is not None:
            check_thread_count("pmap", arguments.size)
        sharding = outermost_sharding("pmap", arguments.size)
        agree_on_arguments("pmap", arguments.shared(), sharding)
        parent = enclosing_replica()
        outer = None if parent is None else parent.stream_slot
        gpus = gpus_of_replicas(devices, arguments.leaves, arguments.size, outer)
        if all(gpu is None for gpu in gpus):
            if devices is not None:
                arguments = arguments._replace(leaves=[move(x, None) for x in arguments.leaves])
            results = _run_replicas(f, arguments, axis_name, schedule, sharding, None)
            return _gather(results, out_axes, lockstep_axes(), sharding)
        with StreamSlots(gpus, arguments.leaves, outer) as slots:
            results = _run_replicas(f, arguments, axis_name, schedule, sharding, slots)
            with slots.gathering():
                found = _gather(
                    results, out_axes, lockstep_axes(), sharding, lambda x: move(x, slots.home)
                )
            results.clear()  # while the streams are held
            return found

    return mapped


def _run_replicas(
    f: Callable[..., Any],
    arguments: MapArguments,
    axis_name: AxisName,
    schedule: str,
    sharding: Sharding | None,
    slots: StreamSlots | None,
) -> list[Any]:
    state = reductions.current()
    # The default state counts nothing: the replicas' copies of the context have it already.
    counted = not state.is_default
    states = [reductions.forked(state) for _ in range(arguments.size if counted else 0)]
    nothing: AbstractContextManager[Any] = nullcontext()

    def replica(index: int) -> Any:
        entry = call.replicas[index].entry
        own_state = reductions.entered(states[index]) if counted else nothing
        on_its_stream = nothing if slots is None else slots.on_stream(index, entry)
        with extend_axis_environment((entry,)), own_state, on_its_stream:
            leaves = [
                _part(leaf, axis, index, slots)
                for leaf, axis in zip(arguments.leaves, arguments.axes, strict=True)
            ]
            return arguments.call(f, leaves)

    def report(index: int, error: BaseException) -> BaseException:
        first = 0 if sharding is None else sharding.offset
        return _describe_failure(first + index, axis_name, error)

    parent = enclosing_replica()
    if parent is None:
        one = schedule == "one"
        call = PmapCall(Scheduler(1 if one else cores(), one, Clock), None, replica, report)
    else:
        call = PmapCall(parent.call.scheduler, parent, replica, report)
    for index in range(arguments.size):
        (entry,) = new_axes((axis_name,), (arguments.size,), index, sharding)
        call.add(entry, contextvars.copy_context())
    if slots is not None:
        call.streams = True
        for thread, slot in zip(call.replicas, slots.of, strict=True):
            thread.stream_slot = slot
    results = call.execute()
    if counted:
        state.calls = max(own.calls for own in states)
    return results


def _part(leaf: Any, axis: int | None, index: int, slots: StreamSlots | None) -> Any:
    """One replica's read-only part of an argument, on the replica's GPU.

    It is in C order if the mapped axis was not the first one.
    """
    gpu = None if slots is None else slots.place(index)
    if axis is None:
        leaf = leaf if slots is None else move(leaf, gpu)
        if isinstance(leaf, MappedArray):
            data, axes = unpack(leaf)
            return wrap_array(read_only(data), axes)
        return read_only(leaf)
    data, axes = unpack(as_array(leaf, "argument"))
    view = data[(slice(None),) * (len(axes) + axis) + (index, ...)]
    part = view if slots is None else move(view, gpu)
    if axis and part is view:
        part = part.copy(order="C")
    part = read_only(part)
    return wrap_array(part, axes) if isinstance(leaf, MappedArray) else part


def _raised_by_gpusim(trace: TracebackType | None) -> bool:
    """Whether the innermost Python code of a traceback, libraries apart, is gpusim's."""
    module = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not name.startswith(LIBRARIES):
            module = name
        trace = trace.tb_next
    return module.startswith(GPUSIM_MODULES)


def _describe_failure(index: int, axis_name: AxisName, error: BaseException) -> BaseException:
    """The exception that pmap raises for an exception in a replica."""
    explain(error)
    who = f"replica {index}" + ("" if axis_name is None else f" of axis {axis_name!r}")
    if isinstance(error, GpusimError) or (
        isinstance(error, (NameError, ValueError, TypeError, IndexError))
        and _raised_by_gpusim(error.__traceback__)
    ):
        error.add_note(f"raised in {who} of a pmap")
        return error
    failure = ReplicaError(index, f"{who} raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _gather(
    results: list[Any],
    out_axes: Any,
    outer: Axes,
    sharding: Sharding | None,
    to_one_gpu: Callable[[Any], Any] | None = None,
) -> Any:
    """One tree with the replicas' results stacked along out_axes."""
    first, structure = trees.flatten(results[0])
    columns = [[leaf] for leaf in first]
    offset = 0 if sharding is None else sharding.offset
    for index, result in enumerate(results[1:], start=offset + 1):
        leaves, other = trees.flatten(result)
        if other != structure:
            raise ValueError(
                f"pmap: replicas returned different trees: replica {offset} {structure}, replica "
                f"{index} {other}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    places = trees.broadcast_prefix(out_axes, results[0], "pmap out_axes")
    stacked = [
        _gather_leaf(column, axis, outer, sharding, to_one_gpu)
        for column, axis in zip(columns, places, strict=True)
    ]
    return trees.unflatten(structure, stacked)


def _gather_leaf(
    column: list[Any],
    axis: int | None,
    outer: Axes,
    sharding: Sharding | None,
    to_one_gpu: Callable[[Any], Any] | None,
) -> Any:
    arrays = [as_array(leaf, "pmap: a result") for leaf in column]
    offset = 0 if sharding is None else sharding.offset
    for index, array in enumerate(arrays, start=offset):
        if array.shape != arrays[0].shape or array.dtype != arrays[0].dtype:
            raise ValueError(
                f"pmap: replicas returned different arrays: replica {offset} {arrays[0].dtype}"
                f"{list(arrays[0].shape)}, replica {index} {array.dtype}{list(array.shape)}"
            )
    if to_one_gpu is not None and any(on_device(unpack(array)[0]) for array in arrays):
        arrays = [to_one_gpu(array) for array in arrays]
    axes = common_axes(arrays)
    parts = [lead_full(array, axes) for array in arrays]
    if axis is None:
        data = parts[0]
        unlike = _first_unlike(parts)
        if unlike is not None:
            raise ValueError(
                f"pmap out_axes is None, but replicas {offset} and {offset + unlike} returned "
                "different values; only what is the same on all replicas can be returned once"
            )
        if sharding is not None:
            agree_on_results("pmap's result for out_axes=None", [data], sharding)
        data = copy_array(data)  # the caller's own; a GPU's goes back to its replica's stream
    else:
        place = len(sizes(axes)) + normalize_axis_index(axis, arrays[0].ndim + 1)
        data = call_on_bits(np.stack, parts, axis=place)
    return wrap_array(data, axes) if outer else data


def _first_unlike(parts: list[Array]) -> int | None:
    """The first replica with other bits than replica 0, or None."""
    for index, part in enumerate(parts):
        if part is not parts[0] and first_unlike(
            call_on_bits(np.stack, [parts[0], part]) if on_device(part) else [parts[0], part]
        ):
            return index
    return None
