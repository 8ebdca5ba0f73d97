"""A campaign: the run without faults, the plans, their verdicts, and the worst made small."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpusim.tools.progress import Advance
from gpusim.torch.distributed.faults.plans import Fault

from .observations import Observation, short_site
from .running import Runner
from .shrinking import MOST_RUNS, shrink
from .verdicts import BAD, VERDICTS, Reference, Verdict, judge, reference_of

__all__ = ["Campaign", "FailedError", "Judged", "run_plans"]

LAST = 40
"""Lines of a failed run's output that are shown."""

Plan = tuple[Fault, ...]


class FailedError(ValueError):
    """The script fails without faults, or nothing of it can be disturbed."""


@dataclass(frozen=True)
class Judged:
    """A plan and its verdict.

    **Attributes**: `site` is where its first fault happened: a line of the program, or a file.
    """

    plan: Plan
    verdict: Verdict
    site: str = ""
    attempts: int = 1


@dataclass
class Campaign:
    """The results of a campaign.

    **Attributes**: `judged` are the plans in the order in which they were drawn; `smallest` is the
    worst of them made small, if there is a bad one; `seconds` is this machine's time for the plans,
    and `processor` the CPU's for all of them.
    """

    ranks: int
    reference: Reference
    judged: list[Judged] = field(default_factory=list)
    smallest: Judged | None = None
    shrunk_from: Judged | None = None
    seconds: float = 0.0
    processor: float = 0.0

    @property
    def worst(self) -> list[Judged]:
        """The plans with a bad verdict, the worst first, else in their order."""
        bad = [each for each in self.judged if each.verdict.name in BAD]
        return sorted(bad, key=lambda each: VERDICTS.index(each.verdict.name))


def run_plans(
    runner: Runner,
    plans_of: Callable[[Observation], Sequence[Plan]],
    checked: bool = False,
    advance: Advance = lambda name, work: None,
) -> Campaign:
    """Run the script without faults, twice, then with each plan.

    **Arguments**: `plans_of` gets the first run without faults; `checked`: whether --check looks at
    the runs; `advance` shows progress, a unit for each run.

    **Raises**: FailedError if the script fails without faults.
    """
    runner.prepare()
    first = _well(runner.undisturbed(), checked)
    advance("without faults", 1)
    runner.prepare(first)
    second = _well(runner.undisturbed(), checked)
    advance("without faults", 1)
    found = Campaign(runner.ranks, reference_of(first, second))
    plans = plans_of(first)
    judged: dict[int, Judged] = {}
    begun = time.monotonic()
    for place, observation in runner.run_all(plans):
        judged[place] = _judged(found.reference, plans[place], observation, checked)
        found.processor += observation.seconds
        advance(f"{judged[place].verdict.name}: {plans[place][0]}", 1)
    found.seconds = time.monotonic() - begun
    found.judged = [judged[place] for place in sorted(judged)]
    if found.worst:
        _shrink(runner, found, checked, advance)
    return found


def _judged(reference: Reference, plan: Plan, found: Observation, checked: bool) -> Judged:
    verdict = judge(reference, found, checked)
    site = ""
    if found.happened:
        fault, site = found.happened[0]
        seen = reference.observation.seen
        if not site and fault.write is not None and seen and fault.attempt == 0:
            writes = seen[fault.rank].writes
            site = short_site(writes[fault.write - 1]) if fault.write <= len(writes) else ""
    return Judged(plan, verdict, site, found.attempts)


def _shrink(runner: Runner, found: Campaign, checked: bool, advance: Advance) -> None:
    """Make the worst plan small."""
    worst = found.worst[0]
    smallest: dict[Plan, Judged] = {worst.plan: worst}

    def holds(plans: Sequence[Plan]) -> list[bool]:
        has = [False] * len(plans)
        for place, observation in runner.run_all(plans):
            one = _judged(found.reference, plans[place], observation, checked)
            has[place] = one.verdict.name == worst.verdict.name
            smallest[plans[place]] = one
            advance(f"smaller: {plans[place][0]}", 0)
        return has

    plan = shrink(worst.plan, holds, runner.jobs)
    found.smallest, found.shrunk_from = smallest[plan], worst
    assert len(smallest) <= MOST_RUNS + 1


def _well(found: Observation, checked: bool) -> Observation:
    """The run, if it ended well. **Raises**: FailedError."""
    if (found.code == 0 or (checked and found.findings)) and len(found.seen) > 0:
        return found
    shown = "\n".join(found.output.splitlines()[-LAST:])
    raise FailedError(f"the script fails without faults:\n{shown}")
