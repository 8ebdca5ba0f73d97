"""Between which calls the cause of a difference lies, by what calls of one place carry.

A record has the data of calls, and not of what runs between them. So an equal call proves nothing
of data that it does not carry: after `w -= lr * g` a logged loss is equal, and `w` is not. Two
bounds follow from the data:

- *Until*: the first pair of calls that differ. All that runs before this pair is the same in both
  runs as far as calls see it, and a program is deterministic: what causes the difference has run
  when the call is made. This bound needs nothing else.
- *After*: calls of one place (site, operation, group, dtypes and shapes) carry the same variable in
  turn after turn of a loop. If the call one turn before is equal, the difference comes into that
  variable in between: on a line that runs there, or by a value that was set before and is first
  used there, such as a learning rate.

A call is one turn before only if a whole turn lies between, or lines would be left out. A record
has no loops. So the turn is the shortest stretch that ends at the call, begins at an equal call of
its chain, and holds calls of each chain that the run comes back to, in the proportion in which the
run makes them. In `for p in parameters:
all_reduce(p.grad)` the gradient of the parameter before is of the same turn and proves nothing;
the call that logs, which the run comes back to, lies not between them. Where nothing else is
called, a turn that makes the call twice looks like two turns: the bound says that it assumes one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .pairing import Pairs, describe
from .runs import Call, Event, Run

__all__ = ["ONE_CALL", "Interval", "interval_of", "previous_of", "size_of"]

ONE_CALL = "one call a turn"


@dataclass(frozen=True)
class Interval:
    """The part of the runs in which the cause lies.

    **Attributes**:

    - `kind`: "call" (it is the call `until` itself), "turn" (between `after` and `until`), or
      "until" (at this call or before it).
    - `until`, `after`: the calls, by run; a run that lacks the call is left out.
    - `assumes`: what must hold: "one call a turn" (a turn of the loop makes this call once).
    - `equal`: of "until", the nearest earlier calls of the same place, if they are equal: evidence,
      and no bound.
    """

    kind: str
    until: dict[str, Call]
    after: dict[str, Call]
    assumes: tuple[str, ...] = ()
    equal: dict[str, Call] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The interval as JSON has it."""
        found: dict[str, Any] = {"kind": self.kind, "until": _places(self.until)}
        if self.after:
            found["after"] = _places(self.after)
        if self.assumes:
            found["assumes"] = list(self.assumes)
        if self.equal:
            found["equal"] = _places(self.equal)
        return found


def _places(calls: dict[str, Call]) -> dict[str, Any]:
    return {
        name: {
            "site": call.site,
            "rank": call.rank,
            "sequence": call.sequence,
            "operation": describe(call),
        }
        for name, call in calls.items()
    }


def interval_of(pairs: Pairs, at: int, rank: int, kind: str) -> Interval:
    """The interval of a verdict of this kind, on the pair `at`, as `rank` calls it."""
    one, other = pairs.events(at)
    until = {
        name: event.calls.get(rank, event.first)
        for name, event in (("a", one), ("b", other))
        if event is not None
    }
    if kind == "collective":
        return Interval("call", until, {})
    if kind not in ("operands", "other") or one is None or other is None or not pairs.same:
        return Interval("until", until, {})
    before = _turn_before(pairs, at, rank)
    if before is None:
        previous = previous_of(pairs, at, rank)
        near = {} if previous is None else dict(zip("ab", previous[1:], strict=True))
        equal = {name: event.calls.get(rank, event.first) for name, event in near.items()}
        return Interval("until", until, {}, equal=equal)
    return Interval("turn", until, before, (ONE_CALL,))


def previous_of(pairs: Pairs, at: int, rank: int) -> tuple[int, Event, Event] | None:
    """The nearest earlier pair of calls of the same place on this rank, if it is equal."""
    one, _ = pairs.events(at)
    if one is None or rank not in one.calls:
        return None
    for before in range(at - 1, -1, -1):
        event, other = pairs.events(before)
        if event is None or other is None or rank not in event.calls:
            continue
        if _continues(event, one, rank):
            return (before, event, other) if pairs.equal(before) else None
    return None


def size_of(call: Call) -> int:
    """How many elements a call carries."""
    return sum(int(np.prod(shape)) for _, shape in call.kinds)


def _place(event: Event, rank: int) -> Hashable:
    """The place of a call, whatever it carries."""
    call = event.calls[rank]
    return (call.site, call.operation, call.op, event.ranks)


def _key(event: Event, rank: int) -> tuple[Hashable, Hashable]:
    """The chain of a call."""
    return (_place(event, rank), event.calls[rank].kinds)


def _continues(event: Event, one: Event, rank: int) -> bool:
    """Whether two calls may carry the same variable; a sum's may be cut otherwise, as by DDP."""
    if _key(event, rank) == _key(one, rank):
        return True
    dtypes = [{dtype for dtype, _ in each.calls[rank].kinds} for each in (event, one)]
    return (
        _place(event, rank) == _place(one, rank)
        and one.first.op is not None
        and (dtypes[0] == dtypes[1])
    )


def _turn_before(pairs: Pairs, at: int, rank: int) -> dict[str, Call] | None:
    """The calls one turn before a pair, in both runs; None if that is not known."""
    one, _ = pairs.events(at)
    assert one is not None
    if rank not in one.calls:
        return None
    own = _own(pairs.a, rank)
    here = next(k for k, event in enumerate(own) if event is one)
    begin = _begin(own, here, rank)
    if begin is None:
        return None
    position = next((k for k, pair in enumerate(pairs.pairs) if pair[0] == own[begin].index), None)
    if position is None or position >= at or not pairs.equal(position):
        return None
    _, other = pairs.events(position)
    assert other is not None
    return {"a": own[begin].calls[rank], "b": other.calls.get(rank, other.first)}


def _own(run: Run, rank: int) -> list[Event]:
    return [event for event in run.events if rank in event.calls]


def _begin(own: list[Event], here: int, rank: int) -> int | None:
    """The call in a rank's list of calls that is one turn before the one `here`."""
    keys = [_key(event, rank) for event in own]
    places = [_place(event, rank) for event in own]
    needed = _needed(keys, here)
    elsewhere = {key: 1 for key in needed if key[0] != places[here]}
    seen: Counter[Hashable] = Counter()
    for begin in range(here - 1, -1, -1):
        seen[keys[begin]] += 1
        if keys[begin] == keys[here] and seen >= needed:
            return begin
        if seen >= Counter(elsewhere) and _cut(own, places, begin, here, rank):
            return begin
    return None


def _needed(keys: Sequence[tuple[Hashable, Hashable]], here: int) -> Counter[Any]:
    """How often calls of each chain are made in a turn, of those that the run comes back to.

    They are counted between the first and the last call of the chain at `here`, which are whole
    turns where a turn makes it once, and divided by the fewest.
    """
    own = [k for k, key in enumerate(keys) if key == keys[here]]
    times = Counter(keys)
    counts = Counter(key for key in keys[own[0] : own[-1]] if times[key] > 1)
    fewest = min(counts.values(), default=1)
    found = {key: -(-count // fewest) for key, count in counts.items()}
    return Counter(found)


def _cut(own: list[Event], places: list[Hashable], begin: int, here: int, rank: int) -> bool:
    """Whether two calls begin visits of one place that carry as many elements, cut otherwise.

    DDP cuts its gradients into other buckets from the second turn on. A place whose calls follow
    each other in both turns has the same cut in both.
    """
    sizes = []
    for start in (begin, here):
        if places[start] != places[here] or (start and places[start - 1] == places[here]):
            return False
        end = start
        while end < len(own) and places[end] == places[here]:
            end += 1
        if not all(_continues(event, own[here], rank) for event in own[start:end]):
            return False
        sizes.append(sum(size_of(event.calls[rank]) for event in own[start:end]))
    return sizes[0] == sizes[1]
