"""The sweep: every setting, number of replicas and seed, over windows of the elements.

Its memory depends neither on the number of elements nor on the number of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fallback import fold, round_to
from gpusim.formats import FormatLike, kernel_format
from gpusim.tools.info import usable_cores
from gpusim.tools.progress import Advance, progress, silent
from gpusim.tools.study.metrics import Partial, measure, merged
from gpusim.tools.study.reference import Exact, exact_sum
from gpusim.tools.study.results import Measurement, Study
from gpusim.tools.study.settings import Setting, grid, whole_numbers
from gpusim.tools.study.sources import GRADIENTS, Source, open_source
from gpusim.tools.study.store import Point, Store

__all__ = ["Sweep", "plan", "run", "sweep"]

WINDOW = 128 * 2**20
"""Bytes of input, over all replicas, that are folded at a time: some 400 MiB in all."""
CHUNK = 1 << 18
"""Elements that one thread draws and rounds at a time."""
REPLICAS = tuple(2**n for n in range(1, 11))
SEEDS = tuple(range(8))


@dataclass(frozen=True)
class Sweep:
    """The checked parameters of a sweep."""

    source: Source
    settings: list[Setting]
    replicas: list[int]
    seeds: list[int]
    scale: float

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the input, for stores of this sweep's measurements."""
        return {**self.source.identity, "scale": self.scale}

    @property
    def about(self) -> dict[str, Any]:
        return {"input": {"title": self.source.title, **self.identity}}

    def seeds_of(self, setting: Setting) -> list[int]:
        return self.seeds if setting.stochastic else [0]

    def windows(self, replicas: int, dtype: np.dtype[Any]) -> Iterator[tuple[int, int]]:
        """The first element and the length of each window."""
        width = max(1, WINDOW // (replicas * dtype.itemsize))
        width -= width % 8 if width > 8 else 0  # the generator's blocks
        for first in range(0, self.source.elements, width):
            yield first, min(width, self.source.elements - first)

    def points(self, setting: Setting, replicas: int, seed: int) -> list[Point]:
        """The measurements that make up one reduction."""
        windows = self.windows(replicas, setting.dtype)
        return [Point(setting, replicas, seed, first, count) for first, count in windows]

    def reductions(self) -> Iterator[tuple[Setting, int, int]]:
        for replicas in self.replicas:
            for setting in self.settings:
                for seed in self.seeds_of(setting):
                    yield setting, replicas, seed

    def work(self, store: Store) -> tuple[float, float]:
        """The number of additions in all, and the number that is done."""
        total = done = 0
        for reduction in self.reductions():
            for point in self.points(*reduction):
                size = point.replicas * point.count
                total += size
                done += size * (store.get(point) is not None)
        return total, done


def plan(
    input: str | PathLike[str] | NDArray[Any] | Source = GRADIENTS,
    *,
    replicas: Iterable[int] | None = None,
    dtypes: Iterable[DTypeLike] = ("float16",),
    accumulators: Iterable[DTypeLike | FormatLike | None] = (None,),
    orders: Iterable[str] = ("linear", "ring", "tree"),
    roundings: Iterable[str] = ("nearest", "stochastic"),
    seeds: Iterable[int] = SEEDS,
    elements: int | None = None,
    scale: float | None = None,
    input_seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
) -> Sweep:
    """Check the arguments of `sweep`, whose docstring describes them and the errors."""
    settings = grid(dtypes, accumulators, orders, roundings)
    words = whole_numbers("seeds", seeds, 0)
    if max(words) >= 2**64:
        raise ValueError(f"seeds: {max(words)} given, expected integers from 0 to 2**64 - 1")
    counts = None if replicas is None else whole_numbers("replicas", replicas, 1)
    source = open_source(input, elements=elements, seed=input_seed, epoch=epoch, tensor=tensor)
    most = source.replicas
    if counts is None:
        counts = [n for n in REPLICAS if most is None or n <= most] or [1]
    if most is not None and max(counts) > most:
        raise ValueError(
            f"replicas: {max(counts)} asked for, but {source.title.split(',')[0]} has {most}"
        )
    factor = source.scale if scale is None else float(scale)
    if not 0 < factor < float("inf"):
        raise ValueError(f"scale={scale!r}: expected a positive number")
    return Sweep(source, settings, counts, words, factor)


def sweep(
    input: str | PathLike[str] | NDArray[Any] | Source = GRADIENTS,
    *,
    replicas: Iterable[int] | None = None,
    dtypes: Iterable[DTypeLike] = ("float16",),
    accumulators: Iterable[DTypeLike | FormatLike | None] = (None,),
    orders: Iterable[str] = ("linear", "ring", "tree"),
    roundings: Iterable[str] = ("nearest", "stochastic"),
    seeds: Iterable[int] = SEEDS,
    elements: int | None = None,
    scale: float | None = None,
    input_seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
    store: str | PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    show: bool = False,
) -> Study:
    """Sum an input's replicas in every combination of settings, and measure the errors.

    Values are rounded to `dtype`, to nearest, and summed over the first R replicas; errors are
    those of the sum, against the exact sum of the rounded values.

    **Arguments**:

    - `input`: "gradients" (of the digits network, an image each), "normal", "lognormal",
      "heavy-tailed" (Student's t with two degrees of freedom), "cancelling", a file (.npy, .npz,
      .safetensors), or an array; axis 0 numbers the replicas.
    - `replicas`: the numbers of replicas; the powers of two from 2 to 1,024 that the input has.
    - `dtypes`: the formats of the values.
    - `accumulators`: the formats partial sums are rounded to: dtypes, a `gpusim.Format` ("e5m6" is
      Format(5, 6)), or None, which is each dtype's own.
    - `orders`: of "linear", "reverse", "tree" and "ring", and names of twins.
    - `roundings`: of "nearest" and "stochastic".
    - `seeds`: of stochastic rounding.
    - `elements`: how many elements are summed; 4,096 of a distribution, else all there are.
    - `scale`: what values are multiplied by before they are rounded; 128 for "gradients", else 1.
    - `input_seed`: seeds distributions, and the digits network.
    - `epoch`: how many epochs the digits network is trained before its gradients are taken.
    - `tensor`: the name of the array, in a file that holds several.
    - `store`: a file that keeps every measurement as soon as it is made.
    - `resume`: go on with what `store` holds; it may have been swept with other settings.
    - `threads`: how many fold at a time; as many as there are cores.
    - `show`: show progress on standard error.

    **Returns**: The study, with rows and ways to print, draw and write them.

    **Raises**:

    - ValueError: an argument, or an input file, that makes no sense.
    - OSError: a file that cannot be read or written; FileExistsError for a `store` that holds a
      sweep, without `resume`.
    - ModuleNotFoundError: a package is needed that the extra `study` brings.

    >>> study = sweep("normal", replicas=[64], orders=["linear", "tree"], roundings=["nearest"])
    >>> for row in study.rows:
    ...     print(f"{row.setting.name:15} {row.mean.relative_error:.1e} {row.mean.correct:.0%}")
    float16, linear 1.2e-03 19%
    float16, tree   5.5e-04 35%
    """
    planned = plan(
        input,
        replicas=replicas,
        dtypes=dtypes,
        accumulators=accumulators,
        orders=orders,
        roundings=roundings,
        seeds=seeds,
        elements=elements,
        scale=scale,
        input_seed=input_seed,
        epoch=epoch,
        tensor=tensor,
    )
    path = None if store is None else Path(store)
    with Store(planned.identity, path, resume=resume) as kept:
        return run(planned, kept, threads=threads, show=show)


def run(planned: Sweep, store: Store, *, threads: int | None = None, show: bool = False) -> Study:
    """Measure the windows that `store` lacks, and combine all of them."""
    total, done = planned.work(store)
    workers = threads or usable_cores()
    bar: AbstractContextManager[Advance] = progress(total, done) if show else nullcontext(silent)
    with bar as advance, ThreadPoolExecutor(workers) as pool:
        for replicas in planned.replicas:
            for dtype in dict.fromkeys(setting.dtype for setting in planned.settings):
                for first, count in planned.windows(replicas, dtype):
                    _window(planned, store, pool, advance, replicas, dtype, first, count)
    return Study(planned.source.title, planned.about, _gathered(planned, store))


def _gathered(planned: Sweep, store: Store) -> list[Measurement]:
    found = []
    for setting, replicas, seed in planned.reductions():
        parts = [store.get(point) for point in planned.points(setting, replicas, seed)]
        metrics = merged([part for part in parts if part is not None])
        found.append(Measurement(setting, replicas, seed, metrics))
    return found


def _window(
    planned: Sweep,
    store: Store,
    pool: ThreadPoolExecutor,
    advance: Advance,
    replicas: int,
    dtype: np.dtype[Any],
    first: int,
    count: int,
) -> None:
    """All reductions of one dtype over one window: its input is made once."""
    points = [
        Point(setting, replicas, seed, first, count)
        for setting in planned.settings
        if setting.dtype == dtype
        for seed in planned.seeds_of(setting)
    ]
    points = [point for point in points if store.get(point) is None]
    if not points:
        return
    members = _members(planned, pool, replicas, dtype, first, count)
    exact = pool.submit(exact_sum, members)  # first in the queue, as the others wait for it
    total = planned.source.elements
    tasks = [pool.submit(_measure, point, members, exact, total) for point in points]
    try:
        for point, task in zip(points, tasks, strict=True):
            store.put(point, task.result())
            advance(f"{point.setting.name}, {replicas} replicas", replicas * count)
    finally:  # interrupted: running tasks end, no other starts
        for task in tasks:
            task.cancel()


def _measure(point: Point, members: NDArray[Any], exact: Future[Exact], total: int) -> Partial:
    setting = point.setting
    result = fold(
        members,
        order=setting.reduction(point.seed).schedule,
        accumulate=kernel_format(setting.accumulate),
        rounding=setting.rounding,
        seed=point.seed,
        window=(point.first, total),
    )
    return measure(result, exact.result())


def _members(
    planned: Sweep,
    pool: ThreadPoolExecutor,
    replicas: int,
    dtype: np.dtype[Any],
    first: int,
    count: int,
) -> NDArray[Any]:
    """The window of all replicas in `dtype`, made a few replicas at a time."""
    members = np.empty((replicas, count), dtype)
    step = max(1, CHUNK // count)

    def fill(start: int) -> None:
        rows = range(start, min(start + step, replicas))
        values = planned.source.block(replicas, rows, first, count)
        if planned.scale != 1:
            values = values.astype(np.float64) * planned.scale
        members[rows.start : rows.stop] = round_to(values, dtype)

    for _ in pool.map(fill, range(0, replicas, step)):
        pass  # an error in a thread is raised here
    return members
