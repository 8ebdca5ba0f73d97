"""The sweep: every setting, number of replicas and seed, over windows of the elements.

Its memory depends neither on the number of elements nor on the number of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpusim.collectives.fold import fold_spec
from gpusim.fallback import fold, round_to, run_fold
from gpusim.fallback.formats import FLOAT64
from gpusim.fallback.schedules import Schedule
from gpusim.fallback.spec import check_room
from gpusim.formats import Format, FormatLike, kernel_format
from gpusim.reduction import ReductionLike
from gpusim.tools.info import usable_cores
from gpusim.tools.progress import Advance, progress, silent
from gpusim.tools.study.arrays import GRADIENTS, Source
from gpusim.tools.study.command_line import command
from gpusim.tools.study.metrics import Partial, measure, merged
from gpusim.tools.study.reference import Exact, ExactSum, exact_sum
from gpusim.tools.study.results import Measurement, Study
from gpusim.tools.study.settings import (
    PRESETS,
    Setting,
    ValueFormat,
    accumulator_rule,
    as_settings,
    carrier,
    format_name,
    grid,
    hierarchy,
    hierarchy_name,
    items,
    rule_name,
    value_format,
    whole_numbers,
    wire,
    wire_name,
)
from gpusim.tools.study.sources import open_sources
from gpusim.tools.study.store import Point, Store
from gpusim.tools.study.traffic import bytes_sent
from gpusim.wires import Wire

__all__ = ["Sweep", "plan", "run", "sweep"]

WINDOW = 128 * 2**20
"""Bytes of input, over all replicas, that are folded at a time: some 400 MiB in all."""
WIDTH = 1 << 20
"""The most elements that are measured at a time: each takes some 100 bytes of exact sums."""
CHUNK = 1 << 18
"""Elements that one thread draws and rounds at a time."""
WHOLE = 2**30
"""The most bytes of input, over all replicas, of values that are folded whole."""
REPLICAS = tuple(2**n for n in range(1, 11))
SEEDS = tuple(range(8))


@dataclass(frozen=True)
class Sweep:
    """The checked parameters of a sweep.

    `sources` are the input's arrays by name, or a single one by None. `arguments` are those of
    `sweep` that repeat it, and `notes` are sentences for the reader of its table.
    """

    sources: dict[str | None, Source]
    settings: list[Setting]
    replicas: list[int]
    seeds: list[int]
    scale: float
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        if None in self.sources:
            return self.sources[None].title
        total = sum(source.elements for source in self.sources.values())
        name = Path(self.arguments["input"]).name
        return f"{name}, {len(self.sources)} arrays, {total:,} elements"

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the input, for stores of this sweep's measurements."""
        if None in self.sources:
            return {**self.sources[None].identity, "scale": self.scale}
        arrays = {str(name): source.identity for name, source in self.sources.items()}
        return {"kind": "arrays", "arrays": arrays, "scale": self.scale}

    @property
    def about(self) -> dict[str, Any]:
        return {
            "input": {"title": self.title, **self.identity},
            "command": command(self.arguments),
            "notes": list(self.notes),
        }

    def seeds_of(self, setting: Setting) -> list[int]:
        return self.seeds if setting.stochastic else [0]

    def windows(
        self, tensor: str | None, replicas: int, dtype: np.dtype[Any]
    ) -> Iterator[tuple[int, int]]:
        """The first element and the length of each window."""
        elements = self.sources[tensor].elements
        if any(setting.in_phases for setting in self.settings):
            yield 0, elements
            return
        width = min(WIDTH, max(1, WINDOW // (replicas * dtype.itemsize)))
        width -= width % 8 if width > 8 else 0  # the generator's blocks
        for first in range(0, elements, width):
            yield first, min(width, elements - first)

    def points(self, tensor: str | None, setting: Setting, replicas: int, seed: int) -> list[Point]:
        """The measurements that make up one reduction."""
        windows = self.windows(tensor, replicas, carrier(setting.dtype))
        return [Point(tensor, setting, replicas, seed, first, count) for first, count in windows]

    def reductions(self) -> Iterator[tuple[Setting, int, int]]:
        for replicas in self.replicas:
            for setting in self.settings:
                for seed in self.seeds_of(setting):
                    yield setting, replicas, seed

    def work(self, store: Store) -> tuple[float, float]:
        """The number of additions in all, and the number that is done."""
        total = done = 0
        for reduction in self.reductions():
            for tensor in self.sources:
                for point in self.points(tensor, *reduction):
                    size = point.replicas * point.count
                    total += size
                    done += size * (store.get(point) is not None)
        return total, done


def plan(
    input: str | PathLike[str] | NDArray[Any] | Source = GRADIENTS,
    *,
    replicas: Iterable[int] | int | str | None = None,
    dtypes: Iterable[DTypeLike | FormatLike] | DTypeLike | FormatLike = ("float16",),
    accumulators: Iterable[DTypeLike | FormatLike | None] | DTypeLike | FormatLike | None = None,
    orders: Iterable[str] | str | None = None,
    roundings: Iterable[str] | str | None = None,
    ops: Iterable[str] | str = ("sum",),
    preset: str = "orders",
    seeds: Iterable[int] | int | str = SEEDS,
    elements: int | None = None,
    scale: float | None = None,
    input_seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
    wires: Iterable[Wire | DTypeLike | None] | Wire | DTypeLike | None = None,
    hierarchies: Iterable[int | str | None] | int | str | None = None,
    reductions: Iterable[ReductionLike] | ReductionLike | None = None,
) -> Sweep:
    """Check the arguments of `sweep`, whose docstring describes them and the errors."""
    formats = [value_format(dtype) for dtype in items(dtypes)]
    lists = {
        "accumulators": accumulators,
        "orders": orders,
        "roundings": roundings,
        "wires": wires,
        "hierarchies": hierarchies,
    }
    notes: list[str] = []
    if reductions is None:
        settings, repeated = _combined(formats, preset, items(ops), lists, notes)
    else:
        settings, repeated = _whole_reductions(formats, items(ops), items(reductions), lists)
    words = whole_numbers("seeds", seeds, 0)
    if max(words) >= 2**64:
        raise ValueError(f"seeds: {max(words)} given, expected integers from 0 to 2**64 - 1")
    counts = None if replicas is None else whole_numbers("replicas", replicas, 1, doubling=True)
    sources = open_sources(
        input, elements=elements, seed=input_seed, epoch=epoch, tensor=tensor, dtypes=formats
    )
    limits = {source.title: source.replicas for source in sources.values()}
    most = min((n for n in limits.values() if n is not None), default=None)
    if counts is None:
        counts = [n for n in REPLICAS if (most is None or n <= most) and _have_room(settings, n)]
        counts = counts or [1]
    for title, there in limits.items():
        if there is not None and max(counts) > there:
            raise ValueError(
                f"replicas: {max(counts)} asked for, but {title.split(',')[0]} has {there}"
            )
    usual = next(iter(sources.values())).scale
    factor = usual if scale is None else float(scale)
    if not 0 < factor < float("inf"):
        raise ValueError(f"scale={scale!r}: expected a positive number")
    _check_cases(settings, counts, sources)
    _check_whole(settings, counts, sources)
    arguments: dict[str, Any] = {
        "input": fspath(input) if isinstance(input, (str, PathLike)) else None,
        "tensor": tensor,
        "elements": elements,
        "scale": factor if factor != usual else None,
        "epoch": epoch if isinstance(input, str) and input == GRADIENTS else None,
        "input_seed": input_seed or None,
        "replicas": counts,
        "dtypes": list(dict.fromkeys(map(format_name, formats))),
        **repeated,
        "seeds": words,
    }
    arguments = {k: v for k, v in arguments.items() if v is not None or k == "input"}
    return Sweep(sources, settings, counts, words, factor, arguments, tuple(notes))


def _combined(
    formats: list[ValueFormat],
    preset: str,
    ops: list[str],
    lists: dict[str, Any],
    notes: list[str],
) -> tuple[list[Setting], dict[str, Any]]:
    """The settings of all combinations, and the arguments that repeat them."""
    if preset not in PRESETS:
        raise ValueError(f"preset={preset!r}: expected one of {', '.join(PRESETS)}")
    defaults = {**PRESETS[preset], "wires": [None], "hierarchies": [None]}
    given = {name: items(defaults[name] if v is None else v) for name, v in lists.items()}
    rules = list(map(accumulator_rule, given["accumulators"]))
    sent = [wire(each) for each in given["wires"]]
    levels = [hierarchy(each) for each in given["hierarchies"]]
    settings = grid(
        formats,
        rules,
        given["orders"],
        given["roundings"],
        ops,
        left_out=notes if lists["orders"] is None else None,
        wires=sent,
        hierarchies=levels,
    )
    wire_names = ["none" if w is None else wire_name(w) for w in sent]
    level_names = ["none" if h is None else hierarchy_name(h) for h in levels]
    return settings, {
        "accumulators": list(map(rule_name, rules)),
        # The preset's orders are not every dtype's where it leaves some out.
        "preset": preset if notes else None,
        "orders": None if notes else given["orders"],
        "roundings": given["roundings"],
        "ops": ops,
        "wires": wire_names if lists["wires"] else None,
        "hierarchies": level_names if lists["hierarchies"] else None,
    }


def _whole_reductions(
    formats: list[ValueFormat],
    ops: list[str],
    reductions: list[Any],
    lists: dict[str, Any],
) -> tuple[list[Setting], dict[str, Any]]:
    """The settings of whole Reductions, and the arguments that repeat them."""
    for name, value in lists.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: expected none beside reductions, which say it")
    if not reductions:
        raise ValueError("reductions is empty: a sweep needs at least one")
    settings = as_settings(formats, reductions, ops)
    texts = [str(setting.given) for setting in settings]
    return settings, {"reductions": list(dict.fromkeys(texts)), "ops": ops}


def _have_room(settings: list[Setting], replicas: int) -> bool:
    """Whether the integers of all settings have room for so many replicas."""
    try:
        for setting in settings:
            check_room(fold_spec(setting.reduction(0)), replicas)
    except ValueError:
        return False
    return True


def _check_cases(
    settings: list[Setting], replicas: list[int], sources: dict[str | None, Source]
) -> None:
    """ValueError if it is not known what an engine does with so many replicas, or if integers have
    no room for them."""
    for setting in settings:
        check_room(fold_spec(setting.reduction(0)), max(replicas))
        schedule = setting.reduction(0).schedule
        if not isinstance(schedule, Schedule):
            continue
        for count in replicas:
            for source in sources.values():
                try:
                    schedule.fold_of(count, source.elements, carrier(setting.dtype).itemsize)
                except ValueError as error:
                    raise ValueError(f"order={setting.order!r}: {error}") from None


def _check_whole(
    settings: list[Setting], replicas: list[int], sources: dict[str | None, Source]
) -> None:
    """ValueError if values that are folded whole take too much memory."""
    if not any(setting.in_phases for setting in settings):
        return
    width = max(carrier(setting.dtype).itemsize for setting in settings)
    elements = max(source.elements for source in sources.values())
    most = WHOLE // (max(replicas) * width)
    if elements > most:
        raise ValueError(
            f"elements: {elements:,} of each of {max(replicas):,} replicas; wires, groups and "
            f"fixed-point sums fold them at once: expected at most {most:,}"
        )


def sweep(
    input: str | PathLike[str] | NDArray[Any] | Source = GRADIENTS,
    *,
    replicas: Iterable[int] | int | str | None = None,
    dtypes: Iterable[DTypeLike | FormatLike] | DTypeLike | FormatLike = ("float16",),
    accumulators: Iterable[DTypeLike | FormatLike | None] | DTypeLike | FormatLike | None = None,
    orders: Iterable[str] | str | None = None,
    roundings: Iterable[str] | str | None = None,
    ops: Iterable[str] | str = ("sum",),
    preset: str = "orders",
    seeds: Iterable[int] | int | str = SEEDS,
    elements: int | None = None,
    scale: float | None = None,
    input_seed: int = 0,
    epoch: int = 5,
    tensor: str | None = None,
    wires: Iterable[Wire | DTypeLike | None] | Wire | DTypeLike | None = None,
    hierarchies: Iterable[int | str | None] | int | str | None = None,
    reductions: Iterable[ReductionLike] | ReductionLike | None = None,
    store: str | PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    show: bool = False,
) -> Study:
    """Sum an input's replicas in every combination of settings, and measure the errors.

    Values are rounded to `dtype`, to nearest, and summed over the first R replicas; errors are
    those of the sum, against the exact sum of the rounded values. `input_error` alone is against
    the exact sum of the values before they were rounded.

    Each list may also be a single item, or a string with items between commas, as on the command
    line: `dtypes="bfloat16,e5m6"`, `replicas="2..64"`.

    **Arguments**:

    - `input`: "gradients" (of the digits network, an image each), "normal", "lognormal",
      "heavy-tailed" (Student's t with two degrees of freedom), "cancelling", a file (.npy, .npz,
      .safetensors), or an array; axis 0 numbers the replicas. Raw bytes, as NumPy stores bfloat16
      and the 8-bit formats, have the type that `dtypes` names. Infinite values are allowed and
      reported, NaNs are not.
    - `replicas`: the numbers of replicas; the powers of two from 2 to 1,024 that the input has,
      and for which integers have room.
    - `dtypes`: the formats of the values: dtypes, a `gpusim.Format` ("e5m6" is Format(5, 6)).
    - `accumulators`: the formats partial sums are rounded to: "wire", that in which they travel
      (the dtype of the values, or what a twin's engine uses); "contract" or [None], the default of
      Reduction (float32 for bfloat16); dtypes and Formats. None is the preset's. For the order
      "fixed", and for it alone, "int8", "int16" and "int32", which is also "wire".
    - `orders`: of "linear", "reverse", "tree", "ring", "exact" and "fixed", and names of twins;
      None: the preset's.
    - `roundings`: of "nearest" and "stochastic"; None: the preset's.
    - `ops`: of "sum" and "mean".
    - `preset`: what the three lists are where they are None: "orders" (linear, ring and tree, in
      both roundings), "engines" (twins that add the dtype, rounded to nearest) or "accumulators"
      (ring and tree with partial sums in the dtype and in float32). All use "wire".
    - `seeds`: of stochastic rounding.
    - `elements`: how many elements are summed; 4,096 of a distribution, else all there are.
    - `scale`: what values are multiplied by before they are rounded; 128 for "gradients", else 1.
    - `input_seed`: seeds distributions, and the digits network.
    - `epoch`: how many epochs the digits network is trained before its gradients are taken.
    - `tensor`: the name of the array, in a file that holds several, or a pattern such as "*" or
      "layer.*": each array that matches is reduced alone and has rows of its own.
    - `wires`: what is sent is rounded to them: None or "none"; a `gpusim.Wire`; a format; or a text
      such as "int8:amax:64@ends" (format, scale, block, at) or "mx:float8_e4m3fn". They round as
      `roundings` says. With wires, hierarchies or the order "fixed" values are folded whole, up to
      1 GiB over all replicas.
    - `hierarchies`: None or "none"; the replicas of a group, 8; or with the order across the
      groups, "8:tree". Else that is the order in the groups.
    - `reductions`: whole Reductions instead of these settings, as `gpusim.as_reduction` takes them:
      "tree accumulate=float32". Where they draw, `seeds` replace theirs. They fold values whole.
    - `store`: a file that keeps every measurement as soon as it is made. If the input cannot be
      measured, a store that this call made is removed.
    - `resume`: go on with what `store` holds; it may have been swept with other settings.
    - `threads`: how many fold at a time; as many as there are cores.
    - `show`: show progress on standard error.

    **Returns**: The study, with rows and ways to print, draw and write them.

    **Raises**:

    - ValueError: an argument, or an input file, that makes no sense; an input with NaNs.
    - TypeError: a twin in `orders` whose engine does not add the dtype.
    - OSError: a file that cannot be read or written; FileExistsError for a `store` that holds a
      sweep, without `resume`.
    - ModuleNotFoundError: a package is needed that the extra `study` brings.

    >>> study = sweep("normal", dtypes="bfloat16", replicas=64, preset="engines")
    >>> for row in study.rows:
    ...     print(f"{row.setting.name:40} {row.mean.relative_error:.1e} {row.mean.correct:.0%}")
    bfloat16 added in float32, xla-cpu       1.7e-03 100%
    bfloat16 added in float32, mpich         1.7e-03 100%
    bfloat16 added in float32, openmpi-ring  1.7e-03 100%
    bfloat16 added in bfloat16, gloo-ring    9.3e-03 20%
    bfloat16 added in bfloat16, nccl-ring    9.8e-03 20%
    bfloat16 added in bfloat16, nccl-tree    9.5e-03 19%
    """
    planned = plan(
        input,
        replicas=replicas,
        dtypes=dtypes,
        accumulators=accumulators,
        orders=orders,
        roundings=roundings,
        ops=ops,
        preset=preset,
        seeds=seeds,
        elements=elements,
        scale=scale,
        input_seed=input_seed,
        epoch=epoch,
        tensor=tensor,
        wires=wires,
        hierarchies=hierarchies,
        reductions=reductions,
    )
    path = None if store is None else Path(store)
    begun = command(planned.arguments)
    with Store(planned.identity, path, resume=resume, command=begun) as kept:
        return run(planned, kept, threads=threads, show=show)


def run(planned: Sweep, store: Store, *, threads: int | None = None, show: bool = False) -> Study:
    """Measure the windows that `store` lacks, and combine all of them.

    **Raises**: ValueError for an input that cannot be measured; a new store is then removed.
    """
    total, done = planned.work(store)
    workers = threads or usable_cores()
    bar: AbstractContextManager[Advance] = progress(total, done) if show else nullcontext(silent)
    formats = dict.fromkeys(setting.dtype for setting in planned.settings)
    try:
        with bar as advance, ThreadPoolExecutor(workers) as pool:
            for replicas in planned.replicas:
                for tensor in planned.sources:
                    for dtype in formats:
                        for window in planned.windows(tensor, replicas, carrier(dtype)):
                            sums = _Window(planned, tensor, replicas, dtype, *window)
                            sums.measure(store, pool, advance)
    except ValueError:
        store.discard()
        raise
    return Study(planned.title, planned.about, _gathered(planned, store))


def _gathered(planned: Sweep, store: Store) -> list[Measurement]:
    """The figures of each reduction; of several arrays first those of all together."""
    found = []
    several = list(planned.sources) if None not in planned.sources else []
    for setting, replicas, seed in planned.reductions():
        parts = {
            tensor: [store.get(point) for point in planned.points(tensor, setting, replicas, seed)]
            for tensor in planned.sources
        }
        whole = [part for found_parts in parts.values() for part in found_parts]
        for tensor, some in [(None, whole), *((name, parts[name]) for name in several)]:
            metrics = merged([part for part in some if part is not None])
            names = planned.sources if tensor is None else [tensor]
            sent = sum(
                bytes_sent(
                    setting.reduction(seed), replicas, planned.sources[n].elements, setting.dtype
                )
                for n in names
            )
            found.append(Measurement(setting, replicas, seed, metrics, tensor, sent))
    return found


@dataclass(frozen=True)
class _Window:
    """All reductions of one format over one window: their input is made once."""

    planned: Sweep
    tensor: str | None
    replicas: int
    dtype: ValueFormat
    first: int
    count: int

    def measure(self, store: Store, pool: ThreadPoolExecutor, advance: Advance) -> None:
        """Measure what `store` lacks."""
        planned = self.planned
        points = [
            Point(self.tensor, setting, self.replicas, seed, self.first, self.count)
            for setting in planned.settings
            if setting.dtype == self.dtype
            for seed in planned.seeds_of(setting)
        ]
        points = [point for point in points if store.get(point) is None]
        if not points:
            return
        unrounded = ExactSum(self.count)
        members = self._members(pool, unrounded)
        # First in the queue, as the others wait for it.
        ops = {point.setting.op for point in points}
        references = pool.submit(_references, members, unrounded, ops)
        total = planned.sources[self.tensor].elements
        tasks = [pool.submit(_measure, point, members, references, total) for point in points]
        try:
            for point, task in zip(points, tasks, strict=True):
                store.put(point, task.result())
                done = self.replicas * self.count
                advance(f"{point.setting.name}, {self.replicas} replicas", done)
        finally:  # interrupted: running tasks end, no other starts
            for task in tasks:
                task.cancel()

    def _members(self, pool: ThreadPoolExecutor, unrounded: ExactSum) -> NDArray[Any]:
        """The window of all replicas in the format, made a few replicas at a time.

        The values before they are rounded are added to `unrounded`.
        """
        source, scale = self.planned.sources[self.tensor], self.planned.scale
        members = np.empty((self.replicas, self.count), carrier(self.dtype))
        step = max(1, CHUNK // self.count)

        def fill(start: int) -> None:
            rows = range(start, min(start + step, self.replicas))
            values = source.block(self.replicas, rows, self.first, self.count)
            if scale != 1:
                with np.errstate(over="ignore"):
                    values = values.astype(np.float64) * scale
            unrounded.add(values)
            members[rows.start : rows.stop] = round_to(values, kernel_format(self.dtype))

        for _ in pool.map(fill, range(0, self.replicas, step)):
            pass  # an error in a thread is raised here
        return members


@dataclass(frozen=True)
class _References:
    """By operation, the exact results of the rounded and of the unrounded values."""

    rounded: dict[str, Exact]
    unrounded: dict[str, Exact]
    infinite: NDArray[np.bool_]


def _references(members: NDArray[Any], unrounded: ExactSum, ops: set[str]) -> _References:
    def of(total: Exact) -> dict[str, Exact]:
        return {op: total if op == "sum" else total.divided(len(members)) for op in ops}

    return _References(of(exact_sum(members)), of(unrounded.total()), unrounded.infinite)


def _measure(
    point: Point, members: NDArray[Any], references: Future[_References], total: int
) -> Partial:
    setting = point.setting
    result, exact = _result(point, members, total), references.result()
    return measure(
        result,
        exact.rounded[setting.op],
        exact.unrounded[setting.op],
        exact.infinite,
        kernel_format(setting.dtype),
    )


def _whole(point: Point, members: NDArray[Any]) -> NDArray[Any]:
    setting = point.setting
    spec = replace(
        fold_spec(setting.reduction(point.seed)),
        out_dtype=FLOAT64 if isinstance(setting.dtype, Format) else None,
        divisor=len(members) if setting.op == "mean" else None,
    )
    return run_fold(spec, members)


def _result(point: Point, members: NDArray[Any], total: int) -> NDArray[Any]:
    setting, dtype = point.setting, point.setting.dtype
    window = point.first, total
    result = (
        _whole(point, members)
        if setting.in_phases
        else fold(
            members,
            order=setting.reduction(point.seed).schedule,
            accumulate=kernel_format(setting.accumulate),
            out_dtype=FLOAT64 if isinstance(dtype, Format) else None,
            rounding=setting.rounding,
            seed=point.seed,
            divisor=len(members) if setting.op == "mean" else None,
            window=window,
        )
    )
    if not isinstance(dtype, Format):
        return result
    # The last rounding: an addition of -0, which changes no value, with random numbers of its own.
    return fold(
        np.stack([result, np.full_like(result, -0.0)]),
        accumulate=dtype.info,
        rounding=setting.rounding,
        seed=point.seed,
        call=1,
        window=window,
    )
