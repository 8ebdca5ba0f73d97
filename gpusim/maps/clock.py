"""Time for replicas: those that sleep, limits of waits, and slots that blocked replicas lose.

**Order.** A sleep, and a wait with a limit, is due at a virtual time. The virtual time moves only
when no replica runs or is ready: to the earliest that is due. So which replica goes on next does
not depend on the machine's speed. A sleep lasts as long as was asked by the machine's clock too;
those of all replicas pass at once. A limit expires without delay, as nothing can happen any more,
unless a replica is away.

**Away.** A replica may wait outside of gpusim for another one: in a socket, a lock of a file, a
process. `outside` marks such a block. A replica that is in one while others could go on, and makes
no progress, loses its slot. It takes one again when it leaves the block, behind the replicas that
are ready. Progress is work of its own (`work_of`), and of what it has started, by the system's
clocks of work and not by the time that passes.

The scheduler's lock guards all state here except `ReplicaThread.outside`. That belongs to the
replica's own thread. At its end the thread clears it and then reads `away`; the watcher sets `away`
and then reads `outside`. So at least one of them sees the other.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import workers
from .scheduler import ReplicaThread, Scheduler

__all__ = ["Clock", "Work", "come_back", "come_inside", "go_outside", "outside", "sleep"]

ROUNDS = 1000
"""How often all replicas that can go on may ask in vain before it is said that none can."""

LOOK = 0.02
"""Seconds between two looks at replicas that are outside."""

LOOKS = 10
"""After so many looks without progress a replica loses its slot."""

IDLE = 0.5
"""A replica makes no progress if it works less than this share of the time. torch's own stores
poll, which on a busy machine is as much as a fifth of the time."""


class Work(NamedTuple):
    """The seconds of work of a replica, and whether it works just now.

    **Attributes**: `at` is when that was seen, in seconds of the machine where the replica works.
    """

    seconds: float
    goes_on: bool
    at: float


class Watched:
    """The work of a replica in a block of `outside`. (Of the thread that watches.)"""

    def __init__(self, stamp: tuple[int, int]) -> None:
        self.stamp, self.looks = stamp, 0
        self._last: Work | None = None
        self._worked = self._passed = 0.0
        self._busy = 0

    def add(self, work: Work) -> None:
        """Note a look, unless it has been noted before."""
        if self._last is not None and work.at == self._last.at:
            return
        if self.looks == LOOKS:
            self.looks, self._worked, self._passed, self._busy = 0, 0.0, 0.0, 0
        if self._last is not None:
            self.looks += 1
            self._worked += work.seconds - self._last.seconds
            self._passed += work.at - self._last.at
            self._busy += work.goes_on
        self._last = work

    def is_idle(self) -> bool:
        """Whether it has worked less than a share of `IDLE`, by the seconds and by the looks."""
        return self._worked < IDLE * self._passed and self._busy < IDLE * self.looks


# Owner: the scheduler. Made and read under its lock. An entry that is no longer its replica's
# `timed` stays in the heap, and is dropped when it comes to the top: so nothing is searched.
class Timed:
    """A replica's sleep, or the limit of its wait; valid while it is the replica's `timed`.

    **Attributes**: `due` is the virtual time, `real` the machine's.
    """

    def __init__(self, replica: ReplicaThread, due: float, real: float, is_limit: bool) -> None:
        self.replica, self.due, self.real, self.is_limit = replica, due, real, is_limit

    def withdraw(self, replica: ReplicaThread) -> None:
        """End the sleep of a replica that ends. (With the scheduler's lock held.)"""
        replica.timed = None


def _unknown(replica: ReplicaThread) -> None:
    """The work of a replica whose thread's clocks are not read."""


class Clock:
    """The virtual time of one scheduler, and the thread that watches its replicas.

    `work_of` gives the work of a replica, and of what it has started; None if unknown.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        work_of: Callable[[ReplicaThread], Work | None] = _unknown,
    ) -> None:
        # Lock: the scheduler's, for all fields below unless a comment says otherwise.
        self.scheduler = scheduler
        # The virtual time. It never goes back, and moves in `_fire` alone: when no replica runs or
        # is ready, or, where several run at a time, when the machine's time has come.
        self.now = 0.0
        # Invariant: the number of started replicas whose `away` is True.
        self.away = 0  # replicas without a slot that may come back at any time
        self.vain = 0  # how often replicas gave way one after another, and nothing else happened
        #: Replicas that have asked in vain in this round. In a round all that can go on ask.
        # A round is over when all that can go on have asked. One that computes meanwhile does not
        # ask, and so holds the round up: a slow replica is never taken for one that asks in vain.
        self._asking: set[ReplicaThread] = set()
        self.rounds = 0  # that have passed one after another, and nothing else happened
        # Called by the watcher's thread, without the lock.
        self.work_of = work_of
        # A heap by virtual time. The second entry breaks ties in the order in which they were
        # added, so that replicas that ask for the same time go on in the order in which they asked.
        self._entries: list[tuple[float, int, Timed]] = []
        self._order = itertools.count()
        # `_watching`: there is a thread that watches, or one is being started. It ends with the
        # scheduler alone: a clock that has never had a sleep or a block outside has none.
        self._watching = self._over = self._rung = False
        # Held as long as nothing is to be done; `_ring` releases it, once, which `_rung` remembers.
        self._bell = threading.Lock()
        self._bell.acquire()
        # Of the watcher's thread alone, without a lock: what it saw at its last look, by replica:
        # the stamp of the block, the work done until then, and for how many looks there was no
        # progress.
        self._seen: dict[ReplicaThread, Watched] = {}

    # Methods below are called with the scheduler's lock held, unless they say otherwise.

    def add(self, replica: ReplicaThread, seconds: float, is_limit: bool) -> Timed:
        """Note the sleep of a replica, or the limit of its wait."""
        entry = Timed(replica, self.now + seconds, time.monotonic() + seconds, is_limit)
        replica.timed, replica.expired = entry, None
        # Something happens: those that poll may go on without the machine's time.
        self.moved()
        heapq.heappush(self._entries, (entry.due, next(self._order), entry))
        self.begin()
        # In turns the virtual time decides alone; else the watcher has to know when the entry is
        # due by the machine's time, as others run.
        if not self.scheduler.one_at_a_time:
            self._ring()
        return entry

    def pending(self) -> bool:
        """Whether a replica will go on, or may, though none is ready."""
        return self.away > 0 or self._first() is not None

    def advance(self) -> bool:
        """Let the first that is due go on, as no replica runs or is ready; False if there is none.

        Another thread does so later, if it is to happen at a time of the machine's.
        """
        entry = self._first()
        if entry is None:
            return self.away > 0
        # A limit need not be waited for: nothing can happen any more. One that is away could still
        # complete what is waited for, so its machine's time counts then; and a sleep has its
        # length.
        if (entry.is_limit and not self.away) or time.monotonic() >= entry.real:
            self._fire(entry)
        else:
            self._ring()
        return True

    def polled(self) -> None:
        """Note that a replica gives way.

        Replicas that poll without sleeping do not let the virtual time move. Where only such run,
        the machine's time counts.
        """
        self.vain += 1
        if not self.scheduler.ready or self.vain > 2 * len(self.scheduler.started):
            self.pass_real_time()

    def moved(self) -> None:
        """Note that something has happened: no replica has asked in vain up to now."""
        self.vain = self.rounds = 0
        self._asking.clear()

    def asked(self, replica: ReplicaThread) -> bool:
        """Note that a replica asks whether another one has done something.

        A replica that does anything else meanwhile, such as to compute, does not ask, and so holds
        up the round.

        **Returns**: False if nothing will happen, as all that can go on ask, again and again.
        """
        scheduler = self.scheduler
        self._asking.add(replica)
        if self.pending():
            self.moved()
        elif len(self._asking) >= scheduler.running + len(scheduler.ready):
            self._asking = {each for each in self._asking if not (each.waiting or each.finished)}
            if len(self._asking) == scheduler.running + len(scheduler.ready):
                self._asking.clear()
                self.rounds += 1
        return self.rounds <= ROUNDS

    def pass_real_time(self) -> None:
        """Let those go on whose time of the machine's has passed."""
        now = time.monotonic()
        while (entry := self._first()) is not None and now >= entry.real:
            self._fire(entry)

    def _first(self) -> Timed | None:
        while self._entries:
            entry = self._entries[0][2]
            if entry.replica.timed is entry:
                return entry
            heapq.heappop(self._entries)
        return None

    def _fire(self, entry: Timed) -> None:
        heapq.heappop(self._entries)
        # From here to `fill_slots` the replica changes from one that waits to one that is ready, in
        # one piece under the lock: who looks sees it in exactly one of both.
        replica, scheduler = entry.replica, self.scheduler
        self.now = max(self.now, entry.due)
        if entry.is_limit:
            said = scheduler.describe_stall
            replica.expired = said() if said is not None else "no replica can go on"
            waiting: Any = replica.waiting
            # Else a later `complete` would make the replica ready a second time.
            waiting.withdraw(replica)
        replica.timed = replica.waiting = None
        scheduler.ready.append(replica)
        scheduler.fill_slots()

    # The watcher

    def begin(self) -> None:
        """Start the thread that watches, if there is none. (With the lock held or not.)"""
        if self._watching or self._over:
            return
        # Set at once, as this may be called without the lock. If two calls pass the question
        # between two bytecodes, two threads watch; no slot is taken twice, as `_take` is under the
        # lock.
        self._watching = True
        try:
            workers.start(self._watch)
        except RuntimeError:
            self._watching = False  # a sleep or a wait begins again

    def end(self) -> None:
        """Let the thread that watches end. (Takes the lock.)"""
        with self.scheduler.lock:
            self._over = True
            self._ring()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._bell.release()

    def _hush(self) -> None:
        if self._rung:
            self._rung = False
            self._bell.acquire(blocking=False)

    def _watch(self) -> None:
        """Let sleepers go on, and take slots away. (In a worker's thread. Takes the lock.)"""
        scheduler = self.scheduler
        pause: float | None = LOOK
        while True:
            self._bell.acquire(timeout=-1 if pause is None else pause)
            with scheduler.lock:
                self._hush()
                if self._over:
                    return
                if not scheduler.one_at_a_time:
                    self.pass_real_time()
                # No replica runs, so none will call `advance`: it is this thread's to let the
                # earliest go on.
                if not scheduler.running and not scheduler.ready:
                    self.advance()
                    self._hush()  # it knows already when to look again
            self._look()
            with scheduler.lock:
                pause = self._pause()

    def _pause(self) -> float | None:
        entry = self._first()
        left = None if entry is None else max(0.0, entry.real - time.monotonic())
        if not self.scheduler.running and not self.scheduler.ready:
            return left
        return LOOK if left is None else max(min(LOOK, left), LOOK / 20)

    def _look(self) -> None:
        """Take the slots of replicas that are outside and make no progress. (Takes the lock.)"""
        # Looks without the lock held in between: `_look` reads clocks of work from /proc, which
        # takes long; only what it decides is done under the lock.
        scheduler = self.scheduler
        with scheduler.lock:
            holders = self._holders() if self.others_wait() else []
        seen, self._seen = self._seen, {}
        for replica, stamp in holders:
            # Reading /proc takes longer than many a block: it is done only for a replica that stood
            # still between two looks.
            # The stamp says that it is the same block as at the last look: else the replica has
            # been back in gpusim since, which is progress.
            watched = seen.get(replica)
            if watched is None or watched.stamp != stamp:  # it has made progress
                self._seen[replica] = Watched(stamp)
                continue
            self._seen[replica] = watched
            watched.add(self.work_of(replica) or Work(0.0, False, time.monotonic()))
            if watched.looks == LOOKS and watched.is_idle():
                with scheduler.lock:
                    if stamp in (each for held, each in self._holders() if held is replica):
                        self._take(replica)

    def others_wait(self) -> bool:
        """Whether something could go on if a replica that is outside lost its slot."""
        return bool(self.scheduler.ready or self._entries)

    def _holders(self) -> list[tuple[ReplicaThread, tuple[int, int]]]:
        """The replicas that run and are outside, each with a stamp of this block."""
        ready = set(self.scheduler.ready)
        return [
            (each, (each.turns, each.blocks))
            for each in self.scheduler.started
            if each.outside and not (each.waiting or each.away or each.finished or each in ready)
        ]

    def _take(self, replica: ReplicaThread) -> None:
        """Take the replica's slot, unless it is just leaving its block."""
        # Invariant of the block's end: the replica's thread writes `outside` and then reads `away`;
        # here `away` is written and then `outside` read. One of both sees the other. If both do,
        # the thread finds `away` False under the lock in `come_back`, and keeps its slot.
        replica.away = True
        if not replica.outside:
            replica.away = False
            return
        self.away += 1
        self.scheduler.running -= 1
        # The others may all wait for this one: then what is due goes on.
        self.scheduler.fill_slots()
        self.scheduler.check_stalled()


@contextmanager
def outside(replica: ReplicaThread) -> Iterator[None]:
    """A block in which the replica may wait for what is outside of gpusim. (In its own thread.)

    It must read and write nothing there that changes hands with a turn.
    """
    if replica.outside:  # a block in a block
        yield
        return
    go_outside(replica)
    try:
        yield
    finally:
        come_inside(replica)


def go_outside(replica: ReplicaThread) -> None:
    """Begin a block of `outside`, which `come_inside` ends. (In its own thread.)"""
    replica.call.scheduler.clock.begin()
    # Before `outside`, so that the watcher never sees a new block under an old stamp.
    replica.blocks += 1
    replica.outside = True


def come_inside(replica: ReplicaThread) -> None:
    """End a block of `outside`. (In its own thread.)"""
    replica.outside = False
    # Without the lock: see `Clock._take`.
    if replica.away:
        come_back(replica)


def come_back(replica: ReplicaThread) -> None:
    """Take a slot again, where the watcher has taken it away. (In its own thread.)

    **Raises**: ReplicaEnded if the replica has been ended meanwhile.
    """
    scheduler = replica.call.scheduler
    with scheduler.lock:
        away, inside = replica.away, replica.inside
        if away:
            # No exception may be posted from here on: the thread is to wait for a slot, and would
            # leave the queue with one.
            replica.inside = True
            replica.away = False
            scheduler.clock.away -= 1
            scheduler.ready.append(replica)
            scheduler.fill_slots()
    if not away:
        return
    replica.wake.wait()
    with scheduler.lock:
        replica.inside = inside
        replica.check_ended()


def sleep(replica: ReplicaThread, seconds: float) -> None:
    """Sleep without a slot. (In its own thread.)

    **Raises**: ReplicaEnded if the replica is ended meanwhile.
    """
    scheduler = replica.call.scheduler
    with scheduler.lock:
        replica.inside = replica.serves or not replica.ended
        replica.check_ended()
        replica.waiting = scheduler.clock.add(replica, seconds, is_limit=False)
        scheduler.release_slot()
    replica.wake.wait()
    with scheduler.lock:
        replica.inside = replica.serves
        replica.check_ended()
