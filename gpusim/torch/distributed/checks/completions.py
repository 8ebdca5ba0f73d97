"""Other orders of a program: when its async calls complete, and which rank runs next.

Without a number a call's outputs get the result at the latest moment that an engine may take: when
the rank waits. Order 0 gives it at the earliest, as soon as all ranks have posted the call. The
others draw both the moment and the turns by their number, so that a run repeats.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..memory import bits_of
from ..private import without_modes
from .spans import is_dense

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["Completion", "Values", "completion_of", "first_difference", "turns_of"]

Completion = Callable[[], bool]
"""Whether the outputs of a call that is complete get its result now."""

CHANCE = 0.3
MOST = 20_000
"""Calls of a rank whose operands are kept."""


def completion_of(order: int | None, rank: int) -> Completion:
    """When calls of a rank complete, in an order."""
    if order is None:
        return lambda: False
    if order == 0:
        return lambda: True
    generator = random.Random(f"completions {order} {rank}")
    return lambda: generator.random() < CHANCE


def turns_of(order: int) -> Callable[[int], int] | None:
    """Which of so many ranks is next, in an order."""
    if order == 0:
        return None
    generator = random.Random(f"turns {order}")
    return generator.randrange


# Owner: the rank's thread.
class Values:
    """The operands of a rank's calls, by which two orders of a program are compared."""

    def __init__(self, watch: Watch) -> None:
        self.rows: list[list[str]] = watch.log.rows.setdefault("values", [])
        self.is_on = watch.keeps_values

    def see_operands(self, call: Call) -> None:
        """Note a checksum of what a call reads."""
        if not self.is_on or len(self.rows) >= MOST:
            return
        total = 0
        with without_modes():
            for each in call.given.read:
                if is_dense(each) and each.is_cpu:
                    bits = bits_of(each, "check")
                    total = zlib.crc32(bits.tobytes(), total)
        self.rows.append([call.site, call.words, f"{total:08x}"])


def first_difference(
    one: Mapping[int, Sequence[Sequence[str]]], other: Mapping[int, Sequence[Sequence[str]]]
) -> dict[int, tuple[int, str, str]]:
    """By rank, the first call that was posted with other values: its number, site and words.

    >>> one, other = [["a.py:1", "all_reduce", "00"]], [["a.py:1", "all_reduce", "01"]]
    >>> first_difference({0: one}, {0: other})
    {0: (0, 'a.py:1', 'all_reduce')}
    """
    found = {}
    for rank, mine in one.items():
        theirs = other.get(rank, ())
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if list(a) != list(b):
                found[rank] = number, b[0], b[1]
                break
    return found
