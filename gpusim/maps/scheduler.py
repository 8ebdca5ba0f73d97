"""The scheduler of pmap's replica threads: execution slots, rendezvous, deadlocks and errors.

A pmap inside a pmap joins the outermost one's scheduler. One lock guards all state. A replica that
waits holds no slot. When no replica runs and none is ready, those that wait are deadlocked.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import CollectiveMismatchError, DeadlockError, GpusimError
from ..runtime.engines import while_waiting
from .call_site import call_site
from .frames import Axes, Frame

ENDING_POLL = 0.05
"""Seconds between the attempts to end replicas that still run."""


ENDING_GRACE = 0.1
"""Seconds in which replicas may end by themselves, at their next collective. Most do, and need no
posted exception, which is lost if it is raised in a destructor."""

NEVER_INTERRUPTED = frozenset(("coverage.collector", __name__))
"""Modules that take a lock in one function and release it in another, as coverage does whenever a
traced function is called. A replica is not ended while it runs their code."""

SIGNAL_POLL = 0.2
"""Seconds after which the thread that called pmap looks whether Ctrl-C was pressed."""


class ReplicaEnded(BaseException):
    """Raised inside a replica to end it, because another one failed or the user interrupted."""


def _end_thread(thread: threading.Thread) -> None:
    """Post a ReplicaEnded to a thread. The interpreter raises it there, between two bytecodes.

    Nothing is posted while the thread runs code of `NEVER_INTERRUPTED`.

    A posted exception must be raised, never taken back with NULL: CPython 3.11 then leaves its
    flag for posted exceptions up, and every traced or profiled function hangs at its entry.
    """
    ident = thread.ident or 0
    post, error = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(ReplicaEnded)
    number = ctypes.c_ulong(ident)
    # CPython lets another thread run after a call, but not where a for loop calls its iterator. So
    # the thread is still where it was seen when the exception is posted.
    for frames in iter(sys._current_frames, None):
        try:
            if frames[ident].f_globals["__name__"] in NEVER_INTERRUPTED:
                return
        except KeyError:
            pass
        post(number, error)
        return


class Task:
    """One replica of one pmap call: its thread, its frame, and what it waits for.

    Attributes:
        inside: True while the thread runs gpusim's own code. No exception is posted to it then;
            it checks `ended` itself.
        waiting: the rendezvous it waits in, or the inner pmap call.
    """

    def __init__(self, run: Run, frame: Frame, context: Context) -> None:
        self.run = run
        self.frame = frame
        self.context = context
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread: threading.Thread | None = None
        self.finished = False
        self.ended = False
        self.inside = True
        self.waiting: Rendezvous | Run | None = None
        self.position = 0  # its position in the rendezvous
        self.lane: Any = None  # its GPU and stream, of `streams`
        self.outcome: Any = None
        self.error: BaseException | None = None

    def meet(
        self,
        threads: Axes,
        enclosing: Axes,
        terms: dict[str, Any],
        contribution: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Wait for the other replicas along `threads`; the last to arrive computes all outcomes.

        An exception in `compute` is raised in every replica.
        """
        scheduler = self.run.scheduler
        site = call_site()
        with scheduler.lock:
            self.inside = not self.ended
            self.check_ended()
            rendezvous = scheduler.rendezvous_of(threads, enclosing)
            complete = rendezvous.arrive(self, threads, terms, contribution, site)
            if self.ended:  # the terms differ
                self.inside = False
                raise ReplicaEnded
            if not complete:
                self.waiting = rendezvous
                scheduler.release_slot()
        if complete:
            keeps_slot = scheduler.complete_rendezvous(rendezvous, self, compute)
        if not complete or not keeps_slot:
            self.wake.acquire()
        with scheduler.lock:
            self.inside = False
            self.check_ended()
        error, self.error = self.error, None
        outcome, self.outcome = self.outcome, None
        if error is not None:
            raise error
        return outcome

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """A block in which this replica waits for other instances, and can be ended.

        It holds no slot in the block, as the replicas that the other instances wait for may need
        it. If one replica runs at a time, it keeps its slot, so that the order is always the same.
        """
        scheduler = self.run.scheduler
        with scheduler.lock:
            before = self.inside
            self.inside = before or not self.ended
            self.check_ended()
            scheduler.release_slot_for_instances()
        try:
            with while_waiting(self.check_ended):
                yield
        finally:
            with scheduler.lock:
                scheduler.request_slot(self)
            if not scheduler.one_at_a_time:
                self.wake.acquire()
            with scheduler.lock:
                self.inside = before

    def check_ended(self) -> None:
        """Raise ReplicaEnded if this replica is to end."""
        if self.ended:
            raise ReplicaEnded

    def run_in_thread(self, function: Callable[[int], Any]) -> None:
        """Run `function` for this replica. (In the replica's thread.)"""
        error: BaseException | None = None
        result: Any = None
        try:
            with self.run.scheduler.lock:
                self.inside = False
                self.check_ended()
            assert self.frame.index is not None  # pmap's frames are threaded
            result = self.context.run(function, self.frame.index)
        except BaseException as raised:
            error = raised
        self.absorb_posted()
        self.run.finish(self, result, error)

    def absorb_posted(self) -> None:
        """Accept no more exceptions from other threads, and drop one that is posted already."""
        while True:
            try:
                with self.run.scheduler.lock:
                    self.inside = True
                    # At a backward jump the interpreter raises a posted exception. Here the lock is
                    # released then; a profiler's event at the end of the block would skip that.
                    for _ in (0, 1):
                        pass
                return
            except ReplicaEnded:
                continue


_current: ContextVar[Task | None] = ContextVar("gpusim replica", default=None)


def current_task() -> Task:
    """The task whose thread this is; only threads of pmap have one."""
    task = _current.get()
    if task is None or task.thread is not threading.current_thread():
        raise RuntimeError(
            "a collective over a pmap axis was called from a thread that is none of its replicas; "
            "replicas must call collectives from their own thread"
        )
    return task


def enclosing_task() -> Task | None:
    """The task whose thread this is, or None outside pmap."""
    task = _current.get()
    return task if task is not None and task.thread is threading.current_thread() else None


class Rendezvous:
    """The replicas that have arrived at one collective, with their contributions."""

    def __init__(self, scheduler: Scheduler, key: Any, threads: Axes) -> None:
        count = math.prod(frame.size for frame in threads)
        self.scheduler = scheduler
        self.key = key
        self.threads = threads
        self.run = scheduler.runs[threads[0]]
        self.missing = count
        self.tasks: list[Task | None] = [None] * count
        self.contributions: list[Any] = [None] * count
        self.call_sites: list[str] = [""] * count
        self.terms: dict[str, Any] | None = None

    def arrive(
        self, task: Task, threads: Axes, terms: dict[str, Any], contribution: Any, site: str
    ) -> bool:
        """Add a replica; True if it is the last. Differing terms end the whole pmap call."""
        position = 0
        for frame in threads:
            position = position * frame.size + (frame.index or 0)
        if self.terms is None:
            self.terms = terms
        elif self.terms != terms:
            self.run.abort(CollectiveMismatchError(self.describe_mismatch(position, site, terms)))
            return False
        self.tasks[position] = task
        self.contributions[position] = contribution
        self.call_sites[position] = site
        self.missing -= 1
        task.position = position
        if self.missing == 0:
            del self.scheduler.pending[self.key]
        return self.missing == 0

    def withdraw(self, task: Task) -> None:
        """Remove a replica that ends."""
        self.tasks[task.position] = None
        self.missing += 1
        if (
            all(other is None for other in self.tasks)
            and self.scheduler.pending.get(self.key) is self
        ):
            del self.scheduler.pending[self.key]

    @property
    def present(self) -> list[int]:
        """The positions of those who have arrived."""
        return [position for position, task in enumerate(self.tasks) if task is not None]

    def index(self, position: int) -> Any:
        """A replica's index: an int on one axis, a tuple on several."""
        index = []
        for frame in reversed(self.threads):
            index.append(frame.offset + position % frame.size)
            position //= frame.size
        return index[0] if len(index) == 1 else tuple(reversed(index))

    def describe_axes(self) -> str:
        names = [repr(frame.name) for frame in self.threads]
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
        away = [position for position, task in enumerate(self.tasks) if task is None]
        returned = away
        if len(self.threads) == 1:
            returned = [position for position in away if self.run.tasks[position].finished]
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


class Run:
    """One call of pmap: its replicas, what they returned, and the error that ended them."""

    def __init__(
        self,
        scheduler: Scheduler,
        parent: Task | None,
        function: Callable[[int], Any],
        report: Callable[[int, BaseException], BaseException],
    ) -> None:
        self.scheduler = scheduler
        self.parent = parent
        self.function = function
        self.report = report
        self.tasks: list[Task] = []
        self.results: list[Any] = []
        self.unfinished = 0
        self.error: BaseException | None = None
        self.interrupt: BaseException | None = None
        self.streams: bool = parent is not None and parent.run.streams  # replicas are on GPUs
        self.signal: SimpleQueue[None] = SimpleQueue()  # wakes the supervisor of the outermost call
        self.over = threading.Lock()  # released when all replicas have ended
        self.over.acquire()

    def add(self, frame: Frame, context: Context) -> None:
        """Add a replica."""
        task = Task(self, frame, context)
        context.run(_current.set, task)
        self.tasks.append(task)
        self.results.append(None)
        self.unfinished += 1

    # Methods below are called with the scheduler's lock held, unless they say otherwise.

    def abort(self, error: BaseException) -> None:
        """End all replicas of this call and of calls inside it. The first error is reported."""
        if self.error is None:
            self.error = error
        scheduler = self.scheduler
        scheduler.ready = deque(
            task for task in scheduler.ready if task.run is not self or task.thread is not None
        )
        for task in self.tasks:
            if task.finished or task.ended:
                continue
            task.ended = True
            if task.thread is None:
                task.finished = True
                self.unfinished -= 1
            elif isinstance(task.waiting, Run):
                task.waiting.abort(ReplicaEnded())
            elif task.waiting is not None:
                task.waiting.withdraw(task)
                task.waiting = None
                scheduler.ready.append(task)
        if scheduler.root is not None:
            scheduler.ending = True
            scheduler.root.signal.put(None)
        self.wake_caller_if_finished()
        scheduler.fill_slots()

    def wake_caller_if_finished(self) -> None:
        """Let the caller of pmap continue if all replicas have ended."""
        if self.unfinished:
            return
        if self.parent is None:
            self.signal.put(None)
        elif self.parent.waiting is self:
            self.parent.waiting = None
            self.scheduler.ready.append(self.parent)

    def finish(self, task: Task, result: Any, error: BaseException | None) -> None:
        """Record how a replica ended, and release its slot. (Takes the lock.)"""
        scheduler = self.scheduler
        with scheduler.lock:
            assert task.frame.index is not None
            self.results[task.frame.index] = result
            task.finished = True
            self.unfinished -= 1
            scheduler.running -= 1
            scheduler.started.discard(task)
            if error is not None and not (task.ended and isinstance(error, ReplicaEnded)):
                self.abort(self.error or self.report(task.frame.index, error))
            else:
                self.wake_caller_if_finished()
            scheduler.fill_slots()
            scheduler.check_stalled()

    def execute(self) -> None:
        """Run all replicas. Sets `results` and `error`. (Takes the lock.)"""
        if self.parent is None:
            self.execute_as_root()
        else:
            self.execute_inside(self.parent)

    def execute_inside(self, parent: Task) -> None:
        with self.scheduler.lock:
            parent.inside = not parent.ended
            parent.check_ended()
            self.enqueue()
            parent.waiting = self
            self.scheduler.release_slot()
        parent.wake.acquire()
        with self.scheduler.lock:
            self.unregister()
            parent.inside = False
            parent.check_ended()

    def execute_as_root(self) -> None:
        """Start the supervisor thread, which runs the replicas, and wait for it.

        Ctrl-C is raised in the main thread between any two bytecodes. That may be this thread, so
        it changes no state that replicas share: it sets `interrupt` for the supervisor.
        """
        self.scheduler.root = self
        supervisor = threading.Thread(
            target=self.run_replicas, name="gpusim supervisor", daemon=True
        )
        try:
            supervisor.start()
            # With a time-out, as a signal that comes just before acquire() blocks does not wake it.
            while not self.over.acquire(timeout=SIGNAL_POLL):
                pass
        except BaseException as raised:
            self.interrupt = raised
            self.signal.put(None)
            while not self.wait_for(supervisor):
                pass
            raise

    def wait_for(self, supervisor: threading.Thread) -> bool:
        """Whether the supervisor has ended. Another Ctrl-C does not end the wait for replicas."""
        try:
            return self.over.acquire(timeout=1) or not supervisor.is_alive()
        except KeyboardInterrupt:
            return False

    def run_replicas(self) -> None:
        """Start the replicas, and end them if one fails. (In the supervisor thread.)"""
        # On CPython 3.11 a traced function waits at its entry until a posted exception is raised.
        sys.settrace(None)
        sys.setprofile(None)
        scheduler = self.scheduler
        grace_ends = 0.0
        try:
            with scheduler.lock:
                self.enqueue()
                scheduler.fill_slots()
            while self.unfinished:
                if self.interrupt is not None and self.error is None:
                    with scheduler.lock:
                        self.abort(self.interrupt)
                    continue
                if not scheduler.ending:
                    self.signal.get()
                    grace_ends = time.monotonic() + ENDING_GRACE
                    continue
                if time.monotonic() > grace_ends:
                    scheduler.end_running()
                with suppress(Empty):
                    self.signal.get(timeout=ENDING_POLL)
            for task in self.tasks:
                if task.thread is not None:
                    task.thread.join()
        finally:
            self.over.release()

    def enqueue(self) -> None:
        for task in self.tasks:
            self.scheduler.runs[task.frame] = self
        self.scheduler.ready.extend(self.tasks)

    def unregister(self) -> None:
        for task in self.tasks:
            self.scheduler.runs.pop(task.frame, None)


class Scheduler:
    """Execution slots for replicas: at most `slots` of them run at once."""

    def __init__(self, slots: int, one_at_a_time: bool) -> None:
        self.lock = threading.Lock()
        self.slots = slots
        self.one_at_a_time = one_at_a_time
        self.running = 0
        self.elsewhere = 0  # replicas that wait for other instances
        self.ready: deque[Task] = deque()
        self.started: set[Task] = set()
        self.pending: dict[Any, Rendezvous] = {}
        self.runs: dict[Frame, Run] = {}
        self.root: Run | None = None
        self.ending = False

    def fill_slots(self) -> None:
        """Let ready replicas run in the free slots."""
        while self.running < self.slots and self.ready:
            task = self.ready.popleft()
            self.running += 1
            if task.thread is not None:
                task.wake.release()
                continue
            self.start(task)

    def start(self, task: Task) -> None:
        """Start a replica's thread. If the system refuses a thread, end the pmap call."""
        task.thread = threading.Thread(
            target=task.run_in_thread,
            args=(task.run.function,),
            name=f"gpusim replica {task.frame.index} of axis {task.frame.name!r}",
            daemon=True,
        )
        self.started.add(task)
        try:
            task.thread.start()
        except RuntimeError as error:
            self.started.discard(task)
            self.running -= 1
            task.thread = None
            task.finished = True
            task.run.unfinished -= 1
            failure = GpusimError(
                f"pmap could not start the thread of replica {task.frame.index} ({error}); "
                "vmap needs no threads"
            )
            failure.__cause__ = error
            task.run.abort(failure)

    def release_slot(self) -> None:
        """Release the slot of the calling replica, which waits from now on."""
        self.running -= 1
        self.fill_slots()
        self.check_stalled()

    def release_slot_for_instances(self) -> None:
        """Release the slot of the calling replica, which waits for other instances from now on."""
        if not self.one_at_a_time:
            self.running -= 1
            self.elsewhere += 1
            self.fill_slots()

    def request_slot(self, task: Task) -> None:
        """Make the calling replica ready again; its `wake` is released when it has a slot."""
        if not self.one_at_a_time:
            self.elsewhere -= 1
            self.ready.append(task)
            self.fill_slots()

    def check_stalled(self) -> None:
        """Raise DeadlockError in the replicas that wait, if none runs or is ready."""
        if self.running or self.ready or self.elsewhere:
            return
        pending = list(self.pending.values())
        if pending:
            error = DeadlockError(
                "no replica can go on: "
                + "; ".join(rendezvous.describe_wait() for rendezvous in pending)
            )
            min(pending, key=lambda rendezvous: rendezvous.threads[0].depth).run.abort(error)

    def rendezvous_of(self, threads: Axes, enclosing: Axes) -> Rendezvous:
        """The rendezvous of the replicas along `threads` with the caller's other indices."""
        path: list[Any] = [id(self.runs[threads[0]])]
        for frame in enclosing[threads[0].depth + 1 :]:
            if frame.index is not None:
                path.append((frame.name, frame.size, "*" if frame in threads else frame.index))
        key = tuple(path)
        rendezvous = self.pending.get(key)
        if rendezvous is None:
            rendezvous = self.pending[key] = Rendezvous(self, key, threads)
        return rendezvous

    def complete_rendezvous(
        self, rendezvous: Rendezvous, last: Task, compute: Callable[[list[Any]], list[Any]]
    ) -> bool:
        """Compute all outcomes and make the replicas ready; True if the last one keeps its slot."""
        error: BaseException | None = None
        outcomes: list[Any] = [None] * len(rendezvous.tasks)
        try:
            outcomes = compute(rendezvous.contributions)
        except Exception as raised:
            error = raised
        except ReplicaEnded:  # while it waited for other instances; the others are not to blame
            error = DeadlockError("the replica that was to compute a collective for all was ended")
        with self.lock:
            for task, outcome in zip(rendezvous.tasks, outcomes, strict=True):
                if task is None:  # ended meanwhile
                    continue
                task.outcome, task.error = outcome, error
                task.waiting = None
                if task is not last or self.one_at_a_time:
                    self.ready.append(task)
            if self.one_at_a_time:
                self.running -= 1
            self.fill_slots()
        return not self.one_at_a_time

    def end_running(self) -> None:
        """Post a ReplicaEnded to each replica that is to end and still runs user code."""
        with self.lock:
            for task in self.started:
                if task.ended and not task.finished and not task.inside and task.thread is not None:
                    _end_thread(task.thread)
