"""Compares a resumed run with the uninterrupted one, and names the first difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpusim.words import count

from .findings import DIFFERENT, SAME, Finding, Pair
from .runs import Key, Run
from .sampling import compare_data
from .wholes import Whole, difference, is_same

__all__ = ["compare", "first_unlike", "is_fresh", "is_rounding"]

STATES = {"weight": "weights", "buffer": "buffers", "optimizer state": "optimizer"}
"""Kinds of tensors, and the state that they are."""
ORDER = (
    "weights",
    "buffers",
    "optimizer",
    "groups",
    "scheduler",
    "scaler",
    "random",
    "data",
    "steps",
    "saved",
)
ROUNDING = 1e-2
"""The share of a run's change of the weights up to which two uninterrupted runs are one but for
rounding."""
MARGIN = 8.0
"""How many times the difference of the uninterrupted runs a resumed run may have."""
LEAST = 1e-3
"""The share of the change since the load that always counts as rounding."""


def compare(
    whole: Run, other: Run, resumed: Run, step: int, exact: bool = True, saved: Run | None = None
) -> Pair:
    """Compare a run that was resumed at `step`.

    **Arguments**: `whole`, never interrupted, on as many ranks as saved; `other`, on as many as
    `resumed` has: the same run if the numbers are the same; `exact`, whether the same number of
    ranks has the same bits: not where sums depend on DistributedDataParallel's buckets, which are
    others in the first step of a run; `saved`, the run up to the checkpoint.
    """
    found = list(_at_load(whole, other, resumed, step))
    found += compare_data(whole, other, resumed, step)
    found += _steps(whole, other, resumed, step)
    if not found:
        found += _later(whole, other, resumed, step, exact)
    if not found and whole is other and exact:
        found += _contents(whole, saved, resumed, step)
    found.sort(key=lambda each: (each.step or step, ORDER.index(each.state)))
    return Pair(whole.ranks, resumed.ranks, step, DIFFERENT if found else SAME, tuple(found))


def _label(key: Key) -> str:
    _, root, name, leaf = key
    full = f"{root}.{name}" if name else root
    return f"{leaf} of {full}" if leaf else full


def _at_load(whole: Run, other: Run, resumed: Run, step: int) -> Iterator[Finding]:
    for kind, state in STATES.items():
        finding = _tensors(whole, other, resumed, step, kind, state)
        if finding is not None:
            yield finding
    for name, state in (("groups", "groups"), ("scheduled", "scheduler"), ("scaled", "scaler")):
        finding = _numbers(whole, other, resumed, step, name, state)
        if finding is not None:
            yield finding
    finding = _random(whole, other, resumed, step)
    if finding is not None:
        yield finding


def _tensors(
    whole: Run, other: Run, resumed: Run, step: int, kind: str, state: str
) -> Finding | None:
    """The first tensor of a kind that is another at load, and how many are."""
    first: Finding | None = None
    count = total = 0
    roots = {key[1] for key in resumed.keys(0)}
    for key in whole.keys(step):
        if key[0] != kind or key[1] not in roots:
            continue
        mine, theirs = whole.wholes(step, key), resumed.wholes(0, key)
        assert mine is not None
        total += 1
        if theirs is None and kind == "buffer":
            continue
        rank = 0 if theirs is None else _unlike(kind, mine, theirs)
        if rank is None:
            continue
        count += 1
        if first is None:
            text = _how(whole, other, theirs, step, key, mine, rank)
            first = Finding(state, _label(key), text, rank, step, _site(resumed, state))
    if first is None:
        return None
    many = f"; {count} of {total} such tensors are others" if total > 1 else ""
    return Finding(state, first.name, first.text + many, first.rank, step, first.site)


def _unlike(kind: str, mine: Whole, theirs: Whole) -> int | None:
    if kind != "buffer" or mine.array is not None:
        if kind == "buffer":  # before a forward pass sends them, ranks may have others
            one, two = mine.parts.get(0), theirs.parts.get(0)
            if one is not None and two is not None and theirs.array is None:
                return None if is_same(one, two) else 0
        return difference(mine, theirs)
    one, two = mine.parts.get(0), theirs.parts.get(0)
    return None if one is None or two is None or is_same(one, two) else 0


def _how(
    whole: Run, other: Run, theirs: Whole | None, step: int, key: Key, mine: Whole, rank: int
) -> str:
    """How a tensor differs."""
    if theirs is None:
        return "it is not there"
    start = other.wholes(0, key)
    if start is not None and difference(start, theirs) is None:
        return "it is that of the run's start"
    if mine.array is not None and theirs.array is None and theirs.apart is not None:
        held = theirs.parts.get(theirs.apart)
        good = [r for r, part in theirs.parts.items() if is_same(part, mine.array)]
        if good and held is not None:
            return f"rank {rank} has another copy than rank{'s' * (len(good) > 1)} {_list(good)}"
    if mine.array is not None and theirs.array is not None:
        if mine.array.shape != theirs.array.shape:
            return f"its shape is {theirs.array.shape}, not {mine.array.shape}"
        if theirs.array.size and not theirs.array.any():
            return "it is zero"
        before = whole.wholes(step - 1, key) if step else None
        if before is not None and before.array is not None and is_same(before.array, theirs.array):
            return f"it is that of step {step - 1}"
        if theirs.array.size == 1:
            return f"it is {theirs.array.reshape(-1)[0]:g}, not {mine.array.reshape(-1)[0]:g}"
        apart = np.abs(theirs.array.astype(float) - mine.array.astype(float))
        largest = float(np.abs(mine.array).max(initial=0.0)) or 1.0
        if theirs.apart is not None and mine.apart is None:
            return f"rank {theirs.apart} has another copy"
        wrong = int((apart != 0).sum())
        return (
            f"{wrong} of {count(apart.size, 'element')} are others, by up to "
            f"{float(apart.max(initial=0.0)) / largest:.1e} of its largest"
        )
    return "its parts are others"


def _list(numbers: list[int]) -> str:
    return ", ".join(str(each) for each in numbers)


def _site(resumed: Run, state: str) -> str:
    return (
        resumed.site(state) or resumed.site("dcp")
        if state in STATES.values()
        else resumed.site({"groups": "optimizer"}.get(state, state))
    )


def _options(entries: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The numbers of a step, by names that do not depend on the ranks."""
    for n, entry in enumerate(entries):
        if name == "groups":
            groups, names = entry
            for g, (options, own) in enumerate(zip(groups, names, strict=True)):
                if not own:
                    yield f"group {g} of optimizer {n}", options
                for each in own:
                    yield each, options
        elif name == "scheduled":
            yield f"{entry[0]}" if len(entries) == 1 else f"{entry[0]} {n}", entry[1]
        else:
            yield "GradScaler" if len(entries) == 1 else f"GradScaler {n}", entry


def _by_name(run: Run, name: str, step: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for _, entries in run.of_step(name, step):
        for key, options in _options(entries, name):
            found.setdefault(key, options)
    return found


def _numbers(
    whole: Run, other: Run, resumed: Run, step: int, name: str, state: str
) -> Finding | None:
    """The first option of a group, or number of a scheduler or scaler, that is another."""
    mine, over = _by_name(whole, name, step), _by_name(other, name, step)
    for rank, entries in resumed.of_step(name, 0):
        theirs = dict(_options(entries, name))
        if state != "groups" and mine and not theirs:
            return Finding(state, next(iter(mine)), "it is not there", rank, step)
        for key, options in mine.items():
            for option, value in options.items():
                got = theirs.get(key, {}).get(option)
                if got is None or got == value or got != got:
                    continue
                if whole is not other and over.get(key, {}).get(option, value) != value:
                    continue  # it depends on the number of ranks, as a scaled learning rate does
                text = f"{option} is {_short(got)}, not {_short(value)}"
                if (_by_name(other, name, 0).get(key) or {}).get(option) == got:
                    text += ": that of the run's start"
                return Finding(state, f"{option} of {key}", text, rank, step, _site(resumed, state))
    return None


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _random(whole: Run, other: Run, resumed: Run, step: int) -> Finding | None:
    """A generator from which is drawn, and whose state is another at load."""
    used = whole.known("draws") | whole.known("data_draws")
    site = resumed.site("random")
    mine, start = dict(whole.of_step("random", step)), dict(other.of_step("random", 0))
    over = dict(other.of_step("random", step))
    theirs = dict(resumed.of_step("random", 0))
    for name in ("torch", "numpy", "python"):
        if name not in used:
            continue
        for rank, own in theirs.items():
            if whole is other and rank in mine and own[name] == mine[rank][name]:
                continue
            if rank in start and own[name] == start[rank][name] and step:
                text = "its state is that of the run's start: the same numbers are drawn again"
            elif whole is other:
                source = [r for r, each in mine.items() if each[name] == own[name]]
                text = (
                    f"its state is that of rank {source[0]}"
                    if source
                    else "its state is another than at the save"
                )
            else:
                twin = next((r for r in theirs if r < rank and theirs[r][name] == own[name]), None)
                apart = twin is not None and over and over[twin][name] != over[rank][name]
                if not apart:
                    continue
                text = f"its state is that of rank {twin} too: both draw the same numbers"
            return Finding("random", f"{name}'s generator", text, rank, step, site)
    return None


def _steps(whole: Run, other: Run, resumed: Run, step: int) -> Iterator[Finding]:
    if whole.steps != other.steps:
        return
    made, expected = resumed.steps, whole.steps - step
    if made != expected:
        text = f"the resumed run makes {count(made, 'step')}; {expected} are left of {whole.steps}"
        yield Finding("steps", "steps", text, None, step + min(made, expected))


def first_unlike(one: Run, two: Run, last: int) -> str | None:
    """The first tensor in which two runs of one program differ, up to a step."""
    for step in range(last + 1):
        for key in one.keys(step):
            mine, theirs = one.wholes(step, key), two.wholes(step, key)
            if (
                mine is not None
                and theirs is not None
                and _unlike(key[0], mine, theirs) is not None
            ):
                return f"{STATES[key[0]]} {_label(key)} at step {step}"
    return None


def is_fresh(other: Run, resumed: Run, whole: Run, step: int) -> bool:
    """Whether the resumed run has the weights of a run's start, and not those that were saved."""
    keys = [key for key in resumed.keys(0) if key[0] == "weight"]
    saved = False
    for key in keys:
        start, own, mine = other.wholes(0, key), resumed.wholes(0, key), whole.wholes(step, key)
        if start is None or own is None or difference(start, own) is not None:
            return False
        saved = saved or (mine is not None and difference(mine, own) is not None)
    return saved and bool(keys)


# ---------------------------------------------------------------- after the load


def _contents(whole: Run, saved: Run | None, resumed: Run, step: int) -> Iterator[Finding]:
    """The first thing that is another in what a rank saves later.

    Of things that two uninterrupted runs save alike: a time is another one in each.
    """
    again = {} if saved is None else dict(saved.of_rank("contents"))
    for rank, theirs in resumed.of_rank("contents"):
        mine = dict(whole.of_rank("contents")).get(rank, {})
        unstable = {
            name
            for at, own in again.get(rank, {}).items()
            for name, value in own.items()
            if mine.get(at, {}).get(name) != value
        }
        for at, own in sorted(theirs.items(), key=lambda each: int(each[0])):
            expected = mine.get(str(int(at) + step), {})
            for name, value in own.items():
                if name in unstable or expected.get(name, value) == value:
                    continue
                text = "it is another in the checkpoint that is saved here"
                if len(value) < 12 and value.lstrip("-")[:1].isdigit():
                    text = f"it is {value}, not {expected[name]}, in the checkpoint saved here"
                yield Finding("saved", name, text, rank, step + int(at))
                return


def _later(whole: Run, other: Run, resumed: Run, step: int, exact: bool) -> Iterator[Finding]:
    last = min(whole.steps - step, resumed.steps)
    if whole is not other or not exact:
        yield from _about(whole, other, resumed, step, last)
        return
    for n in range(1, last + 1):
        for key in whole.keys(step + n):
            mine, theirs = whole.wholes(step + n, key), resumed.wholes(n, key)
            if mine is None or theirs is None:
                continue
            rank = _unlike(key[0], mine, theirs)
            if rank is not None:
                state = STATES[key[0]]
                text = "it differs, and all that is compared was the same at the load"
                yield Finding(state, _label(key), text, rank, step + n)
                return


def _about(whole: Run, other: Run, resumed: Run, step: int, last: int) -> Iterator[Finding]:
    """Compare as far as the uninterrupted runs on both numbers of ranks are the same."""
    if not is_rounding(whole, other):
        return
    for n in range(1, last + 1):
        apart = _distance(whole, step + n, resumed, n)
        allowed = MARGIN * _distance(whole, step + n, other, step + n)
        allowed += LEAST * _distance(whole, step + n, whole, step)
        if apart > allowed:
            text = (
                f"the weights are {apart:.1e} away from those of the uninterrupted run; "
                f"{allowed:.1e} is rounding"
            )
            yield Finding("weights", "all weights", text, None, step + n)
            return


def is_rounding(whole: Run, other: Run) -> bool:
    """Whether two runs on unlike numbers of ranks make the same steps, but for rounding."""
    last = min(whole.steps, other.steps)
    if whole.steps != other.steps or not last:
        return False
    return all(
        _distance(whole, n, other, n) <= ROUNDING * _distance(whole, n, whole, 0)
        for n in range(1, last + 1)
    )


def _distance(one: Run, step: int, two: Run, other: int) -> float:
    """The Euclidean distance of the weights that both have in full."""
    total = 0.0
    for key in one.keys(step):
        if key[0] != "weight":
            continue
        a, b = one.wholes(step, key), two.wholes(other, key)
        if a is None or b is None or a.array is None or b.array is None:
            continue
        if a.array.shape == b.array.shape:
            total += float(np.square(a.array.astype(float) - b.array.astype(float)).sum())
    return float(np.sqrt(total))
