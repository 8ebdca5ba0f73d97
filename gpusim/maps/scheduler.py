"""The scheduler of pmap's replica threads: execution slots, rendezvous, deadlocks and errors.

A pmap inside a pmap joins the outermost one's scheduler. One lock guards all state. A replica that
waits holds no slot. When no replica runs and none is ready, those that wait are deadlocked.

Each replica stays on one thread of `workers`. A thread whose replica has ended runs the next one
that has not begun, so that replicas that never wait need no more threads than there are slots.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from types import FrameType
from typing import Any, Protocol

from ..errors import CollectiveMismatchError, DeadlockError, GpusimError
from ..runtime.engines import while_waiting
from . import workers
from .axis_environment import Axes, AxisEntry
from .call_site import call_site, is_users
from .ending import ReplicaEnded, ReplicaInterrupted, end_thread, interrupted, quiet_ends
from .handover import HandOver

ENDING_POLL = 0.05
"""Seconds between the attempts to end replicas that still run."""

ENDING_GRACE = 0.1
"""Seconds in which replicas may end by themselves, at their next collective. Most do, and need no
posted exception, which is lost if it is raised in a destructor."""

SIGNAL_POLL = 0.2
"""Seconds after which the thread that called pmap looks whether Ctrl-C was pressed."""

ABANDONED_POLL = 1.0
"""The same as ENDING_POLL, once the caller of pmap no longer waits."""

SECOND_GRACE = 0.3
"""Seconds after a second Ctrl-C in which replicas may still end, as two can come at once."""

PATIENCE = 1.0
"""Seconds after Ctrl-C after which pmap says for which replicas it waits."""

PATIENCE_AFTER_ERROR = 5.0
"""The same after the error of a replica."""


class Wait(Protocol):
    """An event that a replica waits for without a slot: a rendezvous, a Completion, a sleep."""

    def withdraw(self, replica: ReplicaThread) -> None:
        """Remove a replica that ends. (With the scheduler's lock held.)"""


class Timekeeper(Protocol):
    """The virtual time of a scheduler: `clock.Clock`, which is made above the scheduler.

    **Attributes**: `now` is the virtual time, `away` the number of started replicas whose `away` is
    True, `rounds` the number of rounds in which all have asked in vain.
    """

    now: float
    away: int
    rounds: int

    def add(self, replica: ReplicaThread, seconds: float, is_limit: bool) -> Wait:
        """Note the sleep of a replica, or the limit of its wait."""

    def advance(self) -> bool:
        """Let the first that is due go on, as no replica runs or is ready; False without one."""

    def polled(self) -> None:
        """Note that a replica gives way."""

    def moved(self) -> None:
        """Note that something has happened."""

    def asked(self, replica: ReplicaThread) -> bool:
        """Note that a replica asks whether another one has done something; False: in vain."""

    def begin(self) -> None:
        """Start the thread that watches, if there is none. (With the lock held or not.)"""

    def end(self) -> None:
        """Let the thread that watches end. (Takes the lock.)"""


# Owner: its PmapCall. Lock: the scheduler's, for all fields but these: `outside` and `blocks` are
# the replica's own thread's (see `clock`); `outcome` and `error` are written by the one that
# computes, under the lock, and read by the replica's thread after it has been woken; `wake` orders
# by itself.
class ReplicaThread:
    """One replica of one pmap call: its thread, its axis entry, and the rendezvous it waits in.

    **Attributes**:

    - `inside`: True while the thread runs gpusim's own code. No exception is posted to it then; it
      checks `ended` itself.
    - `serves`: whether the thread runs gpusim's own code alone, so that it stays inside.
    - `waiting`: the rendezvous or the Completion it waits for, its sleep, or the inner pmap call.
    - `timed`: its sleep, or the limit of its wait. `expired`: who waited for what, if the limit has
      expired.
    - `outside`, `away`: whether it is in a block of `clock.outside`, and has lost its slot there.
    - `turns`, `blocks`: how often it has got a slot, and how many such blocks it has begun.
    """

    def __init__(self, call: PmapCall, entry: AxisEntry, context: Context) -> None:
        self.call = call
        self.entry = entry
        self.context = context
        # Woken once for each time that the replica loses its slot. The one who wakes has counted
        # the slot in `running` before: the replica never takes one by itself.
        self.wake = HandOver()
        self.thread: threading.Thread | None = None  # once it runs
        # It never goes back. A replica in `ready` that is not started has no thread yet.
        self.started = False
        self.finished = False
        # It is to end. Set once, by `abort`; the thread sees it at the latest at its next
        # collective.
        self.ended = False
        # Invariant: an exception is posted only while it is False. So it is True wherever the
        # thread may hold the scheduler's lock, or is about to give its slot away or to get one.
        self.inside = True
        # Set once, by the replica's own thread. Waits leave `inside` True then.
        self.serves = False
        # Invariant: while it is not None the replica holds no slot, and is neither ready nor away.
        # All kinds except PmapCall have `withdraw`.
        self.waiting: Wait | PmapCall | None = None
        self.timed: Wait | None = None
        self.expired: str | None = None
        self.outside = self.away = False
        # Together they are a stamp: the watcher compares it to see whether a block is still the
        # same.
        self.turns = self.blocks = 0
        self.position = 0  # its position in the rendezvous
        self.stream_slot: Any = None  # its GPU and stream, of `streams`
        self.outcome: Any = None
        self.error: BaseException | None = None

    def meet(
        self,
        threaded_axes: Axes,
        enclosing: Axes,
        terms: dict[str, Any],
        contribution: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Wait for the other replicas along the axes; the last to arrive computes all outcomes.

        An exception in `compute` is raised in every replica.
        """
        scheduler = self.call.scheduler
        # Before the lock is taken: it walks up the stack, which takes longer than all that the lock
        # is for.
        site = call_site()
        with scheduler.lock:
            self.inside = not self.ended
            self.check_ended()
            rendezvous = scheduler.rendezvous_of(threaded_axes, enclosing)
            # It may abort the whole call, if the terms differ: this replica is then `ended` too.
            complete = rendezvous.arrive(self, threaded_axes, terms, contribution, site)
            if self.ended:  # the terms differ
                self.inside = False
                raise ReplicaEnded
            # In one piece with the arrival: else the last replica could complete the rendezvous
            # before this one waits, and this one would then wait for ever.
            if not complete:
                self.waiting = rendezvous
                scheduler.release_slot()
        if complete:
            # Here `compute` runs: in the thread of the last to arrive, with its slot, without the
            # lock, and with `inside` True, so that no exception of another's breaks it off.
            keeps_slot = scheduler.complete_rendezvous(rendezvous, self, compute)
        # In turns the last one has put itself behind the others, and waits for its turn too.
        if not complete or not keeps_slot:
            self.wake.wait()
        with scheduler.lock:
            self.inside = False
            self.check_ended()
        # Taken out of the replica: it outlives the call, and would hold arrays and frames.
        error, self.error = self.error, None
        outcome, self.outcome = self.outcome, None
        if error is not None:
            raise error
        return outcome

    @contextmanager
    def without_slot(self) -> Iterator[None]:
        """A block in which this replica waits for other instances, and can be ended.

        It holds no slot in the block, as the replicas that the other instances wait for may need
        it. If one replica runs at a time, it keeps its slot, so that the order is always the same.
        """
        scheduler = self.call.scheduler
        with scheduler.lock:
            before = self.inside
            self.inside = before or not self.ended
            self.check_ended()
            # Not in turns: another replica must not run meanwhile, or the order would depend on the
            # network.
            scheduler.release_slot_for_instances()
        try:
            with while_waiting(self.check_ended):
                yield
        finally:
            with scheduler.lock:
                scheduler.request_slot(self)
            if not scheduler.one_at_a_time:
                self.wake.wait()
            with scheduler.lock:
                self.inside = before

    def check_ended(self) -> None:
        """Raise ReplicaEnded if this replica is to end."""
        if self.ended:
            raise self.call.scheduler.end

    def run(self) -> ReplicaThread | None:
        """Run the call's function for this replica, in this thread.

        **Returns**: A replica that has not begun, with a slot, for this thread to run next.
        """
        error: BaseException | None = None
        result: Any = None
        thread = threading.current_thread()
        thread.name = f"gpusim replica {self.entry.index} of axis {self.entry.name!r}"
        # The thread is a worker's, which may be older than the debugger.
        workers.begin_tracing()
        try:
            try:
                # The number may be that of a thread that has ended, or of this worker's last
                # replica.
                interrupted.discard(threading.get_ident())
                with self.call.scheduler.lock:
                    self.thread = thread
                    self.inside = False
                    self.check_ended()
                assert self.entry.index is not None  # pmap's axes are threaded
                # The user's code. It runs without a lock and with `inside` False: an exception may
                # come between any two bytecodes, up to `absorb_posted`.
                result = self.context.run(self.call.function, self.entry.index)
            except BaseException as raised:
                error = raised
            self.absorb_posted()
        except ReplicaEnded:  # posted between these blocks
            # What is posted between the blocks finds no other handler: the thread must come back to
            # `finish`, or the slot is lost for ever.
            self.absorb_posted()
        workers.end_tracing()
        workers.clear_thread_state()
        thread.name = workers.IDLE_NAME
        return self.call.finish(self, result, error)

    def absorb_posted(self) -> None:
        """Accept no more exceptions from other threads, and drop one that is posted already."""
        while True:
            try:
                with self.call.scheduler.lock:
                    self.inside = True
                    # At a backward jump the interpreter raises a posted exception. Here the lock is
                    # released then; a profiler's event at the end of the block would skip that.
                    for _ in (0, 1):
                        pass
                return
            except ReplicaEnded:
                continue


def _run_here(replica: ReplicaThread | None) -> None:
    """Run a replica, and then others that have not begun, in this thread."""
    while replica is not None:
        replica = replica.run()


# In the context of the replica. A context may be copied to another thread, or outlive its replica:
# so it is believed only together with the thread, in `enclosing_replica`.
_current: ContextVar[ReplicaThread | None] = ContextVar("gpusim replica", default=None)


def current_replica() -> ReplicaThread:
    """The replica that this thread runs; only threads of pmap have one."""
    replica = enclosing_replica()
    if replica is None:
        raise RuntimeError(
            "a collective over a pmap axis was called from a thread that is none of its replicas; "
            "replicas must call collectives from their own thread"
        )
    return replica


def enclosing_replica() -> ReplicaThread | None:
    """The replica that this thread runs, or None outside pmap."""
    replica = _current.get()
    if replica is None or replica.finished or replica.thread is not threading.current_thread():
        return None
    return replica


# Lock: the scheduler's, until the last has arrived. Then it is out of `pending`, and belongs to the
# one that computes; only `replicas` may still change, where a replica that is ended withdraws.
class Rendezvous:
    """The replicas that have arrived at one collective, with their contributions."""

    def __init__(self, scheduler: Scheduler, key: Any, threaded_axes: Axes) -> None:
        count = math.prod(entry.size for entry in threaded_axes)
        self.scheduler = scheduler
        self.key = key
        self.threaded_axes = threaded_axes
        self.call = scheduler.calls[threaded_axes[0]]
        # Invariant: the number of places in `replicas` that are None.
        self.missing = count
        self.replicas: list[ReplicaThread | None] = [None] * count
        self.contributions: list[Any] = [None] * count
        self.call_sites: list[str] = [""] * count
        # Those of the first to arrive. All others must have equal ones.
        self.terms: dict[str, Any] | None = None

    def arrive(
        self,
        replica: ReplicaThread,
        threaded_axes: Axes,
        terms: dict[str, Any],
        contribution: Any,
        site: str,
    ) -> bool:
        """Add a replica; True if it is the last. Differing terms end the whole pmap call."""
        position = 0
        for entry in threaded_axes:
            position = position * entry.size + (entry.index or 0)
        if self.terms is None:
            self.terms = terms
        elif self.terms != terms:
            self.call.abort(CollectiveMismatchError(self.describe_mismatch(position, site, terms)))
            return False
        self.replicas[position] = replica
        self.contributions[position] = contribution
        self.call_sites[position] = site
        self.missing -= 1
        replica.position = position
        if self.missing == 0:
            # At once, not when it has been computed: replicas that go on may arrive at the next
            # one.
            del self.scheduler.pending[self.key]
        return self.missing == 0

    def withdraw(self, replica: ReplicaThread) -> None:
        """Remove a replica that ends."""
        self.replicas[replica.position] = None
        self.missing += 1
        if (
            all(other is None for other in self.replicas)
            and self.scheduler.pending.get(self.key) is self
        ):
            del self.scheduler.pending[self.key]

    @property
    def present(self) -> list[int]:
        """The positions of those who have arrived."""
        return [position for position, replica in enumerate(self.replicas) if replica is not None]

    def index(self, position: int) -> Any:
        """A replica's index: an int on one axis, a tuple on several."""
        index = []
        for entry in reversed(self.threaded_axes):
            index.append(entry.offset + position % entry.size)
            position //= entry.size
        return index[0] if len(index) == 1 else tuple(reversed(index))

    def describe_axes(self) -> str:
        names = [repr(entry.name) for entry in self.threaded_axes]
        return ("axis " if len(names) == 1 else "axes ") + ", ".join(names)

    def describe_mismatch(self, position: int, site: str, terms: dict[str, Any]) -> str:
        assert self.terms is not None
        other = self.present[0]
        differences = [
            f"{name}: {there!r} against {terms[name]!r}"
            for name, there in self.terms.items()
            if terms[name] != there
        ]
        return (
            f"replicas of {self.describe_axes()} do not make the same call: "
            f"replica {self.index(other)} calls {_describe_call(self.terms)} at "
            f"{self.call_sites[other]}, "
            f"replica {self.index(position)} calls {_describe_call(terms)} at {site}; "
            f"they differ in {'; '.join(differences)}"
        )

    def describe_wait(self) -> str:
        assert self.terms is not None
        here = self.present
        away = [position for position, replica in enumerate(self.replicas) if replica is None]
        returned = away
        if len(self.threaded_axes) == 1:
            returned = [position for position in away if self.call.replicas[position].finished]
        elsewhere = [position for position in away if position not in returned]
        call_sites = sorted({self.call_sites[position] for position in here})
        text = (
            f"{self.describe_replicas(here)} of {self.describe_axes()} wait in "
            f"{_describe_call(self.terms)} at {', '.join(call_sites)}"
        )
        if returned:
            text += f", but {self.describe_replicas(returned)} returned without calling it"
        if elsewhere:
            text += f", but {self.describe_replicas(elsewhere)} wait elsewhere"
        return text

    def describe_replicas(self, positions: Sequence[int]) -> str:
        shown = ", ".join(str(self.index(position)) for position in positions[:8])
        more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        return ("replica " if len(positions) == 1 else "replicas ") + shown + more


def _describe_call(terms: dict[str, Any]) -> str:
    names = terms["axis_name"]
    over = repr(names[0]) if len(names) == 1 else repr(names)
    return (
        f"{terms['collective']} over {over} of {', '.join(map(repr, terms['shapes and dtypes']))}"
    )


class PmapCall:
    """One call of pmap: its replicas, what they returned, and the error that ended them."""

    def __init__(
        self,
        scheduler: Scheduler,
        parent: ReplicaThread | None,
        function: Callable[[int], Any],
        report: Callable[[int, BaseException], BaseException],
    ) -> None:
        self.scheduler = scheduler
        self.parent = parent
        self.function = function
        self.report = report
        self.replicas: list[ReplicaThread] = []
        self.results: list[Any] = []
        self.unfinished = 0
        self.error: BaseException | None = None
        self.streams: bool = parent is not None and parent.call.streams  # replicas are on GPUs
        # The first to acquire it decides whether the replicas begin, or never do: the worker that
        # is to start them, or the caller that is interrupted before.
        self.begun = threading.Lock()  # held once the replicas may begin
        # The caller sleeps here, in its own thread, without a slot: it is not a replica. Not a
        # HandOver, as it has to wake up now and then to see signals.
        self.over = threading.Lock()  # released when all replicas have ended
        self.over.acquire()
        self.abandoned = False  # its caller no longer waits

    def add(self, entry: AxisEntry, context: Context) -> None:
        """Add a replica."""
        replica = ReplicaThread(self, entry, context)
        context.run(_current.set, replica)
        self.replicas.append(replica)
        self.results.append(None)
        self.unfinished += 1

    # Methods below are called with the scheduler's lock held, unless they say otherwise.

    def abort(self, error: BaseException) -> None:
        """End all replicas of this call and of calls inside it. The first error is reported."""
        if self.error is None:
            # The first one is what the caller of pmap gets. Later ones follow from it as a rule.
            self.error = error
        scheduler = self.scheduler
        # Those that have not begun never will.
        scheduler.ready = deque(
            replica for replica in scheduler.ready if replica.call is not self or replica.started
        )
        for replica in self.replicas:
            if replica.finished or replica.ended:
                continue
            replica.ended = True
            if not replica.started:
                replica.finished = True
                self.unfinished -= 1
            elif isinstance(replica.waiting, PmapCall):
                # It waits for a pmap inside it: that ends first, and then makes it ready.
                replica.waiting.abort(ReplicaEnded())
            elif replica.waiting is not None:
                # In this order: out of what it waits for, then ready. It needs a slot to raise and
                # to clean up.
                replica.waiting.withdraw(replica)
                replica.waiting = None
                scheduler.ready.append(replica)
        # Those that run user code get an exception from a thread that supervises; nothing is posted
        # here, as the lock is held, and the caller may be one of them.
        scheduler.begin_to_end()
        self.wake_caller_if_finished()
        scheduler.fill_slots()

    def wake_caller_if_finished(self) -> None:
        """Let the caller of pmap continue if all replicas have ended."""
        if self.unfinished:
            return
        if self.parent is None:
            self.over.release()
        elif self.parent.waiting is self:
            self.parent.waiting = None
            self.scheduler.ready.append(self.parent)

    def finish(
        self, replica: ReplicaThread, result: Any, error: BaseException | None
    ) -> ReplicaThread | None:
        """Record how a replica ended, and release its slot. (Takes the lock.)

        **Returns**: A replica that has not begun and now has the slot.
        """
        scheduler = self.scheduler
        with scheduler.lock:
            assert replica.entry.index is not None
            self.results[replica.entry.index] = result
            replica.finished = True
            self.unfinished -= 1
            scheduler.give_back_slot(replica)
            scheduler.started.discard(replica)
            if error is not None and not (replica.ended and isinstance(error, ReplicaEnded)):
                # This replica still counts as one that runs: the caller must not go on before its
                # error is noted.
                self.unfinished += 1  # abort wakes no caller yet
                self.abort(self.error or self.report(replica.entry.index, error))
                self.unfinished -= 1
            self.wake_caller_if_finished()
            # The slot may go to a replica that is yet to begin: then this thread runs it, and none
            # is started.
            following = scheduler.fill_slots(here=True)
            scheduler.check_stalled()
            return following

    def execute(self) -> list[Any]:
        """Run all replicas; what they returned. (Takes the lock.)

        **Raises**: the error that ended them.
        """
        if self.parent is None:
            self.execute_as_root()
        else:
            self.execute_inside(self.parent)
        if self.error is not None:
            raise self.error
        with self.scheduler.lock:
            results = self.results
            # They refer to the call; arguments and results would be there until they are collected.
            # Under the lock: the watcher and a supervisor may still look at the replicas.
            self.replicas, self.results = [], []
            del self.function
        return results

    def execute_inside(self, parent: ReplicaThread) -> None:
        """Run the replicas for one of another call, which waits for them. (In its own thread.)"""
        with self.scheduler.lock:
            parent.inside = not parent.ended
            parent.check_ended()
            self.enqueue()
            # The replica that calls a pmap waits for it as for a collective, without a slot: its
            # own replicas need the slots.
            parent.waiting = self
            self.scheduler.release_slot()
        parent.wake.wait()
        with self.scheduler.lock:
            self.unregister()
            parent.inside = False
            parent.check_ended()

    def execute_as_root(self) -> None:
        """Run the replicas in other threads, and wait for them.

        Ctrl-C is raised in the main thread between any two bytecodes. That may be this thread, so
        it changes no state that replicas share.

        A second Ctrl-C abandons the replicas that have not ended, as threads cannot be ended while
        they are in C code. They end when they return from it.
        """
        # Before any thread is started, and never changed: read without the lock.
        self.scheduler.root = self
        try:
            self.start_job(self.begin)
            waited = 0.0
            # With a time-out, as a signal that comes just before acquire() blocks does not wake it.
            while not self.over.acquire(timeout=SIGNAL_POLL):
                self.scheduler.supervise_without_thread()
                if self.error is not None:
                    if waited >= PATIENCE and self.scheduler.only_blocked_run():
                        self.abandoned = True
                        break
                    if waited <= PATIENCE_AFTER_ERROR < waited + SIGNAL_POLL:
                        self.announce_wait(str(self.error), "Ctrl-C, twice,")
                    waited += SIGNAL_POLL
        except BaseException as raised:
            # A KeyboardInterrupt, which Python raises in the main thread between any two bytecodes:
            # also in the lines above. So they change nothing that replicas share; a worker's thread
            # does (`start_job`).
            self.end_replicas(raised)
            raise
        finally:
            self.scheduler.clock.end()

    def start_job(self, job: Callable[[], None]) -> None:
        try:
            workers.start(job)
        except RuntimeError as error:
            raise GpusimError(
                f"pmap could not start a thread ({error}); vmap needs none"
            ) from error

    def begin(self) -> None:
        """Start the replicas, and run some. (In a worker's thread. Takes the lock.)"""
        if not self.begun.acquire(blocking=False):
            return
        with self.scheduler.lock:
            self.enqueue()
            replica = self.scheduler.fill_slots(here=True)
        _run_here(replica)

    def end_replicas(self, interrupt: BaseException) -> None:
        """End all replicas, because the caller of pmap is interrupted, and wait for them.

        Each sees a KeyboardInterrupt, and has the time that it needs until another Ctrl-C.
        """
        if self.begun.acquire(blocking=False):
            return  # they have not begun, and never will
        if self.error is not None:
            interrupt.__context__ = self.error

        def abort() -> None:
            with self.scheduler.lock:
                if self.unfinished and self.error is None:
                    if isinstance(interrupt, KeyboardInterrupt):
                        # Before `abort`, under the same lock: every replica that is ended sees the
                        # same kind of end.
                        self.scheduler.end = ReplicaInterrupted
                    self.abort(interrupt)

        try:
            self.start_job(abort)
            if not self.over.acquire(timeout=PATIENCE):
                self.scheduler.leave_blocked()
                self.announce_wait(f"{self.scheduler.caller} is interrupted", "another Ctrl-C")
                while not self.over.acquire(timeout=SIGNAL_POLL):
                    self.scheduler.supervise_without_thread()
                    self.scheduler.leave_blocked()
        except KeyboardInterrupt:
            self.abandoned = True
            self.start_job(abort)  # the first may not have begun
            if not self.over.acquire(timeout=SECOND_GRACE):
                caller = self.scheduler.caller
                interrupt.add_note(f"{caller} has abandoned {self.describe_running()}")

    def announce_wait(self, reason: str, cure: str) -> None:
        """Say on standard error which replicas keep the caller of pmap waiting."""
        print(
            f"gpusim: {reason}; {self.scheduler.caller} waits for {self.describe_running()}; "
            f"{cure} abandons it",
            file=sys.stderr,
            flush=True,
        )

    def describe_running(self) -> str:
        """The replicas that still run, also of calls inside, and where. (Takes the lock.)"""
        stacks = sys._current_frames()
        found = []
        with self.scheduler.lock:
            running = [r for r in self.scheduler.started if r.waiting is None]
        for replica in sorted(running, key=lambda each: each.entry.index or 0):
            stack = stacks.get(replica.thread.ident or 0) if replica.thread is not None else None
            while stack is not None and not is_users(stack):
                stack = stack.f_back
            where = "" if stack is None else _describe_line(stack)
            index = replica.entry.offset + (replica.entry.index or 0)
            found.append(self.scheduler.name_of(index, replica.entry.name) + where)
        more = [f"{len(found) - 8} more"] if len(found) > 8 else []
        return ", ".join(found[:8] + more) or "those that end"

    def enqueue(self) -> None:
        for replica in self.replicas:
            self.scheduler.calls[replica.entry] = self
        self.scheduler.ready.extend(self.replicas)

    def unregister(self) -> None:
        for replica in self.replicas:
            self.scheduler.calls.pop(replica.entry, None)


def _describe_line(frame: FrameType) -> str:
    (line,) = traceback.StackSummary.extract([(frame, frame.f_lineno)])
    return f" at {line.filename}:{line.lineno} in {line.name}, `{line.line}`"


# One for each outermost pmap, or launch. Everything that decides who runs is here and under `lock`.
# No other lock of gpusim's may be held when it is taken. With it held only short steps are made: no
# user code, no wait, no copy. A thread may be started, which takes the pool's lock.
class Scheduler:
    """Execution slots for replicas: at most `slots` of them run at once.

    `make_clock` is called once, with the scheduler as far as it is made.
    """

    def __init__(
        self, slots: int, one_at_a_time: bool, make_clock: Callable[[Scheduler], Timekeeper]
    ) -> None:
        self.lock = threading.Lock()
        # Fixed when the first replica begins.
        self.slots = slots
        self.one_at_a_time = one_at_a_time
        # Invariant: the number of replicas that hold a slot, at most `slots`. Raised in
        # `fill_slots`, before the replica is woken or started, so that a slot is never given twice;
        # and by a world's thread whose process has left (`WorldProxy`), before it ends.
        self.running = 0
        self.waiting_for_instances = 0  # replicas that wait for other instances
        # First come, first served: so in turns the order follows from the program.
        self.ready: deque[ReplicaThread] = deque()
        #: Which of so many ready replicas is next: 0 unless another order is asked for.
        self.pick: Callable[[int], int] | None = None
        # Those that have a thread and have not ended.
        self.started: set[ReplicaThread] = set()
        # Rendezvous at which some replicas have arrived, and some have not.
        self.pending: dict[Any, Rendezvous] = {}
        self.calls: dict[AxisEntry, PmapCall] = {}
        self.root: PmapCall | None = None
        # Set once; from then on some thread supervises the end, or the caller of pmap does.
        self.ending = False
        #: Says who waits for what, where replicas wait for Completions; None for pmap's own.
        self.describe_stall: Callable[[], str] | None = None
        self.supervised = False
        #: What is raised in replicas to end them.
        self.end: type[ReplicaEnded] = ReplicaEnded
        #: After Ctrl-C, do not wait for replicas that are in C code.
        self.leaves_blocked = False
        self.clock = make_clock(self)
        #: Who waits for the replicas, and how one is named, in messages.
        self.caller = "pmap"
        self.name_of: Callable[[int, Any], str] = lambda i, axis: f"replica {i} of axis {axis!r}"

    def fill_slots(self, here: bool = False) -> ReplicaThread | None:
        """Let ready replicas run in the free slots.

        **Returns**: If `here`, the first that has not begun, for this thread to run.
        """
        own: ReplicaThread | None = None
        while self.running < self.slots and self.ready:
            if self.pick is not None:
                self.ready.rotate(-self.pick(len(self.ready)))
            replica = self.ready.popleft()
            self.running += 1
            replica.turns += 1
            if replica.started:
                # With the lock held: a wake-up takes microseconds, and the thread that wakes has to
                # take the lock. In turns the waker is about to sleep, so that its core is the best
                # one.
                replica.wake.wake(here=self.one_at_a_time)
                continue
            replica.started = True
            self.started.add(replica)
            if here and own is None:
                own = replica
            else:
                self.start(replica)
        return own

    def start(self, replica: ReplicaThread) -> None:
        """Run a replica in another thread. If the system refuses one, end the pmap call."""
        try:
            workers.start(functools.partial(_run_here, replica))
        except RuntimeError as error:
            self.started.discard(replica)
            # The thread that could not be started had a slot.
            self.running -= 1
            replica.finished = True
            replica.call.unfinished -= 1
            failure = GpusimError(
                f"pmap could not start the thread of replica {replica.entry.index} ({error}); "
                "vmap needs no threads"
            )
            failure.__cause__ = error
            replica.call.abort(failure)

    def begin_to_end(self) -> None:
        """Supervise the end of replicas from now on."""
        if self.ending or self.root is None:
            return
        self.ending = self.supervised = True
        try:
            workers.start(self.supervise)
        except RuntimeError:
            self.supervised = False  # the caller of pmap does it

    def supervise_without_thread(self) -> None:
        """End running replicas, if there was no thread that could do it."""
        if self.ending and not self.supervised:
            self.end_running()

    def supervise(self) -> None:
        """End running replicas until all have ended. (In a worker's thread.)"""
        assert self.root is not None
        # Most replicas end at their next collective. A posted exception may be lost in a
        # destructor.
        time.sleep(ENDING_GRACE)
        with quiet_ends():
            while self.root.unfinished:
                self.end_running()
                time.sleep(ABANDONED_POLL if self.root.abandoned else ENDING_POLL)

    def release_slot(self) -> None:
        """Release the slot of the calling replica, which waits from now on."""
        # The order of the three: the slot is free, others get it, and only then it is known whether
        # any replica can go on.
        self.running -= 1
        self.fill_slots()
        self.check_stalled()

    def give_back_slot(self, replica: ReplicaThread) -> None:
        """Release the slot of a replica that ends, if the clock has not taken it away."""
        if replica.away:
            replica.away = False
            self.clock.away -= 1
        else:
            self.running -= 1

    def release_slot_for_instances(self) -> None:
        """Release the slot of the calling replica, which waits for other instances from now on."""
        if not self.one_at_a_time:
            self.running -= 1
            self.waiting_for_instances += 1
            self.fill_slots()

    def request_slot(self, replica: ReplicaThread) -> None:
        """Make the calling replica ready again; it is woken when it has a slot."""
        if not self.one_at_a_time:
            self.waiting_for_instances -= 1
            self.ready.append(replica)
            self.fill_slots()

    def check_stalled(self) -> None:
        """Raise DeadlockError in the replicas that wait, if none runs or is ready."""
        # The definition of a deadlock. Each of the four is a reason why others may still go on; a
        # new way to wait has to be in one of them.
        if self.running or self.ready or self.waiting_for_instances or self.clock.advance():
            return
        pending = list(self.pending.values())
        if pending:
            error = DeadlockError(
                "no replica can go on: "
                + "; ".join(rendezvous.describe_wait() for rendezvous in pending)
            )
            # The outermost call that waits: its end ends those inside.
            min(pending, key=lambda rendezvous: rendezvous.threaded_axes[0].depth).call.abort(error)
        elif self.describe_stall is not None and self.root is not None and self.root.unfinished:
            self.root.abort(DeadlockError(self.describe_stall()))

    def rendezvous_of(self, threaded_axes: Axes, enclosing: Axes) -> Rendezvous:
        """The rendezvous of the replicas along `threaded_axes` with the caller's other indices."""
        # By the call and not by the axis's name: two maps of one name may run at a time. Replicas
        # bind entries of their own, so sizes and indices stand for them.
        path: list[Any] = [id(self.calls[threaded_axes[0]])]
        for entry in enclosing[threaded_axes[0].depth + 1 :]:
            if entry.index is not None:
                path.append(
                    (entry.name, entry.size, "*" if entry in threaded_axes else entry.index)
                )
        key = tuple(path)
        rendezvous = self.pending.get(key)
        if rendezvous is None:
            rendezvous = self.pending[key] = Rendezvous(self, key, threaded_axes)
        return rendezvous

    def complete_rendezvous(
        self, rendezvous: Rendezvous, last: ReplicaThread, compute: Callable[[list[Any]], list[Any]]
    ) -> bool:
        """Compute all outcomes, and make the replicas ready. (In the last one's thread.)

        **Returns**: True if the last one keeps its slot.
        """
        error: BaseException | None = None
        outcomes: list[Any] = [None] * len(rendezvous.replicas)
        try:
            # Without the lock, in the last replica's thread. Others may run user code meanwhile,
            # and may end.
            outcomes = compute(rendezvous.contributions)
        except Exception as raised:
            error = raised
        except ReplicaEnded:  # while it waited for other instances; the others are not to blame
            error = DeadlockError("the replica that was to compute a collective for all was ended")
        with self.lock:
            for replica, outcome in zip(rendezvous.replicas, outcomes, strict=True):
                # It has withdrawn, under the lock, and has a slot or will get one.
                if replica is None:  # ended meanwhile
                    continue
                replica.outcome, replica.error = outcome, error
                replica.waiting = None
                # In turns in the replicas' order, the last one included: who arrived last does not
                # matter.
                if replica is not last or self.one_at_a_time:
                    self.ready.append(replica)
            if self.one_at_a_time:
                self.running -= 1
            self.fill_slots()
        return not self.one_at_a_time

    def end_running(self) -> None:
        """Post a ReplicaEnded to each replica that is to end and still runs user code.

        One that has seen a KeyboardInterrupt gets another one only once it is abandoned. (Takes the
        lock.)
        """
        with self.lock:
            for thread in self.to_end(self.root is not None and self.root.abandoned):
                # With the lock held, so that no thread becomes `inside` between the look and the
                # post.
                end_thread(thread, self.end)

    def to_end(self, again: bool = False) -> list[threading.Thread]:
        """The threads of replicas that are to end, run user code, and have not seen that they are.

        `again` includes those that have seen it. (With the lock held.)
        """
        return [
            replica.thread
            for replica in self.started
            if replica.ended
            and not replica.finished
            and not replica.inside
            and replica.thread is not None
            and (again or replica.thread.ident not in interrupted)
        ]

    def leave_blocked(self) -> None:
        """Raise KeyboardInterrupt if only replicas in C code run, and are to be left there."""
        if self.only_blocked_run():
            raise KeyboardInterrupt

    def only_blocked_run(self) -> bool:
        """Whether only replicas that wait in C code run, and are to be left there.

        (Takes the lock.)
        """
        with self.lock:
            running = self.running + self.clock.away
            left = self.to_end()
            outside = [each for each in self.started if each.outside and each.ended]
            return 0 < running == (len(left) if self.leaves_blocked else len(outside))
