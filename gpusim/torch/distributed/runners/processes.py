"""Ranks as processes, forked from this one, for programs that keep state in modules.

Each rank has its thread here as well, on the same scheduler and exchange. The thread makes the
calls of its process for it, on tensors in memory that both have mapped; where the process waits,
the thread waits. So matching, folds, deadlocks, mismatches and records are those of threads.

The processes are forked by a new thread, which has run no OpenMP code and lives as long as the
launch: the kernel kills them when it ends, also if this process is killed.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import BytesIO
from typing import Any, cast

from torch import Tensor

from ....errors import GpusimError, InstanceError, ReplicaError
from ....maps.clock import Work, come_inside, go_outside
from ....maps.ending import ReplicaInterrupted
from ....maps.scheduler import ReplicaThread
from ....reduction import Reduction
from ..calls import store
from ..calls.exchange import GroupKey, Posting, RankWork, Terms
from ..calls.folds import FoldCall
from ..calls.group import RankGroup
from ..calls.reductions import Reducing
from ..own.seeds import seeds_of, sow
from .child import METHODS, LaunchOfProcesses
from .child import run as run_in_process
from .messages import (
    Channel,
    Message,
    Received,
    decode,
    decode_error,
    encode,
    encode_error,
    load,
    view,
)
from .plans import CALL, CALLED, PLANS, Plan, answered, is_within
from .progress import Stillness, work_of_process
from .threads import Rank

__all__ = ["ProcessLaunch", "Proxy", "ProxyRank"]

GRACE = 0.5
"""Seconds in which a process may end by itself."""

FILES = 4
"""File descriptors for each process."""

is_frozen = False
"""Whether all objects are frozen already, and stay so; to count them takes as long as a fork."""
# Written by a campaign of faults, in a process of its own, before it launches ranks.

LOADED = ("_dynamo", "distributed.checkpoint.state_dict", "distributed.optim")
"""Large modules of torch that training imports late; each process would have its own copy."""

ASKED = ("group", "describe", "call", "wait", "give_way", "sleep", "fail", "store", "written")
"""The requests of a process: methods of Proxy."""


# In the launching process. Its thread is a replica of the scheduler's and is the only one that uses
# `channel` (except for `shut_down`). While the process computes, the thread holds the slot for it.
class ProxyRank(Rank):
    """A rank whose program runs in another process, and that makes its calls here."""

    runs_here = False
    channel: Channel
    process: Any = None
    #: Seconds in which the process may end by itself, when its rank is to end after an error.
    grace = GRACE
    # Where the program is, as the last request said. Read by others to describe a stall: a string
    # that is replaced as a whole.
    site = ""

    def call_site(self) -> str:
        return self.site

    def ask(self, message: Message) -> Message:
        """Ask the process, in the middle of a call that it waits for."""
        # In the midst of a call: the process waits for an answer, finds a question, and answers it.
        self.channel.send(message)
        found = self.channel.receive(self.thread().check_ended)
        if found is None:
            raise self.failure()
        if "error" in found[0]:
            raise decode_error(found[0]["error"])
        return found[0]

    def stay_inside(self) -> None:
        """Have no exception posted to the thread, which asks itself whether it is to end."""
        with self.launch.scheduler.lock:
            # From now on, waits included. An exception that is posted here could leave a message
            # half read, and the process without an answer; so the thread asks `check_ended` itself.
            self.thread().inside = self.thread().serves = True

    def failure(self) -> GpusimError:
        """The error for a process that has ended by itself."""
        # In the rank's thread, with a slot: the process has closed its socket and ends.
        self.process.join()
        code = self.process.exitcode
        if code is None:
            return self.process.failure()
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        after = f"; its last call was at {self.site}" if self.site else ""
        return ReplicaError(
            self.index,
            f"the process of rank {self.index} {how} before its function returned{after}",
        )

    def show(self, message: Message) -> None:
        """Write what the process has written."""
        stream = {"stdout": sys.stdout, "stderr": sys.stderr}[message["stream"]]
        stream.write(message["text"])
        if message["flush"]:
            stream.flush()

    def end(self) -> None:
        """End the process by a signal, and show what it writes meanwhile.

        After Ctrl-C all processes get the signal at once, and the time that they need.
        """
        assert isinstance(self.launch, ProcessLaunch)
        launch, call = self.launch, self.launch.call
        # In the thread of a rank that is to end, which keeps its slot: as many end at a time as
        # there are slots, and after an error nothing else runs.
        limit = time.monotonic() + self.grace
        still = Stillness(self.process)
        if self.launch.scheduler.end is ReplicaInterrupted:
            self.launch.interrupt()
            limit = math.inf
        elif self.process.is_alive():
            self.process.terminate()

        def check() -> None:
            if call.abandoned or time.monotonic() > limit:
                raise _Impatient
            # A program that waits in C code does not see the signal.
            # The signal was sent, its handler did not run, and the process does no work: it waits
            # in C code, which a signal does not leave. It would wait for ever.
            if not launch.interrupted[1 + self.index] and still.is_blocked():
                raise _Impatient

        with suppress(_Impatient):
            # What it still says is read, or it would wait for us in the midst of its last words.
            while (found := self.channel.receive(check)) is not None:
                if found.file is not None:
                    os.close(found.file)
                if found.message.get("do") == "write":
                    self.show(found.message)
                check()
            self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Impatient(Exception):
    """A process has not ended in time."""


# Belongs to the rank's thread. Its tensors are views of memory that the process has mapped too.
class ProxyGroup(RankGroup):
    """A rank's end of a group.

    **Attributes**: `chooses_here` is False for a call whose Reduction the rank's process chooses.
    """

    # So operands are not copied again: the block is not written before the process is told that the
    # call is complete.
    keeps_values = False  # the process has copied them
    number = 0
    chooses_here = True
    #: Whether the next call is kept: `again` posts it once more, as long as its tensors are where
    #: they were, and `part` has the arrays that it reads and writes. Of the rank's thread alone.
    keeps_call = False
    again: Callable[[], RankWork] | None = None
    part: Any = None

    def _post_as(self, made: Posting, terms: Terms) -> RankWork:
        if self.keeps_call:
            self.keeps_call, self.part = False, made.part
            self.again = functools.partial(super()._post_as, made, terms)
        return super()._post_as(made, terms)

    def _reduce_as(self, made: Reducing) -> RankWork:
        if self.keeps_call:
            self.keeps_call, self.part = False, made.part
            self.again = functools.partial(super()._reduce_as, made)
        return super()._reduce_as(made)

    def _settle(self, call: FoldCall, leaves: int) -> tuple[Reduction, int]:
        if self.chooses_here:
            return super()._settle(call, leaves)
        assert isinstance(self._rank, ProxyRank)
        question = [call.operation, list(call.group), call.dtype, call.size]
        answer = self._rank.ask(
            {"choose": question, "group": self.number, "folded": self._folds, "leaves": leaves}
        )
        return decode(answer["reduction"], []), answer["number"]


class ProcessLaunch(LaunchOfProcesses):
    """A launch whose ranks run in processes."""

    rank_type = ProxyRank
    shares_globals = False

    def __init__(
        self, environments: Sequence[Mapping[str, str]], run: Callable[[Rank], Any], *how: Any
    ) -> None:
        if sys.platform != "linux":
            raise GpusimError("launch: processes=True needs Linux")
        super().__init__(environments, self._serve, *how)
        self.program = run
        # Before a fork's context sets it: a rank finds the one that the program would.
        self.start_method = multiprocessing.get_start_method(allow_none=True)
        # Set when the launch is over: the thread that forks ends, and with it, by the kernel, the
        # processes.
        self._released = threading.Event()
        # Set when all are forked, or forking has failed: `_failure` is written before.
        self._forked = threading.Event()
        self._failure: BaseException | None = None
        self.channels: list[Channel] = []
        # To see at the end whether a view still holds shared memory, which is then collected.
        self.segments: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        #: Bytes that all processes of this instance see: whether SIGTERM stands for Ctrl-C, and
        #: by rank whether it has come to the program.
        # Anonymous and shared: made before the forks, so that all have it.
        self.interrupted = mmap.mmap(-1, 1 + self.size)

    def execute(self) -> list[Any]:
        with self._processes():
            return super().execute()

    def turn_of(self, rank: Rank) -> None:
        """Processes share no globals."""

    def waits_of_programs(self) -> AbstractContextManager[None]:
        return nullcontext()  # they run elsewhere

    def work_of(self, replica: ReplicaThread) -> Work | None:
        """The work of the rank's process; None if that is unknown.

        It goes on where a message of the process waits for this one, which on a busy machine is
        late to read it.
        """
        assert replica.entry.index is not None
        # In the watcher's thread. The process's own clock of work says whether it makes progress.
        found: Any = self.ranks[replica.entry.index]
        work = self.look_at(found.process)
        if work is not None and found.channel.has_more():
            return work._replace(goes_on=True)
        return work

    def look_at(self, process: Any) -> Work | None:
        """The work of a process."""
        number = getattr(process, "pid", None)
        return None if number is None else work_of_process(number)

    # Which ranks are processes of this instance, and how their calls come; see `instances`

    def local_ranks(self) -> Sequence[Rank]:
        return self.ranks

    def open_channel(self, rank: ProxyRank) -> socket.socket:
        """Connect the rank; the end of its process."""
        # In the thread that forks. `far` is closed here as soon as the child has it.
        own, far = socket.socketpair()
        rank.channel = Channel(own)
        self.channels.append(rank.channel)
        return far

    def before_forks(self) -> None:
        pass

    def after_forks(self) -> None:
        pass

    # Forking

    def _import_shared(self) -> None:
        """Import modules once, so that all processes share their pages.

        A module that asks for GPUs finds those of rank 0. It finds no RANK: it would be that of all
        ranks. If it draws, then from rank 0's seeds, so that runs repeat.
        """
        for name in LOADED:
            importlib.import_module(f"torch.{name}")
        if not self.preload:
            return
        sow(seeds_of(self.seed, 0))  # each rank sows its own when it begins
        before = threading.enumerate()
        with self.gpus(), self.gpus_of(self.ranks[0]):
            for name in self.preload:
                try:
                    importlib.import_module(name)
                except (Exception, SystemExit) as error:
                    raised = "".join(traceback.format_exception_only(error)).strip()
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    where = f" at {frame.filename}:{frame.lineno}"
                    where = "" if "importlib" in frame.filename else where  # no such module
                    raise GpusimError(f"preload {name}: {raised}{where}") from error
                # Of Python: libraries' own threads are those of their handlers of forks.
                begun = [each.name for each in threading.enumerate() if each not in before]
                if begun:  # they may hold locks, and the processes would lack them
                    raise GpusimError(
                        f"preload {name}: its import starts threads ({', '.join(begun)}), which "
                        "ranks that are forked afterwards lack; let each rank import it"
                    )

    @contextmanager
    def _processes(self) -> Iterator[None]:
        import resource  # Windows has none

        self._import_shared()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = FILES * self.size + 256
        if files[0] < needed <= files[1] or files[1] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], needed), files[1]))
        # A thread of its own: a child has a copy of this thread alone. It has run no OpenMP code,
        # whose pool the child would wait for; and its end is the parent's end for the kernel
        # (PR_SET_PDEATHSIG).
        thread = threading.Thread(target=self._fork, name="gpusim forks", daemon=True)
        was_frozen = is_frozen or gc.get_freeze_count()
        try:
            self.before_forks()
            # Else collections in the processes copy the memory that they share, and the one below
            # walks through all that the program has.
            gc.freeze()
            thread.start()
            # Before any rank's thread begins: forks while ranks run would copy locks that they
            # hold.
            self._forked.wait()
            if self._failure is not None:
                raise GpusimError(
                    f"launch could not start {len(self.local_ranks())} processes: {self._failure}"
                ) from self._failure
            self.after_forks()
            yield
        finally:
            # Only now: a child dies when the thread that forked it ends.
            self._released.set()
            # After an error the proxies have ended theirs, with their time to clean up. What is
            # left is killed.
            for rank in self.started():
                rank.process.kill()
            if thread.ident is not None:
                thread.join()
            for rank in self.started():
                rank.process.join()
                with suppress(ValueError):  # a second Ctrl-C has cut off another join
                    rank.process.close()
            for channel in self.channels:
                channel.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
            # All ranks' threads have ended: no lock is needed.
            self.exchange.calls.clear()  # which hold shared memory, as long as an error holds them
            self.exchange.mail.clear()
            if self.segments:
                gc.collect()
            if not was_frozen:
                gc.unfreeze()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in all processes."""
        # Once, by whichever rank's thread comes first; two that do send a second signal, which is
        # ignored.
        if not self.interrupted[0]:
            # Before the signals: their handler reads it.
            self.interrupted[0] = 1
            for rank in self.started():
                if rank.process.is_alive():
                    rank.process.terminate()

    def started(self) -> list[ProxyRank]:
        return [r for r in self.ranks if isinstance(r, ProxyRank) and r.process is not None]

    def _fork(self) -> None:
        """Fork all processes, and live until they are to end. (In a thread of its own.)"""
        context = multiprocessing.get_context("fork")
        parent = os.getpid()
        try:
            for rank in self.local_ranks():
                if self._released.is_set():
                    break
                assert isinstance(rank, ProxyRank)
                far = self.open_channel(rank)
                arguments = (self, rank.index, far, list(self.channels), parent)
                name = f"rank {rank.index}"
                child = context.Process(target=run_in_process, args=arguments, name=name)
                with warnings.catch_warnings(), far:
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forks in threads
                    child.start()
                # Written by the thread that forks, before `_forked` is set: read without a lock
                # after that.
                rank.process = child
        except BaseException as error:
            self._failure = error
        self._forked.set()
        self._released.wait()

    # In a rank's thread

    def load(self, rank: Rank, payload: bytearray) -> Any:
        """Decode the result of the rank's function."""
        return load(BytesIO(payload)) if payload else None

    def _serve(self, rank: Rank) -> Any:
        """Make the calls of the rank's process until its function has returned."""
        assert isinstance(rank, ProxyRank)
        rank.stay_inside()
        proxy = Proxy(self, rank)
        try:
            return proxy.serve()
        except BaseException:
            rank.stay_inside()
            rank.end()
            raise
        finally:
            proxy.close()


# The rank's thread in the launching process, for one process. All fields are that thread's alone.
class Proxy:
    """The calls of one process."""

    #: The requests that the process may make.
    asked: Sequence[str] = ASKED

    def __init__(self, launch: ProcessLaunch, rank: ProxyRank) -> None:
        self.launch, self.rank = launch, rank
        self.groups: list[ProxyGroup] = []
        self.works: dict[int, RankWork] = {}
        # The newest segment. Tensors of earlier ones hold theirs by themselves.
        self.memory: mmap.mmap | bytearray | None = None
        #: By the numbers that the process has for them.
        self.plans: dict[int, Plan] = {}
        #: The memory of results that are to be sent, by their work.
        self.results: dict[int, list[memoryview]] = {}

    def serve(self) -> Any:
        """Let the process run; what its function returned, or the exception that it raised."""
        rank = self.rank
        check = rank.thread().check_ended
        check()
        result, returned = None, False
        # In the rank's first turn: so in turns programs begin in the order of ranks.
        self._send({"begin": True})
        while (found := self._receive(check)) is not None:
            message, file, payload, brief = found
            try:
                if brief:
                    # After output, which is shown also of a rank that is ended, and before a
                    # request, which is not made.
                    check()
                    self._answer_planned(brief, file)
                    continue
                kind = message["do"]
                if kind == "write":
                    rank.show(message)
                check()
                if kind == "write":
                    continue
                if kind == "returned":
                    result, returned = self.launch.load(rank, payload), True
                elif kind == "raised":
                    self._raised(message)
                else:
                    self._answer(kind, message, file, payload)
            finally:
                if file is not None:
                    os.close(file)
        if not returned:
            raise rank.failure()
        rank.process.join()
        if rank.process.exitcode != 0:
            raise rank.failure()
        return result

    def _raised(self, message: Message) -> None:
        """Raise what the program has raised."""
        raise decode_error(message["error"])

    def _receive(self, check: Callable[[], object]) -> Received | None:
        """The next message. Until it comes the rank may lose its turn."""
        rank, thread = self.rank, self.rank.thread()
        rank.waits_for = "its program"
        # The process runs its program: it keeps the slot as long as it works, and may lose it if it
        # waits for another process elsewhere. In a request the thread waits as ranks do.
        go_outside(thread)
        try:
            return rank.channel.receive(check)
        finally:
            rank.waits_for = ""
            come_inside(thread)

    def close(self) -> None:
        """Let go of the shared memory."""
        self.works.clear()
        self.results.clear()
        self.plans.clear()
        self.memory = None

    def _answer(self, kind: str, message: Message, file: int | None, payload: bytearray) -> None:
        self.rank.site = message.get("site") or self.rank.site
        if kind not in self.asked:
            raise GpusimError(f"the process of rank {self.rank.index} asks for {kind!r:.60}")
        try:
            if file is not None:
                self._map(file)
            elif not self.rank.channel.shares_memory:
                self.memory = payload
            answer = getattr(self, f"_{kind}")(**message["with"]) or {}
        except (ReplicaError, InstanceError):
            # It cannot be told.
            raise  # the process has ended
        except Exception as error:
            answer = {"raise": encode_error(error)}
        self._say(answer, self._complete_works())

    def _say(
        self, answer: Message, complete: Sequence[tuple[int, BaseException | None, int]]
    ) -> None:
        """Send an answer, with the works that have become complete."""
        done = [
            [number, None if error is None else encode_error(error), source]
            for number, error, source in complete
        ]
        results: list[memoryview] = []
        for number, error, _ in complete:
            parts = self.results.pop(number, [])
            results += parts if error is None else []
        self._send({**answer, "done": done}, results)

    def _map(self, file: int) -> None:
        """Map a new segment of the process's memory."""
        self.memory = mmap.mmap(file, 0)
        self.launch.segments.add(self.memory)
        for plan in self.plans.values():
            # What was kept reads and writes the old segment.
            plan.calls.clear()

    def _complete_works(self) -> list[tuple[int, BaseException | None, int]]:
        """The works that have become complete: their numbers, errors, and senders of messages."""
        # With each answer: the process hears of all that is complete, and no message is sent for
        # that alone. So results are in its tensors after its next request at the latest.
        complete = []
        for number, work in list(self.works.items()):
            pending = work._pending
            if pending.done.done:
                complete.append((number, pending.error, work._source))
                self.rank.unfinished.discard(work)
                del self.works[number]
        return complete

    def _answer_planned(self, brief: bytes, file: int | None) -> None:
        """Answer a planned call: briefly, unless there is an error to tell of."""
        if file is not None:
            self._map(file)
        answer: Message = {}
        try:
            plan, number, start = self._plan_of(brief)
            self.rank.site = plan.site
            work = self._post_planned(plan, start)
            self.works[number] = work
            if plan.wait:
                answer = self._waited(number, plan.limit)
            answer["title"] = "" if work._pending.done.done else work._pending.title
        except (ReplicaError, InstanceError):
            raise  # the process has ended
        except Exception as error:
            answer = {"raise": encode_error(error)}
        complete = self._complete_works()
        if (
            len(answer) == 1
            and "title" in answer
            and all(error is None for _, error, _ in complete)
        ):
            said = [(number, source) for number, _, source in complete]
            self._send(answered(said, answer["title"]))
            return
        self._say(answer, complete)

    def _plan_of(self, brief: bytes) -> tuple[Plan, int, int]:
        """The plan, number and start of a planned call."""
        if len(brief) == CALL.size:
            kind, which, number, start = CALL.unpack(brief)
            plan = self.plans.get(which)
            if kind == CALLED and plan is not None:
                return plan, number, start
        raise GpusimError(
            f"the process of rank {self.rank.index} makes a planned call {brief!r:.60}, whose plan "
            f"is unknown; {len(self.plans)} are known"
        )

    def _post_planned(self, plan: Plan, start: int) -> RankWork:
        """Post a call by its plan.

        What the group has posted for the last call in the same memory is posted again, if it reads
        and writes nothing else.
        """
        group: ProxyGroup = plan.group
        group.chooses_here = plan.chooses_here
        # Of the same plan, in the same block: tensors, views and checks are the same, and are not
        # made again.
        call = plan.calls.get(start)
        if call is not None:
            return cast(RankWork, call())
        memory = self.memory
        tensors = []
        if plan.kinds:
            if not isinstance(memory, mmap.mmap):
                raise GpusimError(f"the process of rank {self.rank.index} has sent no memory")
            tensors = [view(memory, (*kind, start + at)) for *kind, at in plan.kinds]
        given = {name: decode(each, tensors) for name, each in plan.arguments.items()}
        method = getattr(group, plan.method)
        group.keeps_call = True
        try:
            work: RankWork = method(**given)
            again, part = group.again, group.part
        finally:
            group.keeps_call, group.again, group.part = False, None, None
        if isinstance(memory, mmap.mmap):
            # A part that is a copy has the values of this call alone: then only the method is kept.
            if again is None or not is_within(part, memory):
                again = functools.partial(method, **given)
            plan.keep(start, again)
        return work

    def _send(self, message: Message | bytes, payload: Sequence[memoryview] = ()) -> None:
        try:
            self.rank.channel.send(message, None, payload)
        except OSError:
            raise self.rank.failure() from None

    # What a process asks for

    def _group(self, name: str, ranks: list[int], copy: list[int], backend: str) -> None:
        self.rank.backend = backend
        key = GroupKey(name, tuple(ranks), (copy[0], copy[1]))
        self.launch.exchange.admit(key, self.rank)
        group = ProxyGroup(self.rank, key, ranks.index(self.rank.index), self.launch.chooser)
        group.number = len(self.groups)
        self.groups.append(group)

    def _describe(self, group: int, text: str) -> None:
        self.groups[group].setGroupDesc(text)

    def _call(
        self,
        group: int,
        method: str,
        number: int,
        arguments: Message,
        kinds: list[Any],
        choose: bool,
        wait: bool,
        limit: float | None,
        size: int = 0,
        written: Sequence[tuple[int, int]] = (),
        plan: int | None = None,
        start: int = 0,
    ) -> Message:
        # What a process sends is not trusted: it names a method, never an attribute of its choice.
        if method not in METHODS:
            raise GpusimError(f"a group has no method {method!r:.60}")
        if isinstance(self.memory, bytearray):  # what is only written was not sent
            self.memory.extend(bytes(max(0, size - len(self.memory))))
        tensors: list[Tensor] = []
        for kind in kinds:
            assert self.memory is not None
            tensors.append(view(self.memory, kind))
        given = {name: decode(each, tensors) for name, each in arguments.items()}
        own = self.groups[group]
        own.chooses_here = not choose
        # As a rank that is a thread makes the call: matching, checks, fold and record are the same
        # code.
        work = getattr(own, method)(**given)
        if work is None:
            return {}
        if plan is not None:
            if not 0 <= plan < PLANS:
                raise GpusimError(f"expected the number of a plan below {PLANS}, got {plan!r:.60}")
            how = (not choose, wait, limit)
            self.plans[plan] = Plan(own, self.rank.site, method, arguments, kinds, start, *how)
        # By the process's number, so that both sides need no other table.
        self.works[number] = work
        if written:
            assert self.memory is not None
            whole = memoryview(self.memory)
            self.results[number] = [whole[start : start + length] for start, length in written]
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        answer: Message = {
            "title": work._pending.title,
            "outputs": [places[id(each)] for each in work._outputs],
        }
        return answer | self._waited(number, limit) if wait else answer

    def _waited(self, number: int, limit: float | None) -> Message:
        """Wait for a call that has been posted; what to say of an error of the wait."""
        try:
            # Of a call that is not asynchronous: one message less, each way.
            self._wait(number, limit, own=False)
        except (ReplicaError, InstanceError):
            raise
        except Exception as error:
            return {"failed": encode_error(error)}
        return {}

    def _wait(self, work: int, limit: float | None, own: bool) -> None:
        found = self.works[work]
        what = f"{found._pending.title} at {found._site}"
        if not found._pending.done.done:
            self.rank.wait_for_work(found, what, limit, own)

    def _sleep(self, seconds: float) -> None:
        self.rank.sleep(seconds)

    def _written(self) -> None:
        """Nothing: what the process wrote before has been written."""

    def _give_way(self, asks: str) -> Message:
        return {"goes_on": self.rank.give_way(asks)}

    def _fail(self, what: str) -> None:
        self.rank.fail_waiting(what)

    def _store(self, method: str, arguments: Any) -> Message:
        if method not in store.METHODS:
            raise GpusimError(f"a store has no method {method!r:.60}")
        given = decode(arguments, [])
        return {"value": encode(getattr(self.launch.store, method)(self.rank, *given), [])}
