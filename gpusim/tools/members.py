"""The processes that are ranks of a world, as the hub sees them."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpusim.words import count

__all__ = ["Forming", "Member", "World"]

SHOWN = 8
"""How many ranks a message names."""


class Member:
    """A process that is, or is to be, a rank.

    **Attributes**: `key` says which world it means, `limit` until when it waits for the others.
    """

    def __init__(self, end: socket.socket, process: int, about: dict[str, Any]) -> None:
        self.end, self.process = end, process
        self.key, self.name, self.site = str(about["key"]), str(about["name"]), str(about["site"])
        self.rank, self.size = int(about["rank"]), int(about["size"])
        self.seconds = float(about["timeout"])
        self.limit = time.monotonic() + self.seconds

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process}, {self.name}, at {self.site})"

    def refuse(self, kind: str, message: str, close: bool = True) -> None:
        """Answer by an error."""
        from gpusim.torch.distributed.runners.messages import (
            Channel,  # which the hub has, as a rank has come
        )

        with suppress(OSError):
            Channel(self.end).send({"error": kind, "text": message})
        if close:
            self.end.close()

    def is_gone(self) -> bool:
        """Whether its end of the socket is closed."""
        poll = select.poll()
        poll.register(self.end, 0)
        return bool(poll.poll(0))


class Forming:
    """A world whose ranks have not all come."""

    def __init__(self, key: str, size: int) -> None:
        self.key, self.size = key, size
        self.members: list[Member] = []

    def refusal(self, member: Member) -> str:
        """The reason why a process cannot be a rank of it; empty if it can."""
        if member.size < 1 or not 0 <= member.rank < member.size:
            return (
                f"init_process_group: rank={member.rank}, world_size={member.size}: expected a "
                "rank from 0 to world_size - 1"
            )
        for other in self.members:
            if other.size != member.size:
                return (
                    f"init_process_group: ranks that meet at {self.key} differ in world_size: "
                    f"{other} says {other.size}, {member} says {member.size}"
                )
            if other.rank == member.rank:
                return (
                    f"init_process_group: two processes that meet at {self.key} have the same "
                    f"rank: {other} and {member}"
                )
        return ""

    def add(self, member: Member) -> None:
        self.members.append(member)

    def is_complete(self) -> bool:
        return len(self.members) == self.size

    def in_order(self) -> list[Member]:
        return sorted(self.members, key=lambda member: member.rank)

    def missing(self) -> str:
        """The ranks that are missing, and those that are there, in words."""
        there = {member.rank for member in self.members}
        lacks = [rank for rank in range(self.size) if rank not in there]
        came = ", ".join(map(str, self.in_order()[:SHOWN]))
        return (
            f"of {count(self.size, 'rank')} that are to meet at {self.key}, "
            f"{ranks_in_words(lacks)} "
            f"{'have' if len(lacks) > 1 else 'has'} not come; there {_is(self.members)} {came}"
        )

    def in_vain(self) -> str:
        return (
            f"init_process_group: {self.missing()}; all other processes of the script wait for "
            "these, so that no rank can come"
        )

    def timed_out(self, member: Member) -> str:
        return f"init_process_group: timed out after {member.seconds:g} seconds: {self.missing()}"


def _is(members: Sequence[Member]) -> str:
    return "are" if len(members) > 1 else "is"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """
    >>> ranks_in_words([1, 3])
    'ranks 1, 3'
    """
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


class World:
    """A world that there is: its members, and the process that makes their calls.

    **Attributes**: `end` is readable when the process has ended.
    """

    def __init__(
        self, key: str, members: Sequence[Member], process: int, end: socket.socket
    ) -> None:
        self.key, self.members, self.process, self.end = key, members, process, end
        self.size = len(members)
        self.first = next(member for member in members if member.rank == 0)

    def is_left(self) -> bool:
        """Whether all its ranks are gone, so that its process is about to end."""
        return all(member.is_gone() for member in self.members)

    def close(self) -> None:
        self.end.close()
        for member in self.members:
            member.end.close()
