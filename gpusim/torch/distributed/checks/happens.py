"""Which file accesses of ranks happen before which others: vector clocks over the logs.

A rank knows what another did once something has come from there: a collective that all ranks have
to post before one is done, a broadcast of its root, a message, a key of the store, a group that is
made. The clock of a rank says of each rank how many of its accesses are known to be over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .log import Log

__all__ = ["Clock", "replay"]

Clock = NDArray[np.int64]

FROM_ROOT = frozenset(["broadcast", "scatter"])
TO_ROOT = frozenset(["gather", "reduce"])


@dataclass
class _Meeting:
    """A call, or a group that is made, where ranks meet.

    `clocks` are those of the ranks that have come, by their places, and `missing` those that have
    not. `joined` is there when all have: then the ranks that are `waiting` go on. Those that wait
    `for_root` go on when the root has come.
    """

    missing: set[int]
    root: int | None = None
    clocks: dict[int, Clock] = field(default_factory=dict)
    joined: Clock | None = None
    waiting: list[int] = field(default_factory=list)
    for_root: list[int] = field(default_factory=list)


def replay(logs: Sequence[Log], access: Callable[[int, list[Any], Clock], Clock]) -> None:
    """Go through the events of all ranks, each after those that it has to wait for.

    `access` gets each access to a file: the place of the rank's log, the event, and the rank's
    clock. It returns the clock after the access. Clocks are not written to.
    """
    _Replay(logs, access).run()


class _Replay:
    """The state of a replay. Ranks are named by the places of their logs."""

    def __init__(
        self, logs: Sequence[Log], access: Callable[[int, list[Any], Clock], Clock]
    ) -> None:
        self.logs, self.access = logs, access
        self.places = {log.rank: place for place, log in enumerate(logs)}
        zero = np.zeros(len(logs), np.int64)
        zero.flags.writeable = False
        self.clocks: list[Clock] = [zero] * len(logs)
        self.next = [0] * len(logs)
        self.posts: list[dict[int, list[Any]]] = [{} for _ in logs]
        self.meetings: dict[tuple[str, Any], _Meeting] = {}
        self.messages: dict[tuple[Any, ...], Clock] = {}
        #: How many messages there were each way.
        self.counts: dict[tuple[Any, ...], int] = {}
        self.received: dict[tuple[int, int], tuple[Any, ...] | None] = {}
        self.awaited: dict[tuple[Any, ...], int] = {}
        #: By receiver: all that has been sent to it, for receives from any rank.
        self.sent: dict[tuple[str, int | None], Clock] = {}
        #: By key: what its setters knew. Their events are replayed in the order of their times.
        self.keys: dict[str, Clock] = {}
        self.times = deque(
            sorted(
                (event[2], place, number)
                for place, log in enumerate(logs)
                for number, event in enumerate(log.events)
                if event[0] in ("set", "got")
            )
        )
        self.serve = {
            "done": self._done,
            "file": self._file,
            "got": self._got,
            "joined": self._join,
            "post": self._post,
            "set": self._set,
        }
        self.ready = deque(range(len(logs)))
        #: Ranks whose next event waits, in no order.
        self.blocked: dict[int, None] = {}

    def run(self) -> None:
        while self.ready or self.blocked:
            if self.ready:
                place = self.ready.popleft()
            else:
                place = self._first_of_blocked()
                del self.blocked[place]
                self._step(place, forced=True)
            while self.next[place] < len(self.logs[place].events):
                if not self._step(place):
                    self.blocked[place] = None
                    break

    def _first_of_blocked(self) -> int:
        """The rank that goes on if all wait."""
        # Simulated ranks do not wait for each other when they make a group. What one does before
        # it may be later than what another does after it, and goes first all the same.
        waiting = ((self.logs[place].events[self.next[place]], place) for place in self.blocked)
        timed = [(event[2], place) for event, place in waiting if event[0] in ("set", "got")]
        # Else what it waits for is in no log: a rank was killed, or the program has ended.
        return min(timed)[1] if timed else next(iter(self.blocked))

    def _step(self, place: int, forced: bool = False) -> bool:
        """Replay the next event of a rank; False if it waits for another rank."""
        number = self.next[place]
        event = self.logs[place].events[number]
        serve = self.serve.get(event[0])
        if serve is not None and not serve(place, event, number, forced):
            return False
        self.next[place] = number + 1
        return True

    def _wake(self, places: list[int]) -> None:
        for place in places:
            if place in self.blocked:
                del self.blocked[place]
                self.ready.append(place)
        places.clear()

    def _know(self, place: int, other: Clock | None) -> None:
        """Let the rank know what another clock says."""
        own = self.clocks[place]
        if other is None or other is own:
            return
        joined = np.maximum(own, other)
        if not np.array_equal(joined, own):
            self.clocks[place] = other if np.array_equal(joined, other) else joined

    def _file(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        self.clocks[place] = self.access(place, event, self.clocks[place])
        return True

    # Collectives, and groups that are made

    def _meet(self, place: int, key: tuple[str, Any], ranks: Sequence[int]) -> _Meeting:
        meeting = self.meetings.get(key)
        if meeting is None:
            own = {self.places[rank] for rank in ranks if rank in self.places}
            meeting = self.meetings[key] = _Meeting(own)
        if place in meeting.missing:
            meeting.missing.discard(place)
            meeting.clocks[place] = self.clocks[place]
            if place == meeting.root:
                self._wake(meeting.for_root)
            if not meeting.missing:
                meeting.joined = self._joined(meeting)
                self._wake(meeting.waiting)
        return meeting

    @staticmethod
    def _joined(meeting: _Meeting) -> Clock:
        clocks = list({id(clock): clock for clock in meeting.clocks.values()}.values())
        if meeting.root is None:
            meeting.clocks.clear()
        return clocks[0] if len(clocks) == 1 else np.max(clocks, axis=0)

    def _join(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        meeting = self._meet(place, ("group", event[1]), event[2])
        if meeting.missing and not forced:
            meeting.waiting.append(place)
            return False
        self._know(place, meeting.joined)
        return True

    def _post(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        _, id_, group, call, operation, _, about = event
        self.posts[place][id_] = event
        if call is None:
            self._post_message(place, id_, group, operation, about)
            return True
        key = group, call
        if key not in self.meetings and "root" in about:
            members = {self.places[r] for r in self.logs[place].groups[group] if r in self.places}
            self.meetings[key] = _Meeting(members, self.places.get(about["root"]))
        self._meet(place, key, self.logs[place].groups[group])
        return True

    def _done(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        post = self.posts[place].get(event[1])
        if post is None:
            return True
        _, _, group, call, operation, _, _ = post
        if call is None:
            return self._done_message(place, post, forced)
        meeting = self.meetings[group, call]
        if operation in FROM_ROOT:
            root = meeting.root
            if root is not None and root not in meeting.clocks and not forced:
                meeting.for_root.append(place)
                return False
            self._know(place, None if root is None else meeting.clocks.get(root))
        elif operation not in TO_ROOT or place == meeting.root:
            if meeting.missing and not forced:
                meeting.waiting.append(place)
                return False
            self._know(place, meeting.joined)
        del self.posts[place][event[1]]
        return True

    # Messages

    def _post_message(
        self, place: int, id_: int, group: str, operation: str, about: dict[str, Any]
    ) -> None:
        rank, peer, tag = self.logs[place].rank, about.get("peer"), about.get("tag", 0)
        if operation == "send":
            to = group, peer
            before = self.sent.get(to)
            own = self.clocks[place]
            self.sent[to] = own if before is None else np.maximum(before, own)
        if peer is None:
            self.received[place, id_] = None
            return
        ends = (rank, peer) if operation == "send" else (peer, rank)
        way = (operation, group, *ends, tag)
        count = self.counts.get(way, 0)
        self.counts[way] = count + 1
        message = (*way[1:], count)
        if operation == "recv":
            self.received[place, id_] = message
            return
        self.messages[message] = self.clocks[place]
        waiting = self.awaited.pop(message, None)
        if waiting is not None:
            self._wake([waiting])

    def _done_message(self, place: int, post: list[Any], forced: bool) -> bool:
        if post[4] != "recv":
            return True
        message = self.received[place, post[1]]
        if message is None:  # from any rank: when nothing else can be replayed
            if forced:
                self._know(place, self.sent.get((post[2], self.logs[place].rank)))
            return forced
        if message not in self.messages and not forced:
            self.awaited[message] = place
            return False
        self._know(place, self.messages.pop(message, None))
        return True

    # The store

    def _set(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        if not self._is_first(place, event, number, forced):
            return False
        key, own = event[1], self.clocks[place]
        before = self.keys.get(key)
        self.keys[key] = own if before is None or before is own else np.maximum(before, own)
        return self._took_turn(place, event, number)

    def _got(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        if not self._is_first(place, event, number, forced):
            return False
        self._know(place, self.keys.get(event[1]))
        return self._took_turn(place, event, number)

    def _is_first(self, place: int, event: list[Any], number: int, forced: bool) -> bool:
        return forced or self.times[0] == (event[2], place, number)

    def _took_turn(self, place: int, event: list[Any], number: int) -> bool:
        mine = (event[2], place, number)
        if self.times[0] == mine:
            self.times.popleft()
        else:
            self.times.remove(mine)
        if self.times:
            self._wake([self.times[0][1]])
        return True
