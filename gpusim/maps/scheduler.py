"""Turns and meetings of the replicas' threads: who runs, who waits for whom, and how all of it
ends.

Every pmap inside a pmap joins the outermost one's scheduler. One lock guards all state; a replica
that waits holds no turn, and when nobody runs and nobody is ready the ones that wait can never go
on.
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
from .frames import Axes, Frame
from .routes import caller

ENDING_POLL = 0.05
"""Seconds between the attempts to end replicas that still run."""


ENDING_GRACE = 0.1
"""Seconds in which replicas may end by themselves, at their next collective. (An exception posted
to a thread may be raised, and lost, in a destructor; most replicas need none.)"""

NEVER_INTERRUPTED = frozenset(("coverage.collector", __name__))
"""Modules that take a lock in one place and release it in another. A replica is not ended while it
runs their code: coverage's measuring does so at every call of a function."""

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
    ident = thread.ident
    post, error = ctypes.pythonapi.PyThreadState_SetAsyncExc, ctypes.py_object(ReplicaEnded)
    number = ctypes.c_ulong(ident or 0)
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
        inside: True while the thread runs gpusim's own code, where nobody may end it from outside;
            it looks at `ended` itself.
        waiting: the meeting it waits in, or the inner pmap call.
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
        self.waiting: Meeting | Run | None = None
        self.place = 0  # its place in the meeting
        self.lane: Any = None  # its GPU and stream, of `streams`
        self.outcome: Any = None
        self.error: BaseException | None = None

    def meet(
        self,
        threads: Axes,
        around: Axes,
        terms: dict[str, Any],
        offer: Any,
        compute: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Meet the other replicas along `threads`; the last to arrive computes everybody's outcome.

        Whatever `compute` raises is raised in every replica.
        """
        scheduler = self.run.scheduler
        line = caller()
        with scheduler.lock:
            self.inside = not self.ended
            self.check_ended()
            meeting = scheduler.meeting_of(threads, around)
            complete = meeting.arrive(self, threads, terms, offer, line)
            if self.ended:  # the terms differ
                self.inside = False
                raise ReplicaEnded
            if not complete:
                self.waiting = meeting
                scheduler.give_up_turn()
        if complete:
            goes_on = scheduler.conclude(meeting, self, compute)
        if not complete or not goes_on:
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
        """A block in which this replica waits for other instances, and may be told to end.

        It holds no turn meanwhile: those for whom the others wait may need it. Where one replica
        runs at a time it keeps it, so that everything happens in the same order always.
        """
        scheduler = self.run.scheduler
        with scheduler.lock:
            before = self.inside
            self.inside = before or not self.ended
            self.check_ended()
            scheduler.leave()
        try:
            with while_waiting(self.check_ended):
                yield
        finally:
            with scheduler.lock:
                scheduler.come_back(self)
            if not scheduler.one_at_a_time:
                self.wake.acquire()
            with scheduler.lock:
                self.inside = before

    def check_ended(self) -> None:
        """Raise in a replica that was told to end."""
        if self.ended:
            raise ReplicaEnded

    def live(self, function: Callable[[int], Any]) -> None:
        """The whole life of the thread."""
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
        self.run.retire(self, result, error)

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


class Meeting:
    """The replicas that have arrived at one collective, and what they brought."""

    def __init__(self, scheduler: Scheduler, key: Any, threads: Axes) -> None:
        count = math.prod(frame.size for frame in threads)
        self.scheduler = scheduler
        self.key = key
        self.threads = threads
        self.run = scheduler.runs[threads[0]]
        self.missing = count
        self.tasks: list[Task | None] = [None] * count
        self.offers: list[Any] = [None] * count
        self.lines: list[str] = [""] * count
        self.terms: dict[str, Any] | None = None

    def arrive(
        self, task: Task, threads: Axes, terms: dict[str, Any], offer: Any, line: str
    ) -> bool:
        """Take a replica in; True when it is the last. Differing terms end the whole pmap call."""
        place = 0
        for frame in threads:
            place = place * frame.size + (frame.index or 0)
        if self.terms is None:
            self.terms = terms
        elif self.terms != terms:
            self.run.abort(CollectiveMismatchError(self.describe_mismatch(place, line, terms)))
            return False
        self.tasks[place] = task
        self.offers[place] = offer
        self.lines[place] = line
        self.missing -= 1
        task.place = place
        if self.missing == 0:
            del self.scheduler.meetings[self.key]
        return self.missing == 0

    def withdraw(self, task: Task) -> None:
        """Take a replica that ends out again."""
        self.tasks[task.place] = None
        self.missing += 1
        if (
            all(other is None for other in self.tasks)
            and self.scheduler.meetings.get(self.key) is self
        ):
            del self.scheduler.meetings[self.key]

    @property
    def present(self) -> list[int]:
        """The places of those who have arrived."""
        return [place for place, task in enumerate(self.tasks) if task is not None]

    def index(self, place: int) -> Any:
        """A replica's index: an int on one axis, a tuple on several."""
        index = []
        for frame in reversed(self.threads):
            index.append(frame.offset + place % frame.size)
            place //= frame.size
        return index[0] if len(index) == 1 else tuple(reversed(index))

    def describe_axes(self) -> str:
        names = [repr(frame.name) for frame in self.threads]
        return ("axis " if len(names) == 1 else "axes ") + ", ".join(names)

    def describe_mismatch(self, place: int, line: str, terms: dict[str, Any]) -> str:
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
            f"{self.lines[other]}, "
            f"replica {self.index(place)} calls {_describe_call(terms)} at {line}; they differ in "
            + "; ".join(differences)
        )

    def describe_wait(self) -> str:
        assert self.terms is not None
        here = self.present
        away = [place for place, task in enumerate(self.tasks) if task is None]
        returned = away
        if len(self.threads) == 1:
            returned = [place for place in away if self.run.tasks[place].finished]
        elsewhere = [place for place in away if place not in returned]
        lines = sorted({self.lines[place] for place in here})
        text = (
            f"{self.describe_places(here)} of {self.describe_axes()} wait in "
            f"{_describe_call(self.terms)} at {', '.join(lines)}"
        )
        if returned:
            text += f", but {self.describe_places(returned)} returned without calling it"
        if elsewhere:
            text += f", but {self.describe_places(elsewhere)} wait elsewhere"
        return text

    def describe_places(self, places: Sequence[int]) -> str:
        shown = ", ".join(str(self.index(place)) for place in places[:8])
        more = f" and {len(places) - 8} more" if len(places) > 8 else ""
        return ("replica " if len(places) == 1 else "replicas ") + shown + more


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
        self.signal: SimpleQueue[None] = SimpleQueue()  # wakes the steward of the outermost call
        self.over = threading.Lock()
        self.over.acquire()

    def add(self, frame: Frame, context: Context) -> None:
        """One replica more."""
        task = Task(self, frame, context)
        context.run(_current.set, task)
        self.tasks.append(task)
        self.results.append(None)
        self.unfinished += 1

    # All below: with the scheduler's lock held, but for execute and the waits.

    def abort(self, error: BaseException) -> None:
        """End all replicas of this call, and of calls inside it; the first error is the one
        reported."""
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
        self.conclude_if_finished()
        scheduler.dispatch()

    def conclude_if_finished(self) -> None:
        """When the last replica has ended, let the caller go on."""
        if self.unfinished:
            return
        if self.parent is None:
            self.signal.put(None)
        elif self.parent.waiting is self:
            self.parent.waiting = None
            self.scheduler.ready.append(self.parent)

    def retire(self, task: Task, result: Any, error: BaseException | None) -> None:
        """Record how a replica ended and pass its turn on. (Takes the lock.)"""
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
                self.conclude_if_finished()
            scheduler.dispatch()
            scheduler.check_stalled()

    def execute(self) -> None:
        """Run all replicas to their end; the outcome is in `results` and `error`. (Takes the
        lock.)"""
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
            self.scheduler.give_up_turn()
        parent.wake.acquire()
        with self.scheduler.lock:
            self.forget()
            parent.inside = False
            parent.check_ended()

    def execute_as_root(self) -> None:
        """Let a steward conduct the replicas, and wait for it.

        Ctrl-C is raised in the main thread between any two bytecodes, so that thread, which may
        be this one, touches no state: it leaves a note for the steward.
        """
        self.scheduler.root = self
        steward = threading.Thread(target=self.conduct, name="gpusim steward", daemon=True)
        try:
            steward.start()
            # With a time-out, as a signal that comes just before acquire() blocks does not wake it.
            while not self.over.acquire(timeout=SIGNAL_POLL):
                pass
        except BaseException as raised:
            self.interrupt = raised
            self.signal.put(None)
            while not self.wait_for(steward):
                pass
            raise

    def wait_for(self, steward: threading.Thread) -> bool:
        """Whether the steward has ended; one more Ctrl-C does not shorten the wait for replicas."""
        try:
            return self.over.acquire(timeout=1) or not steward.is_alive()
        except KeyboardInterrupt:
            return False

    def conduct(self) -> None:
        """Start the replicas and see them to their end. (In the steward's thread.)"""
        # On CPython 3.11 a traced function waits at its entry until a posted exception is raised.
        sys.settrace(None)
        sys.setprofile(None)
        scheduler = self.scheduler
        patience = 0.0
        try:
            with scheduler.lock:
                self.enqueue()
                scheduler.dispatch()
            while self.unfinished:
                if self.interrupt is not None and self.error is None:
                    with scheduler.lock:
                        self.abort(self.interrupt)
                    continue
                if not scheduler.ending:
                    self.signal.get()
                    patience = time.monotonic() + ENDING_GRACE
                    continue
                if time.monotonic() > patience:
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

    def forget(self) -> None:
        for task in self.tasks:
            self.scheduler.runs.pop(task.frame, None)


class Scheduler:
    """Hands out turns: at most `turns` replicas run at once."""

    def __init__(self, turns: int, one_at_a_time: bool) -> None:
        self.lock = threading.Lock()
        self.turns = turns
        self.one_at_a_time = one_at_a_time
        self.running = 0
        self.elsewhere = 0  # replicas that wait for other instances
        self.ready: deque[Task] = deque()
        self.started: set[Task] = set()
        self.meetings: dict[Any, Meeting] = {}
        self.runs: dict[Frame, Run] = {}
        self.root: Run | None = None
        self.ending = False

    def dispatch(self) -> None:
        """Give free turns to those who are ready."""
        while self.running < self.turns and self.ready:
            task = self.ready.popleft()
            self.running += 1
            if task.thread is not None:
                task.wake.release()
                continue
            self.start(task)

    def start(self, task: Task) -> None:
        """Start a replica's thread; when the system has no more threads, end the pmap call."""
        task.thread = threading.Thread(
            target=task.live,
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

    def give_up_turn(self) -> None:
        """The calling task waits from now on."""
        self.running -= 1
        self.dispatch()
        self.check_stalled()

    def leave(self) -> None:
        """The calling task waits for other instances from now on."""
        if not self.one_at_a_time:
            self.running -= 1
            self.elsewhere += 1
            self.dispatch()

    def come_back(self, task: Task) -> None:
        """The calling task asks for a turn again; its `wake` tells it when it has one."""
        if not self.one_at_a_time:
            self.elsewhere -= 1
            self.ready.append(task)
            self.dispatch()

    def check_stalled(self) -> None:
        """When nobody can go on any more, end those who wait."""
        if self.running or self.ready or self.elsewhere:
            return
        meetings = list(self.meetings.values())
        if meetings:
            error = DeadlockError(
                "no replica can go on: "
                + "; ".join(meeting.describe_wait() for meeting in meetings)
            )
            min(meetings, key=lambda meeting: meeting.threads[0].depth).run.abort(error)

    def meeting_of(self, threads: Axes, around: Axes) -> Meeting:
        """The meeting of those replicas along `threads` that stand where this one stands on other
        axes."""
        path: list[Any] = [id(self.runs[threads[0]])]
        for frame in around[threads[0].depth + 1 :]:
            if frame.index is not None:
                path.append((frame.name, frame.size, "*" if frame in threads else frame.index))
        key = tuple(path)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = Meeting(self, key, threads)
        return meeting

    def conclude(
        self, meeting: Meeting, last: Task, compute: Callable[[list[Any]], list[Any]]
    ) -> bool:
        """Compute, hand the outcomes over, let everybody go on; True if the last to arrive does at
        once."""
        error: BaseException | None = None
        outcomes: list[Any] = [None] * len(meeting.tasks)
        try:
            outcomes = compute(meeting.offers)
        except Exception as raised:
            error = raised
        except ReplicaEnded:  # while it waited for other instances; the others are not to blame
            error = DeadlockError("the replica that was to compute a collective for all was ended")
        with self.lock:
            for task, outcome in zip(meeting.tasks, outcomes, strict=True):
                if task is None:  # ended meanwhile
                    continue
                task.outcome, task.error = outcome, error
                task.waiting = None
                if task is not last or self.one_at_a_time:
                    self.ready.append(task)
            if self.one_at_a_time:
                self.running -= 1
            self.dispatch()
        return not self.one_at_a_time

    def end_running(self) -> None:
        """Raise ReplicaEnded in every replica that was told to end and still runs its own code."""
        with self.lock:
            for task in self.started:
                if task.ended and not task.finished and not task.inside and task.thread is not None:
                    _end_thread(task.thread)
