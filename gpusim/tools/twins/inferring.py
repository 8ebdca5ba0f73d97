"""Find the known fold that gives an engine's sum, from its inputs and its result alone."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim import bounded_arrays
from gpusim.fallback import fold
from gpusim.fallback.formats import default_accumulator, kind_of, real_of
from gpusim.fallback.orders import EXACT, FIXED, ORDERS
from gpusim.fallback.schedules import Balanced, Case, Order, Schedule, Segments, Walk
from gpusim.fallback.sends import UNIT_BLOCK
from gpusim.fallback.spec import FIXED_TYPES

from ...twins import TWINS, nccl_ring
from ..study.settings import floating
from .checking import same_bits

__all__ = ["Candidate", "Match", "candidates", "infer", "read"]

#: Elements of which every candidate is tried, at the beginning, in the middle and at the end.
SAMPLE = 1024
#: The number of best candidates that are tried on all elements.
TRIED = 24


@dataclass(frozen=True)
class Candidate:
    """A fold that may have given a sum: an order, and what partial results are rounded to."""

    name: str
    order: Order
    accumulate: np.dtype[Any] | None


@dataclass(frozen=True)
class Match:
    """A candidate, and how many of the elements it reproduces."""

    candidate: Candidate
    agreeing: int
    elements: int

    @property
    def equal(self) -> bool:
        return self.agreeing == self.elements


def read(file: Path, dtype: str | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """`inputs` (R, N) and `sum` (N,) of an .npz file, in which nothing is executed.

    `dtype` names the type of values that NumPy stores as raw bytes or unsigned integers, such as
    bfloat16.

    **Raises**: ValueError for other files and arrays, OSError for files that cannot be read.
    """
    if not zipfile.is_zipfile(file) and file.stat():
        raise ValueError(f"{file}: expected an .npz file with arrays inputs and sum")
    stored = bounded_arrays.Archive(file)
    if missing := {"inputs", "sum"} - {*stored}:
        raise ValueError(
            f"{file}: no array {' and '.join(sorted(missing))}; it has "
            f"{', '.join(stored)[:300] or 'none'}, expected inputs (R, N) and sum (N,)"
        )
    inputs, total = stored["inputs"], stored["sum"]
    if dtype is not None:
        inputs, total = (
            _as_dtype(name, a, dtype) for name, a in (("inputs", inputs), ("sum", total))
        )
    return _checked(inputs, total)


def _as_dtype(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    kind = floating(dtype)
    if array.dtype == kind:
        return array
    if array.dtype.kind not in "Vui" or array.dtype.itemsize != kind.itemsize:
        raise ValueError(
            f"{name} has dtype {array.dtype}: expected {kind}, or raw values of "
            f"{kind.itemsize} bytes"
        )
    return np.ascontiguousarray(array).view(kind)


def _checked(inputs: NDArray[Any], total: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    if inputs.ndim < 1 or not len(inputs) or inputs.shape[1:] != total.shape:
        raise ValueError(
            f"inputs has shape {inputs.shape}, sum {total.shape}: expected (R, N) and (N,), "
            "R from 1"
        )
    if inputs.dtype != total.dtype:
        raise ValueError(f"inputs has dtype {inputs.dtype}, sum {total.dtype}: expected one dtype")
    if inputs.dtype.type is np.void:
        raise ValueError(
            f"inputs has dtype {inputs.dtype}, raw bytes: expected --dtype, such as bfloat16"
        )
    if kind_of(inputs.dtype) not in ("float", "complex"):
        raise ValueError(
            f"inputs has dtype {inputs.dtype}: expected floating-point or complex values, as "
            "integers have the same sum in every order"
        )
    return inputs.reshape(len(inputs), -1), total.reshape(-1)


def candidates(members: int, dtype: np.dtype[Any]) -> Iterator[Candidate]:
    """The twins, the named orders, and other rings, with each accumulator; and sums of integers."""
    for name, twin in TWINS.items():
        try:
            yield Candidate(name, twin.schedule, twin.schedule.accumulator("sum", dtype))
        except TypeError:
            continue  # the engine adds such values in another way
    real = real_of(dtype)
    wider = (np.dtype(np.float32), np.dtype(np.float64))
    accumulators: dict[np.dtype[Any], None] = dict.fromkeys(
        (default_accumulator(real), real, *wider)
    )
    for accumulate in accumulators:
        if accumulate.itemsize < real.itemsize:
            continue
        suffix = "" if accumulate == default_accumulator(real) else f", in {accumulate.name}"
        for order in ORDERS:
            yield Candidate(f"{order}{suffix}", order, accumulate)
        once = "" if accumulate == real else f", in {accumulate.name}"
        yield Candidate(f"{EXACT}{once}", EXACT, accumulate)
        for name, schedule in _rings(members):
            yield Candidate(f"{name}{suffix}", schedule, accumulate)
    for integers in FIXED_TYPES if kind_of(dtype) == "float" else ():
        yield Candidate(f"{FIXED}, in {integers}", FIXED, np.dtype(integers))


def _rings(members: int) -> Iterator[tuple[str, Schedule]]:
    cuts: dict[str, Balanced | Segments] = {
        "balanced blocks": Balanced(),
        "gloo's blocks": Segments(),
    }
    for (name, cut), start, step in product(cuts.items(), range(members), (1, -1)):
        way = "up" if step == 1 else "down"
        place = f"b + {start}" if start <= members // 2 else f"b - {members - start}"
        walk = Walk(start, step, cut)
        yield f"ring {way} from {place}, {name}", Schedule((Case(walk),))
    for kib, channels in product((16, 64, 128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8, 16)):
        schedule = Schedule(nccl_ring(chunk=kib << 10, channels=channels).cases)
        yield f"NCCL's ring, chunks of {kib} KiB, {channels} channels", schedule
    for start, step in product(range(1, members), (1, -1)):
        way = "up" if step == 1 else "down"
        yield f"chain {way} from {start}", Schedule((Case(Walk(start, step)),))


def infer(inputs: NDArray[Any], total: NDArray[Any], **keywords: Any) -> list[Match]:
    """The best candidates, by how many elements they reproduce; equal ones keep their order.

    Those that reproduce no element are left out. Arrays are as `read` gives them; `keywords` of
    fallback.fold are for all candidates: `op`, `divisor`.

    >>> x = np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32)
    >>> [found.candidate.name for found in infer(x, fold(x, order="reverse")) if found.equal][:2]
    ['openmpi-linear', 'nccl-tree']
    """
    members, elements = inputs.shape
    edges = sorted({0, max(0, elements // 2 - SAMPLE // 2), max(0, elements - SAMPLE)})
    tried: list[tuple[int, Candidate]] = []
    for candidate in candidates(members, inputs.dtype):
        try:
            agreeing = [
                _agreeing(candidate, inputs, total, first, min(first + SAMPLE, elements), keywords)
                for first in edges
            ]
        except ValueError:
            continue  # the fold of this operator or number of members is not known
        tried.append((sum(agreeing), candidate))
    tried.sort(key=lambda pair: -pair[0])
    found = [
        Match(candidate, _agreeing(candidate, inputs, total, 0, elements, keywords), elements)
        for _, candidate in tried[:TRIED]
    ]
    found = [match for match in found if match.agreeing or match.equal]
    return sorted(found, key=lambda match: -match.agreeing)


def _agreeing(
    candidate: Candidate,
    inputs: NDArray[Any],
    total: NDArray[Any],
    first: int,
    end: int,
    keywords: Mapping[str, Any],
) -> int:
    order, elements = candidate.order, inputs.shape[1]
    more: dict[str, Any] = {"window": (first, elements)}
    if order == FIXED:  # is not folded in parts: a part of whole blocks is a value of its own
        first, more = first - first % UNIT_BLOCK, {}
        end = min(-(-end // UNIT_BLOCK) * UNIT_BLOCK, elements)
    members, accumulate = inputs[:, first:end], candidate.accumulate
    part = fold(members, order=order, accumulate=accumulate, **more, **keywords)
    return int(same_bits(part, np.ascontiguousarray(total[first:end])).sum())
