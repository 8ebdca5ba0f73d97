"""The interval of a verdict contains the edit: random programs in loops, with one edit each.

A program is data, and runs here in NumPy: each statement has a line, and its calls are written as a
record has them. What `gpusim compare` says of two records is held against where the line that was
edited ran.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from gpusim.recording import RecordedGroup, Recorder
from gpusim.tools.compare.comparing import Comparison, compare
from gpusim.tools.compare.runs import read
from gpusim.tools.compare.words import sentences
from tests.oracles.budget import SEED, budget

VARIABLES, RANKS = 4, 3
SHAPES = ((3,), (2,))
HELPER = "program.py:1000"


@dataclass(frozen=True)
class Statement:
    """A line of a program, which every rank runs.

    **Attributes**:

    - `kind`: "assign" (`v[to] = factor * v[one] + v[other] / 4 + rank`), "call" (an all-reduce in
      place of v[to]), "drawn" (v[to] += a value of its own, different in each turn).
    - `helper`: whether the call is made in a function, whose line the record has.
    - `shape`: which shape the call's tensor has.
    - `times`: how often the call is made; 0 and 2 are edits.
    - `order`: of the additions of a call.
    - `rank`: the rank on which `factor` is another, or None for all.
    """

    line: int
    kind: str
    to: int
    one: int
    other: int
    factor: float = 0.5
    helper: bool = False
    shape: int = 0
    times: int = 1
    order: int = 1
    rank: int | None = None

    @property
    def site(self) -> str:
        return HELPER if self.helper else f"program.py:{self.line}"

    @property
    def key(self) -> tuple[str, int]:
        return (self.site, self.shape)


@dataclass(frozen=True)
class Program:
    """Statements before a loop, in it (some of them in an inner loop of two turns), and after."""

    before: tuple[Statement, ...]
    inner: tuple[Statement, ...]
    body: tuple[Statement, ...]
    after: tuple[Statement, ...]
    turns: int

    @property
    def statements(self) -> list[Statement]:
        return [*self.before, *self.inner, *self.body, *self.after]

    def path(self) -> Iterator[tuple[Statement, int]]:
        """The statements as they run, each with the number of its turn."""
        clock = itertools.count()
        for statement in self.before:
            yield statement, next(clock)
        for _ in range(self.turns):
            for _ in range(2):
                for statement in self.inner:
                    yield statement, next(clock)
            for statement in self.body:
                yield statement, next(clock)
        for statement in self.after:
            yield statement, next(clock)

    def edited(self, old: Statement, new: Statement) -> Program:
        def within(part: Sequence[Statement]) -> tuple[Statement, ...]:
            return tuple(new if each == old else each for each in part)

        return replace(
            self, before=within(self.before), inner=within(self.inner), body=within(self.body),
            after=within(self.after),
        )  # fmt: skip


def run(program: Program, folder: Path) -> dict[int, list[int]]:
    """Run a program and record it; for each line, the calls made before each time it runs."""
    recorder = Recorder(folder, arrays=range(10_000))
    recorder.begin(RANKS)
    world = RecordedGroup("0", "0", "", tuple(range(RANKS)))
    start = np.random.default_rng(1).standard_normal((RANKS, VARIABLES, 3)).astype(np.float32)
    state = start.copy()
    number, ran = 0, {statement.line: [] for statement in program.statements}
    for statement, clock in program.path():
        ran[statement.line].append(number)
        to = statement.to
        if statement.kind == "assign":
            for rank in range(RANKS):
                other = statement.rank is None or statement.rank == rank
                factor = np.float32(statement.factor if other else 0.5)
                value = factor * state[rank, statement.one] + state[rank, statement.other] / 4
                state[rank, to] = np.tanh(value + np.float32(0.1) * rank)
        elif statement.kind == "drawn":
            drawn = np.random.default_rng(clock).standard_normal((RANKS, 3))
            state[:, to] += np.float32(statement.factor) * drawn.astype(np.float32)
        for _ in range(statement.times if statement.kind == "call" else 0):
            size = SHAPES[statement.shape][0]
            parts = state[:, to, :size].copy()
            total = np.float32(0)
            for rank in range(RANKS)[:: statement.order]:
                total = np.float32(total) + parts[rank] * np.float32(1 / 3)
            made = [
                (rank, recorder.add(
                    world, rank, number, "all_reduce", [("float32", (size,), 4 * size)],
                    statement.site, [("float32", (size,), parts[rank])], op="SUM",
                )) for rank in range(RANKS)
            ]  # fmt: skip
            recorder.add_results(made, [("float32", (size,), total)])
            state[:, to, :size] = total
            number += 1
    recorder.end()
    return ran


def one_call_a_turn(program: Program) -> bool:
    """Whether a turn cannot be taken for several: the numbers of its calls have no common divisor.

    Otherwise calls of one line, as of a function, look as if they were of turns of their own.
    """
    counts = Counter(
        each.key for each in [*program.inner, *program.inner, *program.body] if each.kind == "call"
    )
    outside = {each.key for each in (*program.before, *program.after) if each.kind == "call"}
    return math.gcd(*counts.values()) == 1 and not outside & counts.keys()


NUMBERS = st.integers(0, VARIABLES - 1)


@st.composite
def statements(draw: st.DrawFn, first: int, most: int) -> tuple[Statement, ...]:
    found = []
    for line in range(first, first + draw(st.integers(0, most))):
        kind = draw(st.sampled_from(["assign", "assign", "call", "call", "drawn"]))
        to, one, other = draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)
        helper = kind == "call" and draw(st.integers(0, 3)) == 0
        shape = draw(st.sampled_from([0, 0, 1]))
        found.append(Statement(line, kind, to, one, other, helper=helper, shape=shape))
    return tuple(found)


@st.composite
def edits(draw: st.DrawFn) -> tuple[Program, Program, Statement]:
    """A program, the same with one edit, and the statement that is edited."""
    program = Program(
        draw(statements(10, 3)),
        draw(statements(20, 2)) if draw(st.booleans()) else (),
        (*draw(statements(30, 6)), Statement(40, "call", draw(NUMBERS), 0, 0)),
        draw(statements(50, 2)),
        draw(st.integers(1, 4)),
    )
    old = draw(st.sampled_from(program.statements))
    changes: dict[str, Any] = {"factor": draw(st.sampled_from([0.75, -0.5, 1.5]))}
    if old.kind == "assign":
        changes["rank"] = draw(st.sampled_from([None, *range(RANKS)]))
    elif old.kind == "call":
        changes = draw(st.sampled_from([{"order": -1}, {"times": 0}, {"times": 2}, {"shape": 1}]))
    return program, program.edited(old, replace(old, **changes)), old


def contradiction(
    found: Comparison,
    programs: tuple[Program, Program],
    old: Statement,
    ran: tuple[dict[int, list[int]], dict[int, list[int]]],
) -> str | None:
    """The sentence about a place that is false; None if the interval contains the edit."""
    verdict = found.verdict
    assert verdict is not None
    interval = verdict.interval
    for name, lines in zip("ab", ran, strict=True):  # the ranks make the same calls
        until = interval.until.get(name)
        if until is not None and not lines[old.line][0] <= until.sequence:
            return f"line {old.line} of {name} first runs after call {until.sequence}"
    if interval.kind == "call":
        until = interval.until["a"]
        return None if until.site == old.site and old.kind == "call" else f"it is not {until.site}"
    if interval.kind == "turn":
        after, until = interval.after["a"], interval.until["a"]
        program = programs[0]
        if old in (*program.inner, *program.body) and one_call_a_turn(program):
            if not any(after.sequence < k <= until.sequence for k in ran[0][old.line]):
                return f"line {old.line} runs not between {after.sequence} and {until.sequence}"
    return None


@seed(SEED)
@settings(max_examples=budget(4000, most=150), deadline=None)
@given(edits())
def test_the_interval_contains_the_edit(made: tuple[Program, Program, Statement]) -> None:
    program, changed, old = made
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in "ab"]
        ran = [run(each, folder) for each, folder in zip((program, changed), folders, strict=True)]
        found = compare(*map(read, folders), folds=False)
        if found.verdict is None:
            return  # the edit is of a value that no call carries
        note("\n".join([repr(program), repr(old), *sentences(found)]))
        assert contradiction(found, (program, changed), old, (ran[0], ran[1])) is None
