"""Calls that some ranks make and others never do, and what ranks of a deadlock wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .findings import Finding, ranks_in_words
from .log import Log
from .posts import Post, group_in_words, line_of

__all__ = ["analyse"]

STALLED = "no rank can go on"
"""How a launch's error says that its ranks wait in vain."""


def analyse(
    logs: Sequence[Log], posts: Sequence[list[Post]], members: dict[str, list[int]], failure: str
) -> list[Finding]:
    """Calls without a counterpart, at the end of the launch or where it has come to a stop."""
    complete = bool(logs) and len(logs) == logs[0].size
    if not failure and complete and not any(log.ended for log in logs):
        return [*_uneven_groups(posts, members), *_uneven_messages(posts, members)]
    if STALLED in failure:
        return list(_Stall(logs, posts, members).findings())
    return []


def _uneven_groups(posts: Sequence[list[Post]], members: dict[str, list[int]]) -> Iterator[Finding]:
    counts: dict[str, Counter[int]] = {}
    for own in posts:
        for label, count in Counter(p.group for p in own if p.number is not None).items():
            counts.setdefault(label, Counter())[own[0].rank] = count
    lasts = {label: [count[rank] for rank in members[label]] for label, count in counts.items()}
    uneven = {label for label, row in lasts.items() if min(row) < max(row)}
    if not uneven:
        return
    for label in sorted(uneven):
        least = min(lasts[label])
        more = [rank for rank in members[label] if counts[label][rank] > least]
        alone = [
            post
            for own in posts
            for post in own
            if post.group == label and post.number is not None and post.number >= least
        ]
        yield _uneven(alone[0], more, [*set(members[label]) - {*more}], counts[label], members)


def _uneven(
    post: Post,
    more: Sequence[int],
    less: Sequence[int],
    counts: Counter[int],
    members: dict[str, list[int]],
) -> Finding:
    calls = ", ".join(f"{counts[rank]} of rank {rank}" for rank in members[post.group][:8])
    group = group_in_words(post.group, members[post.group])
    one = len(more) == 1
    text = (
        f"{ranks_in_words(more)} call{'s' * one} {line_of(post, members)}, and "
        f"{ranks_in_words(less)} never make{'s' * (len(less) == 1)} the call that belongs to it; "
        f"calls of {group}: {calls}"
    )
    return Finding("uneven-calls", post.site, sorted(more), text, post.operation)


def _uneven_messages(
    posts: Sequence[list[Post]], members: dict[str, list[int]]
) -> Iterator[Finding]:
    ways: dict[tuple[str, int, int, int], dict[str, list[Post]]] = {}
    any_source = {
        (post.group, post.rank)
        for own in posts
        for post in own
        if post.number is None and post.peer is None
    }
    for own in posts:
        for post in own:
            if post.number is None and post.peer is not None:
                way = (post.group, *post.ends, post.about.get("tag", 0))
                both = ways.setdefault(way, {"send": [], "recv": []})
                both[post.operation].append(post)
    for (label, _, receiver, _), both in ways.items():
        sends, receives = both["send"], both["recv"]
        if len(sends) == len(receives) or (label, receiver) in any_source:
            continue
        count = min(len(sends), len(receives))
        post = (sends if len(sends) > count else receives)[count]
        other = "receives" if post.operation == "send" else "sends"
        text = (
            f"rank {post.rank} calls {line_of(post, members)}, and rank {post.peer} never {other}"
        )
        yield Finding("uneven-calls", post.site, [post.rank], text, post.operation)


class _Stall:
    """The state of ranks that wait in vain: the calls that are not complete, and who is missing."""

    def __init__(
        self, logs: Sequence[Log], posts: Sequence[list[Post]], members: dict[str, list[int]]
    ) -> None:
        self.members = members
        self.returned = {log.rank for log in logs if not log.ended}
        self.own = {log.rank: own for log, own in zip(logs, posts, strict=True)}
        self.counts: dict[str, Counter[int]] = {}
        self.messages: Counter[tuple[str, str, int, int, int]] = Counter()
        self.pending: dict[int, list[Post]] = {}
        for log, own in zip(logs, posts, strict=True):
            done = {event[1] for event in log.events if event[0] == "done"}
            for post in own:
                if post.number is not None:
                    self.counts.setdefault(post.group, Counter())[post.rank] += 1
                elif post.peer is not None:
                    self.messages[self._way(post)] += 1
            if log.rank not in self.returned:
                left = [post for post in own if post.id not in done]
                # A call that is waited for at once is what the rank waits in.
                last = bool(left) and left[-1] is own[-1] and not left[-1].about["async"]
                self.pending[log.rank] = left[-1:] if last else left

    def _way(self, post: Post) -> tuple[str, str, int, int, int]:
        return (post.group, post.operation, *post.ends, post.about.get("tag", 0))

    def findings(self) -> Iterator[Finding]:
        """The reason for which ranks wait: ranks that have returned, or each other."""
        found = list(self._of_returned())
        if found:
            yield from found
            return
        cycle = self._cycle()
        if not cycle:
            return
        if all(post.operation == "send" for post in cycle):
            yield self._of_cycle("send-order", cycle)
        elif all(post.number is not None for post in cycle):
            left = self._left(cycle)
            if left is None:
                yield self._of_cycle("host-sync-in-cycle", cycle)
            else:
                yield left

    def _waits_for(self, post: Post) -> list[int]:
        """The ranks that have not made their part of a call."""
        if post.number is not None:
            own = self.counts[post.group]
            return [rank for rank in self.members[post.group] if own[rank] <= post.number]
        if post.peer is None:
            return []
        way = self._way(post)
        other = (way[0], "recv" if post.operation == "send" else "send", *way[2:])
        return [post.peer] if self.messages[other] < self.messages[way] else []

    def _of_returned(self) -> Iterator[Finding]:
        for posts in self.pending.values():
            for post in posts:
                less = [rank for rank in self._waits_for(post) if rank in self.returned]
                if not less:
                    continue
                if post.number is None:
                    verb = "receiving" if post.operation == "send" else "sending"
                    text = f"rank {post.rank} waits in {line_of(post, self.members)}, and rank "
                    text += f"{post.peer} has returned without {verb}"
                    yield Finding("uneven-calls", post.site, [post.rank], text, post.operation)
                    continue
                counts = self.counts[post.group]
                more = [r for r in self.members[post.group] if counts[r] > (post.number or 0)]
                yield _uneven(post, more, less, counts, self.members)

    def _cycle(self) -> list[Post]:
        """Calls of ranks that wait for each other, each for the rank of the next."""
        for start in self.pending:
            came: dict[int, Post] = {}
            queue = [start]
            while queue and start not in came:
                rank = queue.pop(0)
                for post in self.pending[rank]:
                    for other in self._waits_for(post):
                        if other in self.pending and other not in came:
                            came[other] = post
                            queue.append(other)
            if start in came:
                cycle = [came[start]]
                while cycle[-1].rank != start:
                    cycle.append(came[cycle[-1].rank])
                return cycle[::-1]
        return []

    def _left(self, cycle: Sequence[Post]) -> Finding | None:
        """The finding of a cycle in which one rank has gone on past the other's call.

        It has made calls there before, and the other rank has not come to where it waits now.
        """
        if len(cycle) != 2:
            return None
        for post, other in (cycle, cycle[::-1]):
            been = any(
                each.site == post.site and each.group == post.group for each in self.own[other.rank]
            )
            come = any(
                each.site == other.site and each.group == other.group
                for each in self.own[post.rank]
            )
            if been and not come and post.site != other.site:
                counts = self.counts[post.group]
                found = _uneven(post, [post.rank], [other.rank], counts, self.members)
                found.related.append(
                    f"{other.site}: {other.operation}, where rank {other.rank} waits"
                )
                return found
        return None

    def _of_cycle(self, kind: str, cycle: Sequence[Post]) -> Finding:
        steps = [f"rank {post.rank} waits in {line_of(post, self.members)}" for post in cycle[:4]]
        if len(cycle) > 4:
            steps.append(f"and so on around {len(cycle)} ranks")
        ranks = sorted({post.rank for post in cycle})
        related = list(dict.fromkeys(f"{post.site}: {post.operation}" for post in cycle))
        text = f"{'; '.join(steps)}: each waits for a rank that waits for another"
        return Finding(kind, cycle[0].site, ranks, text, cycle[0].operation, 1, related)
