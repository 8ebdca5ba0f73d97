"""The measurements of one window of the elements: its values are made once for all settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.collectives.fold import fold_spec
from gpusim.fallback import fold, round_to, run_fold
from gpusim.fallback.formats import FLOAT64
from gpusim.formats import Format, kernel_format
from gpusim.reduction import Reduction
from gpusim.tools.progress import Advance
from gpusim.tools.study.arrays import Source
from gpusim.tools.study.feedback import accumulated
from gpusim.tools.study.metrics import Partial, Sizes, measure
from gpusim.tools.study.reference import Exact, ExactSum
from gpusim.tools.study.settings import Setting, ValueFormat, carrier
from gpusim.tools.study.store import Point, Store

__all__ = ["Window"]

CHUNK = 1 << 18
"""Elements that one thread draws and rounds at a time."""
LARGE = 2.0**900
"""Magnitudes beyond which a sum of them may leave the range of float64."""


@dataclass(frozen=True)
class Window:
    """Elements first..first+count-1 of a source, rounded to one format, over all its replicas."""

    source: Source
    total: int
    """The elements of the whole source."""
    scale: float
    replicas: int
    dtype: ValueFormat
    first: int
    count: int
    steps: int = 1

    def measure(
        self, points: list[Point], store: Store, pool: ThreadPoolExecutor, advance: Advance
    ) -> None:
        """Measure the points that `store` lacks."""
        points = [point for point in points if store.get(point) is None]
        if not points:
            return
        references = _References(self)
        members = self.members(0, references.unrounded, pool.map)
        # First in the queue, as the others wait for it.
        ready = pool.submit(references.complete, members, {point.setting.op for point in points})
        tasks = [pool.submit(self._measure, point, members, ready) for point in points]
        try:
            for point, task in zip(points, tasks, strict=True):
                store.put(point, task.result())
                done = self.replicas * self.count * self.steps
                advance(f"{point.setting.name}, {self.replicas} replicas", done)
        finally:  # interrupted: running tasks end, no other starts
            for task in tasks:
                task.cancel()

    def members(
        self, step: int, unrounded: ExactSum | None, spread: Callable[..., Iterator[Any]]
    ) -> NDArray[Any]:
        """The window of all replicas in the format, made a few replicas at a time.

        The values before they are rounded are added to `unrounded`. `spread` is map, or that of a
        pool.
        """
        source = at_step(self.source, step)
        members = np.empty((self.replicas, self.count), carrier(self.dtype))
        size = max(1, CHUNK // self.count)

        def fill(start: int) -> None:
            rows = range(start, min(start + size, self.replicas))
            values = source.block(self.replicas, rows, self.first, self.count)
            if self.scale != 1:
                with np.errstate(over="ignore"):
                    values = values.astype(np.float64) * self.scale
            if unrounded is not None:
                unrounded.add(values)
            members[rows.start : rows.stop] = round_to(values, kernel_format(self.dtype))

        for _ in spread(fill, range(0, self.replicas, size)):
            pass  # an error in a thread is raised here
        return members

    def step_of(self, first: NDArray[Any]) -> Callable[[int], NDArray[Any]]:
        """The values of each step: the first ones again, where they do not differ."""

        def members(step: int) -> NDArray[Any]:
            same = step == 0 or not hasattr(self.source, "at_step")
            return first if same else self.members(step, None, map)

        return members

    def _measure(
        self, point: Point, members: NDArray[Any], references: Future[References]
    ) -> Partial:
        setting = point.setting
        if setting.steps > 1:
            result = accumulated(
                setting, point.seed, self.step_of(members), _folded(setting, point.seed)
            )
        else:
            result = _result(point, members, self.total)
        exact = references.result()
        return measure(
            result,
            exact.rounded[setting.op],
            exact.unrounded[setting.op],
            exact.infinite,
            kernel_format(setting.dtype),
            exact.sizes[setting.op],
        )


def at_step(source: Source, step: int) -> Source:
    """The values of another step, where a source has others; else the same at every step."""
    found: Source = source.at_step(step) if step and hasattr(source, "at_step") else source
    return found


@dataclass(frozen=True)
class References:
    """By operation, the exact results of the rounded and of the unrounded values, and the sums of
    the rounded values' magnitudes."""

    rounded: dict[str, Exact]
    unrounded: dict[str, Exact]
    sizes: dict[str, Sizes]
    infinite: NDArray[np.bool_]


class _References:
    """The exact sums of a window, over all its steps."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.unrounded = ExactSum(window.count)

    def complete(self, members: NDArray[Any], ops: set[str]) -> References:
        """The references, from the values of the first step and those of the others."""
        window = self.window
        rounded, sizes = ExactSum(window.count), _Magnitudes(members)
        for step in range(window.steps):
            if step:
                members = window.members(step, self.unrounded, map)
            rounded.add(members)
            sizes.add(members)

        def of(total: Exact) -> dict[str, Exact]:
            return {op: total if op == "sum" else total.divided(window.replicas) for op in ops}

        total = sizes.total()
        return References(
            of(rounded.total()),
            of(self.unrounded.total()),
            {op: total if op == "sum" else total.divided(window.replicas) for op in ops},
            self.unrounded.infinite,
        )


class _Magnitudes:
    """The sums of magnitudes, which leave the range of float64 where sums need not: large ones are
    scaled."""

    def __init__(self, first: NDArray[Any]) -> None:
        self.exponents: NDArray[Any] | None = None
        if first.dtype == FLOAT64:
            largest = np.abs(np.where(np.isfinite(first), first, 0.0)).max(axis=0)
            if largest.max(initial=0.0) > LARGE:
                self.exponents = np.frexp(largest)[1]
        self.sums = ExactSum(first.shape[1])

    def add(self, members: NDArray[Any]) -> None:
        rows = max(1, CHUNK // max(1, members.shape[1]))
        for start in range(0, len(members), rows):
            block = np.abs(members[start : start + rows])
            if self.exponents is not None:
                block = np.ldexp(block, -self.exponents)
            self.sums.add(block)

    def total(self) -> Sizes:
        return Sizes(self.sums.total().high, self.exponents)


def _fold(setting: Setting, reduction: Reduction, members: NDArray[Any], call: int) -> NDArray[Any]:
    spec = replace(
        fold_spec(reduction),
        out_dtype=FLOAT64 if isinstance(setting.dtype, Format) else carrier(setting.dtype),
        divisor=len(members) if setting.op == "mean" else None,
    )
    return run_fold(spec, members, call=call)


def _folded(setting: Setting, seed: int) -> Callable[[Reduction, NDArray[Any], int], NDArray[Any]]:
    """One whole reduction, and the last rounding of a format without a dtype."""

    def result(reduction: Reduction, members: NDArray[Any], call: int) -> NDArray[Any]:
        found = _fold(setting, reduction, members, call)
        return _last(found, setting, seed, (0, found.shape[-1]), call + 1)

    return result


def _result(point: Point, members: NDArray[Any], total: int) -> NDArray[Any]:
    setting = point.setting
    window = point.first, total
    if setting.in_phases:
        result = _fold(setting, setting.reduction(point.seed), members, 0)
    else:
        result = fold(
            members,
            order=setting.reduction(point.seed).schedule,
            accumulate=kernel_format(setting.accumulate),
            out_dtype=FLOAT64 if isinstance(setting.dtype, Format) else None,
            rounding=setting.rounding,
            seed=point.seed,
            divisor=len(members) if setting.op == "mean" else None,
            window=window,
        )
    return _last(result, setting, point.seed, window, 1)


def _last(
    result: NDArray[Any], setting: Setting, seed: int, window: tuple[int, int], call: int
) -> NDArray[Any]:
    """The last rounding to a format without a dtype, with random numbers of its own.

    It is an addition of -0, which changes no value.
    """
    dtype = setting.dtype
    if not isinstance(dtype, Format):
        return result
    return fold(
        np.stack([result, np.full_like(result, -0.0)]),
        accumulate=dtype.info,
        rounding=setting.rounding,
        seed=seed,
        call=call,
        window=window,
    )
