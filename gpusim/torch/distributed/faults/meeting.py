"""Where ranks meet that may be gone: calls fail that need a rank whose process has ended.

A call of gloo's fails for each rank by itself: for those that have a connection to the dead rank in
the call's algorithm (`engines.needed`), and for the others when one of those ends too, or closes
its connections as it has timed out. NCCL's calls do not fail: they wait until their limit. Where
nothing else can go on, a call of gloo's is complete for those that the missing ranks owe nothing
(`engines.is_served`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....maps.completion import Completion
from ..calls.exchange import SAME, Exchange, GroupKey, Pending, Posting, RankWork, Terms
from ..calls.names import backend_name
from ..calls.timeouts import barrier_text
from .engines import (
    ABORTS,
    closed_by_peer,
    closed_here,
    is_served,
    needed,
    not_met,
    timed_out,
)

if TYPE_CHECKING:
    from ..runners.threads import Rank

__all__ = ["MortalExchange", "Part", "is_monitored"]

Name = tuple[str, tuple[int, int], int]


def is_monitored(work: RankWork) -> bool:
    """Whether a call is a monitored_barrier, whose errors have words of their own."""
    return work._pending.terms.get("operation") == "monitored_barrier"


# Owner: the exchange, under its lock.
@dataclass(eq=False)
class Part:
    """A rank's part of a call, or its end of a message.

    **Attributes**: `peers` are the global ranks whose end the call notices. `place` is the rank's
    in the group, and `compute` makes the call; a message has None.
    """

    rank: Any
    work: RankWork
    peers: frozenset[int]
    name: Name
    place: int = 0
    compute: Callable[[list[Any]], None] | None = None

    def is_open(self) -> bool:
        """Whether the call is yet to be completed."""
        return not self.work.is_done()


class MortalExchange(Exchange):
    """The exchange of a launch whose ranks may die."""

    def __init__(self, launch: Any) -> None:
        super().__init__(launch)
        # Lock: the exchange's, for all but `backends`. A rank is put into `gone` or `closed` before
        # calls fail: a call that is posted meanwhile either is found then, or finds the rank here.
        #: The ranks whose processes have ended, and how, in words.
        self.gone: dict[int, str] = {}
        #: By group the ranks that have closed their connections there as they timed out, and why.
        self.closed: dict[Name, dict[int, str]] = {}
        self.parts: dict[Name, list[Part]] = {}
        self.meetings: dict[GroupKey, tuple[set[int], Completion]] = {}
        self.worlds: dict[tuple[int, int], tuple[dict[int, int], Completion]] = {}
        # Written before a group's first call; all ranks of a group say the same.
        self.backends: dict[GroupKey, str] = {}

    def admit(self, key: GroupKey, rank: Rank) -> None:
        super().admit(key, rank)
        self.backends[key] = rank.backend

    def aborts(self, key: GroupKey) -> bool:
        """Whether the group's engine notices nothing, and ends the process at the limit."""
        return backend_name(self.backends.get(key, "")) in ABORTS

    def meet(self, key: GroupKey, rank: Rank, limit: float | None) -> None:
        """Wait until all ranks of a new group have come, as gloo does. (In the rank's thread.)

        **Raises**: torch.distributed.DistStoreError if the limit has expired.
        """
        if self.aborts(key):
            return
        with self.lock:
            arrived, whole = self.meetings.setdefault(
                key, (set(), Completion(self.launch.scheduler))
            )
            arrived.add(rank.index)
            complete = len(arrived) == len(key.ranks)
        if complete:
            whole.complete()
        elif not rank.wait_for(whole, f"the making of {key} at {rank.call_site()}", limit):
            missing = [place for place, each in enumerate(key.ranks) if each not in arrived]
            raise not_met(key.name, missing[0], limit or 0.0)

    def gather_world(
        self, rank: Rank, size: int, place: int, number: int, limit: float | None
    ) -> list[int]:
        """The ranks of a world that some make anew, by their numbers there, once all have come.

        **Raises**: torch.distributed.DistStoreError if the limit has expired.
        """
        with self.lock:
            come, whole = self.worlds.setdefault(
                (size, number), ({}, Completion(self.launch.scheduler))
            )
            if come.setdefault(place, rank.index) != rank.index:
                raise ValueError(
                    f"init_process_group: ranks {come[place]} and {rank.index} are both to be "
                    f"rank {place} of world_size={size}"
                )
            complete = len(come) == size
        if complete:
            whole.complete()
        elif not rank.wait_for(whole, f"init_process_group at {rank.call_site()}", limit):
            missing = min({*range(size)} - come.keys())
            raise not_met("0", missing, limit or 0.0)
        return [come[each] for each in range(size)]

    def post(
        self, rank: Rank, key: GroupKey, place: int, number: int, terms: Terms, made: Posting
    ) -> RankWork:
        work = super().post(rank, key, place, number, terms, made)
        if not work.is_done():
            peers = self._peers(key, place, terms)
            error = self._note(Part(rank, work, peers, _name(key), place, made.compute))
            # Its words are for ranks that have reached the barrier.
            if error is not None and is_monitored(work):
                raise error
        return work

    def _peers(self, key: GroupKey, place: int, terms: Mapping[str, Any]) -> frozenset[int]:
        if self.aborts(key):
            return frozenset()
        return frozenset(key.ranks[each] for each in needed(terms, place, len(key.ranks)))

    def _mail(
        self,
        rank: Rank,
        key: GroupKey,
        receiver: int,
        side: int,
        tensor: Any,
        source: int | None,
        *rest: Any,
    ) -> RankWork:
        work = super()._mail(rank, key, receiver, side, tensor, source, *rest)
        if not work.is_done():
            peer = source if side else receiver
            known = peer is not None and not self.aborts(key)
            peers = frozenset([key.ranks[peer or 0]] if known else [])
            error = self._note(Part(rank, work, peers, _name(key)))
            # gloo begins to send at once, and raises where the connection is closed already.
            if error is not None and side == 0:
                raise error
        return work

    def _note(self, part: Part) -> BaseException | None:
        """Note a part that is not complete; the error, if a rank that it needs is gone."""
        with self.lock:
            open_parts = [each for each in self.parts.get(part.name, ()) if each.is_open()]
            self.parts[part.name] = [*open_parts, part]
            error = self._error_of(part)
        if error is not None:
            self._fail(part, error)
        return error

    def _error_of(self, part: Part) -> BaseException | None:
        """The error of a part at once; None if it may wait. (With the lock held.)"""
        closed = self.closed.get(part.name, {})
        if part.rank.index in closed:
            return closed_here(closed[part.rank.index])
        # Those that have gone on owe nothing.
        peers = part.peers - self._finished(part.work._pending)
        for lost in (self.gone, closed):
            for peer in sorted(peers & lost.keys()):
                return closed_by_peer(peer, lost[peer])
        return None

    def _finished(self, pending: Pending) -> set[int]:
        """The ranks for which a call is complete that others wait for. (With the lock held.)"""
        key = pending.key
        if key is None:
            return set()
        parts = self.parts.get(_name(key), ())
        waiting = {part.place for part in parts if part.work._pending is pending}
        return {key.ranks[place] for place in pending.parts.keys() - waiting}

    def open_parts(self, rank: Rank) -> list[Part]:
        """The calls of a rank that are not complete, in the order in which it made them."""
        with self.lock:
            return [
                part
                for parts in self.parts.values()
                for part in parts
                if part.rank is rank and part.is_open()
            ]

    def served_parts(self, rank: Rank) -> list[Part]:
        """The calls of a rank that are complete for it, though others have not posted them.

        To be asked when nothing else can go on: before, those that are late may come.
        """
        parts = self.open_parts(rank)
        with self.lock:
            return [part for part in parts if self._is_served(part)]

    def _is_served(self, part: Part) -> bool:
        pending = part.work._pending
        key = pending.key
        if part.compute is None or key is None or self.aborts(key):
            return False
        size = len(key.ranks)
        return is_served(pending.terms, part.place, size, pending.sites, pending.parts)

    def serve(self, rank: Rank) -> None:
        """Complete the calls of `served_parts`. (In the rank's thread.)"""
        for part in self.served_parts(rank):
            pending, compute = part.work._pending, part.compute
            key = pending.key
            assert compute is not None and key is not None
            own = pending.parts[part.place]
            # What is computed for the others, missing ones too, goes to copies.
            parts = [_copy(pending.parts.get(place, own)) for place in range(len(key.ranks))]
            parts[part.place] = own
            compute(parts)
            with self.lock:
                # The rank goes on, and uses its memory again: one that is late meets a copy.
                pending.parts[part.place] = _copy(own)
                mine = [each for each in pending.recorded if each[0] == rank.index]
                for each in mine:
                    pending.recorded.remove(each)
            if mine:
                self._record_results(mine, pending.terms["operation"] in SAME)
            self._end(part, None)

    def bury(self, dead: int, how: str) -> None:
        """Let the calls fail that need a rank whose process has ended. (In its proxy's thread.)"""
        with self.lock:
            self.gone[dead] = how
            # Its own part of a call is lost with it. The call is never complete, for ranks that
            # post theirs later too.
            self._drop_calls(dead, lambda key: dead in key.ranks)
            for (key, receiver), boxes in self.mail.items():
                if dead not in key.ranks:
                    continue
                place = key.ranks.index(dead)
                for side, box in enumerate(boxes):
                    for letter in list(box):
                        if place == (receiver if side else letter.source):
                            box.remove(letter)
        self._fail_open(lambda part: dead in part.peers and part.rank.index != dead)

    def expire(self, rank: Rank, work: RankWork, limit: float) -> None:
        """Let a rank's call of gloo's fail at its limit. (In the rank's thread.)

        gloo closes all connections of the rank in the group then: others hear of that, and its
        other calls there fail as well.
        """
        name = _name(work.group._key)
        pending = work._pending
        error = timed_out(pending.title, limit, rank.thread().expired)
        if is_monitored(work) and not work.group.rank():
            error = RuntimeError(barrier_text(work, pending, limit, str(error)))
        why = f"timed out in {pending.title.rstrip(',')} at {work._site}"
        with self.lock:
            self.closed.setdefault(name, {})[rank.index] = why
            # Else a rank that is late would complete the call, and write results to memory that
            # the others have used again.
            self._drop_calls(rank.index, lambda key: _name(key) == name)
            own = [part for part in self.parts.get(name, ()) if part.work is work]
        for part in own:
            self._fail(part, error)
        self._fail_open(lambda part: part.name == name)

    def _drop_calls(self, rank: int, which: Callable[[GroupKey], bool]) -> None:
        """Forget calls of groups that are never to be complete. (With the lock held.)

        A call is, if it needs this rank, which takes no part any more.
        """
        for slot, pending in list(self.calls.items()):
            if pending.key is None or not which(pending.key):
                continue
            if rank not in self._finished(pending):
                del self.calls[slot]

    def _fail_open(self, which: Any) -> None:
        """Let those open parts fail that need what is lost."""
        with self.lock:
            # One whose own limit has expired, and that is yet to run, will say so itself.
            parts = [
                part
                for parts in self.parts.values()
                for part in parts
                if part.is_open() and not part.rank.times_out and which(part)
            ]
            errors = [(part, self._error_of(part)) for part in parts]
        for part, error in errors:
            if error is not None:
                self._fail(part, error)

    def _fail(self, part: Part, error: BaseException) -> None:
        """Complete one rank's part of a call with an error; the others' goes on."""
        with self.lock:
            if part.compute is not None:
                # The call is never complete, also if all others post it.
                part.work._pending.parts.pop(part.place, None)
        self._end(part, error)

    def _end(self, part: Part, error: BaseException | None) -> None:
        """Complete one rank's part of a call; the others' goes on."""
        work, old = part.work, part.work._pending
        new = Pending(old.title, Completion(self.launch.scheduler), old.terms, old.key)
        new.error, new.done.done = error, True
        with self.lock:
            for boxes in self.mail.values():
                for box in boxes:
                    for letter in [each for each in box if each.pending is old]:
                        box.remove(letter)
        scheduler, thread = self.launch.scheduler, part.rank.thread()
        with scheduler.lock:
            # In one piece under the lock, as a Completion does it: who looks sees the rank either
            # waiting or ready.
            work._pending = new
            scheduler.clock.moved()
            if thread.waiting is old.done:
                old.done.withdraw(thread)
                thread.waiting = None
                scheduler.ready.append(thread)
                scheduler.fill_slots()


def _copy(part: Any) -> Any:
    """A part whose arrays are copies."""
    if isinstance(part, np.ndarray):
        return part.copy(order="K")
    return type(part)(map(_copy, part)) if isinstance(part, (list, tuple)) else part


def _name(key: GroupKey) -> Name:
    """A group's name, copy and first rank, which are one group's alone."""
    return key.name, key.copy, key.ranks[0]
