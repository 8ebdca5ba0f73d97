"""Whether the resumed run goes on with the samples that the uninterrupted one takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .findings import Finding
from .runs import Run

__all__ = ["compare_data"]

SHOWN = 4
"""Samples that are named."""


def compare_data(whole: Run, other: Run, resumed: Run, step: int) -> Iterator[Finding]:
    """The first difference of the data from `step` on.

    **Arguments**: `whole`, never interrupted, on as many ranks as saved; `other`, on as many as
    `resumed` has; they are one run if the numbers are the same.
    """
    last = min(whole.steps, step + resumed.steps)
    if whole is other:
        yield from _by_rank(whole, resumed, step, last)
    elif all(_batch(whole, n) == _batch(other, n) for n in range(min(whole.steps, other.steps))):
        for n in range(step, last):
            mine, theirs = _batch(whole, n), _batch(resumed, n - step)
            if mine != theirs:
                other_ones, own = _names(theirs - mine), _names(mine - theirs)
                text = f"the global batch has {other_ones} in place of {own}"
                yield _finding(text, None, n, whole, resumed, step)
                return
    elif not _has_elements(whole):
        yield from _by_epoch(whole, other, resumed, step)


def _finding(text: str, rank: int | None, n: int, whole: Run, resumed: Run, step: int) -> Finding:
    before = sum((_batch(whole, m) for m in range(step)), Counter[Any]())
    after = sum((_batch(resumed, m) for m in range(resumed.steps)), Counter[Any]())
    expected = sum((_batch(whole, m) for m in range(whole.steps)), Counter[Any]())
    more = ""
    if whole.steps == step + resumed.steps:
        lost, doubled = expected - (before + after), (before + after) - expected
        if lost or doubled:
            more = f"; over both runs {_counts(lost, doubled)}"
        else:
            more = "; over both runs each is taken as often as without the interruption"
    return Finding("data", "samples", text + more, rank, n)


def _counts(lost: Counter[Any], doubled: Counter[Any]) -> str:
    said = []
    if lost:
        said.append(f"{lost.total()} never taken ({_names(lost)})")
    if doubled:
        said.append(f"{doubled.total()} taken once more ({_names(doubled)})")
    return ", ".join(said)


def _by_rank(whole: Run, resumed: Run, step: int, last: int) -> Iterator[Finding]:
    for n in range(step, last):
        mine, theirs = dict(whole.of_step("data", n)), dict(resumed.of_step("data", n - step))
        for rank in sorted(mine.keys() & theirs.keys()):
            one, two = _samples(mine[rank]), _samples(theirs[rank])
            if one != two:
                same = "the same samples in another order" if Counter(one) == Counter(two) else ""
                text = same or f"samples {_names(two)} in place of {_names(one)}"
                yield _finding(f"it takes {text}", rank, n, whole, resumed, step)
                return
        mine = dict(whole.of_step("elements", n))
        theirs = dict(resumed.of_step("elements", n - step))
        for rank in sorted(mine.keys() & theirs.keys()):
            if mine[rank] != theirs[rank]:
                text = "the model is given other elements for the same samples: drawn anew?"
                yield Finding("random", "elements of the samples", text, rank, n)
                return


def _samples(taken: Iterable[Any]) -> list[Any]:
    return [sample for _, samples in taken for sample in samples]


def _batch(run: Run, step: int) -> Counter[Any]:
    """The samples of a step on all ranks; ranks that take the same count once."""
    distinct: list[list[Any]] = []
    for _, taken in run.of_step("data", step):
        own = _samples(taken)
        if own not in distinct:
            distinct.append(own)
    return Counter(sample for own in distinct for sample in own)


def _names(samples: Iterable[Any]) -> str:
    names = [str(each) for each in sorted(samples, key=lambda each: (isinstance(each, str), each))]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}" if names else "none"


def _has_elements(run: Run) -> bool:
    """Whether samples are known by their elements alone, as the program has no DataLoader."""
    return any(number < 0 for _, taken in run.of_step("data", 0) for number, _ in taken)


@dataclass
class Epoch:
    """The samples of one pass over a loader: of each step, and whether it came to its end."""

    steps: list[Counter[Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def all(self) -> Counter[Any]:
        return sum(self.steps, Counter[Any]())


def _epochs(run: Run, steps: int) -> list[Epoch]:
    """The passes over the loaders that a run trains on, up to a step."""
    order: list[list[int]] = [[] for _ in run.ends]
    found: list[Epoch] = []
    for step in range(steps):
        by_epoch: dict[int, list[list[Any]]] = {}
        for rank, taken in run.of_step("data", step):
            for number, samples in taken:
                if number not in order[rank]:
                    order[rank].append(number)
                own = by_epoch.setdefault(order[rank].index(number), [])
                if samples not in own:
                    own.append(samples)
        for n, lists in by_epoch.items():
            while len(found) <= n:
                found.append(Epoch())
            found[n].steps.append(Counter(each for own in lists for each in own))
            found[n].numbers.append(step)
    for n, epoch in enumerate(found):
        ends = [
            end["ended"][order[rank][n]]
            for rank, end in enumerate(run.ends)
            if n < len(order[rank])
        ]
        epoch.ended = all(ends)
    return found


def _by_epoch(whole: Run, other: Run, resumed: Run, step: int) -> Iterator[Finding]:
    """Samples that an epoch loses or takes twice where the global batch depends on the ranks.

    At an epoch's end samples may be dropped or repeated, as there is no full batch of them: that
    depends on the ranks, and is fine.
    """
    before, mine, theirs = (
        _epochs(whole, step),
        _epochs(whole, whole.steps),
        _epochs(other, other.steps),
    )
    after = _epochs(resumed, resumed.steps)
    if not after or not before:
        return
    goes_on = len(mine) >= len(before) and len(mine[len(before) - 1].steps) > len(before[-1].steps)
    history = [*before, *after]
    if goes_on:
        joined = Epoch(before[-1].steps + after[0].steps, [], after[0].ended)
        history = [*before[:-1], joined, *after[1:]]
    for n, (own, one, two) in enumerate(zip(history, mine, theirs, strict=False)):
        last = Counter[Any]()
        for epoch in (one, two):
            last |= epoch.steps[-1]
        taken = own.all
        lost = (one.all & two.all) - taken - last if own.ended and one.ended and two.ended else None
        doubled = taken - (one.all | two.all) - own.steps[-1]
        if lost or doubled:
            text = f"in epoch {n} of both runs {_counts(lost or Counter(), doubled)}"
            yield Finding("data", "samples", text, None, step)
            return
