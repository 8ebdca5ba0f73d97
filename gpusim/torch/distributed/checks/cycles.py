"""Cycles among calls that several ranks enqueue, each in an order of its own.

A line is the order in which one rank enqueues calls. A cycle is a chain of legs: on the line of
each leg, its first call stands before its last one, which is the first of the next leg.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Leg", "cycles"]

STARTS, STEPS = 64, 500_000
"""How many calls of one knot are looked at as the start of a cycle, and how long, at most."""


class Leg(NamedTuple):
    """A part of a cycle: two places on a line, of which the first stands before the last."""

    line: int
    first: int
    last: int


def cycles(
    lines: Sequence[Sequence[Hashable]], likes: Sequence[Sequence[Hashable]]
) -> Iterator[list[Leg]]:
    """A shortest cycle for each kind of call in each knot of calls that precede each other.

    It takes linear time. `likes` has the kind of each call of `lines`: cycles of knots of the same
    kinds are not looked for again.
    """
    graph = _Graph(lines)
    seen: set[Hashable] = set()
    for knot in graph.knots():
        kinds: dict[Hashable, int] = {}
        for node in knot:
            line, place = graph.places[node][0]
            kinds.setdefault(likes[line][place], node)
        key = frozenset(kinds)
        if key in seen:
            continue
        seen.add(key)
        search = _Search(graph, knot)
        for start in list(kinds.values())[: max(1, min(STARTS, STEPS // len(knot)))]:
            cycle = search.cycle(start)
            if frozenset(cycle) not in seen:
                seen.add(frozenset(cycle))
                first = cycle.index(min(cycle))
                yield [*cycle[first:], *cycle[:first]]


class _Graph:
    """The calls of all lines as nodes. Those on one line alone are in no cycle and left out."""

    def __init__(self, lines: Sequence[Sequence[Hashable]]) -> None:
        count: dict[Hashable, int] = {}
        for line in lines:
            for call in line:
                count[call] = count.get(call, 0) + 1
        numbers: dict[Hashable, int] = {}
        #: By node: on which lines, and at which places of them.
        self.places: list[list[tuple[int, int]]] = []
        #: By line: its nodes, with the place of each.
        self.lines: list[list[tuple[int, int]]] = []
        for number, line in enumerate(lines):
            row: list[tuple[int, int]] = []
            for place, call in enumerate(line):
                if count[call] < 2:
                    continue
                node = numbers.setdefault(call, len(numbers))
                if node == len(self.places):
                    self.places.append([])
                self.places[node].append((number, place))
                row.append((node, place))
            self.lines.append(row)

    def knots(self) -> list[list[int]]:
        """The strongly connected sets of several nodes, each in the order of the first line."""
        after: list[list[int]] = [[] for _ in self.places]
        before = [0] * len(self.places)
        for row in self.lines:
            for (node, _), (following, _) in pairwise(row):
                after[node].append(following)
                before[following] += 1
        ready = [node for node, count in enumerate(before) if not count]
        while ready:  # nodes that are behind no cycle are in none
            node = ready.pop()
            for each in after[node]:
                before[each] -= 1
                if not before[each]:
                    ready.append(each)
        return _strong([node for node, count in enumerate(before) if count], after, before)


class _Search:
    """The search for cycles in one knot."""

    def __init__(self, graph: _Graph, knot: Sequence[int]) -> None:
        inside = set(knot)
        self.lines = {node: [line for line, _ in graph.places[node]] for node in knot}
        #: The place of a node on a line of the graph.
        self.place = {node: dict(graph.places[node]) for node in knot}
        #: By line: the knot's nodes, in order, and the index of each.
        self.rows: dict[int, list[int]] = {}
        self.index: dict[tuple[int, int], int] = {}
        for line in sorted({line for lines in self.lines.values() for line in lines}):
            row = [node for node, _ in graph.lines[line] if node in inside]
            self.rows[line] = row
            self.index.update(((node, line), index) for index, node in enumerate(row))

    def cycle(self, start: int) -> list[Leg]:
        """A cycle through the node with as few legs as there can be."""
        # Breadth first: a leg goes along one line, as far as it likes. `ends` are the places of
        # lines from which on all has been reached.
        came: dict[int, tuple[int, int]] = {}  # by node: the node before, and the line between
        ends = {line: len(row) for line, row in self.rows.items()}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for line in self.lines[node]:
                index, end = self.index[node, line] + 1, ends[line]
                ends[line] = min(index, end)
                for following in self.rows[line][index:end]:
                    if following not in came:
                        came[following] = node, line
                        queue.append(following)
                if start in came:
                    return self._legs(start, came)
        raise AssertionError("a knot without a cycle")

    def _legs(self, start: int, came: dict[int, tuple[int, int]]) -> list[Leg]:
        legs: list[Leg] = []
        node = start
        while not legs or node != start:
            earlier, line = came[node]
            legs.append(Leg(line, self.place[earlier][line], self.place[node][line]))
            node = earlier
        return legs[::-1]


def _strong(nodes: Sequence[int], after: list[list[int]], counts: list[int]) -> list[list[int]]:
    """Tarjan's strongly connected sets among the nodes, without recursion."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    on_stack: set[int] = set()
    stack: list[int] = []
    found: list[list[int]] = []
    for root in nodes:
        if root in order:
            continue
        work = [(root, iter(after[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for each in rest:
                if not counts[each]:
                    continue
                if each not in order:
                    order[each] = low[each] = len(order)
                    stack.append(each)
                    on_stack.add(each)
                    work.append((each, iter(after[each])))
                    break
                if each in on_stack:
                    low[node] = min(low[node], order[each])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    knot = [stack.pop()]
                    while knot[-1] != node:
                        knot.append(stack.pop())
                    on_stack.difference_update(knot)
                    if len(knot) > 1:
                        found.append(sorted(knot))
    return found
