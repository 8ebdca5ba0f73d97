"""Folds of which each instance does some of the elements: it gets them of all members, and gives
all the others the results."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np

from ...engines import Pending
from ..kernels import empty
from ..operand import Array
from .task import AHEAD, Task, blocks_of, flat, new_result, places_of


def by_windows(task: Task) -> Array:
    """Each instance folds its share of the elements of all members; then all get the results."""
    spread, instances = task.spread, task.instances
    own = [flat(task, value) for value in task.values]
    rows, length = own[0].shape
    out = new_result(task)
    result = flat(task, out)
    held = {i: int((task.owners == i).sum()) for i in instances}
    places = [np.flatnonzero(task.owners == i) for i in instances]
    shared = blocks_of(0, length, max(1, rows * len(task.members) // len(instances)))
    windows = [_shares(first, end, len(instances)) for first, end in shared]

    def begin(shares: list[tuple[int, int]]) -> tuple[dict[int, Array], Pending]:
        first, end = shares[task.turn]
        incoming = {
            i: empty(task.like, (held[i], rows, end - first), task.values[0].dtype)
            for i in instances
            if i != spread.own
        }
        sends = []
        for other, (start, stop) in zip(instances, shares, strict=True):
            if other != spread.own:
                outgoing = empty(task.like, (len(own), rows, stop - start), task.values[0].dtype)
                for number, value in enumerate(own):
                    outgoing[number] = value[:, start:stop]
                sends.append((outgoing, other))
        pending = spread.exchange(sends, [(buffer, i) for i, buffer in incoming.items()])
        return incoming, pending

    under_way = deque(begin(shares) for shares in windows[:AHEAD])
    finals: list[tuple[Pending, list[tuple[Array, Array]]]] = []
    for number, shares in enumerate(windows):
        incoming, pending = under_way.popleft()
        if number + AHEAD < len(windows):
            under_way.append(begin(windows[number + AHEAD]))
        pending.wait()
        first, end = shares[task.turn]
        members: list[Any] = [None] * len(task.members)
        for instance, positions in zip(instances, places, strict=True):
            for k, position in enumerate(positions.tolist()):
                mine = instance == spread.own
                members[position] = own[k][:, first:end] if mine else incoming[instance][k]
        if end > first:
            part = task.kernel(
                members,
                batch_ndim=1,
                window=(first, length),
                **{**task.whole, "places": places_of(task)},
            )
        else:
            part = empty(task.like, (rows, 0), result.dtype)
        result[:, first:end] = part
        finals.append(_to_all(task, part, shares, result))
    for pending, arrived in finals:
        pending.wait()
        for target, source in arrived:
            target[...] = source
    return out


def _shares(first: int, end: int, count: int) -> list[tuple[int, int]]:
    edges = [first + (end - first) * k // count for k in range(count + 1)]
    return list(pairwise(edges))


def _to_all(
    task: Task, part: Array, shares: list[tuple[int, int]], result: Array
) -> tuple[Pending, list[tuple[Array, Array]]]:
    """Give this instance's share of the result to the others, and take theirs."""
    receives, arrived = [], []
    for other, (start, stop) in zip(task.instances, shares, strict=True):
        if other == task.spread.own:
            continue
        target = result[:, start:stop]
        buffer = target
        if not target.flags.c_contiguous:
            buffer = np.empty_like(target, order="C")
            arrived.append((target, buffer))
        receives.append((buffer, other))
    sends = [(part, other) for other in task.instances if other != task.spread.own]
    return task.spread.exchange(sends, receives, results=True), arrived
