"""Axes bound over tensors: by `vmap` in lockstep, or for a graph that is traced.
A collective records its enclosing axes; where it is computed, they are bound again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..errors import GpusimError
from ..maps.arguments import check_axis_size
from ..maps.axis_environment import (
    Axes,
    AxisEntry,
    AxisName,
    Sharding,
    _axis_environment,
    axis_environment,
    extend_axis_environment,
    resolve,
)
from ..runtime.world import current_world

__all__ = [
    "EnclosingAxis",
    "TensorAxis",
    "enclosing_axes",
    "is_traced",
    "rebound",
    "trace_axes",
    "traced_sizes",
]


class TensorAxis(AxisEntry):
    """A lockstep axis over tensors.

    **Attributes**:

    - `marker`: each replica's index on the axis, a tensor that is batched at just the level of
      torch.func.vmap that the entry stands for; None where a graph is traced.
    """

    __slots__ = ("marker",)

    def __init__(
        self, name: AxisName, size: int, sharding: Sharding | None, marker: torch.Tensor | None
    ) -> None:
        super().__init__(name, size, len(axis_environment()), sharding=sharding)
        self.marker = marker


class EnclosingAxis(NamedTuple):
    """One axis around a collective, as a plan records it.

    **Attributes**:

    - `name`: its name.
    - `size`: how many of its replicas are here.
    - `total`: how many there are on all instances.
    - `kind`: "lockstep", "thread" (of pmap), "traced", or "shared" (lockstep, and shared out over
      instances).
    """

    name: Any
    size: int
    total: int
    kind: str


def enclosing_axes() -> tuple[EnclosingAxis, ...]:
    """The axes bound here, outermost first."""
    return tuple(EnclosingAxis(f.name, f.size, f.total, _kind(f)) for f in axis_environment())


def _kind(entry: AxisEntry) -> str:
    if entry.index is not None:
        return "thread"
    if isinstance(entry, TensorAxis) and entry.marker is None:
        return "traced"
    return "lockstep" if entry.sharding is None else "shared"


def traced_sizes(names: Sequence[str]) -> tuple[int, ...]:
    """The sizes of these axes, if one of them is bound for tracing: a graph has them as
    constants."""
    entries = [resolve(name) for name in names]
    traced = any(_kind(entry) == "traced" for entry in entries)
    return tuple(entry.total for entry in entries) if traced else ()


def is_traced(name: AxisName) -> bool:
    """Whether an axis of this name is bound for tracing."""
    entries = [entry for entry in axis_environment() if entry.name == name]
    return bool(entries) and _kind(entries[-1]) == "traced"


@contextmanager
def rebound(enclosing: Sequence[EnclosingAxis], unnamed: Sequence[int]) -> Iterator[Axes]:
    """Bind the written-down axes, and inside them unnamed ones of these sizes; all are yielded.

    Axes of pmap are those of the running replica.

    **Raises**:

    - GpusimError: outside of a replica of such a pmap, or if the axis was bound for tracing.
    """
    here = axis_environment()
    entries: list[AxisEntry] = []
    for depth, axis in enumerate(enclosing):
        if axis.kind == "thread":
            entries.append(_own_entry(here, depth, axis))
        else:
            entries.append(AxisEntry(axis.name, axis.size, depth, sharding=_sharding(axis)))
    depth = len(entries)
    entries += [AxisEntry(None, size, depth + place) for place, size in enumerate(unnamed)]
    token = _axis_environment.set(tuple(entries))
    try:
        yield tuple(entries)
    finally:
        _axis_environment.reset(token)


def _own_entry(here: Axes, depth: int, axis: EnclosingAxis) -> AxisEntry:
    entry = here[depth] if depth < len(here) else None
    if entry is None or entry.index is None or entry.name != axis.name:
        raise GpusimError(
            f"a collective over pmap's axis {axis.name!r} cannot run outside of its replicas: call "
            "backward() inside the function that pmap maps"
        )
    return entry


def _sharding(axis: EnclosingAxis) -> Sharding | None:
    if axis.kind != "shared":
        return None
    world = current_world()
    if world is None:
        raise GpusimError(
            f"a collective over axis {axis.name!r} cannot run outside of `with world`: call "
            "backward() inside of it"
        )
    return Sharding(world, world.counts)


@contextmanager
def trace_axes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Bind axis names where one replica's function is traced, so that shapes are known.

    What is traced inside (make_fx with pre_dispatch=True, torch.export, torch.compile) is a graph
    of one replica in which collectives are operators that look up their axes when they run: it can
    run in `vmap` and in `pmap`, with the same number of replicas (another one is a ValueError).

    **Arguments**:

    - `sizes`: the number of replicas along each axis, outermost first.

    **Raises**:

    - GpusimError: by collectives inside that are to compute anything.

    >>> import torch, gpusim.torch as gt
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> def f(x):
    ...     return x / gt.psum(x, "i")
    >>> with gt.trace_axes({"i": 4}):
    ...     graph = make_fx(f, pre_dispatch=True, tracing_mode="fake")(torch.ones(()))
    >>> gt.vmap(graph, axis_name="i")(torch.arange(4.0))
    tensor([0.0000, 0.1667, 0.3333, 0.5000])
    """
    entries: list[TensorAxis] = []
    for name, size in sizes.items():
        checked = check_axis_size(f"trace_axes ({name!r})", size)
        if checked is None:
            raise TypeError(f"trace_axes sizes must be integers, but axis {name!r} has {size!r}")
        entry = TensorAxis(name, checked, None, None)
        entry.depth += len(entries)
        entries.append(entry)
    with extend_axis_environment(tuple(entries)):
        yield
