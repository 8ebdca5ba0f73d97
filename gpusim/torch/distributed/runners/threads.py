"""Ranks: threads of this process that take turns, each with what a process has to itself."""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from gpusim.fallback.threads import cores
from gpusim.words import count

from ....errors import GpusimError, ReplicaError, explain
from ....maps.axis_environment import AxisEntry
from ....maps.call_site import call_site
from ....maps.clock import Clock, Work
from ....maps.scheduler import PmapCall, ReplicaThread, Scheduler
from ....recording import Recorder
from ....reduction import Reduction, current, entered, forked
from ..accelerator import (
    OneGpu,
    cpu_as_accelerator,
    one_gpu_as_many,
    out_of_memory,
    simulated_gpus,
)
from ..calls.dispatcher import dispatched
from ..calls.exchange import Exchange, GroupKey
from ..calls.folds import Chooser, as_chooser
from ..calls.group import RankGroup
from ..calls.outside import waits_outside
from ..calls.store import RankStore, Values
from ..calls.timeouts import group_limit
from ..calls.waits import Waits, stall_of
from ..own.casts import casts_of_ranks
from ..own.draws import OwnDraws
from ..own.environment import encoded, own_environments
from ..own.forks import ends_forks
from ..own.registries import CURE, is_of_shared_modules, operators_made_once
from ..own.seeds import seeds_of
from ..own.table import installed
from ..own.threads import (
    current_rank,
    enter,
    own_rank,
    rank_of_thread,
    record_of_starter,
    threads_of_ranks,
)
from ..own.turns import Globals
from ..private import has_gpu
from ..private_calls import key_of_draws
from ..private_groups import leave_groups, ranks_as_threads
from .progress import work_of_process

__all__ = ["Around", "Launch", "Rank", "environment_of"]

T = TypeVar("T")
#: A context of a rank's number, in which its thread runs.
Around = Callable[[int], AbstractContextManager[Any]]


# Owner: the launch. Fields are the rank's own thread's, unless a comment says otherwise.
class Rank(Waits):
    """One rank of a launch, and what a process would have to itself."""

    group_type = RankGroup
    #: What sees the rank's calls, where the program is checked: `checks.watch.Watch`.
    watch: Any = None
    #: Whether its program runs in this thread.
    runs_here = True
    #: The process that the rank runs in; one that it forks has another number.
    home = 0

    def call_site(self) -> str:
        """file:line of the rank's program."""
        return call_site()

    def __init__(self, launch: Launch, index: int, environment: Mapping[str, str]) -> None:
        self.launch = launch
        self.index = index
        # The rank's os.environ, read and written in its threads.
        self.environment = encoded(environment)
        process = launch.process
        #: The variables that may differ from the process's.
        self.own_names = {n for n, v in self.environment.items() if process.get(n) != v}
        self.own_names |= process.keys() - self.environment.keys()
        # Written by the rank's thread before it waits; read under the scheduler's lock to describe
        # a stall, when the rank waits and does not write.
        self.waits_for = ""
        # Works that nothing else may hold: see RankWork.
        self.unfinished: set[dist.Work] = set()
        self.stores: list[dist.Store] = []
        # How often the rank has made a group of a name, by world. Ranks of one group count alike,
        # so that the count tells groups of one name apart.
        self.groups_made: dict[tuple[int, str], int] = {}
        self.worlds = 0
        self.backend = ""  # that the program names for the group that it makes
        #: What torch keeps of the rank's groups, while its function runs.
        # None before and after the rank's function: a thread that outlives it is told so.
        self.record: dict[str, Any] | None = None

    def thread(self) -> ReplicaThread:
        """The rank as the scheduler knows it."""
        return self.launch.call.replicas[self.index]

    def check_thread(self, what: str) -> None:
        """GpusimError if the calling thread is not the rank's own."""
        if own_rank() is not self:
            raise self.thread_error(what)

    def thread_error(self, what: str) -> GpusimError:
        """The error for a call in the calling thread, which is not the rank's own."""
        which = "a thread that the rank started" if rank_of_thread() is self else "another thread"
        if self.home not in (0, os.getpid()):
            which = "a process that the rank has forked"
        verb = "calls collectives" if what == "async_save" else "was called"
        cure = "; use torch.distributed.checkpoint.save" if what == "async_save" else ""
        return GpusimError(
            f"{what} of rank {self.index} {verb} from {which}; ranks call collectives from their "
            f"own thread{cure}"
        )

    def new_group(
        self, name: str, ranks: Sequence[int], options: Any, timeout: Any = None
    ) -> RankGroup:
        """The rank's end of a new group."""
        members = tuple(ranks) or tuple(range(self.launch.size))
        if not ranks:
            self.worlds += 1
        made = self.groups_made.get((self.worlds, name), 0)
        self.groups_made[self.worlds, name] = made + 1
        key = GroupKey(name, members, (self.worlds, made))
        chooser = self.launch.chooser
        if isinstance(options, (Reduction, str, os.PathLike, Mapping)) or callable(options):
            chooser = as_chooser(options, "pg_options")
        # Before the group is there: a name that other ranks use for other ranks is an error here,
        # and not one of the first call.
        self.launch.exchange.admit(key, self)
        group = self.group_type(self, key, members.index(self.index), chooser, options)
        group.limit = group_limit(timeout, self.backend)
        return group


# Made and executed in the caller's thread; ranks' threads only read its fields, except those below.
class Launch:
    """Ranks that run together: their scheduler, their exchange, and whose turn it is."""

    rank_type = Rank
    #: Whether ranks are threads, which share the process's globals.
    shares_globals = True
    store_type: type[RankStore] = RankStore
    clock_type = Clock
    exchange_type = Exchange
    #: Modules that are imported once, before ranks are forked. Threads share theirs anyway.
    preload: Sequence[str] = ()

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        run: Callable[[Rank], Any],
        chooser: Chooser | None,
        schedule: str,
        recorder: Recorder | None,
        device: str | None = None,
        around: Around | None = None,
        seed: int = 0,
    ) -> None:
        self.size = len(environments)
        self.seed = seed
        self.device = device
        self.schedule = schedule
        self.in_turns = schedule == "turns"
        self.chooser = chooser
        self.recorder = recorder
        #: `checks.Check`, if the program is checked.
        self.check: Any = None
        self.run = run
        self.around = around or (lambda index: nullcontext())
        # In turns one: "who runs" and "whose globals are in place" are then the same question.
        slots = 1 if self.in_turns else cores()
        clock = functools.partial(self.clock_type, work_of=self.work_of)
        self.scheduler = Scheduler(slots, self.in_turns, clock)
        # Called with the scheduler's lock held: it must not take it, nor wait.
        self.scheduler.describe_stall = self.describe_stall
        self.scheduler.name_of = lambda index, axis: f"rank {index}"
        # The process and the thread that launch: what this thread does is not a rank's work.
        self.pid, self.tid = os.getpid(), threading.get_native_id()
        self.call = PmapCall(self.scheduler, None, self._run_in_context, self._report)
        self.exchange = self.exchange_type(self)
        self.store = Values(self)
        self.process = encoded(os.environ)
        self.ranks = [self.rank_type(self, index, each) for index, each in enumerate(environments)]
        state = current()
        # Each rank counts its sums by itself, from where the caller stands.
        self.states = [forked(state) for _ in self.ranks]
        # Without the replica of the scheduler's: a pmap that a rank calls is an outermost one, with
        # threads and slots of its own.
        self.contexts = [contextvars.copy_context() for _ in self.ranks]
        if device != "cpu" and has_gpu():
            torch.cuda.init()  # else seeds wait for it, of all ranks in one list
        # The caller's, as they were when the launch was made: what is put back.
        self.base = Globals()
        # By rank. Invariant, in turns: those of `last` are in the process, all others here.
        self.globals: list[Globals] = []
        #: Of ranks that are threads and run freely, while they run.
        # Of the launch, and not of a rank: each draw looks at its thread. Set before ranks begin.
        self.draws: OwnDraws | None = None
        if self.shares_globals and not self.in_turns:
            key_of_draws()
        elif self.shares_globals:
            self.globals = [self.base.of_rank(seeds_of(seed, rank)) for rank in range(self.size)]
        # Whose globals the process has. Read and written by the rank that has the turn: no lock.
        self.last: Rank | None = None
        #: What changes in C's environment with a rank's turn, by the rank: after which rank's.
        self.changes: dict[Rank | None, tuple[Rank | None, list[tuple[bytes, bytes | None]]]] = {}
        for index in range(self.size):
            self.call.add(AxisEntry("rank", self.size, 0, index), contextvars.copy_context())

    def execute(self) -> list[Any]:
        """Run all ranks; their results, or the error that ended them."""
        threads = torch.get_num_threads()
        is_shared = self.shares_globals and self.size > 1
        with (
            # What is replaced for the whole process, in this order, and put back in the reverse
            # one. Each looks at the calling thread, and does what it did before in other threads.
            ranks_as_threads(self._rendezvous, self._admit, record_of_starter) as world,
            threads_of_ranks(),
            own_environments(),
            installed() if is_shared else nullcontext(),
            operators_made_once() if is_shared and not self.in_turns else nullcontext(),
            casts_of_ranks(lambda: current_rank().give_way()),
            dispatched(RankGroup, world),
            self.waits_of_programs(),
            self.gpus(),
        ):
            self.world = world
            try:
                if self.recorder is not None:
                    self.recorder.begin(self.size, schedule=self.schedule, torch=torch.__version__)
                with self._own_draws():
                    # The caller's thread waits here until all ranks have ended. It is not a rank.
                    return self.call.execute()
            finally:
                if self.recorder is not None:
                    self.recorder.end(self.call.error or sys.exc_info()[1])
                if self.in_turns:
                    # All ranks have ended, so this thread has the turn, so to speak.
                    now = self.globals[self.last.index] if self.last is not None else self.base
                    now.save()
                    self.base.restore(now)
                    self._export(None)
                else:
                    self.base.restore(Globals())
                torch.set_num_threads(threads)

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """A block in which ranks that are threads and run freely draw from states of their own."""
        if self.in_turns or not self.shares_globals:
            yield
            return
        self.draws = OwnDraws(self.size, self.seed)
        with self.draws.functions():
            yield

    @contextmanager
    def of_thread(self, rank: Rank) -> Iterator[None]:
        """A block of a thread that is the rank's own, or that it has started."""
        with self.around(rank.index), self.draws.of_thread() if self.draws else nullcontext():
            yield

    def gpus(self) -> AbstractContextManager[Any]:
        """A block in which torch's names answer ranks that have GPUs played for them."""
        if self.device == "cpu":
            return cpu_as_accelerator()
        return one_gpu_as_many() if self.device == "cuda" else nullcontext()

    # In a rank's thread

    def gpus_of(self, rank: Rank) -> AbstractContextManager[Any]:
        """A block of the rank's thread in which it has them."""
        (name,) = encoded({"LOCAL_WORLD_SIZE": ""})
        count = int(rank.environment[name])
        if self.device == "cpu":
            return simulated_gpus(count, seeds_of(self.seed, rank.index).of_gpu)
        return OneGpu(count) if self.device == "cuda" else nullcontext()

    def _run_in_context(self, index: int) -> Any:
        # In a context without the scheduler's replica: a pmap in a rank is an outermost one.
        # In the worker's thread, around all that the rank does there; threads that it starts have a
        # block of their own.
        with self.of_thread(self.ranks[index]):
            return self.contexts[index].run(self._run_rank, self.ranks[index])

    def _run_rank(self, rank: Rank) -> Any:
        # In the rank's thread, which is a worker's and may have run another rank before.
        enter(rank)
        try:
            rank.record = self.world.enter()
            # The first turn: the process's globals become the rank's, with its seeds.
            self.turn_of(rank)
            # As torchrun has it; `execute` puts it back.
            torch.set_num_threads(1)
            with ExitStack() as stack:
                stack.enter_context(entered(self.states[rank.index]))
                # Else backward passes run in threads that are no rank's.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(self.gpus_of(rank))
                if self.check is not None and rank.runs_here:
                    stack.enter_context(self.check.of_rank(rank))
                with ends_forks():
                    return self.run(rank)
        except NameError as error:
            explain(error)
            raise
        except SystemExit as ended:
            if ended.code is None or (isinstance(ended.code, int) and ended.code == 0):
                return None
            raise
        finally:
            # Works hold tensors, and the rank outlives its function.
            rank.unfinished.clear()
            rank.stores.clear()
            rank.record = None
            # While `world` still has the rank's record.
            leave_groups()
            self.world.leave()
            # The worker goes back to the pool: what torch keeps by thread must not reach the next
            # job.
            _clear_thread()

    def turn_of(self, rank: Rank) -> None:
        """Exchange the process's globals, if another rank has run since this one did."""
        if self.draws is not None:
            self.draws.check()
        # In the rank's own thread, in its turn: after each wait, and when it begins. Abandoned
        # ranks may run beside others: they must not take what is not theirs.
        if not self.in_turns or self.last is rank or self.call.abandoned:
            return
        now = self.base if self.last is None else self.globals[self.last.index]
        if self.last is not None:
            # What the last rank has changed since it got its turn. It is not running, so that only
            # this thread touches it.
            now.save()
        # Only what differs is written.
        self.globals[rank.index].restore(now)
        self._export(rank)
        self.last = rank

    def _export(self, rank: Rank | None) -> None:
        """Give the C library, and programs that a rank starts, the environment of the rank.

        None gives it the process's. What it has is that of the last rank.
        """
        # In turns the order is fixed, so the last rank is the same each time as a rule, and so is
        # what C has to be told.
        last, changes = self.changes.get(rank, (rank, []))
        if last is not self.last or last is rank:
            changes = self._differences(rank)
            self.changes[rank] = self.last, changes
        for name, value in changes:
            if value is None:
                os.unsetenv(name)
            else:
                # C's environment alone: Python's looks at the rank. For getenv in libraries, and
                # for children.
                os.putenv(name, value)

    def _differences(self, rank: Rank | None) -> list[tuple[bytes, bytes | None]]:
        """The variables that differ between the last rank, or the process, and a rank."""
        names: set[bytes] = set()
        before = own = self.process
        if self.last is not None:
            names, before = self.last.own_names, self.last.environment
        if rank is not None:
            names, own = names | rank.own_names, rank.environment
        return [(name, own.get(name)) for name in names if own.get(name) != before.get(name)]

    def waits_of_programs(self) -> AbstractContextManager[None]:
        """A block in which ranks give up their turn where their programs wait."""
        return waits_outside()

    def work_of(self, replica: ReplicaThread) -> Work | None:
        """The work of a rank that waits outside. (In the thread that watches.)"""
        return work_of_process(os.getpid(), (self.tid, threading.get_native_id()))

    # What torch asks for

    def _rendezvous(self, rank: int, size: int) -> Iterator[tuple[dist.Store, int, int]]:
        me = current_rank()
        for name, given, own in (("rank", rank, me.index), ("world_size", size, self.size)):
            if given not in (-1, own):
                raise ValueError(
                    f"init_process_group: {name}={given}, but this is rank {me.index} of "
                    f"{count(self.size, 'rank')}"
                )
        yield self.store_type(self, me), me.index, self.size

    def _admit(self, size: int, rank: int, ranks: list[int], backend: str) -> None:
        me = current_rank()
        me.backend = backend
        if not ranks and (size, rank) != (self.size, me.index):
            raise ValueError(
                f"init_process_group: rank={rank} of world_size={size}, but this is rank "
                f"{me.index} of {count(self.size, 'rank')}"
            )

    # When ranks fail

    def _report(self, index: int, error: BaseException) -> BaseException:
        if self.shares_globals and self.size > 1 and is_of_shared_modules(error):
            error.add_note(f"Ranks that are threads share the modules that they import; {CURE}")
        if isinstance(error, GpusimError):
            # In the thread of the rank that failed, with the scheduler's lock held: it must not
            # wait.
            error.add_note(f"raised in rank {index}")
            return error
        text = f": {error}" if str(error) else ""
        text += f"; {stall_of(error)}" if stall_of(error) else ""
        text += out_of_memory(error, self.size) if self.device == "cuda" else ""
        failure = ReplicaError(index, f"rank {index} raised {type(error).__name__}{text}")
        failure.__cause__ = error
        return failure

    def describe_stall(self) -> str:
        """The ranks that wait, and those that have returned. (With the scheduler's lock held.)"""
        doing: dict[str, list[int]] = {}
        for rank, thread in zip(self.ranks, self.call.replicas, strict=True):
            asks = rank.asks_for if self.scheduler.clock.rounds else ""
            what = f"in {rank.waits_for or asks}" if rank.waits_for or asks else "elsewhere"
            doing.setdefault("" if thread.finished else what, []).append(rank.index)
        returned = doing.pop("", [])
        parts = [
            f"{_who(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {what}"
            for what, ranks in doing.items()
        ]
        if returned:
            parts.append(f"{_who(returned)} {'have' if len(returned) > 1 else 'has'} returned")
        return self.explained(f"no rank can go on: {'; '.join(parts)}")

    def explained(self, stall: str) -> str:
        """The text about a stall, and which ranks called another group than those that wait."""
        apart = self.exchange.apart()
        return f"{stall}. {apart[0].upper()}{apart[1:]}" if apart else stall


def _clear_thread() -> None:
    """Leave the thread as a new one is: the next rank, or a pmap, may run in it."""
    enter(None)
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            torch.set_autocast_enabled(device, False)
    torch.set_autocast_cache_enabled(True)
    if torch.cuda.is_initialized():
        torch.cuda.set_device(0)
        torch.cuda.set_stream(torch.cuda.default_stream())
    if torch.get_default_device() != torch.device("cpu"):
        torch.set_default_device(None)


def _who(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def environment_of(rank: int, ranks: int, local_ranks: int, **more: str) -> dict[str, str]:
    """The variables that torchrun gives a rank, with the caller's environment below."""
    node, local = divmod(rank, local_ranks)
    nodes = -(-ranks // local_ranks)
    own = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_ranks,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    return {**os.environ, **{name: str(value) for name, value in own.items()}, **more}
