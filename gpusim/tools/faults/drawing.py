"""Draws plans of faults for a program of which one run has been seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from gpusim.torch.distributed.faults.plans import Fault
from gpusim.torch.distributed.faults.watching import Seen

from .settings import Settings

__all__ = ["Draws", "draw", "draw_plans"]

T = TypeVar("T")

LATE = (5.0, 60.0, 900.0, 7200.0)
"""Simulated seconds: below all usual limits, and above NCCL's 10 minutes and gloo's 30."""

CODES = (None, 0, 3)
"""Exit codes of ranks that leave; 0 is one that leaves early and well."""

TORN = (None, 0, 1, 100)
"""Bytes that are left of a torn file; None is half of it."""

BITS = {"float64": 64, "int64": 64, "complex64": 64, "complex128": 128, "float32": 32, "int32": 32}
NARROW = {"bfloat16": 16, "float16": 16, "int16": 16}
BYTE = 8
FLOATS = ("float64", "float32", "bfloat16", "float16", "complex64", "complex128")
NEED_CALL = ("exit", "kill", "raise", "hang", "late", "flip", "flip-result", "nan")


class Draws:
    """Numbers that follow from a seed and a plan's number alone, on each machine and Python.

    >>> draws = Draws(7, 0)
    >>> draws.below(100), Draws(7, 0).below(100)
    (20, 20)
    >>> draws.below(100) == Draws(7, 1).below(100)
    False
    """

    def __init__(self, seed: int, number: int) -> None:
        self._text = f"gpusim faults {seed} {number}"
        self._count = 0

    def below(self, limit: int) -> int:
        """A whole number from 0, below the limit."""
        self._count += 1
        text = f"{self._text} {self._count}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:16], "big") % limit

    def one_of(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]


class _Place(NamedTuple):
    """A call of a rank: its number from 1, and its tensors."""

    number: int
    tensors: list[tuple[str, int]]


def draw_plans(
    settings: Settings, seen: Sequence[Seen], runs: int, restarts: int
) -> list[tuple[Fault, ...]]:
    """Draw as many plans as there are runs; see `draw`."""
    return [draw(settings, number, seen, restarts) for number in range(runs)]


def draw(
    settings: Settings, number: int, seen: Sequence[Seen], restarts: int = 0
) -> tuple[Fault, ...]:
    """Draw one plan.

    **Arguments**:

    - `number` is the plan's, from 0: a campaign of more runs has the same first plans.
    - `seen` has what each rank did in the run without faults.
    - `restarts` are those that the agent may make: from the second fault on, one may come in a
      later start.

    **Returns**: the faults, at least one.

    **Raises**: ValueError if no fault of the settings' kinds fits the program.
    """
    draws = Draws(settings.seed, number)
    kinds = [kind for kind in settings.kinds if any(_fits(kind, own) for own in seen)]
    if not kinds:
        raise ValueError(
            f"kinds={','.join(settings.kinds)}: no such fault can happen to the program, which "
            "makes no calls, writes no files and waits for no store that it could happen to"
        )
    faults: list[Fault] = []
    for _ in range(settings.fewest + draws.below(settings.most - settings.fewest + 1)):
        fault = _one(draws, draws.one_of(kinds), seen)
        if faults and restarts and draws.below(2):
            fault = replace(fault, attempt=1 + draws.below(restarts))
        if fault not in faults:
            faults.append(fault)
    return tuple(faults)


def _fits(kind: str, own: Seen) -> bool:
    """Whether a fault of the kind can happen to a rank."""
    if kind in ("torn", "missing"):
        return bool(own.writes)
    if kind == "store-timeout":
        return bool(own.waits)
    if kind in ("flip", "flip-result"):
        return any(_tensors(call) for call in own.calls)
    if kind == "nan":
        return any(_floats(call) for call in own.calls)
    return bool(own.calls)


def _one(draws: Draws, kind: str, seen: Sequence[Seen]) -> Fault:
    rank = draws.one_of([rank for rank, own in enumerate(seen) if _fits(kind, own)])
    own = seen[rank]
    if kind in ("torn", "missing"):
        write = 1 + draws.below(len(own.writes))
        return Fault(kind, rank, write=write, bytes=draws.one_of(TORN) if kind == "torn" else None)
    if kind == "store-timeout":
        return Fault(kind, rank, wait=1 + draws.below(len(own.waits)))
    number, tensors = _call(draws, kind, own)
    if kind == "exit":
        return Fault(kind, rank, call=number, code=draws.one_of(CODES))
    if kind == "late":
        return Fault(kind, rank, call=number, seconds=draws.one_of(LATE))
    if kind not in ("flip", "flip-result", "nan"):
        return Fault(kind, rank, call=number)
    place = draws.one_of([place for place, each in enumerate(tensors) if each[1]])
    dtype, elements = tensors[place]
    tensor, element = place or None, draws.below(elements) or None
    if kind == "nan":
        return Fault(kind, rank, call=number, tensor=tensor, element=element)
    bit = draws.below(BITS.get(dtype) or NARROW.get(dtype) or BYTE)
    return Fault(kind, rank, call=number, bit=bit, tensor=tensor, element=element)


def _call(draws: Draws, kind: str, own: Seen) -> _Place:
    """One of the rank's calls: of half of the faults any, of the others one of a drawn place.

    So places where a program calls once are not lost among those of a loop.
    """
    of_kind = {"flip": _tensors, "flip-result": _tensors, "nan": _floats}.get(kind)
    calls = [
        (number, call)
        for number, call in enumerate(own.calls, 1)
        if of_kind is None or of_kind(call)
    ]
    if draws.below(2):
        sites = list(dict.fromkeys((call["site"], call["operation"]) for _, call in calls))
        site = draws.one_of(sites)
        calls = [each for each in calls if (each[1]["site"], each[1]["operation"]) == site]
    number, call = draws.one_of(calls)
    return _Place(number, [] if of_kind is None else of_kind(call))


def _tensors(call: dict[str, Any]) -> list[tuple[str, int]]:
    """The operands of a call if one has elements; else nothing."""
    tensors = [(str(dtype), int(elements)) for dtype, elements in call["tensors"]]
    return tensors if any(elements for _, elements in tensors) else []


def _floats(call: dict[str, Any]) -> list[tuple[str, int]]:
    """The same with zero for the elements of tensors that have no NaN."""
    tensors = [(dtype, n if dtype in FLOATS else 0) for dtype, n in _tensors(call)]
    return tensors if any(elements for _, elements in tensors) else []
