"""Calls as the logs have them, for the parts that compare ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .findings import ranks_in_words
from .log import Log

__all__ = ["Post", "group_in_words", "line_of", "members_of", "posts_of"]


class Post(NamedTuple):
    """A call that a rank has posted.

    **Attributes**: `place` is its index among the rank's events. `number` is None for messages.
    """

    rank: int
    place: int
    id: int
    group: str
    number: int | None
    operation: str
    site: str
    about: dict[str, Any]

    @property
    def is_on_nccl(self) -> bool:
        return self.about.get("engine") == "nccl"

    @property
    def peer(self) -> int | None:
        """The global rank at the other end of a message; None where any may send it."""
        return self.about.get("peer")

    @property
    def ends(self) -> tuple[int, int]:
        """The sender and the receiver of a message."""
        assert self.peer is not None
        return (self.rank, self.peer) if self.operation == "send" else (self.peer, self.rank)


def posts_of(log: Log) -> list[Post]:
    """All calls of a rank, in the order of its program."""
    return [
        Post(log.rank, place, *event[1:])
        for place, event in enumerate(log.events)
        if event[0] == "post"
    ]


def members_of(logs: Sequence[Log]) -> dict[str, list[int]]:
    """The global ranks of each group, by its label."""
    return {label: ranks for log in logs for label, ranks in log.groups.items()}


def group_in_words(label: str, ranks: Sequence[int]) -> str:
    """A group as texts name it.

    >>> group_in_words("0", [0, 1, 2])
    "group '0' (ranks 0 to 2)"
    """
    return f"group {label!r} ({ranks_in_words(ranks)})"


def line_of(post: Post, members: dict[str, list[int]]) -> str:
    """A call with its line, and its group or the other end."""
    if post.number is None:
        word = "to" if post.operation == "send" else "from"
        return f"{post.operation} {word} rank {post.peer} at {post.site}"
    group = group_in_words(post.group, members[post.group])
    return f"{post.operation} of {group} at {post.site}"
