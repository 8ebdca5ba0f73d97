"""Time-outs that programs set: they expire when no rank can go on, with the exceptions of gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed.constants import default_pg_timeout

from .waits import note_stall

if TYPE_CHECKING:
    from .exchange import Exchange, Pending, RankWork
    from .group import RankGroup

__all__ = [
    "LATER",
    "SOON",
    "barrier_text",
    "expired",
    "group_limit",
    "milliseconds",
    "reached_in_vain",
    "seconds_of",
]

DEFAULTS = (default_pg_timeout, timedelta(seconds=300))
"""Time-outs of groups and of stores that a program has not set."""


SOON = 1e-9
"""Seconds of a time-out of none."""

LATER = 2
"""How much longer than rank 0 the others wait in monitored_barrier."""


def seconds_of(timeout: timedelta | None, is_set: bool = False) -> float | None:
    """A time-out in seconds; None if there is none.

    Unless it `is_set`, torch's defaults are none.
    """
    if not isinstance(timeout, timedelta) or (not is_set and timeout in DEFAULTS):
        return None
    return timeout.total_seconds() if timeout > timedelta() else None


def group_limit(timeout: timedelta | None, backend: str) -> float | None:
    """The limit, in seconds, of calls of a group. NCCL's ends the process, and is none here."""
    named = backend.lower()
    is_gloo = "gloo" in named or named in ("", "undefined")
    return seconds_of(timeout) if is_gloo else None


def reached_in_vain(rank: int, original: str) -> str:
    """The words of monitored_barrier in the ranks that have come to it, after another's error."""
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: "
        f"\n{original}"
    )


def milliseconds(seconds: float | None) -> int:
    """A limit as torch's messages have it."""
    return round(1000 * (seconds or 0))


def expired(work: RankWork, limit: float, own: bool, stall: str | None) -> BaseException:
    """The exception of a rank's call whose limit has expired.

    **Arguments**: `own` is True if the limit is that of this wait alone, after which the call goes
    on. Else the group is broken, as gloo closes the connections: its other ranks get an error.
    """
    exchange: Exchange = work._rank.launch.exchange
    pending = work._pending
    if own and pending.key is not None:
        return note_stall(RuntimeError("Operation timed out!"), stall)
    kind = "send" if pending.title.startswith("send") else "recv"
    is_monitored = pending.terms.get("operation") == "monitored_barrier"
    limit = limit / LATER if is_monitored and work.group.rank() else limit
    text = f"[gloo] Timed out waiting {milliseconds(limit)}ms for {kind} operation to complete"
    why = f"rank {work._rank.index} timed out in {pending.title.rstrip(',')} at {work._site}"
    if is_monitored:
        text = barrier_text(work, pending, limit, text)
    group = work.group
    with exchange.lock:
        _break(exchange, group, pending, why)
    pending.done.complete()
    return note_stall(RuntimeError(text), stall)


def _break(exchange: Exchange, group: RankGroup, pending: Pending, why: str) -> None:
    key = group._key
    exchange.broken[key.name, key.copy, key.ranks[0]] = why
    pending.error = RuntimeError(f"Connection closed by peer: {why}")
    for boxes in exchange.mail.values():
        for box in boxes:
            for letter in [each for each in box if each.pending is pending]:
                box.remove(letter)


def barrier_text(work: RankWork, pending: Pending, limit: float, original: str) -> str:
    """The words of monitored_barrier: in rank 0, which rank is missing."""
    group, after = work.group, f"failed to pass monitoredBarrier in {milliseconds(limit)} ms"
    me = group.rank()
    if me:
        return reached_in_vain(me, original)
    missing = [place for place in range(group.size()) if place not in pending.sites]
    if limit <= SOON:
        return (
            "Rank 0 timed out in monitoredBarrier after 0 ms.\n"
            "No ranks successfully processed in monitoredBarrier."
        )
    if work.names_all:
        return f"[Rank 0]: Ranks {', '.join(map(str, missing))} {after}"  # also of one
    return f"[Rank 0]: Rank {missing[0]} {after}\n Original exception: \n{original}"
