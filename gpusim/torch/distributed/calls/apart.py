"""Which rank has called another group than the ranks that wait for it.

A stall of collectives is a set of calls that some ranks of a group have posted and others have not.
A rank that has posted one of them, and that another one waits for, has gone another way than the
ranks that wait there. Each such pair of calls is a split of the ranks that both groups have, and
the text names the side that is odd:

1. Ranks vote by the group that they called from the lines of the two calls, each time that a rank
   comes there being a vote of its own. A group of the same size counts as the same choice:
   data-parallel groups of a mesh differ by rank.
2. Where that is a tie, the side with fewer ranks in its call is odd.
3. Where that is a tie too, the text names both and blames neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from gpusim.words import listed, named

__all__ = ["Choices", "Group", "Open", "explain"]

WORLD = "0"
"""The name of the group of all ranks."""

Group = tuple[str, tuple[int, ...]]
"""A group: its name and its ranks."""

KEPT = 16
"""How many calls from one line are remembered, of each rank."""


class Choices:
    """The groups that a rank has called from one line of its program: the last of them.

    >>> choices = Choices()
    >>> choices.add(("1", (0, 1)))
    >>> choices.add(("0", (0, 1, 2, 3)))
    >>> choices.count, choices.at(1), choices.at(3)
    (2, ('1', (0, 1)), None)
    """

    __slots__ = ("_last", "count")

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[Group] = deque(maxlen=KEPT)

    def add(self, group: Group) -> None:
        """Note a call."""
        self.count += 1
        self._last.append(group)

    def at(self, number: int) -> Group | None:
        """The group of call `number`, counted from 1; None if it is forgotten or not made."""
        back = self.count - number
        return self._last[-1 - back] if 0 <= back < len(self._last) else None


@dataclass(frozen=True)
class Open:
    """A collective that some ranks of its group have called, and others have not.

    **Attributes**:

    - `group`: the group's name and ranks.
    - `sites`: the ranks that wait in it, and the lines of their programs.
    - `missing`: the ranks that have not called it.
    """

    group: Group
    sites: Mapping[int, str]
    missing: Sequence[int]

    def __str__(self) -> str:
        name, ranks = self.group
        return "the group of all ranks" if name == WORLD else f"group {name!r} ({_named(ranks)})"


def explain(calls: Sequence[Open], chosen: Mapping[int, Mapping[str, Choices]]) -> str:
    """Which ranks called another group than those that wait for them; empty if none did.

    **Arguments**:

    - `calls`: the open collectives.
    - `chosen`: for each rank the groups that it called from each line of its program.

    >>> own = Open(("1", (0, 1)), {0: "train.py:9"}, missing=[1])
    >>> world = Open(("0", (0, 1, 2, 3)), {1: "train.py:9"}, missing=[0, 2, 3])
    >>> chosen = {rank: {"train.py:9": Choices()} for rank in range(4)}
    >>> for rank, group in enumerate([own.group, world.group, ("2", (2, 3)), ("2", (2, 3))]):
    ...     chosen[rank]["train.py:9"].add(group)
    >>> print(explain([own, world], chosen))
    rank 1 is the odd one: it called the group of all ranks at train.py:9, where rank 0 waits for \
it in group '1' (ranks 0 and 1)
    """
    found: dict[tuple[int, int], tuple[list[int], Open, Open]] = {}
    for (a, here), (b, there) in permutations(enumerate(calls), 2):
        # A call that none waits in is asynchronous: its ranks have gone on by their programs.
        if there.sites and here.group != there.group and (gone := _gone(here, there)):
            found[a, b] = gone, here, there
    said = []
    for (first, second), (ranks, here, there) in found.items():
        back = found.get((second, first))
        if back is None:
            said.append(_text(ranks, here, there, "is the odd one", "are the odd ones"))
            continue
        odd = _odd(here, there, ranks, back[0], chosen)
        if odd is None and first < second:
            said.append(_both(ranks, here, back[0], there))
        elif odd is True:
            said.append(_text(ranks, here, there, "is the odd one", "are the odd ones"))
    return "; ".join(said)


def _gone(here: Open, there: Open) -> list[int]:
    """The ranks that wait in a call, and that another one lacks."""
    return [rank for rank in there.missing if rank in here.sites]


def _odd(
    here: Open,
    there: Open,
    ranks: Sequence[int],
    others: Sequence[int],
    chosen: Mapping[int, Mapping[str, Choices]],
) -> bool | None:
    """Whether the ranks that called `here` are odd, and not those of `there`; None for a tie."""
    asked = set()
    for call, callers in ((here, ranks), (there, others)):
        for rank in callers:
            line = call.sites[rank]
            if line in chosen.get(rank, {}):
                asked.add((line, chosen[rank][line].count))
    for_here = for_there = 0
    for rank, lines in chosen.items():
        for line, number in asked:
            group = lines[line].at(number) if line in lines else None
            if group is None:
                continue
            alike_here, alike_there = (
                group == call.group
                or (rank not in call.group[1] and len(group[1]) == len(call.group[1]))
                for call in (here, there)
            )
            for_here += alike_here and not alike_there
            for_there += alike_there and not alike_here
    if for_here == for_there:
        for_here, for_there = len(here.sites), len(there.sites)
    return None if for_here == for_there else for_here < for_there


def _text(ranks: Sequence[int], here: Open, there: Open, one: str, several: str) -> str:
    is_one = len(ranks) == 1
    line = _line(here, ranks)
    waiting = list(there.sites)
    where = _line(there, waiting)
    place = "where" if where == line else f"and at {where}"
    return (
        f"{named('rank', ranks)} {one if is_one else several}: {'it' if is_one else 'they'} called "
        f"{here} at {line}, {place} {named('rank', waiting)} "
        f"{'waits' if len(waiting) == 1 else 'wait'} for {'it' if is_one else 'them'} in {there}"
    )


def _both(ranks: Sequence[int], here: Open, others: Sequence[int], there: Open) -> str:
    return (
        f"{named('rank', ranks)} called {here} at {_line(here, ranks)}, and "
        f"{named('rank', others)} "
        f"{there} at {_line(there, others)}: each waits for the other"
    )


def _line(call: Open, ranks: Sequence[int]) -> str:
    return listed([*dict.fromkeys(call.sites[rank] for rank in ranks)])


def _named(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == tuple(range(first, last + 1)):
        return f"ranks {first} to {last}"
    return named("rank", ranks)
