"""The order in which ranks enqueue calls: of several groups, and of messages.

NCCL runs what a rank enqueues in the order of the rank's program. Calls of two communicators that
two ranks enqueue in different orders may wait for each other.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import distributed as dist

from ..private import c10d
from . import made, sends, uneven
from .cycles import Leg, cycles
from .findings import Finding, ranks_in_words
from .here import replace
from .log import Log
from .posts import Post, line_of, members_of, posts_of

__all__ = ["analyse", "install"]


def install(stack: ExitStack) -> None:
    """Note which messages make a batch, and which groups are made."""
    for owner in (dist, c10d):
        replace(stack, owner, "batch_isend_irecv", _in_batch)
    made.install(stack)


def _in_batch(watch: Any, real: Any, /, *args: Any, **named: Any) -> Any:
    before, watch.batch = watch.batch, watch.batches
    watch.batches += 1
    try:
        return real(*args, **named)
    finally:
        watch.batch = before


def analyse(logs: Sequence[Log], failure: str = "") -> list[Finding]:
    """Findings from the ranks' orders of calls; `failure` is the text of the launch's error."""
    members = members_of(logs)
    posts = [posts_of(log) for log in logs]
    return [
        *_order_of_groups(logs, posts, members),
        *sends.analyse(posts, members),
        *uneven.analyse(logs, posts, members, failure),
        *made.analyse(logs),
    ]


def _order_of_groups(
    logs: Sequence[Log], posts: Sequence[list[Post]], members: dict[str, list[int]]
) -> list[Finding]:
    """Cycles of calls on several groups, which ranks enqueue in different orders."""
    lines = [
        [
            post
            for post in own
            if post.number is not None and post.is_on_nccl and len(members[post.group]) > 1
        ]
        for own in posts
    ]
    if len({post.group for line in lines for post in line}) < 2:
        return []
    calls = [[(post.group, post.number) for post in line] for line in lines]
    likes = [[(post.group, post.site) for post in line] for line in lines]
    hosts = [[p for p, event in enumerate(log.events) if event[0] == "host"] for log in logs]
    where = [dict(zip(row, range(len(row)), strict=True)) for row in calls]
    found = []
    for cycle in cycles(calls, likes):
        found.append(_finding(logs, lines, where, hosts, cycle, members))
    return found


def _finding(
    logs: Sequence[Log],
    lines: Sequence[Sequence[Post]],
    where: Sequence[dict[tuple[str, int | None], int]],
    hosts: Sequence[Sequence[int]],
    cycle: Sequence[Leg],
    members: dict[str, list[int]],
) -> Finding:
    ranks: set[int] = set()
    related: list[str] = []
    waits: list[str] = []
    parts: list[str] = []
    orders: list[tuple[int, int, Post]] = []
    for leg in cycle:
        first, last = lines[leg.line][leg.first], lines[leg.line][leg.last]
        ends = [(post.group, post.number) for post in (first, last)]
        same: list[int] = []
        for own, places in enumerate(where):
            if not all(end in places for end in ends):
                continue
            one, other = (lines[own][places[end]] for end in ends)
            ranks.add(one.rank)
            related += [f"{post.site}: {post.operation}" for post in (one, other)]
            if one.place > other.place:
                continue
            same.append(one.rank)
            host = bisect.bisect(hosts[own], one.place)
            if host < len(hosts[own]) and hosts[own][host] < other.place:
                event = logs[own].events[hosts[own][host]]
                waits.append(f"between them the host of rank {one.rank} waits: {event[1]}")
                related.append(f"{event[2]}: {event[1]}")
        parts.append(
            f"{ranks_in_words(same)} enqueue{'s' * (len(same) == 1)} "
            f"{line_of(first, members)} before {line_of(last, members)}"
        )
        orders.append((len(same), -max(same), first))
    # The order that fewest ranks have is the one to change.
    post = min(orders, key=lambda each: each[:2])[2]
    return Finding(
        "host-sync-in-cycle" if waits else "communicator-order",
        post.site,
        sorted(ranks),
        "; ".join([*parts, *waits[:1]]),
        post.operation,
        related=list(dict.fromkeys(related)),
    )
