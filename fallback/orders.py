"""The orders of additions: how members are visited, how a ring cuts a value, how a tree numbers.
Only sequences of numbers, no arrays."""

from __future__ import annotations

from collections.abc import Iterator

ORDERS = ("linear", "reverse", "tree", "ring")
#: The order without an order: one rounding of the exact sum.
EXACT = "exact"
#: The order of integers: members are multiples of a unit that they have in common.
FIXED = "fixed"
#: Linear orders that keep what additions lose, and add it again.
KAHAN, NEUMAIER = "kahan", "neumaier"
COMPENSATED = (KAHAN, NEUMAIER)


def ring_bounds(elements: int, members: int) -> list[int]:
    """Where the ring's blocks begin and end: the first `elements % members` are one longer."""
    length, longer = divmod(elements, members)
    return [block * length + min(block, longer) for block in range(members + 1)]


def visits(order: str, members: int, start: int, step: int = 1) -> Iterator[int]:
    """The members of a sequential order, in the order of their visits.

    `start` is the member at which a ring's block begins, `step` (1 or -1) its direction.
    """
    if order == "reverse":
        start, step = members - 1, -1
    yield from range(start, members if step > 0 else -1, step)
    yield from range(start) if step > 0 else range(members - 1, start, -1)


def tree_levels(members: int) -> list[int]:
    """The number of additions below each level: entry k counts levels 0..k-1.

    An addition of level k (k from 0) at position j from the left is step entry[k] + j + 1.
    """
    counts = [0]
    while members > 1:
        counts.append(counts[-1] + members // 2)
        members -= members // 2
    return counts
