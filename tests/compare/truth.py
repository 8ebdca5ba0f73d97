"""Where the marked lines of a program lie among each rank's calls, and what came before a call.

The program runs once more with a call before each marked line, and behind it. These calls are known
by their shape, and left out again. Nothing of `gpusim compare` takes part.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.compare.marks import FIRST
from tests.compare.pair import MARKED, Effect

__all__ = ["Calls", "Truth", "calls_of", "clocks_of", "instrumented", "truth_of"]

Line = Mapping[str, Any]
Calls = dict[int, list[Line]]
"""The calls of a record, for each rank in its order."""
Clock = tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    """A run without its marks.

    **Attributes**:

    - `begins`, `ends`: for each mark and rank, how many calls the rank has made when the marked
      line begins, and when it has ended, each time it runs.
    - `clocks`: for each call of each rank, how many calls of every rank lie before it or at it.
    """

    begins: Mapping[tuple[str, int], list[int]]
    ends: Mapping[tuple[str, int], list[int]]
    clocks: Mapping[int, Sequence[Clock]]

    def places(self, effect: Effect) -> dict[int, tuple[int, int]]:
        """For each rank on which an effect takes place, the calls made before and after it."""
        found = {}
        for rank in effect.ranks or sorted(self.clocks):
            begins = self.begins.get((effect.mark, rank), [])
            if effect.nth < len(begins):
                found[rank] = begins[effect.nth], self.ends[effect.mark, rank][effect.nth]
        if not found:
            raise LookupError(f"{effect}: the marked line does not run that often")
        return found

    def begun(self, effect: Effect, rank: int, sequence: int) -> bool:
        """Whether an effect has begun, on some rank, when a call is complete."""
        clock = self.clocks[rank][sequence]
        return any(clock[own] > begin for own, (begin, _) in self.places(effect).items())

    def over(self, effect: Effect, rank: int, sequence: int) -> bool:
        """Whether an effect has ended, on some rank, before that rank's part in a call."""
        clock = self.clocks[rank][sequence]
        return any(clock[own] > end for own, (_, end) in self.places(effect).items())


def instrumented(program: str, marks: Collection[str]) -> str:
    """A program with a call before each marked line or lines, and behind them.

    None is behind a line that begins a block, or returns.
    """
    numbers = {name: 2 * number for number, name in enumerate(sorted(marks))}
    statements = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.stmt)]
    before: dict[int, str] = {}
    behind: dict[int, str] = {}
    for name, indent, first, last in _blocks(program):
        if name not in numbers:
            continue
        call = f"{indent}__import__('tests.compare.marks').compare.marks.mark"
        before[first] = f"{call}({numbers.pop(name)})"
        own = [node for node in statements if first <= node.lineno <= last]
        ends = [node.end_lineno or 0 for node in own if not hasattr(node, "body")]
        last = max([last, *ends])
        opened = any((node.end_lineno or 0) > last for node in own)
        if not opened and not any(isinstance(node, ast.Return) for node in own):
            number = int(before[first].rpartition("(")[2][:-1]) + 1
            behind[last] = f"{call}({number})"
    if numbers:
        raise KeyError(f"the program lacks the marks {sorted(numbers)}")
    lines = []
    for number, line in enumerate(program.splitlines(), 1):
        lines += [
            text for text in (before.get(number), line, behind.get(number)) if text is not None
        ]
    return "\n".join(lines) + "\n"


def _blocks(program: str) -> Iterator[tuple[str, str, int, int]]:
    """Each mark, the indent of its first line, and its first and last line."""
    found = [(number, MARKED.match(line)) for number, line in enumerate(program.splitlines(), 1)]
    for name, group in groupby(found, lambda each: each[1] and each[1]["name"]):
        own = list(group)
        if name and own[0][1]:
            yield name, own[0][1]["indent"], own[0][0], own[-1][0]


def calls_of(record: Path) -> Calls:
    """The calls of a record: of one file, or of one for each rank."""
    calls: Calls = defaultdict(list)
    for file in sorted(record.glob("calls*.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "call":
                calls[line["rank"]].append(line)
    return {rank: sorted(calls[rank], key=lambda call: call["sequence"]) for rank in sorted(calls)}


def truth_of(record: Path, marks: Collection[str]) -> Truth:
    """Read the record of an instrumented program."""
    names = dict(enumerate(sorted(marks)))
    begins: dict[tuple[str, int], list[int]] = defaultdict(list)
    ends: dict[tuple[str, int], list[int]] = defaultdict(list)
    rest: Calls = {}
    for rank, calls in calls_of(record).items():
        rest[rank] = []
        for call in calls:
            number = (call["shapes"] or [[0]])[0][:1]
            if not number or number[0] < FIRST:
                rest[rank].append(call)
                continue
            which, behind = divmod(number[0] - FIRST, 2)
            if behind:
                ends[names[which], rank][-1] = len(rest[rank])
            else:
                begins[names[which], rank].append(len(rest[rank]))
                ends[names[which], rank].append(len(rest[rank]))
    return Truth(begins, ends, clocks_of(rest))


def clocks_of(calls: Calls) -> dict[int, list[Clock]]:
    """Vector clocks: a collective joins its ranks, a message its two ends."""
    size = max(calls, default=-1) + 1
    members: dict[Any, set[int]] = defaultdict(set)
    for rank, own in calls.items():
        for call in own:
            members[_key(call)].add(rank)
    clocks: dict[int, list[Clock]] = {rank: [] for rank in calls}
    sent: dict[tuple[int, int, Any], list[Clock]] = defaultdict(list)
    taken: dict[tuple[int, int, Any], int] = defaultdict(int)
    waiting: dict[Any, set[int]] = defaultdict(set)

    def own_clock(rank: int) -> list[int]:
        clock = list(clocks[rank][-1]) if clocks[rank] else [0] * size
        clock[rank] += 1
        return clock

    def step(rank: int) -> bool:
        """Whether the rank's next call is complete."""
        if len(clocks[rank]) == len(calls[rank]):
            return False
        call, clock = calls[rank][len(clocks[rank])], own_clock(rank)
        if call.get("number") is not None:
            key = _key(call)
            waiting[key].add(rank)
            if waiting[key] < members[key]:
                return False
            joint = tuple(map(max, zip(*map(own_clock, sorted(members[key])), strict=True)))
            for each in members[key]:
                clocks[each].append(joint)
            return True
        if call["operation"] == "recv":
            route = call["peer"], rank, call.get("tag")
            if taken[route] >= len(sent[route]):
                return False
            clock = list(map(max, zip(clock, sent[route][taken[route]], strict=True)))
            taken[route] += 1
        elif call["operation"] == "send":
            sent[rank, call["peer"], call.get("tag")].append(tuple(clock))
        clocks[rank].append(tuple(clock))
        return True

    moved = True
    while moved:
        moved = any([step(rank) for rank in calls])  # noqa: C419 - each rank takes its step
    if any(len(clocks[rank]) < len(calls[rank]) for rank in calls):
        raise ValueError("calls in no order that all ranks have")
    return clocks


def _key(call: Line) -> tuple[Any, ...]:
    return (call["group"], call["number"]) if call.get("number") is not None else (id(call),)
