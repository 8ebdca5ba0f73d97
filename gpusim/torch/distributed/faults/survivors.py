"""A launch whose ranks may die: the others see what c10d shows, and an agent ends them at last.

All here runs in the launching process. A rank ends when its process does; nothing else ends then.
Its calls are lost, and calls of others that need it fail as their engine has it (`meeting`). Time
passes when nothing else can go on: then the earliest limit expires. Once a rank has failed the
agent ends the others, as torchrun does: when each has ended or waits, and the agent has looked.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import distributed as dist

from gpusim.words import count

from ....errors import GpusimError, ReplicaError
from ....maps.clock import LOOK, Clock, Timed
from ....maps.completion import Completion
from ....maps.ending import ReplicaEnded, ReplicaInterrupted
from ....maps.scheduler import ReplicaThread
from ..calls.exchange import RankWork
from ..calls.waits import note_stall
from ..own.threads import current_rank
from ..runners.messages import Message
from ..runners.processes import ASKED, ProcessLaunch, Proxy, ProxyRank
from ..runners.threads import Rank
from . import dying
from .endings import Ending, Endings
from .engines import TAKES_DOWN, watchdog_text
from .happened import Happened
from .meeting import MortalExchange, is_monitored
from .plans import Fault

__all__ = ["Ending", "Endings", "MortalLaunch"]

MONITOR = 0.1
"""Simulated seconds from a rank's failure until torchrun's agent notices it."""

PATIENCE = 30.0
"""Seconds that a rank has between the agent's SIGTERM and its SIGKILL, as of torchrun."""


class AgentEnd(GpusimError):
    """The agent ends the ranks that are left."""


class ProgramRaised(Exception):
    """A rank's program has raised an exception, and its process has ended."""

    def __init__(self, message: Message) -> None:
        super().__init__("a rank's program has raised an exception")
        self.message = message


# Lock: the scheduler's, as of all of the clock.
class MortalClock(Clock):
    """A clock that lets the agent look before it lets a limit expire."""

    launch: MortalLaunch | None = None

    def advance(self) -> bool:
        if self.wake_lost() or self.wake_served():
            return True
        # A rank that waits elsewhere, as in a pipe, is one that waits. It would be told by nothing.
        if self.is_agents_turn():
            self.end_survivors()
            return True
        return super().advance()

    def wake_lost(self) -> bool:
        """Let a rank go on whose process has ended while its thread waits for it."""
        launch = self.launch
        if launch is None:
            return False
        # The call has no replicas any more when it is over.
        for each, thread in zip(launch.ranks, launch.call.replicas, strict=False):
            rank: Any = each
            waiting: Any = thread.waiting
            if thread.finished or thread.ended or waiting is None:
                continue
            if rank.has_ended():
                rank.is_lost = True
                self._release(thread)
                self.scheduler.fill_slots()
                return True
        return False

    def wake_served(self) -> bool:
        """Let ranks go on whose call the missing ranks owe nothing, as gloo does at once."""
        launch, woken = self.launch, False
        if launch is None:
            return False
        for each, thread in zip(launch.ranks, launch.call.replicas, strict=False):
            rank: Any = each
            waiting: Any = thread.waiting
            if thread.finished or thread.ended or waiting is None:
                continue
            parts = launch.exchange.served_parts(rank)
            if any(part.work._pending.done is waiting for part in parts):
                rank.is_served = True
                self._release(thread)
                woken = True
        if woken:
            self.moved()
            self.scheduler.fill_slots()
        return woken

    def _release(self, thread: ReplicaThread) -> None:
        """Let a thread go on without what it waits for."""
        waiting: Any = thread.waiting
        waiting.withdraw(thread)
        thread.waiting = thread.timed = None
        self.scheduler.ready.append(thread)

    def _pause(self) -> float | None:
        # Also while all wait: the process of one may end meanwhile.
        pause = super()._pause()
        return LOOK if pause is None else min(pause, LOOK)

    def others_wait(self) -> bool:
        # The agent waits until a rank that is elsewhere makes no progress.
        has_failed = self.launch is not None and self.launch.failed_at is not None
        return has_failed or super().others_wait()

    def is_agents_turn(self) -> bool:
        """Whether a rank has failed, and nothing else happens before the agent notices it."""
        launch = self.launch
        if launch is None or launch.failed_at is None or not launch.call.unfinished:
            return False
        entry = self._first()
        return entry is None or entry.due > launch.failed_at + MONITOR

    def end_survivors(self) -> None:
        """Have the agent end all ranks that are left."""
        assert self.launch is not None
        self.launch.call.abort(AgentEnd("a rank has failed"))

    def asked(self, replica: ReplicaThread) -> bool:
        # Ranks that ask again and again let time pass, as those that wait do: when all that can go
        # on have asked in vain, the agent looks, and then the earliest limit expires.
        if self.away or self.launch is None:
            return super().asked(replica)
        entry, self._entries = self._entries, []
        try:
            goes_on = super().asked(replica)
        finally:
            self._entries = entry
        if goes_on or self.wake_served():
            return True
        served = [
            thread
            for rank, thread in zip(self.launch.ranks, self.launch.call.replicas, strict=False)
            if not (thread.waiting or thread.finished or thread.ended)
            and self.launch.exchange.served_parts(rank)
        ]
        if served:
            return replica not in served  # `fail_waiting` completes its calls
        first = self._first()
        if self.is_agents_turn():
            self.end_survivors()
        elif first is None or not first.is_limit:
            return first is not None
        else:
            self._fire(first)
        self.moved()
        return True

    def _fire(self, entry: Timed) -> None:
        if entry.is_limit and self.launch is not None:
            rank: Any = self.launch.ranks[entry.replica.entry.index or 0]
            rank.times_out = True
        super()._fire(entry)
        # Ranks whose limits are due at one time all time out; none hears of another's first.
        following = self._first()
        if following is not None and following.is_limit and following.due <= self.now:
            self._fire(following)


class MortalProxyRank(ProxyRank):
    """The launching process's end of a rank that may die."""

    grace = PATIENCE
    #: The words with which an engine has ended the process.
    aborted = ""
    #: Whether waits for NCCL's calls raise at the limit, and the process lives on.
    blocks = False
    #: Whether its limit has expired and it is yet to go on.
    # Set under the scheduler's lock while the rank waits; cleared by its own thread when it runs.
    times_out = False
    #: Whether its process has ended while it waited: another thread of the program ended it.
    # As `times_out`.
    is_lost = False
    #: Whether it waits for a call that is complete for it alone.
    # As `times_out`.
    is_served = False

    def wait_for(self, completion: Completion, what: str, limit: float | None = None) -> bool:
        done = super().wait_for(completion, what, limit)
        self.times_out = False
        if self.is_lost:
            raise self.failure()
        return done

    def has_ended(self) -> bool:
        """Whether its process has ended, which its thread may not have seen yet."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, how) is not None
        return True  # its thread has seen it

    def wait_for_work(self, work: RankWork, what: str, limit: float | None, own: bool) -> None:
        self.wait_for(work._pending.done, what, limit)
        if self.is_served:
            self.is_served = False
            self.exchange().serve(self)
        # A part that has failed is another object now, and is complete.
        if not work._pending.done.done:
            assert limit is not None
            if own and work._pending.key is not None:
                work.expire(limit, own, self.thread().expired)
            self.expire(work, limit)
        error = work._pending.error
        if error is not None and is_monitored(work):
            # In the midst of `RankGroup.monitored_barrier`, which adds words to the call's error.
            raise error if work.group.rank() else RuntimeError(str(error))

    def expire(self, work: RankWork, limit: float) -> None:
        """Let a call fail at its limit, as its engine does."""
        exchange, group = self.exchange(), work.group
        if not exchange.aborts(group._key):
            exchange.expire(self, work, limit)
            return
        text = watchdog_text(work, self.index, group._calls, limit)
        if self.blocks:
            raise note_stall(dist.DistBackendError(text), self.thread().expired)
        # The watchdog ends the process: the program sees no exception.
        shown = "\n".join([text, *TAKES_DOWN, f"  what():  {text}", ""])
        self.show({"stream": "stderr", "text": shown, "flush": True})
        self.aborted = text
        os.kill(self.process.pid, signal.SIGABRT)
        raise self.failure()

    def fail_waiting(self, what: str) -> None:
        if self.exchange().served_parts(self):
            self.exchange().serve(self)
            return
        # It asks in vain for a call that would time out by itself, however it is waited for.
        parts = self.exchange().open_parts(self)
        part = next((each for each in parts if each.work.limit is not None), None)
        if part is None:
            super().fail_waiting(what)
        else:
            self.expire(part.work, part.work.limit or 0.0)

    def exchange(self) -> MortalExchange:
        found: Any = self.launch.exchange
        return found


class MortalProxy(Proxy):
    """The calls of one process that may die."""

    asked = (*ASKED, "blocks", "hang", "late", "meet", "world")
    posted = 0

    def _raised(self, message: Message) -> None:
        # The process lives on until its exit functions have run: others hear of its end after it.
        self.read_to_end()
        self.rank.process.join()
        raise ProgramRaised(message)

    def read_to_end(self) -> None:
        """Show what the process has written, until it has ended."""
        while (found := self._receive(self.rank.thread().check_ended)) is not None:
            if found.file is not None:
                os.close(found.file)
            if not found.brief and found.message.get("do") == "write":
                self.rank.show(found.message)

    def _post_planned(self, *given: Any) -> RankWork:
        self.posted += 1
        return super()._post_planned(*given)

    def _call(self, *given: Any, **named: Any) -> Message:
        self.posted += 1
        return super()._call(*given, **named)

    # What a process asks for

    def _blocks(self) -> None:
        rank: Any = self.rank
        rank.blocks = True

    def _world(self, size: int, place: int, number: int, limit: float | None) -> Message:
        exchange: Any = self.launch.exchange
        return {"members": exchange.gather_world(self.rank, size, place, number, limit)}

    def _meet(self, limit: float | None) -> None:
        exchange: Any = self.launch.exchange
        group = self.groups[-1]
        # Waits come with theirs; this one is for calls that the program only asks about.
        group.limit = limit
        exchange.meet(group._key, self.rank, limit)

    def _hang(self, what: str) -> None:
        self.rank.wait_for(Completion(self.launch.scheduler), self._at(what))

    def _late(self, seconds: float, what: str) -> None:
        # A limit that expires, and not a sleep: the machine's time need not pass.
        self.rank.wait_for(Completion(self.launch.scheduler), self._at(what), seconds)

    def _at(self, what: str) -> str:
        return f"the fault {what!r} at {self.rank.site}"


class MortalLaunch(ProcessLaunch):
    """A launch of processes that may die, hang and be late."""

    rank_type = MortalProxyRank
    clock_type = MortalClock
    exchange_type = MortalExchange
    exchange: MortalExchange

    def __init__(
        self,
        faults: Sequence[Fault],
        attempt: int,
        environments: Sequence[Mapping[str, str]],
        run: Callable[[Rank], Any],
        *how: Any,
    ) -> None:
        super().__init__(environments, functools.partial(dying.begin, run), *how)
        # Fixed before the forks: the ranks' processes have the same, by number.
        self.faults, self.attempt = tuple(faults), attempt
        #: The simulated time at which a rank has failed; None as long as none has.
        # Lock: the scheduler's.
        self.failed_at: float | None = None
        self.happened = Happened(self.faults)
        # Appended by ranks' threads, each with its slot: one operation, which needs no lock.
        self.endings: list[Ending] = []
        self.results: list[Any] = [None] * self.size
        clock: Any = self.scheduler.clock
        clock.launch = self

    def rank_of_process(self) -> Any:
        return object.__new__(dying.MortalRank)

    def execute(self) -> Any:
        error: GpusimError | None = None
        try:
            super().execute()
        except AgentEnd:
            pass
        except GpusimError as raised:
            error = raised
        for index in {*range(self.size)} - {each.rank for each in self.endings}:
            # It never began: another has ended all before.
            self._note(index, -signal.SIGTERM, by_agent=True)
        ranks = tuple(sorted(self.endings, key=lambda each: each.rank))
        order = tuple(each.rank for each in self.endings)
        came = tuple(fault for fault in self.faults if self.happened.has(fault))
        left = tuple(self.happened.left(self.attempt))
        return Endings(ranks, order, error, came, left, self.results)

    def _serve(self, rank: Rank) -> Any:
        """Make the calls of the rank's process until it has ended. (In the rank's thread.)"""
        assert isinstance(rank, MortalProxyRank)
        rank.stay_inside()
        proxy = MortalProxy(self, rank)
        about: dict[str, Any] = {}
        try:
            self.results[rank.index] = proxy.serve()
            code = 0
        except ProgramRaised as raised:
            said = raised.message["error"]
            code = rank.process.exitcode or raised.message["code"]
            about = {"error": said["name"], "message": said["text"], "traceback": said["trace"]}
        except ReplicaEnded as ended:
            rank.stay_inside()
            rank.end()
            if not isinstance(ended, ReplicaInterrupted):
                code = rank.process.exitcode
                self._note(rank.index, code, by_agent=True, calls=proxy.posted, site=rank.site)
            raise
        except ReplicaError:
            # Its process has ended without a word.
            if rank.process.exitcode is None:
                raise
            code = rank.process.exitcode
            # A thread of the program may have written while its main one waited.
            with suppress(OSError):
                proxy.read_to_end()
            if rank.aborted:
                about = {"error": "DistBackendError", "message": rank.aborted}
        finally:
            proxy.close()
        ending = self._note(rank.index, code, calls=proxy.posted, site=rank.site, **about)
        if code:
            with self.scheduler.lock:
                if self.failed_at is None:
                    self.failed_at = self.scheduler.clock.now
        # While this thread has its slot: nothing runs in between, in turns.
        self.exchange.bury(rank.index, str(ending))
        return None

    # In a rank's process, as torch asks for it

    def _rendezvous(self, rank: int, size: int) -> Iterator[tuple[dist.Store, int, int]]:
        me: Any = current_rank()
        rank = int(os.environ["RANK"]) if rank == -1 else rank
        size = int(os.environ["WORLD_SIZE"]) if size == -1 else size
        yield self.store_type(self, me), rank, size

    def _admit(self, size: int, rank: int, ranks: list[int], backend: str) -> None:
        me: Any = current_rank()
        me.backend = backend
        if ranks:
            return
        if not 0 <= rank < size <= self.size:
            raise ValueError(
                f"init_process_group: rank={rank} of world_size={size}: expected a rank below the "
                f"size, and at most the {count(self.size, 'rank')} of this launch"
            )
        me.world = size, rank

    def _note(self, index: int, code: int, **about: Any) -> Ending:
        ending = Ending(index, code, place=len(self.endings), **about)
        self.endings.append(ending)
        return ending

    def describe_stall(self) -> str:
        text = super().describe_stall()
        bad = [each for each in self.endings if each.code]
        return "; ".join([text, *(f"rank {each.rank} {each}" for each in bad)])
