#!/usr/bin/env python3
"""Reveal in which order a cluster adds: the tree of additions of every element of an all-reduce.

Run it on the ranks of the engine in question; NumPy and the engine are all that it needs:

    torchrun --nproc-per-node 8 reveal_order.py --elements 4096,65536 --dtype bfloat16
    mpirun -n 4 python reveal_order.py --engine mpi --dtype float32
    python reveal_order.py --engine jax --ranks 8

It writes order.json: for each element the tree of additions, how wide partial sums are and how they
are rounded. gpusim replays it: `gpusim.Reduction.like("order.json")`, and draws it: `gpusim reveal
--show order.json`.

How it works (FPRev, USENIX ATC 2025). Rank i gives a huge number M, rank j gives -M, all others a
unit that is lost when it is added to M. Units that meet M or -M before the two cancel are lost, the
others are counted by the result. So the result says how many ranks are below the adder where i and
j meet. These counts of all pairs determine the tree. n ranks take n(n-1)/2 sums, more where a
narrow format has no room for all units at once. Then M + x - M shows, for each adder, how many bits
it keeps of x and how it rounds. At last random values are summed, and every bit of the results
is compared with the description.

The sections: formats, trees, groups of elements, probes, arithmetic of adders, the same sum in
NumPy, the whole search, engines, the command line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
#: More different trees than this in one sum are not an order, but noise.
MOST_TREES = 4096
#: Random values are drawn in pieces of this number of elements, so that memory is bounded.
PIECE = 1 << 16
#: Elements of one tree whose random sums are repeated in exact integers; others are checked by all.
SAMPLE = 512

# ---------------------------------------------------------------- formats


@dataclass(frozen=True)
class Format:
    """A floating-point format: `bits` of the significand, and exponents `low` to `high`.

    2**low is the smallest normal number that probes use; 1.5 * 2**high is the largest, M.
    """

    bits: int
    low: int
    high: int

    @property
    def unit(self) -> int:
        """The exponent of the units: far below M, but not farther than any accumulator is wide."""
        return max(self.low, self.high - 120)

    def room(self, bits: int) -> int:
        """How many units an accumulator of so many bits loses at once beside M; 0: none.

        Less than half of M's last bit is lost. The result has to count the others exactly.
        """
        lost = self.high - bits - self.unit
        return 0 if lost < 0 else 1 << min(lost, self.bits)


#: M of wide formats is far from their end, so that nothing overflows.
FORMATS = {
    "float64": Format(53, -1022, 300),
    "float32": Format(24, -126, 100),
    "bfloat16": Format(8, -126, 100),
    "float16": Format(11, -14, 15),
    "float8_e4m3fn": Format(4, -6, 8),
    "float8_e5m2": Format(3, -14, 15),
    "float8_e4m3fnuz": Format(4, -7, 7),
    "float8_e5m2fnuz": Format(3, -15, 15),
    "float8_e4m3b11fnuz": Format(4, -10, 4),
    "float8_e4m3": Format(4, -6, 7),
    "float8_e3m4": Format(5, -2, 3),
}
#: Significand bits of accumulators that engines have; 28 of adders that align float32's.
ACCUMULATORS = (24, 11, 8, 53, 25, 28, 4, 3)


def format_of(dtype: str) -> Format:
    """The format by its name.

    **Raises**: ValueError for integers, complex and unknown types.
    """
    if dtype in FORMATS:
        return FORMATS[dtype]
    reason = "a sum of integers is the same in every order" if "int" in dtype else ""
    if "complex" in dtype:
        reason = "complex values are two real ones, which are added like float32 or float64"
    raise ValueError(
        f"--dtype {dtype}: expected one of {', '.join(FORMATS)}{f' ({reason})' if reason else ''}"
    )


# ---------------------------------------------------------------- trees


@dataclass(frozen=True)
class Adder:
    """An adder: its terms are ranks or adders. `kind` is rounded (two terms), exact or aligned."""

    terms: tuple[Any, ...]
    kind: str = "rounded"


Tree = Any  # int | Adder
Path_ = tuple[int, ...]


def leaves(tree: Tree) -> list[int]:
    """The ranks of a tree, from left to right."""
    if not isinstance(tree, Adder):
        return [tree]
    return [rank for term in tree.terms for rank in leaves(term)]


def adders(tree: Tree, path: Path_ = ()) -> Iterator[tuple[Path_, Adder]]:
    """All adders with their paths from the root, the root first."""
    if isinstance(tree, Adder):
        yield path, tree
        for number, term in enumerate(tree.terms):
            yield from adders(term, (*path, number))


def nested(tree: Tree) -> Any:
    """The tree as nested lists."""
    return [nested(term) for term in tree.terms] if isinstance(tree, Adder) else tree


#: A question: the ranks with M, with a unit, and with -M. The answer: whether the unit is lost.
Doubt = tuple[int, int, int]


def tree_of(
    counts: np.ndarray, ranks: Sequence[int] | None = None
) -> Generator[Doubt, bool, Tree | None]:
    """The tree with these counts, or None if no tree has them; it asks where several have them.

    counts[i, j] is the number of ranks whose units are lost when i has M and j has -M. Below an
    adder that aligns its terms, or that has two, all units are lost. An exact adder of more terms
    loses those of the two terms with M and -M alone.

    >>> linear = np.array([[0, 2, 3], [2, 0, 3], [3, 3, 0]])
    >>> def tree(counts):
    ...     try:
    ...         next(tree_of(counts))
    ...     except StopIteration as end:
    ...         return end.value
    >>> nested(tree(linear))
    [[0, 1], 2]
    >>> tree(np.full((3, 3), 3)).kind, tree(np.full((3, 3), 2)).kind
    ('aligned', 'exact')
    """
    mine = np.arange(len(counts)) if ranks is None else np.asarray(ranks)
    if len(mine) == 1:
        return int(mine[0])
    below = counts[np.ix_(mine, mine)]
    top = int((below - np.diag(np.diag(below))).max())
    if top == len(mine):
        labels = _parts(below < top)
        across = labels[:, None] != labels
        if not across.any() or (below[across] != top).any():
            return None
        kind = "aligned" if labels.max() > 1 else "rounded"
    else:
        found = _exact_parts(below)
        while len(found) > 1:
            doubt = _doubt(found[0], found[1])
            if doubt is None:
                break
            i, j, k = doubt
            lost = yield int(mine[i]), int(mine[j]), int(mine[k])
            found = [each for each in found if _lost(each, i, j, k) == lost]
        if not found:
            return None
        labels, kind = found[0], "exact"
    terms = []
    for part in range(labels.max() + 1):
        terms.append((yield from tree_of(counts, mine[labels == part])))
        if terms[-1] is None:
            return None
    return Adder(tuple(terms), kind)


def _parts(together: np.ndarray) -> np.ndarray:
    """The number of each rank's part: the first that is free takes all that go with it."""
    labels = np.full(len(together), -1)
    while (labels < 0).any():
        first = int(np.flatnonzero(labels < 0)[0])
        part = together[first] & (labels < 0)
        part[first] = True
        labels[part] = labels.max() + 1
    return labels


def _exact_parts(below: np.ndarray) -> list[np.ndarray]:
    """All ways to split ranks among the terms of an exact adder; usually one.

    Once the size of the first rank's term is known, the sizes of all other terms are: a count is
    the sum of two. Terms of one rank and a term that is a pair may change places: ask.
    """
    found = []
    for size in range(1, len(below) - 1):
        first = below[0] <= size
        first[0] = True
        sizes = np.where(first, size, below[0] - size)
        if first.sum() != size or (sizes < 1).any():
            continue
        labels = _parts((below <= sizes[:, None]) & (sizes[:, None] == sizes))
        across = labels[:, None] != labels
        expected = sizes[:, None] + sizes
        fits = (np.bincount(labels)[labels] == sizes).all() and labels.max() > 1
        if fits and (below[across] == expected[across]).all():
            found.append(labels)
    return found


def _lost(labels: np.ndarray, i: int, j: int, k: int) -> bool:
    """Whether an exact adder with these parts loses j's unit when i has M and k has -M."""
    return bool(labels[j] in (labels[i], labels[k]))


def _doubt(one: np.ndarray, other: np.ndarray) -> Doubt | None:
    """A question that two ways to split answer differently."""
    for a, b in ((one, other), (other, one)):
        for i, j in zip(*np.nonzero((a[:, None] == a) & (b[:, None] != b)), strict=True):
            apart = (a != a[i]) & (b != b[i]) & (b != b[j])
            if apart.any():
                return int(i), int(j), int(np.flatnonzero(apart)[0])
    return None


def counts_of(tree: Tree, ranks: int) -> np.ndarray:
    """The counts that a tree gives: the opposite of `tree_of`."""
    counts = np.zeros((ranks, ranks), np.int64)
    for _, adder in adders(tree):
        parts = [leaves(term) for term in adder.terms]
        whole = sum(map(len, parts))
        for a, b in combinations(parts, 2):
            count = len(a) + len(b) if adder.kind == "exact" else whole
            counts[np.ix_(a, b)] = count
            counts[np.ix_(b, a)] = count
    return counts


# ---------------------------------------------------------------- groups of elements


class Groups:
    """Elements with equal results so far: few groups, though there may be a million elements.

    **Attributes**:

    - `index`: each element's group; -1 if its results were no counts.
    - `history`: a row for each group: its results.
    """

    def __init__(self, elements: int, probes: int) -> None:
        self.index = np.zeros(elements, np.int64)
        self.history = np.zeros((1, probes), np.int32)
        self.done = 0

    def split(self, codes: np.ndarray, bad: np.ndarray) -> None:
        """Take the results of one more probe, a whole number for each element."""
        self.index[bad] = -1
        live = self.index >= 0
        span = int(codes[live].max(initial=0)) + 1
        keys = self.index * span + codes
        seen = np.zeros(len(self.history) * span, bool)
        seen[keys[live]] = True
        found = np.flatnonzero(seen)
        if len(found) > MOST_TREES:
            raise TooManyTrees
        numbers = np.cumsum(seen) - 1
        self.index[live] = numbers[keys[live]]
        self.history = self.history[found // span]
        self.history[:, self.done] = found % span
        self.done += 1


class TooManyTrees(Exception):
    """The results differ from element to element: they are noise."""


def spans_of(index: np.ndarray) -> list[tuple[int, int, int]]:
    """Runs of equal numbers: begin, end, number.

    >>> spans_of(np.array([3, 3, 0]))
    [(0, 2, 3), (2, 3, 0)]
    """
    edges = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(index)]
    return [(a, b, int(index[a])) for a, b in pairwise(edges) if b > a]


# ---------------------------------------------------------------- probes


@dataclass(frozen=True)
class Call:
    """One kind of all-reduce: its size, type, and where its operand lies."""

    elements: int
    dtype: str
    in_place: bool = True
    offset: int = 0

    def __str__(self) -> str:
        place = "in place" if self.in_place else "not in place"
        shifted = f", shifted by {self.offset}" if self.offset else ""
        return f"{self.elements:,} elements of {self.dtype}, {place}{shifted}"


@dataclass
class Asking:
    """All sums of one call: they are made here, and counted.

    `sum_rows(table, spans, call)`: element e of rank r is table[row of e's span, r]; it returns the
    sum as float64, and whether all ranks have the same bits. `sum_random(seed, call)` sums
    `random_row(rank, seed, call)` of all ranks.
    """

    engine: Engine
    call: Call
    tell: Callable[[str], None] = lambda _: None
    probes: int = 0
    alike: bool = True

    def sum(self, table: np.ndarray, spans: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Sum values that are the same in each span of elements."""
        header = {"do": "rows", "rows": len(table), "spans": len(spans)}
        body = table.astype(np.float64).tobytes() + np.array(spans, np.int64).tobytes()
        return self._sum(header, body)

    def same(self, row: np.ndarray) -> np.ndarray:
        """Sum values that are the same in all elements."""
        return self.sum(row[None], [(0, self.call.elements, 0)])

    def random(self, seed: int) -> np.ndarray:
        """Sum random values."""
        return self._sum({"do": "random", "seed": seed}, b"")

    def _sum(self, header: dict[str, Any], body: bytes) -> np.ndarray:
        order = {**header, "call": vars(self.call)}
        self.engine.share(pack(order, body))
        total, alike = obey(self.engine, order, body)
        self.probes += 1
        self.alike &= alike
        return total


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """A message of the first process to the others: a header, and arrays behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<q", len(text)) + text + body


def unpack(message: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the arrays."""
    (length,) = struct.unpack_from("<q", message)
    return json.loads(message[8 : 8 + length]), message[8 + length :]


def obey(engine: Engine, header: dict[str, Any], body: bytes) -> tuple[np.ndarray, bool]:
    """Do one sum as the first process says; all processes come here at the same time."""
    call = Call(**header["call"])
    if header["do"] == "random":
        rows = [random_row(rank, header["seed"], call, engine.ranks) for rank in engine.local]
    else:
        split = header["rows"] * engine.ranks * 8
        table = np.frombuffer(body[:split]).reshape(header["rows"], engine.ranks)
        spans = np.frombuffer(body[split:], np.int64).reshape(-1, 3)
        lengths, numbers = spans[:, 1] - spans[:, 0], spans[:, 2]
        rows = [np.repeat(table[numbers, rank], lengths) for rank in engine.local]
    return engine.all_reduce(rows, call)


def follow(engine: Engine) -> None:
    """Take part in the sums of the first process until it says that it is done."""
    while True:
        header, body = unpack(engine.share(b""))
        if header["do"] == "end":
            return
        obey(engine, header, body)


#: Sums that are asked for one after the other: {rank: value}, all others 0.
Question = dict[int, float]
Answers = Generator[Question, float, Any]


@dataclass(frozen=True)
class Plan:
    """How units are counted: `block` ranks have one at a time, of 2**`unit`.

    With `quantum` the sum is taken modulo 2**quantum: accumulators that do not round to the nearest
    move M by multiples of its last bit, whose half is the room of all units.
    """

    block: int
    unit: int
    quantum: int | None = None


def plans(number: Format, ranks: int) -> Iterator[Plan]:
    """Ways to count, from the cheapest on; each next one is for what the ones before leave open."""
    usual = [room for bits in ACCUMULATORS if bits >= number.bits and (room := number.room(bits))]
    block = min([*usual, 1 << min(number.bits, 20)])
    yield Plan(block, number.unit)
    if 1 < block < 1 << min(number.bits, 20) or number.room(53) == 0:
        yield Plan(1, number.unit)
    for bits in ACCUMULATORS:
        if bits < number.bits:
            continue
        quantum = number.high - bits + 1
        kept = min(bits, number.bits)  # a sum of lost last bits and of units has to be exact
        block = 1
        while block < ranks and 2 * (2 * block) * (2 * block) + 2 * block < 1 << kept:
            block *= 2
        unit = quantum - (2 * block - 1).bit_length()
        while block > 1 and unit < number.low:
            block //= 2
            unit += 1
        if unit >= number.low:
            yield Plan(block, unit, quantum)


def count_units(total: np.ndarray, plan: Plan, most: int) -> tuple[np.ndarray, np.ndarray]:
    """How many units the sums have, and where they have no whole number of them."""
    with np.errstate(all="ignore"):
        rest = total
        if plan.quantum is not None:
            whole = 2.0**plan.quantum
            rest = total - np.floor(total / whole) * whole
        counted = rest / 2.0**plan.unit
        bad = ~((counted >= 0) & (counted <= most) & (counted == np.rint(counted)))
    return np.where(bad, 0, counted).astype(np.int64), bad


class Split(Exception):
    """Elements of one group add differently: `index` has new groups, `before` their old ones."""

    def __init__(self, old: np.ndarray, total: np.ndarray) -> None:
        keys = np.stack([old.astype(np.float64), np.where(old < 0, 0, total)])
        _, firsts, new = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        none = int((old < 0).any())
        self.index, self.before = new.reshape(-1) - none, old[firsts[none:]]
        if len(self.before) > MOST_TREES:
            raise TooManyTrees


def interview(asking: Asking, index: np.ndarray, talks: list[Answers]) -> list[Any]:
    """Ask about all trees at once: one sum answers a question of each."""
    order = np.argsort(index, kind="stable")
    order = order[np.searchsorted(index[order], 0) :]
    starts = np.searchsorted(index[order], np.arange(len(talks)))
    spans = [(a, b, max(t, 0)) for a, b, t in spans_of(index)]
    found: list[Any] = [None] * len(talks)
    questions: dict[int, Question] = {}
    for number, talk in enumerate(talks):
        try:
            questions[number] = next(talk)
        except StopIteration as end:
            found[number] = end.value
    while questions:
        table = np.zeros((len(talks), asking.engine.ranks))
        for number, question in questions.items():
            table[number, list(question)] = list(question.values())
        total = asking.sum(table, spans)
        answers = total[order]
        low, high = np.minimum.reduceat(answers, starts), np.maximum.reduceat(answers, starts)
        if not np.array_equal(low, high, equal_nan=True):
            again = asking.sum(table, spans)
            if np.array_equal(total, again, equal_nan=True):
                raise Split(index, total)
        following = {}
        for number in questions:
            try:
                following[number] = talks[number].send(float(answers[starts[number]]))
            except StopIteration as end:
                found[number] = end.value
        questions = following
    return found


def with_subnormals(asking: Asking, number: Format) -> Format:
    """The format with smaller units, if they and their sums survive: narrow ones need the room."""
    tiny = number.low - number.bits + 1
    if number.unit > number.low or asking.engine.ranks < 2:
        return number
    for count in (1, 2):
        row = np.zeros(asking.engine.ranks)
        row[[0, -1][:count]] = 2.0**tiny
        if (asking.same(row) != count * 2.0**tiny).any():
            return number
    return replace(number, low=tiny)


def find_trees(asking: Asking, number: Format, plan: Plan) -> tuple[np.ndarray, list[Tree]]:
    """The tree of each element: its number, -1 if there is none, and the trees."""
    ranks = asking.engine.ranks
    pairs = list(combinations(range(ranks), 2))
    groups = Groups(asking.call.elements, len(pairs))
    huge, unit = 1.5 * 2.0**number.high, 2.0**plan.unit
    for done, (i, j) in enumerate(pairs):
        asking.tell(f"pair {done + 1} of {len(pairs)}")
        others = [rank for rank in range(ranks) if rank not in (i, j)]
        counted = np.zeros(asking.call.elements, np.int64)
        bad = np.zeros(asking.call.elements, bool)
        for first in range(0, max(len(others), 1), plan.block):
            some = others[first : first + plan.block]
            row = np.zeros(ranks)
            row[[i, j]] = huge, -huge
            row[some] = unit
            count, wrong = count_units(asking.same(row), plan, len(some))
            counted += count
            bad |= wrong
        groups.split(counted, bad)
        if (groups.index < 0).all():
            break
    counts = np.zeros((len(groups.history), ranks, ranks), np.int64)
    ends = np.array(pairs, int).reshape(-1, 2).T
    counts[:, ends[0], ends[1]] = ranks - groups.history
    counts += counts.transpose(0, 2, 1)
    index = groups.index
    if (index < 0).all():
        return index, []
    grown: list[Tree]
    while True:
        try:
            grown = interview(asking, index, [_grow(each, huge, plan) for each in counts])
            break
        except Split as split:  # different trees with the same counts
            counts, index = counts[split.before], split.index
    right = [
        tree is not None and np.array_equal(counts_of(tree, ranks), each)
        for tree, each in zip(grown, counts, strict=True)
    ]
    numbers = np.where(right, np.cumsum(right) - 1, -1)
    index = np.where(index < 0, -1, numbers[index])
    return index, [tree for tree, fits in zip(grown, right, strict=True) if fits]


def _grow(counts: np.ndarray, huge: float, plan: Plan) -> Answers:
    """The tree of one group of elements; it asks for sums where several trees fit."""
    talk = tree_of(counts)
    lost: bool | None = None
    while True:
        try:
            i, j, k = talk.send(lost)  # type: ignore[arg-type]  # the first one is None
        except StopIteration as end:
            return end.value
        total = yield {i: huge, j: 2.0**plan.unit, k: -huge}
        count, _ = count_units(np.array([total]), plan, 1)
        lost = not count[0]


# ---------------------------------------------------------------- arithmetic of adders

#: Parts of M's last bit that are added to it; the last one is a half and a bit more.
PARTS = (0.25, 0.5, 0.75, 0.5)
SIGNS = ((1, 1), (1, -1), (-1, 1))


def _round(value: Fraction, mode: str) -> int:
    """A number to a whole one."""
    down = math.floor(value)
    part = value - down
    up = {
        "nearest-even": part > Fraction(1, 2) or (part == Fraction(1, 2) and down % 2 == 1),
        "nearest-away": part > Fraction(1, 2) or (part == Fraction(1, 2) and down >= 0),
        "up": part > 0,
        "down": False,
        "toward-zero": part > 0 and down < 0,
        "away": part > 0 and down >= 0,
    }
    return down + up[mode]


ROUNDINGS = ("nearest-even", "toward-zero", "up", "down", "away", "nearest-away")


@cache
def _signature(mode: str, slight: float) -> list[int]:
    """The changes of M's last bit, for all signs and parts, by an accumulator of this rounding."""
    parts = (*PARTS[:3], 0.5 + slight)
    return [_round(6 * s + t * Fraction(part), mode) - 6 * s for s, t in SIGNS for part in parts]


class Examination:
    """The questions about one tree's adders. Each `yield` is one sum: {rank: value}, others 0."""

    def __init__(self, tree: Tree, number: Format) -> None:
        self.tree, self.number = tree, number
        self.huge = 1.5 * 2.0**number.high
        self.reach = min(number.high - number.low, 115)
        self.found: dict[Path_, dict[str, Any]] = {}
        self.fused: dict[Path_, dict[str, Any]] = {}

    def all(self) -> Answers:
        """Ask about all adders; the description, see `describe`."""
        guess = self.number.bits
        for path, adder in adders(self.tree):
            first, second = (leaves(term)[0] for term in adder.terms[:2])
            if adder.kind == "aligned":
                yield from self.cut(path, adder)
            if not path:
                continue
            outside = self.sibling(path)
            bits = yield from self.width(first, second, outside, guess)
            guess = bits or guess
            rounding = "exact"
            if bits is not None:
                rounding = yield from self.rounding(path, (first, second, outside), bits)
            self.found[path] = {"bits": bits, "rounding": rounding}
        result = {"bits": self.number.bits, "rounding": "exact"}
        if isinstance(self.tree, Adder):
            first, second = (leaves(term)[0] for term in self.tree.terms[:2])
            ranks = first, second, None
            result["rounding"] = yield from self.rounding((), ranks, self.number.bits)
        subnormals = yield from self.subnormals()
        zero = yield dict.fromkeys(leaves(self.tree), -0.0)
        return self.describe(result, subnormals, bool(np.signbit(zero)))

    def sibling(self, path: Path_) -> int:
        """A rank that is added in the adder above."""
        above = self.tree
        for step in path[:-1]:
            above = above.terms[step]
        return leaves(above.terms[1 if path[-1] == 0 else 0])[0]

    def width(self, first: int, second: int, outside: int, guess: int) -> Answers:
        """The bits of the sum of two ranks: M + 2**-m M - M is lost from m = bits on."""

        def kept(m: int) -> Answers:
            small = 2.0 ** (self.number.high - m)
            total = yield {first: self.huge, second: small, outside: -self.huge}
            return total == small

        low, high = 0, self.reach + 1  # kept at low, lost at high, as far as known
        if 1 <= guess - 1 <= self.reach and (yield from kept(guess - 1)):
            low = guess - 1
            if guess <= self.reach and not (yield from kept(guess)):
                return guess
        elif 1 <= guess - 1 <= self.reach:
            high = guess - 1
        while high - low > 1:
            middle = (low + high) // 2
            if (yield from kept(middle)):
                low = middle
            else:
                high = middle
        return None if high > self.reach else high

    def rounding(self, path: Path_, ranks: tuple[int, int, int | None], bits: int) -> Answers:
        """How the sum of two ranks is rounded; the root's is seen in the result itself."""
        first, second, outside = ranks
        last = 2.0 ** (self.number.high - bits + 1)

        def moved(sign: int, small: float) -> Answers:
            """By how many of its last bits M is moved."""
            values = {first: sign * self.huge, second: small * last}
            if outside is None:
                return ((yield values) - sign * self.huge) / last
            return (yield {**values, outside: -sign * self.huge}) / last

        slight = 2.0**-self.number.bits
        seen = []
        for sign, small in SIGNS:
            for part in (*PARTS[:3], 0.5 + slight):
                seen.append((yield from moved(sign, small * part)))
        for mode in ROUNDINGS:
            if seen == _signature(mode, slight):
                return mode
        repeated = set()
        for _ in range(16):
            repeated.add((yield from moved(1, 0.5)))
        if len(repeated) > 1:
            return "stochastic"
        kept = None
        if not any(seen):  # each term is cut to M's last bit, or to half of it
            kept = bits + (yield from self.half(path, ranks, bits))
        elif seen == _signature("nearest-even", 0.0):  # or to a few bits more
            kept = bits + 2
            while (yield from moved(1, 0.5 + 2.0 ** (bits - kept - 1))) == 1:
                kept += 1
        if kept is None:
            return "unknown"
        aligned = {"kind": "aligned", "bits": kept, "rounding": "toward-zero"}
        self.fused.setdefault(path, aligned)
        return "nearest-even"

    def half(self, path: Path_, ranks: tuple[int, int, int | None], bits: int) -> Answers:
        """1 if half of the last bit is kept where terms are cut: it makes an odd M an even one."""
        first, second, outside = ranks
        adder = dict(adders(self.tree))[path]
        last = 2.0 ** (self.number.high - bits + 1)
        values = {first: self.huge, second: last / 2}
        mates = leaves(adder.terms[0])[1:]
        if bits == self.number.bits:
            values[first] += last
        elif mates:
            values[mates[0]] = last
        elif len(leaves(adder.terms[1])) > 1:
            values = {second: self.huge, first: last / 2, leaves(adder.terms[1])[1]: last}
        else:
            return 0  # no values of two ranks show a difference
        if outside is None:
            return int((yield values) == self.huge + 2 * last)
        return int((yield {**values, outside: -self.huge}) == 2 * last)

    def cut(self, path: Path_, adder: Adder) -> Answers:
        """Where an adder of several terms cuts them: M - M + 2**-m M is lost from m = bits on."""
        a, b, c = (leaves(term)[0] for term in adder.terms[:3])

        def total(small: float) -> Answers:
            return (yield {a: self.huge, b: -self.huge, c: small})

        low, high = 0, self.reach + 1
        while high - low > 1:
            middle = (low + high) // 2
            small = 2.0 ** (self.number.high - middle)
            if (yield from total(small)) == small:
                low = middle
            else:
                high = middle
        last, seen = 2.0 ** (self.number.high - high + 1), []
        for small in (0.25, 0.5, 0.75, -0.25, -0.5, -0.75):
            seen.append((yield from total(small * last)) / last)
        names = {
            tuple(
                _round(Fraction(part), mode) for part in (0.25, 0.5, 0.75, -0.25, -0.5, -0.75)
            ): mode
            for mode in reversed(ROUNDINGS)
        }
        rounding = names.get(tuple(seen), "unknown")
        self.fused[path] = {"kind": "aligned", "bits": high, "rounding": rounding}

    def subnormals(self) -> Answers:
        """Whether numbers below the smallest normal one survive, as operands and as sums."""
        ranks = leaves(self.tree)
        low = 2.0 ** (self.number.low)
        alone = yield {ranks[0]: low / 2}
        if len(ranks) < 2:
            return "kept" if alone == low / 2 else "flushed"
        between = yield {ranks[0]: 1.5 * low, ranks[1]: -low}
        return "kept" if alone == between == low / 2 else "flushed"

    def describe(self, result: dict[str, Any], subnormals: str, minus: bool) -> dict[str, Any]:
        """The entry of the file: the tree, its adders, and the most common accumulator."""
        common = {"bits": self.number.bits, "rounding": result["rounding"]}
        rounds = [found for found in self.found.values() if found["bits"] is not None]
        several = [json.dumps(found) for found in rounds or self.found.values()]
        if several:
            common = json.loads(max(dict.fromkeys(several), key=several.count))
        for path, adder in adders(self.tree):
            if adder.kind == "exact":
                self.fused[path] = {"kind": "exact"}
        entry: dict[str, Any] = {
            "tree": nested(self.tree),
            "adders": [[list(path), found] for path, found in sorted(self.fused.items())]
            or "rounded",
            "accumulator": {**common, "subnormals": subnormals},
            "result": result,
            "minus_zero": minus,
        }
        others = [[list(p), found] for p, found in self.found.items() if found != common]
        if others:
            entry["accumulators"] = others
        return entry


def find_arithmetic(
    asking: Asking, number: Format, index: np.ndarray, trees: list[Tree]
) -> tuple[np.ndarray, list[dict[str, Any]], list[Tree]]:
    """The description of each tree; elements with one tree that add differently are told apart."""
    asking.tell("accumulators")
    while True:
        try:
            talks = [Examination(tree, number).all() for tree in trees]
            return index, interview(asking, index, talks), trees
        except Split as split:
            trees, index = [trees[n] for n in split.before], split.index


# ---------------------------------------------------------------- the same sum in NumPy


def random_piece(rank: int, seed: int, call: Call, piece: int, ranks: int) -> np.ndarray:
    """Random values of one rank: exact in the type, of many magnitudes, none near its ends."""
    number = FORMATS[call.dtype]
    most = min(11, number.high - ranks.bit_length() - 1)
    least = max(-8, number.low + 2)
    size = min(PIECE, call.elements - piece * PIECE)
    random = np.random.default_rng([seed, rank, piece])
    whole = random.integers(1 << (number.bits - 1), 1 << number.bits, size)
    exponents = random.integers(least, max(most, least + 1), size)
    signs = 1 - 2 * random.integers(0, 2, size)
    drawn: np.ndarray = np.ldexp((signs * whole).astype(np.float64), exponents - number.bits + 1)
    return drawn


def random_row(rank: int, seed: int, call: Call, ranks: int) -> np.ndarray:
    """All random values of one rank."""
    pieces = range(-(-call.elements // PIECE))
    return np.concatenate([random_piece(rank, seed, call, piece, ranks) for piece in pieces])


def round_sum(total: np.ndarray, error: np.ndarray, bits: int | None, mode: str) -> np.ndarray:
    """total + error, where the error is below total's last bit, rounded to so many bits."""
    if bits is None or (bits >= 53 and mode == "nearest-even"):
        return total
    toward = np.nextafter(total, np.copysign(np.inf, error))
    if bits >= 53:
        other = {
            "up": error > 0,
            "down": error < 0,
            "toward-zero": error * np.sign(total) < 0,
            "away": error * np.sign(total) > 0,
        }.get(mode, np.zeros(total.shape, bool))
        return np.where(other, toward, total)
    # Rounded to odd in float64 first: no information that a second rounding needs is lost.
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, toward, total)
    fraction, exponent = np.frexp(odd)
    scaled = np.ldexp(fraction, bits)
    down = np.floor(scaled)
    whole = {
        "nearest-even": lambda: np.rint(scaled),
        "nearest-away": lambda: np.copysign(np.floor(np.abs(scaled) + 0.5), scaled),
        "toward-zero": lambda: np.trunc(scaled),
        "up": lambda: np.ceil(scaled),
        "down": lambda: down,
        "away": lambda: np.copysign(np.ceil(np.abs(scaled)), scaled),
    }.get(mode, lambda: np.rint(scaled))()
    rounded: np.ndarray = np.ldexp(whole, exponent - bits)
    return rounded


def add_two(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum in float64 and its error, which is exact (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def add_exactly(terms: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The exact sum of several terms, as a float64 and a rest whose sign is right."""
    scale = 1 << 64  # random values are multiples of 2**-60
    columns = zip(*(term.tolist() for term in terms), strict=True)
    whole = [sum(int(x * scale) for x in column) for column in columns]
    nearest = [n / scale for n in whole]  # Python divides whole numbers with one rounding
    rest = [float(n - int(x * scale)) for n, x in zip(whole, nearest, strict=True)]
    return np.array(nearest), np.array(rest)


def add_aligned(terms: Sequence[np.ndarray], how: dict[str, Any]) -> np.ndarray:
    """Terms cut where the largest one's last bit is, and added."""
    largest = np.max(np.abs(terms), axis=0)
    _, exponent = np.frexp(np.where(largest == 0, 1, largest))
    last = exponent - how["bits"]
    total = np.zeros_like(largest)
    for term in terms:
        scaled = np.ldexp(term, -last)
        total += round_whole(scaled, how["rounding"])
    moved: np.ndarray = np.ldexp(total, last)
    return moved


def round_whole(scaled: np.ndarray, mode: str) -> np.ndarray:
    """Numbers to whole ones."""
    functions: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "toward-zero": np.trunc,
        "up": np.ceil,
        "down": np.floor,
        "away": lambda x: np.copysign(np.ceil(np.abs(x)), x),
        "nearest-away": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    }
    return functions.get(mode, np.rint)(scaled)


def simulate(entry: dict[str, Any], rows: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the ranks' values as the entry of a tree describes it.

    >>> entry = {"tree": [[0, 1], 2], "adders": "rounded", "result": {"bits": 8,
    ...     "rounding": "nearest-even"}, "accumulator": {"bits": 8, "rounding": "nearest-even"}}
    >>> simulate(entry, np.array([[256.0], [1.0], [1.0]])).tolist()
    [256.0]
    """
    kinds = {} if entry["adders"] == "rounded" else dict(_keyed(entry["adders"]))
    others = dict(_keyed(entry.get("accumulators", [])))

    def value(tree: Any, path: Path_) -> np.ndarray:
        if not isinstance(tree, list):
            return np.asarray(rows[tree], np.float64)
        terms = [value(term, (*path, number)) for number, term in enumerate(tree)]
        how = others.get(path, entry["accumulator"])
        kind = kinds.get(path, {"kind": "rounded"})
        if kind["kind"] == "aligned":
            total = add_aligned(terms, kind)
            error = np.zeros_like(total)
        elif len(terms) == 2:
            total, error = add_two(terms[0], terms[1])
        else:
            total, error = add_exactly(terms)
        return round_sum(total, error, how["bits"], how["rounding"])

    total = value(entry["tree"], ())
    result = entry["result"]
    return round_sum(total, np.zeros_like(total), result["bits"], result["rounding"])


def _keyed(pairs: list[Any]) -> list[tuple[Path_, dict[str, Any]]]:
    return [(tuple(path), how) for path, how in pairs]


def candidates(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Descriptions that no probe tells apart: the accumulator of the root is behind the result's
    rounding, and two-term adders that align may keep one bit more than they return."""
    yield entry
    fused = [] if entry["adders"] == "rounded" else entry["adders"]
    wider = [
        [path, {**how, "bits": how["bits"] + 1}] if how["kind"] == "aligned" else [path, how]
        for path, how in fused
    ]
    others = entry.get("accumulators", [])
    own = [[[], {k: entry["result"][k] for k in ("bits", "rounding")}], *others]
    for kinds in (entry["adders"], wider) if wider != fused else (entry["adders"],):
        for accumulators in (others, own, []):
            yield {**entry, "adders": kinds, "accumulators": accumulators}


def verify(
    asking: Asking, index: np.ndarray, entries: list[dict[str, Any]], seeds: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Sum random values and compare; how many elements of each tree were compared and were equal.

    The third value: whether the same random values gave the same bits again.
    """
    asking.tell("random values")
    compared, equal = np.zeros(len(entries), int), np.zeros(len(entries), int)
    repeated = True
    for seed in seeds:
        total = asking.random(seed)
        repeated &= np.array_equal(total, asking.random(seed), equal_nan=True)
        for piece in range(-(-len(index) // PIECE)):
            part = slice(piece * PIECE, (piece + 1) * PIECE)
            ranks = asking.engine.ranks
            rows = [random_piece(r, seed, asking.call, piece, ranks) for r in range(ranks)]
            for number in np.unique(index[part][index[part] >= 0]).tolist():
                where = np.flatnonzero(index[part] == number)
                if any(how["kind"] == "exact" for how in _kinds(entries[number])):
                    where = where[:: max(1, len(where) // SAMPLE)]
                values, expected = [row[where] for row in rows], total[part][where]
                if compared[number] == 0:
                    entries[number] = best(entries[number], values, expected)
                compared[number] += len(where)
                equal[number] += int((simulate(entries[number], values) == expected).sum())
    return compared, equal, repeated


def _kinds(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if entry["adders"] == "rounded" else [how for _, how in entry["adders"]]


def best(entry: dict[str, Any], values: Any, expected: np.ndarray) -> dict[str, Any]:
    """Of the descriptions that no probe tells apart the one with the most equal results."""
    found, most = entry, -1
    for candidate in candidates(entry):
        equal = int((simulate(candidate, values) == expected).sum())
        if equal > most:
            found, most = candidate, equal
        if equal == len(expected):
            break
    if not found.get("accumulators", True):
        del found["accumulators"]
    return found


# ---------------------------------------------------------------- the whole search


@dataclass
class Options:
    """How thorough the search is: passes over all probes, and sums of random values."""

    repeats: int = 2
    verify: int = 2
    tell: Callable[[str], None] = lambda _: None
    trees: list[dict[str, Any]] = field(default_factory=list)


NO_COUNTS = "the results are no counts of units: no tree of additions gives them"
NOT_VERIFIED = (
    "a tree explains the probes, but random values have other sums: values may be changed before "
    "they are added (a compressed wire, integers in a switch), or the arithmetic is unknown"
)


def reveal_call(engine: Engine, call: Call, options: Options) -> dict[str, Any]:
    """The trees of all elements of one call; an entry of the file. Trees go to `options.trees`."""
    number = format_of(call.dtype)
    asking = Asking(engine, call, options.tell)
    final = np.full(call.elements, -1, np.int64)
    reasons = np.zeros(call.elements, np.int64)  # 0: no counts, 1: not verified
    entry: dict[str, Any] = {**vars(call), "repeats": max(1, options.repeats), "same": True}
    compared = equal = 0
    bits_same = True
    for plan in plans(with_subnormals(asking, number), engine.ranks):
        try:
            index, trees = find_trees(asking, number, plan)
            index[final >= 0] = -1
            index, trees = _used(index, trees)
            if not trees:
                continue
            index, entries, trees = find_arithmetic(asking, number, index, trees)
        except TooManyTrees:
            continue
        for _ in range(1, options.repeats):
            again, same = find_trees(asking, number, plan)
            entry["same"] &= _same_trees(index, trees, again, same)
        seeds = range(1, 1 + options.verify)
        checked, right, repeated = verify(asking, index, entries, seeds)
        bits_same &= repeated
        for tree, described in enumerate(entries):
            where = index == tree
            stochastic = described["accumulator"]["rounding"] == "stochastic"
            if checked[tree] == right[tree] or stochastic:
                final[where] = _add_tree(options.trees, described)
                compared, equal = compared + int(checked[tree]), equal + int(right[tree])
            else:
                reasons[where] = 1
        if (final >= 0).all():
            break
    entry["bits_same"] = bits_same
    entry["ranks_agree"] = asking.alike
    entry["ranges"] = [
        [a, b, n] if n >= 0 else [a, b, -1, (NO_COUNTS, NOT_VERIFIED)[-2 - n]]
        for a, b, n in spans_of(np.where(final >= 0, final, -2 - reasons))
    ]
    entry["probes"] = asking.probes
    entry["verified"] = {"elements": compared, "equal": equal}
    return entry


def _used(index: np.ndarray, trees: list[Tree]) -> tuple[np.ndarray, list[Tree]]:
    """Without the trees that no element has."""
    used = np.unique(index[index >= 0])
    numbers = np.full(len(trees) + 1, -1)
    numbers[used] = np.arange(len(used))
    return numbers[index], [trees[n] for n in used]


def _same_trees(index: np.ndarray, trees: list[Tree], again: np.ndarray, same: list[Tree]) -> bool:
    """Whether a second pass found the trees of the first one."""
    where = index >= 0
    pairs = np.unique(np.stack([index[where], again[where]]), axis=1).T
    return all(b >= 0 and trees[a] == same[b] for a, b in pairs.tolist())


def _add_tree(trees: list[dict[str, Any]], entry: dict[str, Any]) -> int:
    if entry not in trees:
        trees.append(entry)
    return trees.index(entry)


def reveal(engine: Engine, calls: Sequence[Call], options: Options) -> dict[str, Any]:
    """The contents of order.json; the first process calls it, the others `follow`."""
    options.trees = []
    entries = []
    for number, call in enumerate(calls):
        options.tell(f"{call} ({number + 1} of {len(calls)})")
        entries.append(reveal_call(engine, call, options))
    dtypes = list(dict.fromkeys(call.dtype for call in calls))
    return {
        "format": "gpusim order",
        "version": VERSION,
        "engine": engine.name,
        "world_size": engine.ranks,
        "dtype": dtypes[0],
        "dtypes": dtypes,
        "op": "sum",
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "calls": entries,
        "trees": options.trees,
    }


# ---------------------------------------------------------------- engines


class Engine:
    """An engine of all-reduces.

    **Attributes**:

    - `name`: the engine with its version, for the file.
    - `ranks`: how many members a sum has.
    - `local`: the ranks whose values this process gives.
    - `places`: whether it sums in place (True), out of place (False), or either; its own first.
    """

    name = ""
    ranks = 1
    local: Sequence[int] = (0,)
    places: tuple[bool, ...] = (True,)

    def all_reduce(self, rows: Sequence[np.ndarray], call: Call) -> tuple[np.ndarray, bool]:
        """The sum of all ranks' rows in the call's type; whether all ranks have the same bits.

        Abstract: each engine has its own.
        """
        raise NotImplementedError(f"{type(self).__name__}.all_reduce")

    def share(self, message: bytes) -> bytes:
        """Give the first process's message to all."""
        return message

    def check(self, call: Call) -> None:
        """Raise a ValueError if the engine cannot do this call."""

    def close(self, failed: bool = False) -> None:
        """End; after a failure the other processes, too."""


class Given(Engine):
    """A function that sums: float64 (ranks, elements) to (elements,)."""

    def __init__(
        self, sum_of: Callable[[np.ndarray], np.ndarray], ranks: int, name: str = "a function"
    ) -> None:
        self.sum_of, self.ranks, self.name = sum_of, ranks, name
        self.local = range(ranks)

    def all_reduce(self, rows: Sequence[np.ndarray], call: Call) -> tuple[np.ndarray, bool]:
        return np.asarray(self.sum_of(np.stack(rows)), np.float64).reshape(-1), True


class Torch(Engine):
    """torch.distributed: the script is started by torchrun."""

    def __init__(self, backend: str | None) -> None:
        import torch
        import torch.distributed as dist

        if "RANK" not in os.environ:
            raise ValueError("--engine torch: start the script with torchrun (RANK is not set)")
        self.torch, self.dist = torch, dist
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.device = torch.device("cpu")
        if "gloo" not in backend and "mpi" not in backend and torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():  # a program that uses this as a module may have begun
            dist.init_process_group(backend)
        self.ranks, self.local = dist.get_world_size(), (dist.get_rank(),)
        version = ""
        if backend == "nccl":
            version = f" {'.'.join(map(str, torch.cuda.nccl.version()))}"
        self.name = f"torch.distributed {backend}{version}, torch {torch.__version__}"
        if self.device.type == "cuda":
            self.name += f", {torch.cuda.get_device_name(self.device)}"

    def check(self, call: Call) -> None:
        if not hasattr(self.torch, call.dtype):
            raise ValueError(f"--dtype {call.dtype}: PyTorch has no such type")

    def all_reduce(self, rows: Sequence[np.ndarray], call: Call) -> tuple[np.ndarray, bool]:
        torch = self.torch
        dtype = getattr(torch, call.dtype)
        buffer = torch.zeros(call.elements + call.offset, dtype=dtype, device=self.device)
        x = buffer[call.offset :]
        x.copy_(torch.from_numpy(np.array(rows[0])).to(dtype))
        self.dist.all_reduce(x)
        total = x.to(device="cpu", dtype=torch.float64).numpy()
        mine = torch.tensor([zlib.crc32(total.tobytes())], dtype=torch.int64, device=self.device)
        every = [torch.zeros_like(mine) for _ in range(self.ranks)]
        self.dist.all_gather(every, mine)
        return total, len({int(each) for each in every}) == 1

    def share(self, message: bytes) -> bytes:
        torch = self.torch
        size = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        self.dist.broadcast(size, 0)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.local[0] == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        self.dist.broadcast(data, 0)
        return bytes(data.cpu().numpy().tobytes())

    def close(self, failed: bool = False) -> None:
        if not failed:  # torchrun ends the others of a process that fails
            self.dist.destroy_process_group()


class Mpi(Engine):
    """MPI by mpi4py: the script is started by mpirun."""

    places = (False, True)

    def __init__(self, backend: str | None) -> None:
        from mpi4py import MPI

        if backend:
            raise ValueError(f"--backend {backend}: expected none with --engine mpi")
        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.ranks, self.local = self.world.size, (self.world.rank,)
        version = MPI.Get_library_version().split(",")[0].split("\n")[0]
        self.name = f"MPI: {' '.join(version.split())}"

    def check(self, call: Call) -> None:
        if call.dtype not in ("float32", "float64"):
            raise ValueError(f"--dtype {call.dtype}: MPI adds float32 and float64")

    def all_reduce(self, rows: Sequence[np.ndarray], call: Call) -> tuple[np.ndarray, bool]:
        x = np.zeros(call.elements + call.offset, call.dtype)[call.offset :]
        x[:] = rows[0]
        total = x
        if call.in_place:
            self.world.Allreduce(self.mpi.IN_PLACE, x)
        else:
            total = np.zeros(call.elements + call.offset, call.dtype)[call.offset :]
            self.world.Allreduce(x, total)
        found = total.astype(np.float64)
        return found, len(set(self.world.allgather(zlib.crc32(found.tobytes())))) == 1

    def share(self, message: bytes) -> bytes:
        size = np.array([len(message)], np.int64)
        self.world.Bcast(size)
        data = np.zeros(int(size[0]), np.uint8)
        if self.world.rank == 0:
            data[:] = np.frombuffer(message, np.uint8)
        self.world.Bcast(data)
        return data.tobytes()

    def close(self, failed: bool = False) -> None:
        if failed and self.ranks > 1:
            self.world.Abort(1)


class Jax(Engine):
    """JAX's psum over all devices, or the first of them; of one process, or of several."""

    places = (False,)

    def __init__(self, backend: str | None, ranks: int | None, several: bool) -> None:
        if ranks and "jax" not in sys.modules:
            flags = os.environ.get("XLA_FLAGS", "")
            if "host_platform_device_count" not in flags:
                count = f"--xla_force_host_platform_device_count={ranks}"
                os.environ["XLA_FLAGS"] = f"{flags} {count}".strip()
        import jax

        jax.config.update("jax_enable_x64", True)
        if several:
            jax.distributed.initialize()
        self.jax = jax
        devices = jax.devices(backend)[:ranks]
        if ranks and len(devices) < ranks:
            raise ValueError(f"--ranks {ranks}: JAX has {len(devices)} devices")
        self.ranks = len(devices)
        self.local = tuple(
            n for n, device in enumerate(devices) if device.process_index == jax.process_index()
        )
        self.psum = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=devices)
        self.name = f"XLA:{devices[0].platform.upper()}, JAX {jax.__version__}"
        if devices[0].platform != "cpu":
            self.name += f", {devices[0].device_kind}"

    def check(self, call: Call) -> None:
        if call.offset:
            raise ValueError(f"--offsets {call.offset}: JAX places its arrays itself")

    def all_reduce(self, rows: Sequence[np.ndarray], call: Call) -> tuple[np.ndarray, bool]:
        import ml_dtypes  # JAX brings it

        dtype = np.dtype(getattr(ml_dtypes, call.dtype, call.dtype))
        given = np.stack([row.astype(dtype) for row in rows])
        every = np.asarray(self.psum(given), np.float64) if self._alone() else self._mine(given)
        alike = bool((every.view(np.int64) == every[0].view(np.int64)).all())
        if not self._alone():
            from jax.experimental import multihost_utils

            sums = np.uint32(zlib.crc32(every[0].tobytes()))
            alike &= len(set(np.asarray(multihost_utils.process_allgather(sums)).tolist())) == 1
        return every[0], alike

    def _alone(self) -> bool:
        return bool(self.jax.process_count() == 1)

    def _mine(self, given: np.ndarray) -> np.ndarray:
        shards = self.psum(given).addressable_shards
        return np.stack([np.asarray(shard.data, np.float64).reshape(-1) for shard in shards])

    def share(self, message: bytes) -> bytes:
        if self._alone():
            return message
        from jax.experimental import multihost_utils

        size = int(multihost_utils.broadcast_one_to_all(np.int64(len(message))))
        data = np.zeros(size, np.uint8)
        if self.jax.process_index() == 0:
            data[:] = np.frombuffer(message, np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())


# ---------------------------------------------------------------- the command line


def numbers(smallest: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers with commas."""

    def convert(text: str) -> list[int]:
        try:
            found = [int(word) for word in text.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < smallest:
            raise argparse.ArgumentTypeError(
                f"expected whole numbers from {smallest}, such as 4096,65536; got {text!r}"
            )
        return found

    return convert


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of what is summed, and how thoroughly."""
    parser.add_argument(
        "--elements",
        type=numbers(1),
        default=[4096],
        metavar="LIST",
        help="the sizes to sum, in elements (default: 4096)",
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="LIST", help="types of values (default: float32)"
    )
    parser.add_argument(
        "--offsets",
        type=numbers(0),
        default=[0],
        metavar="LIST",
        help="elements by which the buffer is shifted: other alignments (default: 0)",
    )
    parser.add_argument(
        "--in-place",
        choices=("own", "yes", "no", "both"),
        default="own",
        help="sum in place, or into another buffer (default: own, as the engine usually does)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=2,
        metavar="N",
        help="passes over all probes, to see trees that change from run to run (default: 2)",
    )
    parser.add_argument(
        "--verify",
        type=int,
        default=2,
        metavar="N",
        help="sums of random values that are compared with the description (default: 2)",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the script."""
    parser = argparse.ArgumentParser(
        prog="reveal_order.py",
        description="Reveal the order of an all-reduce's additions, from results alone.",
        epilog="Averages (op AVG) are not revealed: their sum is that of op SUM, divided by the "
        "number of ranks, before or after. Only the op SUM is called.",
    )
    parser.add_argument(
        "--engine",
        choices=("torch", "mpi", "jax"),
        help="the engine (default: torch under torchrun, MPI under mpirun, else JAX)",
    )
    parser.add_argument(
        "--backend", help="torch.distributed's backend (nccl with GPUs, else gloo); JAX's platform"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="JAX: the first N devices; CPU: make them"
    )
    parser.add_argument(
        "--several", action="store_true", help="JAX: call jax.distributed.initialize() first"
    )
    add_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("order.json"), help="the file (default: order.json)"
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    arguments = parser.parse_args(argv)
    for name in ("repeats", "verify"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    return arguments


def engine_of(arguments: argparse.Namespace) -> Engine:
    """The engine that is named, or the one whose launcher started this process."""
    name = arguments.engine
    if name is None:
        launched = {
            "torch": ("TORCHELASTIC_RUN_ID", "RANK"),
            "mpi": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK"),
        }
        found = [key for key, words in launched.items() if any(w in os.environ for w in words)]
        name = found[0] if found else "jax"
    if name == "torch":
        return Torch(arguments.backend)
    if name == "mpi":
        return Mpi(arguments.backend)
    return Jax(arguments.backend, arguments.ranks, arguments.several)


def calls_of(arguments: argparse.Namespace, engine: Engine) -> list[Call]:
    """The calls that the options name.

    **Raises**: ValueError for a type that cannot be revealed, or a place that the engine lacks.
    """
    places = engine.places
    dtypes = [word.strip() for word in arguments.dtype.split(",")]
    for dtype in dtypes:
        format_of(dtype)
    wanted = {"own": places[:1], "yes": (True,), "no": (False,), "both": places}
    for place in wanted[arguments.in_place]:
        if place not in places:
            only = "in place" if places[0] else "into another buffer"
            raise ValueError(f"--in-place {arguments.in_place}: this engine sums {only} only")
    calls = [
        Call(elements, dtype, place, offset)
        for dtype in dtypes
        for elements in arguments.elements
        for place in wanted[arguments.in_place]
        for offset in arguments.offsets
    ]
    for call in calls:
        engine.check(call)
    return calls


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write the file whole, or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text_of(contents))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def text_of(contents: dict[str, Any]) -> str:
    """JSON with a line for each call and each tree."""
    lists = {key: contents[key] for key in ("calls", "trees")}
    head = json.dumps({key: contents[key] for key in contents if key not in lists}, indent=1)
    parts = [
        f'"{key}": [\n  ' + ",\n  ".join(json.dumps(each) for each in found) + "\n ]"
        for key, found in lists.items()
    ]
    return head.removesuffix("\n}") + ",\n " + ",\n ".join(parts) + "\n}\n"


class Progress:
    """Lines on standard error: one per piece of work, and one every few seconds."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.shown = quiet, 0.0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if not self.quiet and (now - self.shown > 2 or "elements" in text):
            self.shown = now
            print(f"reveal_order: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Reveal and write; the exit code: 0, 1 if elements have no tree, 2 for a wrong use."""
    arguments = parse(argv)
    engine: Engine | None = None
    failed = False
    try:
        engine = engine_of(arguments)
        calls = calls_of(arguments, engine)
        failed = True  # until the end: the other processes wait for this one
        if 0 not in engine.local:
            follow(engine)
            failed = False
            return 0
        options = Options(arguments.repeats, arguments.verify, Progress(arguments.quiet))
        contents = reveal(engine, calls, options)
        write(arguments.out, contents)
        engine.share(pack({"do": "end"}))
        failed = False
        return report(contents, arguments.out, arguments.quiet)
    except ValueError as error:
        if engine is None or 0 in engine.local:
            print(f"reveal_order: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reveal_order: interrupted; nothing is written", file=sys.stderr)
        return 130
    finally:
        if engine is not None:
            engine.close(failed)


def report(contents: dict[str, Any], path: Path, quiet: bool) -> int:
    """Say what is in the file; the exit code."""
    code = int(any(r[2] < 0 for call in contents["calls"] for r in call["ranges"]))
    if quiet:
        return code
    for call in contents["calls"]:
        used = {r[2] for r in call["ranges"] if r[2] >= 0}
        lost = sum(r[1] - r[0] for r in call["ranges"] if r[2] < 0)
        checked = call["verified"]
        one = Call(call["elements"], call["dtype"], call["in_place"], call["offset"])
        print(
            f"{one}: {len(used)} trees, {checked['equal']:,} of {checked['elements']:,} random "
            f"sums equal{f'; {lost:,} elements have no tree' if lost else ''}"
        )
    print(f"{path}: written")
    return code


if __name__ == "__main__":
    sys.exit(main())
