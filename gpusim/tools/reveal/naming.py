"""Names for revealed orders: the twin with a call's trees, the nearest one, words for chains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from gpusim.fallback.formats import KINDS, default_accumulator, real_of
from gpusim.fallback.graphs import ChainSchedule
from gpusim.fallback.orders import EXACT, ORDERS
from gpusim.fallback.schedules import Schedule
from gpusim.fallback.trees import SumTree, Trees, compile_trees
from gpusim.reduction.replay import ACCUMULATORS
from gpusim.revealed import DTYPES, OrderFile, RevealedCall, trees_of
from gpusim.twins import TWINS

__all__ = ["Likeness", "differing", "in_words", "likenesses", "tree_in_words"]


@dataclass(frozen=True)
class Likeness:
    """How a call's trees compare with those of a twin or an order.

    **Attributes**: the `name`; how many elements have `other` trees, and the `first` of them; and
    how partial sums or zeros differ, in words, where the trees are the same.
    """

    name: str
    other: int
    first: int | None
    differs: str = ""

    @property
    def is_twin(self) -> bool:
        """Whether trees, partial sums and zeros are the same."""
        return not self.other and not self.differs


def likenesses(file: OrderFile, call: RevealedCall) -> list[Likeness]:
    """How a call compares with all twins and orders that know such a call, the nearest first.

    Empty for a call with elements that no tree explains.
    """
    if call.unexplained:
        return []
    own = file.trees_of_call(call)
    found: dict[str, Likeness] = {}
    known: dict[str, Schedule | str] = {name: twin.schedule for name, twin in TWINS.items()}
    known |= {name: name for name in (*ORDERS, EXACT)}
    for name, schedule in known.items():
        if isinstance(schedule, Schedule) and schedule.formats:
            if call.dtype not in schedule.formats:
                continue
        try:
            theirs = trees_of(schedule, file.world_size, call.elements, DTYPES[call.dtype])
        except ValueError:
            continue  # the engine's order is not known for so many
        other, first = differing(own, theirs)
        differs = "" if other else _rounding_differs(file, call, schedule)
        found[name] = Likeness(name, other, first, differs)
    return sorted(found.values(), key=lambda each: (each.other, bool(each.differs)))


def differing(one: Trees, other: Trees) -> tuple[int, int | None]:
    """How many elements have different trees, and the first of them.

    >>> differing(trees_of("linear", 3, 9, 4), trees_of("ring", 3, 9, 4))
    (6, 3)
    """
    number, first = 0, None
    for begin, end, mine, theirs in _overlaps(one, other):
        if mine != theirs:
            number += end - begin
            first = begin if first is None else first
    return number, first


def _overlaps(one: Trees, other: Trees) -> Iterator[tuple[int, int, SumTree, SumTree]]:
    left, right = iter(one.ranges), iter(other.ranges)
    mine, theirs = next(left, None), next(right, None)
    while mine is not None and theirs is not None:
        end = min(mine[1], theirs[1])
        yield max(mine[0], theirs[0]), end, mine[2], theirs[2]
        mine = next(left, None) if mine[1] == end else mine
        theirs = next(right, None) if theirs[1] == end else theirs


def _rounding_differs(file: OrderFile, call: RevealedCall, schedule: Schedule | str) -> str:
    """How partial sums and zeros differ from those of an order with the same trees, in words."""
    dtype = next(each for each in KINDS if each.name == call.dtype)
    theirs = schedule.accumulator("sum", dtype) if isinstance(schedule, Schedule) else None
    theirs = theirs or default_accumulator(real_of(dtype))
    bits = {file.trees[which].accumulator.bits for _, _, which in call.ranges}
    own = [ACCUMULATORS.get(each) if each is not None else None for each in bits]
    said = []
    if file.world_size > 1 and schedule != EXACT:
        names = [
            held.name if held is not None else f"{number} bits"
            for held, number in zip(own, bits, strict=True)
            if number is not None and held != theirs
        ]
        if names:
            said.append(f"partial sums in {' and '.join(names)}, there in {theirs.name}")
    from_zero = isinstance(schedule, Schedule) and schedule.from_zero
    signs = {file.trees[which].minus_zero for _, _, which in call.ranges}
    if signs != {not from_zero} and file.world_size > 1:
        here, there = ("+0", "-0") if False in signs else ("-0", "+0")
        said.append(f"a sum of negative zeros is {here}, there {there}")
    return "; ".join(said)


def in_words(trees: Trees, members: int) -> str:
    """A call's order in a few words, or "" if it has no simple ones.

    >>> from gpusim.twins import TWINS
    >>> in_words(trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4), 4)
    'a ring: block b is a chain from rank b - 1 down, of 4 blocks'
    >>> in_words(trees_of("tree", 6, 9, 4), 6)
    'one tree for all elements: neighbours in pairs, level by level'
    """
    order = compile_trees(trees, members)
    if order == "ring":
        return "a ring: block b is a chain from rank b up, of one block for each rank"
    if order == EXACT:
        return "the exact sum of all ranks, rounded once"
    if order == "tree":
        return "one tree for all elements: neighbours in pairs, level by level"
    if order in ("linear", "reverse"):
        return f"one chain for all elements: {tree_in_words(trees.trees[0])}"
    if not isinstance(order, ChainSchedule):
        return "one tree for all elements" if len(trees.trees) == 1 else ""
    if len(order.starts) == 1:
        return f"one chain for all elements: {tree_in_words(trees.trees[0])}"
    way = "up" if order.step > 0 else "down"
    steps = {(after - before) % members for before, after in pairwise(order.starts)}
    blocks = f"of {len(order.starts)} blocks"
    if steps != {1}:
        return f"chains {way}, {blocks}, which start at ranks {_some(order.starts)}"
    start = order.starts[0]
    shift = f" + {start}" if 2 * start <= members else f" - {members - start}"
    return f"a ring: block b is a chain from rank b{shift if start else ''} {way}, {blocks}"


def _some(numbers: tuple[int, ...], most: int = 12) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return shown + (", ..." if len(numbers) > most else "")


def tree_in_words(tree: SumTree) -> str:
    """A tree in one line: a chain by its ranks, any other one as a sum in parentheses.

    >>> tree_in_words(SumTree.of([[[2, 3], 1], 0]))
    '3, 2, 1, 0 (down from 3)'
    >>> tree_in_words(SumTree.of([[0, 1], [2, 3]]))
    '(0 + 1) + (2 + 3)'
    """
    chain = None if tree.is_wide else tree.chain()
    if chain is None or len(chain) < 3:
        return _sum(tree)
    members = len(chain)
    for first, second in ((chain[0], chain[1]), (chain[1], chain[0])):
        visited = (first, second, *chain[2:])
        for step, way in ((1, "up"), (-1, "down")):
            if all((first + step * k) % members == m for k, m in enumerate(visited)):
                return f"{_some(visited, 24)} ({way} from {first})"
    return f"{_some(chain, 24)} (a chain)"


def _sum(tree: SumTree, most: int = 300) -> str:
    def add(terms: list[tuple[str, bool]], adder: object) -> tuple[str, bool]:
        parts = [text if is_leaf else f"({text})" for text, is_leaf in terms]
        joined = " + ".join(parts)
        if adder is not None:
            joined = f"{adder}: {joined}"
        return joined[: 2 * most], False  # what is longer is not shown

    text, _ = tree.folded(lambda member: (str(member), True), add)
    return text if len(text) <= most else f"{text[:most]}..."
