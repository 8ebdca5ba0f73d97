"""Makes a plan small: fewer faults, simpler kinds, earlier calls, with the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gpusim.torch.distributed.faults.plans import Fault, PlanError

__all__ = ["MOST_RUNS", "shrink"]

MOST_RUNS = 60
"""How many runs a plan is made small with."""

SIMPLE = ("kill", "raise", "exit", "hang")
"""Kinds that come at a call, the simplest first."""

Plan = tuple[Fault, ...]


def shrink(
    plan: Plan, holds: Callable[[Sequence[Plan]], Sequence[bool]], together: int = 2
) -> Plan:
    """Make a plan smaller as long as it keeps its verdict.

    **Arguments**: `holds` runs several plans, and says which of them have the verdict; `together`
    is how many it is given at a time. The first that has it, in order, is taken; so the result does
    not depend on which run ends first.

    **Returns**: the smallest plan found in `MOST_RUNS` runs.

    >>> from gpusim.torch.distributed.faults.plans import parse, plan_text
    >>> def holds(plans):
    ...     return [any(f.kind == "kill" and f.call >= 9 for f in plan) for plan in plans]
    >>> found = shrink(parse("flip rank=1 call=4 bit=3, kill rank=2 call=40"), holds)
    >>> plan_text(found)
    'kill rank=0 call=9'
    """
    left = MOST_RUNS
    tried = {plan}
    while True:
        found = None
        candidates = (each for each in _smaller(plan) if each not in tried)
        while found is None and left > 0:
            batch = [each for _, each in zip(range(min(together, left)), candidates, strict=False)]
            if not batch:
                break
            left -= len(batch)
            tried.update(batch)
            held = [each for each, has in zip(batch, holds(batch), strict=True) if has]
            found = held[0] if held else None
        if found is None:
            return plan
        plan = found


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are smaller by one step, the largest steps first."""
    if len(plan) > 1:
        for place in range(len(plan)):
            yield plan[:place] + plan[place + 1 :]
    for place, fault in enumerate(plan):
        for other in _simpler(fault):
            made = (*plan[:place], other, *plan[place + 1 :])
            if len(set(made)) == len(made):
                yield made


def _simpler(fault: Fault) -> Iterator[Fault]:
    """Faults that are simpler than one."""
    steps: list[dict[str, object]] = []
    own = SIMPLE.index(fault.kind) if fault.kind in SIMPLE else len(SIMPLE)
    if fault.call is not None:
        plain = {"code": None, "seconds": None, "bit": None, "element": None, "tensor": None}
        steps += [{"kind": kind, **plain} for kind in SIMPLE[:own]]
    steps += [{name: None} for name in ("code", "bytes", "tensor", "element")]
    steps += [{"attempt": 0}]
    for name in ("call", "write", "wait"):
        number = getattr(fault, name)
        if number is not None:
            # From the first on: halves of what is left between it and the fault's own.
            steps += [{name: each} for each in _earlier(number)]
    steps += [{"rank": 0}]
    for step in steps:
        if all(getattr(fault, name) == value for name, value in step.items()):
            continue
        try:
            yield replace(fault, **step)  # type: ignore[arg-type]
        except PlanError:  # a value that the kind needs
            continue


def _earlier(number: int) -> list[int]:
    """Numbers from 1 below one, closer and closer to it.

    >>> _earlier(40), _earlier(1)
    ([1, 21, 31, 36, 38, 39], [])
    """
    found, low = [], 1
    while low < number:
        found.append(low)
        low = (low + number + 1) // 2
    return found
