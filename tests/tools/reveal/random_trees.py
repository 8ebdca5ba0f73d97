"""Random trees of adders, and an engine that adds by them: one tree for each element.

The engine shares no code with the script: it adds with `math.fsum` and float64's own operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Adders", "Machine", "Tree", "canonical", "canonical_of", "draw"]

Tree = Any
MOST_TERMS = 8
SIGNIFICANDS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e5m2": 3}


@dataclass(frozen=True)
class Adders:
    """The adders of an engine.

    **Attributes**:

    - `dtype`: the type of the values.
    - `bits`, `rounding`: of partial sums.
    - `kinds`: the adders that are drawn: rounded (two terms), exact and aligned (two or more).
    """

    dtype: str = "float32"
    bits: int = 24
    rounding: str = "nearest-even"
    kinds: tuple[str, ...] = ("rounded", "exact", "aligned")


@dataclass(frozen=True)
class Node:
    """An adder of a drawn tree."""

    terms: tuple[Any, ...]
    kind: str
    width: int


def draw(random: np.random.Generator, ranks: int, adders: Adders, chain: float = 0.3) -> Tree:
    """A random tree: any of the values left are added next; `chain`: how often the last sum is."""
    left: list[Tree] = list(range(ranks))
    while len(left) > 1:
        kind = str(random.choice(adders.kinds))
        # An adder that aligns two terms is told from one that rounds by bits that members have.
        own = adders.bits == SIGNIFICANDS[adders.dtype]
        least = {"rounded": 2, "exact": 3, "aligned": 2 if own else 3}[kind]
        if len(left) < least:
            kind, least = "rounded", 2
        most = 2 if kind == "rounded" else min(MOST_TERMS, len(left))
        count = int(random.integers(least, most + 1))
        taken = [left.pop()] if random.random() < chain else []
        while len(taken) < count:
            taken.append(left.pop(int(random.integers(len(left)))))
        order = random.permutation(len(taken))
        width = adders.bits + int(random.integers(0, 4)) if kind == "aligned" else 0
        left.append(Node(tuple(taken[n] for n in order), kind, width))
    return left[0]


def canonical(tree: Any, kinds: dict[tuple[int, ...], Any], path: tuple[int, ...] = ()) -> Any:
    """A tree of order.json, as a value that does not depend on the order of terms."""
    if not isinstance(tree, list):
        return tree
    kind = kinds.get(path, {"kind": "rounded"})
    terms = [canonical(term, kinds, (*path, number)) for number, term in enumerate(tree)]
    return kind["kind"], kind.get("bits", 0), frozenset(terms)


def canonical_of(tree: Tree) -> Any:
    """The same of a drawn tree."""
    if not isinstance(tree, Node):
        return tree
    return tree.kind, tree.width, frozenset(map(canonical_of, tree.terms))


class Machine:
    """An engine: element e is summed by tree e."""

    def __init__(self, trees: list[Tree], ranks: int, adders: Adders, seed: int = 0) -> None:
        self.adders, self.ranks, self.calls = adders, ranks, 0
        self.dtype = np.dtype(getattr(ml_dtypes, adders.dtype, adders.dtype))
        self.random = np.random.default_rng(seed)
        self.size = 2 * ranks + 1  # slots of one element: ranks, sums, and one that is zero
        levels: list[list[tuple[list[int], str, int, int]]] = []
        self.roots = np.array([self._place(t, e, levels)[0] for e, t in enumerate(trees)])
        self.steps = []
        for level in levels:
            terms = max(len(slots) for slots, *_ in level)
            zero = self.size - 1
            slots = np.array([each[0] + [zero] * (terms - len(each[0])) for each in level]).T
            kinds, widths = np.array([e[1] for e in level]), np.array([e[2] for e in level])
            self.steps.append((slots, kinds, widths, np.array([each[3] for each in level])))

    def _place(self, tree: Tree, element: int, levels: list[Any]) -> tuple[int, int]:
        """Put a tree's adders into levels that can be added at once; the root's slot and level."""
        first = element * self.size
        used = self.ranks

        def place(node: Tree) -> tuple[int, int]:
            nonlocal used
            if not isinstance(node, Node):
                return first + int(node), 0
            terms = [place(term) for term in node.terms]
            level = max(each for _, each in terms)
            if level == len(levels):
                levels.append([])
            slot = first + used
            used += 1
            levels[level].append(([s for s, _ in terms], node.kind, node.width, slot))
            return slot, level + 1

        return place(tree)

    def __call__(self, members: np.ndarray) -> np.ndarray:
        """The sums of float64 members, which are exact in the type."""
        self.calls += 1
        rows = members.astype(self.dtype)
        values = np.zeros((members.shape[1], self.size))
        values[:, : self.ranks] = rows.T
        flat = values.reshape(-1)
        for slots, kinds, widths, targets in self.steps:
            flat[targets] = self._add(flat[slots], kinds, widths)
        total = flat[self.roots]
        return total.astype(self.dtype).astype(np.float64)

    def _add(self, terms: np.ndarray, kinds: np.ndarray, widths: np.ndarray) -> np.ndarray:
        total = terms[0] + terms[1]
        part = total - terms[0]
        error = (terms[0] - (total - part)) + (terms[1] - part)
        for e in np.flatnonzero(kinds == "exact"):
            column = terms[:, e].tolist()
            total[e] = math.fsum(column)
            error[e] = math.fsum([*column, -total[e]])
        aligned = kinds == "aligned"
        if aligned.any():
            some = terms[:, aligned]
            largest = np.maximum(np.abs(some).max(axis=0), 2.0**-200)
            _, exponents = np.frexp(largest)
            last = np.ldexp(1.0, exponents - widths[aligned])
            total[aligned] = np.trunc(some / last).sum(axis=0) * last
            error[aligned] = 0
        return self._round(total, error)

    def _round(self, total: np.ndarray, error: np.ndarray) -> np.ndarray:
        bits, rounding = self.adders.bits, self.adders.rounding
        if bits >= 53 and rounding == "nearest-even":
            return total
        _, exponents = np.frexp(total)
        last = np.ldexp(1.0, exponents - bits)
        below = np.floor(total / last)
        rest = (total / last - below) + np.sign(error) * 2.0**-40  # exact but for the sign of both
        below, rest = np.where(rest < 0, below - 1, below), np.where(rest < 0, rest + 1, rest)
        up = {
            "nearest-even": (rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)),
            "toward-zero": (below < 0) & (rest > 0),
            "up": rest > 0,
            "down": np.zeros(total.shape, bool),
            "away": (below >= 0) & (rest > 0),
            "stochastic": self.random.random(total.shape) < rest,
        }[rounding]
        return (below + up) * last
