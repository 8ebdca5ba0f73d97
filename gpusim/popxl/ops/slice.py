"""`slice`, `slice_`: a part of a tensor, forwards or backwards along each axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._ops import shapes
from .._ops.definition import Definition, add_op
from ..tensor import Tensor

__all__ = ["process_args", "slice", "slice_"]

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
Bounds = int | Sequence[int | None] | None


def slice(
    t: Tensor,
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> Tensor:
    """The elements of `t` from `start` up to `stop`, which is not among them, along axes.

    **Arguments**

    - `start`, `stop`: a number for each axis, negative ones from the end; None is where the axis
      begins and ends, or where it ends and begins if the step is negative.
    - `step`: a number for each axis, by default 1; with -1 the slice goes backwards.
    - `axis`: the axes, by default the first ones.

    Without start, stop and step, `t` itself. ValueError for lists of different lengths.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ...     popxl.ops.slice(t, start=[None, 2], stop=[None, 0], step=[1, -1])
    Tensor[slice_out popxl.dtypes.float32 (2, 2)]
    """
    return _slice(shapes.SLICE, t, start, stop, step, axis)


def slice_(
    t: Tensor,
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> Tensor:
    """`slice` as a view: what changes it changes `t`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.slice_(popxl.constant([1.0, 2.0, 3.0]), start=1)
    Tensor[sliceinplace_out popxl.dtypes.float32 (2,)]
    """
    return _slice(shapes.SLICE_INPLACE, t, start, stop, step, axis)


def process_args(
    start: Bounds = None,
    stop: Bounds = None,
    step: Bounds = None,
    axis: int | Sequence[int] | None = None,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """All four as lists of one length, with numbers in the place of None; ValueError otherwise.

    >>> process_args(stop=[None, 3], step=[-1, None])
    ([-1, 0], [-2147483648, 3], [-1, 1], [0, 1])
    """
    given = {"start": start, "stop": stop, "step": step, "axis": axis}
    listed = {name: _listed(value) for name, value in given.items()}
    count = None
    for k, v in listed.items():
        if v is None:
            continue
        N = count = len(v) if count is None else count
        if len(v) != N:
            raise ValueError(f"All inputs must have same length. `{k}` has length {len(v)} != {N}.")
    steps = [1 if by is None else by for by in listed["step"] or [None] * (count or 0)]
    starts = _filled(listed["start"], steps, (0, -1))
    stops = _filled(listed["stop"], steps, (INT_MAX, INT_MIN))
    axes: Any = listed["axis"]
    return starts, stops, steps, list(range(count or 0)) if axes is None else axes


def _listed(value: Bounds) -> list[int | None] | None:
    if value is None:
        return None
    return [value] if isinstance(value, int) else list(value)


def _filled(
    values: list[int | None] | None, steps: list[int], defaults: tuple[int, int]
) -> list[int]:
    """Values, with the default for steps forwards or backwards where there is none."""
    forwards, backwards = defaults
    numbers = values or [None] * len(steps)
    return [
        (forwards if step > 0 else backwards) if value is None else value
        for value, step in zip(numbers, steps, strict=True)
    ]


def _slice(
    definition: Definition,
    t: Tensor,
    start: Bounds,
    stop: Bounds,
    step: Bounds,
    axis: int | Sequence[int] | None,
) -> Tensor:
    if start is None and stop is None and step is None:
        return t
    names = ("starts", "stops", "steps", "axes")
    attributes = dict(zip(names, map(tuple, process_args(start, stop, step, axis)), strict=True))
    return add_op(definition, [t], attributes)[0]
