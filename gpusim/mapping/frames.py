"""The axis environment: which named axes are bound around the running code, outermost first.

vmap and shard_map bind lockstep frames (all replicas advance in one batched operation); pmap binds,
in each replica's thread, a threaded frame that knows the replica's own index.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import GpusimError

AxisName = Hashable


class Frame:
    """One binding of an axis: its name, its size, how deep it nests, and where a thread stands on
    it.

    Attributes:
        name: the axis name; None for a map without one.
        size: the number of replicas.
        depth: how many frames enclose this one; mapped axes are kept in this order.
        index: the replica's own index in a threaded frame, None in a lockstep frame.
        active: False once the map has ended; its values must not be used any more.
    """

    __slots__ = ("active", "depth", "index", "name", "size")

    def __init__(self, name: AxisName, size: int, depth: int, index: int | None = None) -> None:
        self.name = name
        self.size = size
        self.depth = depth
        self.index = index
        self.active = True

    def __repr__(self) -> str:
        where = "" if self.index is None else f"[{self.index}]"
        return f"{self.name!r}{where} (size {self.size})"


Axes = tuple[Frame, ...]

_environment: ContextVar[Axes] = ContextVar("gpusim axis environment", default=())


def environment() -> Axes:
    """The bound frames, outermost first."""
    return _environment.get()


def lockstep_environment() -> Axes:
    """The bound frames that MappedArrays may be mapped over."""
    return tuple(frame for frame in _environment.get() if frame.index is None)


@contextmanager
def bound(frames: Axes) -> Iterator[None]:
    """Bind `frames` inside the present ones; on leaving they are ended for good."""
    token = _environment.set(_environment.get() + frames)
    try:
        yield
    finally:
        for frame in frames:
            frame.active = False
        _environment.reset(token)


def new_frames(names: Sequence[AxisName], sizes: Sequence[int], index: int | None = None) -> Axes:
    """Frames for the axes of one map, to be bound inside the present environment."""
    depth = len(_environment.get())
    return tuple(
        Frame(name, size, depth + place, index)
        for place, (name, size) in enumerate(zip(names, sizes, strict=True))
    )


def resolve(axis_name: AxisName) -> Frame:
    """The innermost frame of that name.

    Raises:
        NameError: when no enclosing map binds the name.
    """
    frames = _environment.get()
    for frame in reversed(frames):
        if frame.name is not None and frame.name == axis_name:
            return frame
    names = ", ".join(repr(frame.name) for frame in frames if frame.name is not None)
    raise NameError(
        f"unbound axis name: {axis_name!r}; "
        + (f"the axes bound here are {names}" if names else "no axis is bound here")
        + " (axis names are bound by the axis_name of vmap or pmap, and by shard_map's mesh)"
    )


def union(first: Axes, second: Axes) -> Axes:
    """The frames of both, outermost first."""
    if first is second or not second:
        return first
    if not first:
        return second
    frames = sorted({*first, *second}, key=lambda frame: frame.depth)
    return tuple(frames)


def check_active(axes: Axes) -> None:
    """Refuse values whose map has ended.

    Raises:
        GpusimError: naming the axis.
    """
    for frame in axes:
        if not frame.active:
            raise GpusimError(
                f"a MappedArray mapped over axis {frame.name!r} (size {frame.size}) was used after "
                "its map had ended; return it from the mapped function instead of keeping it"
            )
