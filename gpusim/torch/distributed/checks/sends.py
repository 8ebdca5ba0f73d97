"""The order of messages that are not in a batch, as NCCL runs them.

ProcessGroupNCCL gives each pair of ranks that exchange unbatched messages a communicator of its
own, made at the first message. There the host waits for the other end, and later the messages of
the pair are one sequence. A group that is bound to a device (`device_id`) runs them in the sequence
of its collectives instead. PyTorch's warning "An unbatched P2P op was called" has both. A send ends
when it has been received: nothing else is guaranteed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .cycles import Leg, cycles
from .findings import Finding, ranks_in_words
from .posts import Post, line_of

__all__ = ["analyse"]


FIRST = "; at the first message of two ranks the host waits for the other end"
"""Why an order of messages of several pairs hangs, in the words of a finding."""


class _Line(NamedTuple):
    """The sequence in which a rank's calls run, or in which its host waits for other ends."""

    nodes: list[Hashable]
    posts: list[Post]


def analyse(posts: Sequence[list[Post]], members: dict[str, list[int]]) -> list[Finding]:
    """Messages that wait for each other, in the orders of the ranks."""
    if not any(post.number is None for own in posts for post in own):
        return []
    sequences: list[_Line] = []
    firsts: list[_Line] = []
    for own in posts:
        lines, first = _lines(own, members)
        sequences += lines
        firsts.append(first)
    return [*_findings(sequences, members), *_findings(firsts, members, FIRST)]


def _lines(own: Sequence[Post], members: dict[str, list[int]]) -> tuple[list[_Line], _Line]:
    """A rank's sequences of calls, and of the first messages of its pairs."""
    lines: dict[Hashable, _Line] = {}
    first = _Line([], [])
    counts: dict[Hashable, int] = {}
    any_source = {post.group for post in own if post.number is None and post.peer is None}
    bound = {post.group for post in own if post.about.get("bound")}
    for post in own:
        # Messages of which the other end is not known have no place in a sequence.
        if not post.is_on_nccl or post.group in any_source:
            continue
        if post.number is not None:
            if post.group in bound and len(members[post.group]) > 1:
                key: Hashable = post.group
                node: Hashable = post.group, post.number
            else:
                continue
        elif "batch" in post.about or post.peer == post.rank:
            continue
        else:
            pair = post.group, *sorted(post.ends)
            way = post.group, *post.ends
            key = post.group if post.group in bound else pair
            node = *way, counts.get(way, 0)
            counts[way] = counts.get(way, 0) + 1
            if key not in lines and post.group not in bound:
                first.nodes.append(pair)
                first.posts.append(post)
        line = lines.setdefault(key, _Line([], []))
        line.nodes.append(node)
        line.posts.append(post)
    return list(lines.values()), first


def _findings(
    lines: Sequence[_Line], members: dict[str, list[int]], why: str = ""
) -> list[Finding]:
    nodes = [line.nodes for line in lines]
    likes = [[(post.site, post.rank, post.peer) for post in line.posts] for line in lines]
    found = []
    for cycle in cycles(nodes, likes):
        ends = [_ends(lines, leg) for leg in cycle]
        if any(post.number is None for both in ends for post in both):
            found.append(_finding(ends, members, why))
    return found


def _ends(lines: Sequence[_Line], leg: Leg) -> tuple[Post, Post]:
    posts = lines[leg.line].posts
    return posts[leg.first], posts[leg.last]


def _finding(ends: Sequence[tuple[Post, Post]], members: dict[str, list[int]], why: str) -> Finding:
    involved = [post for both in ends for post in both]
    sends = [first for first, _ in ends if first.operation == "send"]
    sends += [post for post in involved if post.operation == "send"]
    post = (sends or involved)[0]
    orders = [
        f"{ranks_in_words([first.rank])} enqueues {line_of(first, members)} before "
        f"{line_of(last, members)}"
        for first, last in ends[:4]
    ]
    if len(ends) > 4:
        orders.append(f"and so on around {len(ends)} ranks")
    return Finding(
        "send-order",
        post.site,
        sorted({each.rank for each in involved}),
        "; ".join(orders) + why,
        post.operation,
        related=list(dict.fromkeys(f"{each.site}: {each.operation}" for each in involved)),
    )
