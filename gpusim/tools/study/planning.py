"""The plan of a sweep: its arguments checked, and everything that it measures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from gpusim.collectives.fold import fold_spec
from gpusim.fallback.schedules import Schedule
from gpusim.fallback.spec import check_room
from gpusim.formats import FormatLike, rounding_name
from gpusim.reduction import ReductionLike
from gpusim.tools.study.arrays import GRADIENTS, Source
from gpusim.tools.study.command_line import command
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.paired import setting_named
from gpusim.tools.study.rows import CONFIDENCE
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
from gpusim.tools.study.sources import Input, open_sources, varies
from gpusim.tools.study.store import Point, Store
from gpusim.wires import Wire

__all__ = ["Sweep", "plan"]

WINDOW = 128 * 2**20
"""Bytes of input, over all replicas, that are folded at a time: some 400 MiB in all."""
WIDTH = 1 << 20
"""The most elements that are measured at a time: each takes some 100 bytes of exact sums."""
WHOLE = 2**30
"""The most bytes of input, over all replicas, of values that are folded whole."""
REPLICAS = tuple(2**n for n in range(1, 11))
SEEDS = tuple(range(8))


@dataclass(frozen=True)
class Sweep:
    """The checked parameters of a sweep.

    `inputs` has the input's arrays by name, or a single one by None, for each seed of the input.
    `arguments` are those of `sweep` that repeat it, and `notes` are sentences for the reader of its
    table.
    """

    inputs: dict[int, dict[str | None, Source]]
    settings: list[Setting]
    replicas: list[int]
    seeds: list[int]
    scale: float
    arguments: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    steps: int = 1
    confidence: float = CONFIDENCE

    @property
    def sources(self) -> dict[str | None, Source]:
        """The arrays of the first input."""
        return next(iter(self.inputs.values()))

    @property
    def title(self) -> str:
        several = f", {len(self.inputs)} inputs" if len(self.inputs) > 1 else ""
        if None in self.sources:
            title = self.sources[None].title
            return (re.sub(r" \(seed \d+\)", "", title) if several else title) + several
        total = sum(source.elements for source in self.sources.values())
        name = Path(self.arguments["input"] or "arrays").name
        return f"{name}, {len(self.sources)} arrays, {total:,} elements{several}"

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the input, for stores of this sweep's measurements."""
        several = {"input seeds": list(self.inputs)} if len(self.inputs) > 1 else {}
        if None in self.sources:
            return {**self.sources[None].identity, "scale": self.scale, **several}
        arrays = {str(name): source.identity for name, source in self.sources.items()}
        return {"kind": "arrays", "arrays": arrays, "scale": self.scale, **several}

    @property
    def about(self) -> dict[str, Any]:
        return {
            "input": {"title": self.title, **self.identity},
            "command": command(self.arguments),
            "confidence": self.confidence,
            "notes": list(self.notes),
            **self._compared,
        }

    @property
    def _compared(self) -> dict[str, Any]:
        """The tests that are asked for."""
        pairs = self.arguments.get("compare")
        metric = self.arguments.get("compare_metric", "relative_error")
        return {"compare": {"pairs": pairs, "metric": metric}} if pairs else {}

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

    def points(
        self, number: int, tensor: str | None, setting: Setting, replicas: int, seed: int
    ) -> list[Point]:
        """The measurements that make up one reduction of the input with this seed."""
        windows = self.windows(tensor, replicas, carrier(setting.dtype))
        drawn = number if len(self.inputs) > 1 else None
        return [
            Point(tensor, setting, replicas, seed, first, count, drawn) for first, count in windows
        ]

    def points_of(
        self,
        number: int,
        tensor: str | None,
        dtype: ValueFormat,
        replicas: int,
        place: tuple[int, int],
    ) -> list[Point]:
        """All measurements of one window."""
        drawn = number if len(self.inputs) > 1 else None
        return [
            Point(tensor, setting, replicas, seed, *place, drawn)
            for setting in self.settings
            if setting.dtype == dtype
            for seed in self.seeds_of(setting)
        ]

    def reductions(self) -> Iterator[tuple[int, Setting, int, int]]:
        """The seed of the input, the setting, the number of replicas, and the seed of rounding."""
        for replicas in self.replicas:
            for setting in self.settings:
                for number in self.inputs:
                    for seed in self.seeds_of(setting):
                        yield number, setting, replicas, seed

    def work(self, store: Store) -> tuple[float, float]:
        """The number of additions in all, and the number that is done."""
        total = done = 0
        for number, setting, replicas, seed in self.reductions():
            for tensor in self.sources:
                for point in self.points(number, tensor, setting, replicas, seed):
                    size = point.replicas * point.count * self.steps
                    total += size
                    done += size * (store.get(point) is not None)
        return total, done


def plan(
    input: Input = GRADIENTS,
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
    input_seed: Iterable[int] | int | str = 0,
    epoch: int = 5,
    tensor: str | None = None,
    wires: Iterable[Wire | DTypeLike | None] | Wire | DTypeLike | None = None,
    hierarchies: Iterable[int | str | None] | int | str | None = None,
    reductions: Iterable[ReductionLike] | ReductionLike | None = None,
    concatenate: bool = False,
    resample: str | None = None,
    error_feedback: int | None = None,
    confidence: float = CONFIDENCE,
    compare: Iterable[tuple[str, str]] = (),
    compare_metric: str = "relative_error",
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
    steps = _checked_steps(error_feedback)
    settings = _stepped(settings, steps)
    words = whole_numbers("seeds", seeds, 0)
    if max(words) >= 2**64:
        raise ValueError(f"seeds: {max(words)} given, expected integers from 0 to 2**64 - 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence!r}: expected a number between 0 and 1")
    numbers = _input_seeds(input_seed, input, resample)
    options: dict[str, Any] = {
        "elements": elements,
        "epoch": epoch,
        "tensor": tensor,
        "dtypes": formats,
        "concatenate": concatenate,
        "resample": resample,
    }
    inputs = {number: open_sources(input, seed=number, **options) for number in numbers}
    sources = inputs[numbers[0]]
    counts = _counts(replicas, settings, sources)
    usual = next(iter(sources.values())).scale
    factor = usual if scale is None else float(scale)
    if not 0 < factor < float("inf"):
        raise ValueError(f"scale={scale!r}: expected a positive number")
    _check_cases(settings, counts, sources)
    _check_whole(settings, counts, sources)
    if steps > 1 and not all(hasattr(source, "at_step") for source in sources.values()):
        notes.append(f"the values are the same at each of the {steps} steps")
    arguments: dict[str, Any] = {
        "input": fspath(input) if isinstance(input, (str, PathLike)) else None,
        "tensor": tensor,
        "concatenate": concatenate or None,
        "resample": resample,
        "elements": elements,
        "scale": factor if factor != usual else None,
        "epoch": epoch if isinstance(input, str) and input == GRADIENTS else None,
        "input_seed": numbers if numbers != [0] else None,
        "replicas": counts,
        "dtypes": list(dict.fromkeys(map(format_name, formats))),
        **repeated,
        "error_feedback": error_feedback,
        "seeds": words,
        "confidence": confidence if confidence != CONFIDENCE else None,
        "compare": _compared(compare, settings, numbers, words) or None,
        "compare_metric": compare_metric if compare_metric != "relative_error" else None,
    }
    if compare_metric not in METRICS:
        raise ValueError(f"compare_metric={compare_metric!r}: expected one of {', '.join(METRICS)}")
    arguments = {k: v for k, v in arguments.items() if v is not None or k == "input"}
    return Sweep(
        inputs, settings, counts, words, factor, arguments, tuple(notes), steps, confidence
    )


def _checked_steps(given: int | None) -> int:
    """The number of steps whose sums are accumulated."""
    if given is None:
        return 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 2:
        raise ValueError(f"error_feedback={given!r}: expected a number of steps, at least 2")
    return given


def _stepped(settings: list[Setting], steps: int) -> list[Setting]:
    """Of several steps, each setting, and those with feedback that have messages to feed back."""
    if steps == 1:
        return settings
    found = []
    for setting in settings:
        found.append(replace(setting, steps=steps))
        if setting.can_feed_back:
            found.append(replace(setting, steps=steps, feedback=True))
    if not any(setting.feedback for setting in found):
        raise ValueError(
            f"error_feedback={steps}: expected a wire at 'ends' or 'members', such as "
            "int8:amax:64@ends, in which each replica rounds its own value"
        )
    return found


def _input_seeds(given: Any, input: Input, resample: str | None) -> list[int]:
    numbers = whole_numbers("input_seed", given, 0)
    if max(numbers) >= 2**64:
        raise ValueError(f"input_seed={max(numbers)}: expected an integer from 0 to 2**64 - 1")
    if len(numbers) > 1 and not varies(input, resample):
        raise ValueError(
            f"input_seed: {len(numbers)} given, but the input has the same values for each; "
            "expected one, or resample='workers'"
        )
    return numbers


def _compared(
    pairs: Iterable[tuple[str, str]], settings: list[Setting], inputs: list[int], seeds: list[int]
) -> list[list[str]]:
    """The names of the settings that are tested; known before anything is measured."""
    found = []
    for a, b in pairs:
        both = [setting_named(settings, given, "compare") for given in (a, b)]
        if both[0] == both[1]:
            raise ValueError(f"compare: {both[0].name!r} twice; expected two settings")
        stochastic = any(setting.stochastic for setting in both)
        if len(inputs) < 2 and not (stochastic and len(seeds) > 1):
            raise ValueError(
                "compare: one value of each setting; expected several inputs (input_seed, --input-"
                "seed 0..7), or several seeds of a stochastic setting"
            )
        found.append([setting.name for setting in both])
    return found


def _counts(replicas: Any, settings: list[Setting], sources: dict[str | None, Source]) -> list[int]:
    """The numbers of replicas; the input has as many."""
    limits = {source.title: source.replicas for source in sources.values()}
    most = min((n for n in limits.values() if n is not None), default=None)
    if replicas is None:
        found = [n for n in REPLICAS if (most is None or n <= most) and _have_room(settings, n)]
        return found or [1]
    counts = whole_numbers("replicas", replicas, 1, doubling=True)
    for title, there in limits.items():
        if there is not None and max(counts) > there:
            raise ValueError(
                f"replicas: {max(counts)} asked for, but {title.split(',')[0]} has {there}; "
                "resample='workers' (--resample) draws more from them"
            )
    return counts


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
    given["roundings"] = list(map(rounding_name, given["roundings"]))
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
