"""The process of a rank: its torch.distributed, whose calls its thread of the parent makes."""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import itertools
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TextIO, cast

from torch import Tensor

from ....files import flush_all
from ....maps.ending import ReplicaEnded, ReplicaInterrupted
from ....reduction import current
from ..accelerator import cpu_as_accelerator
from ..calls.dispatcher import dispatched, through_dispatcher
from ..calls.exchange import GroupKey, RankWork
from ..calls.folds import FoldCall, OneReduction, settle
from ..calls.group import RankGroup
from ..calls.outside import polls_and_sleeps
from ..calls.reductions import Reductions
from ..calls.store import RankStore
from ..own.forks import of_one_process
from ..own.seeds import seeds_of, sow
from ..own.threads import own_rank, record_of_starter, threads_of_ranks
from ..private import without_dynamo
from ..private_groups import ranks_as_threads
from .messages import (
    Channel,
    Copies,
    Message,
    SharedMemory,
    decode,
    decode_error,
    dump,
    encode,
    encode_error,
)
from .parts import Parts, Posted
from .plans import CALL, CALLED, PLANS, Planned, answer_of, key_of
from .threads import Launch, Rank

__all__ = [
    "LaunchOfProcesses",
    "ProcessGroup",
    "ProcessRank",
    "ProcessStore",
    "run",
    "trace_of",
]

EMPTY = memoryview(b"")

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>

METHODS = {
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "monitored_barrier",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "scatter": "scatter",
    "send": "send",
}
"""The methods of a group that call others, and their operation's name."""


class LaunchOfProcesses(Launch):
    """A launch whose ranks are processes, as they know it: they have it from the fork.

    **Attributes**: `program` is what each rank runs; `start_method` is multiprocessing's, as it was
    in the launching process; `interrupted` is memory that all map: byte 0 is 1 after Ctrl-C, and
    byte 1 + rank when the rank has seen it.
    """

    program: Callable[[Rank], Any]
    start_method: str | None
    interrupted: mmap.mmap

    def rank_of_process(self) -> ProcessRank:
        """A rank that is yet to join; other launches have other types."""
        return object.__new__(ProcessRank)


# In the rank's process. All fields are the program's main thread's, which alone makes calls
# (`check_thread`), but `streams`, which any thread of the program writes to, and those that the
# signal handler writes: `ended`, `late`. Python runs it in the main thread, between two bytecodes.
class ProcessRank(Rank):
    """The rank of this process."""

    runs_here = True

    def join(self, launch: LaunchOfProcesses, rank: Rank, channel: Channel) -> None:
        # The rank as the launching process had it at the fork: number, environment, names.
        vars(self).update(vars(rank))
        self.launch, self.channel = launch, channel
        # Shared with the launching process. Byte 0 is written there before the signal is sent; byte
        # 1 + rank here alone.
        self.interrupted = launch.interrupted
        self.memory = SharedMemory(channel.shares_memory)
        # By number, as the proxy has them: both append in the same order.
        self.groups: list[ProcessGroup] = []
        # Posted and not known to be complete. Invariant: the blocks of their copies are taken in
        # `memory`.
        self.works: dict[int, tuple[RankWork, Copies]] = {}
        self.failure: BaseException | None = None
        # `ended`: the end has come, and is raised once. `busy`: in the midst of sending a message,
        # which a signal must not cut. `late`: the end came meanwhile. `asking`: the program waits
        # in gpusim.
        self.ended = self.busy = self.late = self.asking = False
        self.how: type[ReplicaEnded] = ReplicaEnded
        self.posted = 0
        self.plans = 0  # how many there are; see `plans`
        self.streams = [ForwardedStream(n, getattr(sys, n), self) for n in ("stdout", "stderr")]

    def end(self, *signal: Any) -> None:
        """Raise ReplicaEnded in the program, once, after the message that is being sent."""
        # First: the launching process sees that Python's code runs here, and gives it its time.
        self.interrupted[1 + self.index] = 1
        if self.ended:
            return
        self.ended, self.late = True, self.busy
        self.how = ReplicaInterrupted if self.interrupted[0] else ReplicaEnded
        # A raise out of a signal handler is a raise in the program, wherever it is. In `receive`
        # that is right too: the answer is not read any more, as the rank makes no other call.
        if not self.busy:
            raise self.how

    def send(
        self,
        message: Message | bytes,
        file: int | None = None,
        payload: Sequence[memoryview] = (),
    ) -> None:
        """Send a message whole."""
        # Other threads of the program send what they print. They see no signals, and must not touch
        # `busy`.
        main = threading.current_thread() is threading.main_thread()  # where signals are handled
        if main:
            self.busy = True
        try:
            self.channel.send(message, file, payload)
        except OSError:
            # Without `atexit` functions, which may wait for other ranks.
            os._exit(1)  # the parent is gone
        finally:
            if main:
                self.busy = False
        if main and self.late:
            self.late = False
            raise self.how

    def ask(
        self,
        kind: str,
        file: int | None = None,
        site: str = "",
        payload: Sequence[memoryview] = (),
        **more: Any,
    ) -> Message:
        """Ask the parent, and do what has become possible: copy results of complete works."""
        return self.ask_by({"do": kind, "site": site, "with": more}, file, payload)

    def ask_by(
        self,
        message: Message | bytes,
        file: int | None = None,
        payload: Sequence[memoryview] = (),
    ) -> Message:
        """As `ask`, by the whole message."""
        if self.ended:
            raise self.how
        if self.home not in (0, os.getpid()):  # whose end of the channel is closed
            raise self.thread_error("a call of torch.distributed")
        self.asking = True
        try:
            return self._ask(message, file, payload)
        finally:
            self.asking = False

    def _ask(
        self, message: Message | bytes, file: int | None, payload: Sequence[memoryview]
    ) -> Message:
        # What was printed before a call is shown before it.
        for stream in self.streams:
            stream.send_line()
        self.send(message, file, payload)
        while True:
            # The main thread sleeps here, while its proxy waits with or without a slot. No
            # time-out: the end of the parent closes the socket, and an end comes as a signal.
            found = self.channel.receive()
            if found is None:
                os._exit(1)  # the parent is gone
            answer = found.message
            # A question in the midst of a call: which Reduction the program has chosen. It may be
            # asked once for each call, and its answer is the next message that the parent reads.
            if "choose" not in answer:
                break
            self._choose(answer)
        if self.ended:
            raise self.how
        if found.brief:
            complete, title = answer_of(found.brief)
            for number, source in complete:
                self._complete(number, None, source, EMPTY)
            return {"title": title}
        # The results of all works that are complete, one behind the other, where memory is not
        # shared.
        results = memoryview(found.payload)
        for number, error, source in answer["done"]:
            results = self._complete(number, error, source, results)
        if "raise" in answer:
            # The program's own exception, if it was the chooser's: with its traceback, and of its
            # own type.
            error, self.failure = self.failure, None
            raise error or decode_error(answer["raise"])
        return answer

    def _choose(self, question: Message) -> None:
        operation, group, dtype, size = question["choose"]
        try:
            reduction, number = settle(
                self.groups[question["group"]]._chooser,
                FoldCall(operation, tuple(group), dtype, size),
                question["folded"],
                question["leaves"],
            )
            self.send({"reduction": encode(reduction, []), "number": number})
        except Exception as error:
            self.failure = error
            self.send({"error": encode_error(error)})

    def _complete(
        self, number: int, error: Message | None, source: int, results: memoryview
    ) -> memoryview:
        """Copy the results of a work to its tensors. The rest of the payload."""
        # Out first: an error below leaves no work that is known to be complete and is not.
        work, copies = self.works.pop(number)
        pending: Any = work._pending
        work._source = source
        if error is not None:
            pending.error = decode_error(error)
        else:
            for start, size in copies.received:
                copies.part(start, size)[:] = results[:size]
                results = results[size:]
            # Here results come to the program's tensors: at a call of the program's, in its own
            # thread, and not while it computes.
            copies.finish()
        # The arrays hold the tensors. Then the block is free for the next call.
        copies.clear()
        self.memory.free(copies)
        pending.done.done = True
        self.unfinished.discard(work)
        return results

    def post(self, work: RankWork, copies: Copies) -> int:
        """Note a call that is about to be posted; its number."""
        self.posted = number = self.posted + 1
        done: Any = work._pending.done
        done.number = number
        # Before it is asked: the answer may say already that the call is complete.
        self.works[number] = work, copies
        return number

    def forget(self, work: RankWork) -> None:
        """Drop a call that was not posted."""
        done: Any = work._pending.done
        self.unfinished.discard(work)
        found = self.works.get(done.number)
        if found is not None and found[0] is work:
            del self.works[done.number]
            found[1].clear()
            self.memory.free(found[1])

    def count_plan(self) -> None:
        """Note a plan; those that are too many are forgotten, and their numbers begin again."""
        self.plans += 1
        if self.plans == PLANS:
            self.plans = 0
            for group in self.groups:
                group._plans.clear()

    def wait_for_results_in(self, spans: Sequence[tuple[int, int]], operation: str) -> None:
        """Wait for the works whose results go to memory that is to be read or written.

        `spans` are the addresses of this memory, with their ends. As in `RankGroup._begin`, a
        message does not wait for others.
        """
        # Operands are copied at once, so only tensors that a work will still write have to be
        # waited for.
        for work, copies in list(self.works.values()):
            if work.message and operation in ("send", "recv"):
                continue
            both = itertools.product(copies.spans, spans)
            if any(one[0] < other[1] and other[0] < one[1] for one, other in both):
                work.wait()

    def wait_for_work(self, work: RankWork, what: str, limit: float | None, own: bool) -> None:
        # One connection, one question at a time: two threads that ask would take each other's
        # answers.
        self.check_thread("wait")
        completion: Any = work._pending.done
        self.ask("wait", work=completion.number, limit=limit, own=own)

    def is_inside(self) -> bool:
        # While it asks the launching process waits in its place; at its end it sleeps as Python
        # does.
        return self.asking or self.ended

    def give_way(self, asks: str = "") -> bool:
        self.check_thread("is_completed")
        return bool(self.ask("give_way", asks=asks)["goes_on"])

    def fail_waiting(self, what: str) -> None:
        self.ask("fail", what=what)

    def sleep(self, seconds: float) -> None:
        self.ask("sleep", site=self.call_site(), seconds=seconds)

    def store_of(self, launch: Launch) -> ProcessStore:
        """The rank's end of the launch's store."""
        return ProcessStore(launch, self)

    def last_words(self, error: BaseException) -> Message:
        """The last message of a rank whose program has raised an exception."""
        return {"do": "raised", "error": encode_error(error, trace_of(error))}


class ProcessGroup(RankGroup):
    """The rank's end of a group, whose calls the parent makes."""

    def __init__(
        self, rank: Any, key: GroupKey, place: int, chooser: Any, options: Any = None
    ) -> None:
        super().__init__(rank, key, place, chooser, options)
        self._number = len(rank.groups)
        #: By their keys; see `plans`. Of the rank's thread alone.
        # Invariant: the proxy has the same numbers. A plan is noted here only when the proxy has
        # answered the call that says it, and both forget at the same count.
        self._plans: dict[Any, Planned] = {}
        rank.groups.append(self)

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        self._asked("describe", group=self._number, text=description)

    _set_group_desc = setGroupDesc

    def _asked(self, kind: str, file: int | None = None, **more: Any) -> Message:
        assert isinstance(self._rank, ProcessRank)
        return self._rank.ask(kind, file, self._rank.call_site(), **more)

    def _is_chosen_by_parent(self) -> bool:
        """Whether the Reduction of a call is the one that the parent has for all calls."""
        if self._chooser is None:
            return current().is_default
        return (
            isinstance(self._chooser, OneReduction) and self._chooser is self._rank.launch.chooser
        )

    def _forward(
        self, method: str, given: dict[str, Any], args: Sequence[Any] | None
    ) -> RankWork | None:
        """Have the parent make the call, on copies of the tensors.

        `args` are the arguments without names, where these are all.
        """
        rank, operation = self._rank, METHODS[method]
        assert isinstance(rank, ProcessRank)
        self._check_open(operation)
        barrier = method == "barrier"
        limit = self.barrier_limit(given.get("opts")) if barrier else self.limit
        site, choose = rank.call_site(), not self._is_chosen_by_parent()
        work = RankWork(rank, cast(Any, Posted()), [], site)
        work.message = operation if operation in ("send", "recv") else ""
        work.group, work.limit = self, limit
        try:
            key: Any = None
            tensors: list[Tensor] = []
            if args is not None and rank.channel.shares_memory:
                own = key_of(method, args, tensors)
                key = own and (own, site, choose, limit, self._coalesced is None)
            # A call that was made before is a number and a place in the memory: all else is in the
            # key, so that a plan is never stale (`plans`).
            planned = self._plans.get(key) if key is not None else None
            answer = None
            if planned is not None:
                answer = self._call_planned(planned, tensors, operation, work)
            if answer is None:
                call = {"method": method, "choose": choose, "limit": limit}
                answer, tensors = self._call(call, given, operation, work, key)
        except BaseException:
            # The proxy has refused the call, or it was cut off: no answer will name it. The block
            # is free.
            rank.forget(work)
            raise
        if "title" not in answer:
            rank.forget(work)
            return None
        places = answer["outputs"] if planned is None else planned.outputs
        work._pending.title = answer["title"]
        work._outputs = [tensors[place] for place in places]
        # Its waits are the block's.
        if self._coalesced is not None:
            self._coalesced.append(work)
        if "failed" in answer:
            raise decode_error(answer["failed"])
        return work

    def _call_planned(
        self, planned: Planned, tensors: list[Tensor], operation: str, work: RankWork
    ) -> Message | None:
        """Make a planned call; None if a tensor has no memory, of which an error tells then."""
        rank: Any = self._rank
        starts = [tensor.data_ptr() for tensor in tensors]
        if not all(starts):
            return None
        # As a rule there are none: a call is waited for before the next one is made.
        if rank.works:
            both = (*planned.read, *planned.written)
            rank.wait_for_results_in(
                [(starts[place], starts[place] + size) for place, _, size in both], operation
            )
        copies, file = rank.memory.allocate(planned.size) if tensors else (Copies(None, 0), None)
        base = copies.address
        for place, at, size in planned.read:
            # Now, as under threads: what the program writes to the tensor later changes nothing.
            ctypes.memmove(base + at, starts[place], size)
        for place, at, size in planned.written:
            start = starts[place]
            copies.moves.append((start, base + at, size))
            copies.spans.append((start, start + size))
        # Results are copied to addresses: what owns the memory has to live until then.
        copies.owners = tensors
        number = rank.post(work, copies)
        # The process names the memory, and never an address: the proxy adds it to its own map's.
        message = CALL.pack(CALLED, planned.number, number, copies.start)
        try:
            answer: Message = rank.ask_by(message, file)
        finally:
            if file is not None:
                os.close(file)
        return answer

    def _call(
        self,
        call: dict[str, Any],
        given: dict[str, Any],
        operation: str,
        work: RankWork,
        key: Any,
    ) -> tuple[Message, list[Tensor]]:
        """Make a call by a message that says all; its tensors. It becomes a plan under the key."""
        rank: Any = self._rank
        parts, arguments, waits = Parts(), {}, False
        for name, value in given.items():
            arguments[name] = encode(value, parts.tensors)
            waits = waits or not getattr(value, "asyncOp", True)
            both = name == "tensors"
            parts.mark(
                operation != "recv" if both else not name.startswith("output"),
                operation != "send" if both else name.startswith("output"),
            )
        parts.lay_out(operation)
        # Before anything is copied: the operand may be what another call is about to write.
        rank.wait_for_results_in(parts.spans, operation)
        shared = rank.channel.shares_memory
        # One block for the tensors of a call. The segment's file goes along if it is new: the proxy
        # maps it before it looks at the tensors, as both come in one message.
        copies, file = (
            rank.memory.allocate(parts.size) if parts.tensors else (Copies(None, 0), None)
        )
        kinds = parts.copy_to(copies, copies.start if shared else 0)
        payload, more_given = [], {}
        if not shared:
            payload = [copies.part(0, parts.sent)] if parts.sent else []
            more_given = {"size": parts.size, "written": copies.received}
        else:
            copies.received.clear()
        # The proxy makes a plan of the call under this number, if it can post it at all.
        if key is not None:
            more_given = {"plan": rank.plans, "start": copies.start}
        number = rank.post(work, copies)
        # The caller of a call that is not asynchronous waits for it at once.
        call |= {"group": self._number, "number": number, "arguments": arguments, "kinds": kinds}
        call |= {"wait": waits and self._coalesced is None, **more_given}
        try:
            answer: Message = rank.ask("call", file, work._site, payload, **call)
        finally:
            if file is not None:
                # The proxy has its own descriptor now, and both have the memory mapped.
                os.close(file)
        if key is not None and "title" in answer:
            self._plans[key] = parts.plan(rank.plans, answer["outputs"])
            rank.count_plan()
        return answer, parts.tensors


def _forwarding(method: str) -> Any:
    function = getattr(RankGroup, method)
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name != "self"]

    @functools.wraps(function)
    def forward(self: ProcessGroup, *args: Any, **named: Any) -> RankWork | None:
        if method == "allreduce" and _is_sparse(args):
            return cast(RankWork, function(self, *args, **named))  # of dense tensors
        if named or len(args) > len(names):
            given = dict(signature.bind(self, *args, **named).arguments)
            del given["self"]
            return self._forward(method, given, None)
        # as C++ calls it, and most of torch; ten times as fast
        return self._forward(method, dict(zip(names, args, strict=False)), args)

    return forward


for _method in METHODS:
    if _method in {**vars(RankGroup), **vars(Reductions)}:
        setattr(ProcessGroup, _method, _forwarding(_method))
ProcessRank.group_type = without_dynamo(through_dispatcher(ProcessGroup))


def _is_sparse(args: Sequence[Any]) -> bool:
    """Whether the first argument is a sparse tensor, or a list that begins with one."""
    first = args[0] if args else None
    tensor = first[0] if isinstance(first, list) and first else first
    return isinstance(tensor, Tensor) and tensor.is_sparse


class ProcessExchange:
    """The exchange of the rank's launch, which the rank asks through its channel."""

    def __init__(self, rank: ProcessRank) -> None:
        self._rank = rank

    def admit(self, key: GroupKey, rank: Rank) -> None:
        site = rank.call_site()
        about: dict[str, Any] = {"name": key.name, "ranks": key.ranks, "copy": key.copy}
        self._rank.ask("group", None, site, backend=rank.backend, **about)


class ProcessStore(RankStore):
    """The rank's end of the launch's store, which is in the parent."""

    def _ask(self, method: str, *args: Any) -> Any:
        rank: Any = self._rank
        rank.check_thread(f"the store's {method}")
        arguments = encode(list(args), [])
        answer = rank.ask("store", None, rank.call_site(), method=method, arguments=arguments)
        return decode(answer["value"], [])


# Written by any thread of the program, in its process. `_lock` guards `_line` alone, for a moment:
# it is not held while text is sent, as a signal's exception may come there.
class ForwardedStream:
    """Standard output or error, whose text the rank's thread of the parent writes.

    It goes there by lines, or up to the rank's next call. Those of other ranks do not cut a line.
    """

    def __init__(self, name: str, stream: TextIO, rank: ProcessRank) -> None:
        self._name, self._stream, self._rank = name, stream, rank
        self._line: list[str] = []
        self._lock = threading.Lock()
        #: Whether `flush` waits until the text has been written.
        self.waits = False

    def write(self, text: str) -> int:
        with self._lock:
            self._line.append(str(text))
        if "\n" in text:
            self.send_line()
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._stream.flush()
        self._send(True)
        if self.waits and own_rank() is self._rank and not self._rank.ended:
            self._rank.ask("written")

    def send_line(self) -> None:
        """Send what there is of a line."""
        if self._line:
            self._send(False)

    def _send(self, flush: bool) -> None:
        with self._lock:
            text, self._line = "".join(self._line), []
        # Its connection is closed there: the text goes to the inherited file.
        if self._rank.home not in (0, os.getpid()):  # of a process that the rank has forked
            self._stream.write(text)
            if flush:
                self._stream.flush()
            return
        self._rank.send({"do": "write", "stream": self._name, "text": text, "flush": flush})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(
    launch: LaunchOfProcesses, index: int, end: socket.socket, others: list[Channel], parent: int
) -> None:
    """Run the program of a rank, in its process, which has just been forked."""
    # Else the other ranks' sockets stay open here, and their end is not seen.
    for other in others:
        other.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Between the fork and prctl: the kernel sends the signal only for an end that comes after it.
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    # Functions that the program registers from now on are the process's, and run below.
    atexit._clear()  # what the parent has to do at its end
    channel = Channel(end)
    _be_main(launch)
    rank = launch.rank_of_process()
    rank.join(launch, launch.ranks[index], channel)
    # The parent's event loop must not hear of the child's signals.
    signal.set_wakeup_fd(-1)
    # A terminal sends Ctrl-C to all. Not SIG_IGN, which programs that the rank starts would
    # inherit.
    signal.signal(signal.SIGINT, lambda *_: None)  # the parent ends its processes
    signal.signal(signal.SIGTERM, of_one_process(rank.end))
    # A child of the program's must not keep the connection open when the rank has ended.
    os.register_at_fork(after_in_child=channel.close)
    try:
        # The program begins when the rank has its first turn, in the order of ranks.
        if channel.receive() is None:
            os._exit(1)
        _run(launch, rank)
    except ReplicaEnded:
        pass
    finally:
        # From here on nothing may cut what is to be written, closed and said.
        rank.ended = True  # no more ReplicaEnded
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            flush_all()  # multiprocessing ends the process at once
        for stream in rank.streams:
            stream.send_line()


def _be_main(launch: LaunchOfProcesses) -> None:
    """Let Python take the process for one that nothing has forked, as torchrun's are."""
    multiprocessing.set_start_method(launch.start_method, force=True)  # a fork has set it
    multiprocessing.current_process().name = "MainProcess"
    threading.current_thread().name = "MainThread"
    module: Any = multiprocessing.process
    # Else torch's and the program's own checks of `parent_process()` take a rank for a worker.
    module._parent_process = None


def _run(launch: LaunchOfProcesses, rank: ProcessRank) -> None:
    # Before the program's first line, and the same as under threads.
    sow(seeds_of(launch.seed, rank.index))  # after Python, which seeds anew in a fork
    os.environb.update(rank.environment)
    streams: Any = rank.streams
    sys.stdout, sys.stderr = streams
    state: Any = launch
    # The launch is this process's copy: what torch asks of it goes to the parent from now on.
    state.ranks[rank.index], state.run = rank, launch.program
    state.store_type = lambda launch, own: rank.store_of(launch)
    state.exchange, state.pid = ProcessExchange(rank), os.getpid()
    try:
        with (
            ranks_as_threads(launch._rendezvous, launch._admit, record_of_starter) as launch.world,
            threads_of_ranks(),
            dispatched(RankGroup, launch.world),
            polls_and_sleeps(),
            cpu_as_accelerator() if launch.device == "cpu" else nullcontext(),
        ):
            result = launch.contexts[rank.index].run(launch._run_rank, rank)
        payload = [] if result is None else [dump(result)]
    except ReplicaEnded:
        raise
    except BaseException as error:
        message, payload = rank.last_words(error), []
    else:
        message = {"do": "returned"}
    for stream in streams:
        stream.flush()
    # The last message. Then the process ends, and the proxy waits for its exit code.
    rank.send(message, None, payload)


def trace_of(error: BaseException) -> str:
    """The traceback from the program's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gpusim."):
        trace = trace.tb_next
    shown = error.__traceback__ if trace is None else trace
    return "".join(traceback.format_exception(type(error), error, shown))
