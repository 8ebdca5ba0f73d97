"""Completion: something that replicas wait for, each when it likes, until another one completes it.

In a rendezvous all replicas wait at their call. What has begun before it is waited for, as an
asynchronous operation, is a Completion.
"""

from __future__ import annotations

import time

from .scheduler import ReplicaThread, Scheduler

__all__ = ["Completion", "give_way"]

_sleep = time.sleep  # which is replaced where ranks run


class Completion:
    """An event of one scheduler, which happens once.

    **Attributes**: `done` is True from then on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        # Written under the scheduler's lock, once. Read without it by the thread of a rank that
        # only asks: it goes from False to True, and what it stands for is complete before.
        self.done = False
        # Lock: the scheduler's. Invariant: a replica is in it if and only if its `waiting` is this
        # one.
        self.waiting: list[ReplicaThread] = []

    def wait(self, replica: ReplicaThread, limit: float | None = None) -> bool:
        """Wait in the replica's own thread, without an execution slot.

        **Returns**: False if `limit`, in seconds, has expired before: the replica's `expired` says
        then who waited for what.

        **Raises**: ReplicaEnded if the replica is ended meanwhile.
        """
        scheduler = self.scheduler
        with scheduler.lock:
            # From here to the end no exception is posted to this thread: it looks itself, before it
            # gives its slot away and after it has one again. Else it would leave with a lock, or
            # with two slots.
            replica.inside = replica.serves or not replica.ended
            replica.check_ended()
            ready = self.done
            if not ready:
                # In one piece with `release_slot`: no thread sees a replica that waits and holds a
                # slot.
                self.waiting.append(replica)
                replica.waiting = self
                if limit is not None:
                    scheduler.clock.add(replica, limit, is_limit=True)
                scheduler.release_slot()
        # Without the lock. The wake-up may have come before: it is not lost.
        if not ready:
            replica.wake.wait()
        with scheduler.lock:
            replica.inside = replica.serves
            replica.check_ended()
        return self.done

    def complete(self) -> None:
        """Make the replicas that wait ready, in the order in which they came."""
        with self.scheduler.lock:
            self.done = True
            # It is progress: those that poll may be about to see it.
            self.scheduler.clock.moved()
            for replica in self.waiting:
                replica.waiting = replica.timed = None
                self.scheduler.ready.append(replica)
            self.waiting.clear()
            self.scheduler.fill_slots()

    def withdraw(self, replica: ReplicaThread) -> None:
        """Remove a replica that ends. (With the scheduler's lock held.)"""
        self.waiting.remove(replica)
        replica.timed = None


def give_way(replica: ReplicaThread, asks: bool = False) -> bool:
    """Let the replicas that are ready run first, and those that have slept long enough.

    **Arguments**: `asks` says that the replica asks whether another one has done something, and
    does nothing else. (In its own thread.)

    **Returns**: False if it asks in vain, as no replica does anything but ask.
    """
    scheduler = replica.call.scheduler
    with scheduler.lock:
        replica.inside = replica.serves or not replica.ended
        replica.check_ended()
        scheduler.clock.polled()
        others = bool(scheduler.ready)
        goes_on = not asks or scheduler.clock.asked(replica)
        if others:
            scheduler.ready.append(replica)
            scheduler.running -= 1
            scheduler.fill_slots()
    if others:
        replica.wake.wait()
    # No other is ready, as all have slots: it is the interpreter's lock that they wait for.
    elif asks and not scheduler.one_at_a_time:
        _sleep(0)  # others run: without it they would wait for the interpreter's lock
    with scheduler.lock:
        replica.inside = replica.serves
        replica.check_ended()
    return goes_on
