"""The events of two runs, aligned by a diff of what is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

__all__ = ["Pair", "align"]

Pair = tuple[int | None, int | None]
"""Positions in both runs; None where one run lacks the event."""

LARGEST = 400
"""Edits beyond which what remains is one block of other calls."""


def align(
    a: Sequence[Hashable],
    b: Sequence[Hashable],
    score: Callable[[list[Pair]], tuple[float, ...]],
) -> list[Pair]:
    """Align two sequences with the fewest insertions and removals.

    Where an edit can stand at several places, as in a loop, `score` decides between the earliest
    and the latest; the latest if they are equal.

    >>> align("abcd", "abxcd", lambda pairs: (0,))
    [(0, 0), (1, 1), (None, 2), (2, 3), (3, 4)]
    """
    latest = _diff(a, b)
    n, m = len(a), len(b)
    earliest = [
        (None if i is None else n - 1 - i, None if j is None else m - 1 - j)
        for i, j in reversed(_diff(a[::-1], b[::-1]))
    ]
    return earliest if score(earliest) > score(latest) else latest


def purity(sites: Sequence[tuple[str, str]]) -> int:
    """How many pairs of places in two programs agree with the most frequent partner."""
    best: dict[str, int] = {}
    for (one, _), count in Counter(sites).items():
        best[one] = max(best.get(one, 0), count)
    return sum(best.values())


def _diff(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    """Myers' greedy algorithm, after what both begin and end with."""
    n, m = len(a), len(b)
    begin = 0
    while begin < min(n, m) and a[begin] == b[begin]:
        begin += 1
    end = 0
    while end < min(n, m) - begin and a[n - 1 - end] == b[m - 1 - end]:
        end += 1
    middle = _edits(a[begin : n - end], b[begin : m - end])
    pairs: list[Pair] = [(k, k) for k in range(begin)]
    pairs += [
        (None if i is None else i + begin, None if j is None else j + begin) for i, j in middle
    ]
    pairs += [(n - k, m - k) for k in range(end, 0, -1)]
    return pairs


def _edits(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Pair]:
    n, m = len(a), len(b)
    reached = {1: 0}
    history: list[dict[int, int]] = []
    found = not (n or m)
    for distance in range(min(n + m, LARGEST) + 1) if not found else ():
        history.append(dict(reached))
        for k in range(-distance, distance + 1, 2):
            down = k == -distance or (k != distance and reached[k - 1] < reached[k + 1])
            x = reached[k + 1] if down else reached[k - 1] + 1
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            reached[k] = x
            if x >= n and x - k >= m:
                found = True
                break
        if found:
            break
    if not found:
        return [(i, None) for i in range(n)] + [(None, j) for j in range(m)]
    pairs: list[Pair] = []
    x, y = n, m
    for distance in range(len(history) - 1, -1, -1):
        before, k = history[distance], x - y
        down = k == -distance or (k != distance and before[k - 1] < before[k + 1])
        previous = k + 1 if down else k - 1
        start = before[previous]
        while x > max(start, 0) and y > max(start - previous, 0) and distance >= 0:
            if (x, y) == ((start, start - previous + 1) if down else (start + 1, start - previous)):
                break
            pairs.append((x - 1, y - 1))
            x, y = x - 1, y - 1
        if distance:
            pairs.append((None, y - 1) if down else (x - 1, None))
            x, y = (x, y - 1) if down else (x - 1, y)
    return pairs[::-1]
