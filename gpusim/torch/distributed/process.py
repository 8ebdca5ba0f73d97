"""The process of a rank: its torch.distributed, whose calls its thread of the parent makes."""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

import numpy as np
from torch import Tensor

from ...files import flush_all
from ...maps.ending import ReplicaEnded, ReplicaInterrupted
from ...reduction import current
from .accelerator import cpu_as_accelerator
from .dispatcher import dispatched, through_dispatcher
from .exchange import GroupKey, Pending, RankWork
from .folds import FoldCall, OneReduction, settle
from .group import RankGroup
from .memory import Array, bits_of, kind_of
from .outside import polls_and_sleeps
from .private import ranks_as_threads, without_dynamo
from .ranks import Rank
from .reductions import Reductions
from .seeds import seeds_of, sow
from .store import RankStore
from .threads import own_rank, record_of_starter, threads_of_ranks
from .wire import (
    ALIGNMENT,
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

if TYPE_CHECKING:
    from .processes import ProcessLaunch

__all__ = ["run"]

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


class Done:
    """Whether a work is complete, as far as the process knows."""

    def __init__(self, number: int) -> None:
        self.number, self.done = number, False


class ProcessRank(Rank):
    """The rank of this process."""

    def join(self, launch: ProcessLaunch, rank: Rank, channel: Channel) -> None:
        vars(self).update(vars(rank))
        self.launch, self.channel = launch, channel
        self.interrupted = launch.interrupted
        self.memory = SharedMemory(channel.shares_memory)
        self.groups: list[ProcessGroup] = []
        self.works: dict[int, tuple[RankWork, Copies]] = {}
        self.failure: BaseException | None = None
        self.ended = self.busy = self.late = self.asking = False
        self.how: type[ReplicaEnded] = ReplicaEnded
        self.posted = 0
        self.streams = [ForwardedStream(n, getattr(sys, n), self) for n in ("stdout", "stderr")]

    def end(self, *signal: Any) -> None:
        """Raise ReplicaEnded in the program, once, after the message that is being sent."""
        self.interrupted[1 + self.index] = 1
        if self.ended:
            return
        self.ended, self.late = True, self.busy
        self.how = ReplicaInterrupted if self.interrupted[0] else ReplicaEnded
        if not self.busy:
            raise self.how

    def send(
        self, message: Message, file: int | None = None, payload: Sequence[memoryview] = ()
    ) -> None:
        """Send a message whole."""
        main = threading.current_thread() is threading.main_thread()  # where signals are handled
        if main:
            self.busy = True
        try:
            self.channel.send(message, file, payload)
        except OSError:
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
        if self.ended:
            raise self.how
        self.asking = True
        try:
            return self._ask(kind, file, site, payload, more)
        finally:
            self.asking = False

    def _ask(
        self, kind: str, file: int | None, site: str, payload: Sequence[memoryview], more: Any
    ) -> Message:
        for stream in self.streams:
            stream.send_line()
        self.send({"do": kind, "site": site, "with": more}, file, payload)
        while True:
            found = self.channel.receive()
            if found is None:
                os._exit(1)  # the parent is gone
            answer = found.message
            if "choose" not in answer:
                break
            self._choose(answer)
        if self.ended:
            raise self.how
        results = memoryview(found.payload)
        for number, error, source in answer["done"]:
            results = self._complete(number, error, source, results)
        if "raise" in answer:
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
        work, copies = self.works.pop(number)
        pending: Any = work._pending
        work._source = source
        if error is not None:
            pending.error = decode_error(error)
        else:
            for start, size in copies.received:
                copies.part(start, size)[:] = results[:size]
                results = results[size:]
            for target, value in copies.pairs:
                np.copyto(target, value)
        copies.pairs.clear()
        self.memory.free(copies)
        pending.done.done = True
        self.unfinished.discard(work)
        return results

    def forget(self, number: int) -> None:
        """Drop a call that was not posted."""
        if number in self.works:
            work, copies = self.works.pop(number)
            self.unfinished.discard(work)
            copies.pairs.clear()
            self.memory.free(copies)

    def wait_for_results_in(self, arrays: Sequence[Array], operation: str) -> None:
        """Wait for the works whose results go to memory that is to be read or written.

        As in `RankGroup._begin`, a message does not wait for others.
        """
        for work, copies in list(self.works.values()):
            if work.message and operation in ("send", "recv"):
                continue
            targets = [target for target, _ in copies.pairs]
            if any(np.may_share_memory(one, other) for one in targets for other in arrays):
                work.wait()

    def wait_for_work(self, work: RankWork, what: str, limit: float | None, own: bool) -> None:
        self.check_thread("wait")
        completion: Any = work._pending.done
        self.ask("wait", work=completion.number, limit=limit, own=own)

    def is_inside(self) -> bool:
        return self.asking or self.ended

    def give_way(self) -> bool:
        self.check_thread("is_completed")
        return bool(self.ask("give_way")["others"])

    def fail_waiting(self, what: str) -> None:
        self.ask("fail", what=what)

    def sleep(self, seconds: float) -> None:
        self.ask("sleep", site=self.call_site(), seconds=seconds)


class ProcessGroup(RankGroup):
    """The rank's end of a group, whose calls the parent makes."""

    def __init__(
        self, rank: Any, key: GroupKey, place: int, chooser: Any, options: Any = None
    ) -> None:
        super().__init__(rank, key, place, chooser, options)
        self._number = len(rank.groups)
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

    def _forward(self, method: str, given: dict[str, Any]) -> RankWork | None:
        """Have the parent make the call, on copies of the tensors."""
        rank, operation = self._rank, METHODS[method]
        assert isinstance(rank, ProcessRank)
        self._check_open(operation)
        tensors: list[Tensor] = []
        written: list[bool] = []
        read: list[bool] = []
        arguments = {}
        waits = False
        for name, value in given.items():
            arguments[name] = encode(value, tensors)
            waits = waits or not getattr(value, "asyncOp", True)
            more = len(tensors) - len(read)
            both = name == "tensors"
            read += [operation != "recv" if both else not name.startswith("output")] * more
            written += [operation != "send" if both else name.startswith("output")] * more
        own = [_bits(tensor, operation) for tensor in tensors]
        rank.wait_for_results_in(own, operation)
        order = sorted(range(len(own)), key=lambda place: not read[place])
        starts, end, sent = [0] * len(own), 0, 0
        for place in order:  # those that are read come first: they are sent in one piece
            starts[place] = end
            end += -(-_extent(own[place]) // ALIGNMENT) * ALIGNMENT
            sent = end if read[place] else sent
        copies, file = rank.memory.allocate(end) if tensors else (Copies(None, 0), None)
        origin = copies.start if rank.channel.shares_memory else 0
        kinds = []
        for start, tensor, bits, is_read, is_written in zip(
            starts, tensors, own, read, written, strict=True
        ):
            kinds.append((kind_of(tensor).dtype, tensor.shape, tensor.stride(), origin + start))
            at = copies.start + start
            shared = np.ndarray(bits.shape, bits.dtype, copies.memory, at, bits.strides)
            if is_read:
                np.copyto(shared, bits)
            if is_written:
                copies.pairs.append((bits, shared))
                copies.received.append((start, _extent(bits)))
        payload, more_given = [], {}
        if not rank.channel.shares_memory:
            payload = [copies.part(0, sent)] if sent else []
            more_given = {"size": end, "written": copies.received}
        else:
            copies.received.clear()
        rank.posted = number = rank.posted + 1
        site = rank.call_site()
        barrier = method == "barrier"
        limit = self.barrier_limit(given.get("opts")) if barrier else self.limit
        pending: Any = Pending("", cast(Any, Done(number)))
        work = RankWork(rank, pending, [], site)
        work.message = operation if operation in ("send", "recv") else ""
        rank.works[number] = work, copies
        try:
            answer = rank.ask(
                "call",
                file,
                site,
                payload,
                group=self._number,
                method=method,
                number=number,
                arguments=arguments,
                kinds=kinds,
                choose=not self._is_chosen_by_parent(),
                # The caller of a call that is not asynchronous waits for it at once.
                wait=waits and self._coalesced is None,
                limit=limit,
                **more_given,
            )
        except BaseException:
            rank.forget(number)
            raise
        finally:
            if file is not None:
                os.close(file)
        if "title" not in answer:
            rank.forget(number)
            return None
        pending.title = answer["title"]
        work._outputs = [tensors[place] for place in answer["outputs"]]
        work.group, work.limit = self, limit
        if self._coalesced is not None:
            self._coalesced.append(work)
        if "failed" in answer:
            raise decode_error(answer["failed"])
        return work


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
        else:  # as C++ calls it, and most of torch; ten times as fast
            given = dict(zip(names, args, strict=False))
        return self._forward(method, given)

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


def _bits(tensor: Tensor, what: str) -> Array:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{what}: expected a tensor on the host, as ranks are processes; got one on "
            f"{tensor.device}"
        )
    return bits_of(tensor, what)


def _extent(bits: Array) -> int:
    """The bytes from an array's first element to its last."""
    if not bits.size:
        return 0
    steps = zip(bits.shape, bits.strides, strict=True)
    return bits.itemsize + sum((size - 1) * stride for size, stride in steps)


class ProcessExchange:
    """What the rank asks its launch's exchange for."""

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
        if self._rank.home not in (0, os.getpid()):  # of a process that the rank has forked
            self._stream.write(text)
            if flush:
                self._stream.flush()
            return
        self._rank.send({"do": "write", "stream": self._name, "text": text, "flush": flush})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run(
    launch: ProcessLaunch, index: int, end: socket.socket, others: list[Channel], parent: int
) -> None:
    """Run the program of a rank, in its process, which has just been forked."""
    for other in others:
        other.close()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    atexit._clear()  # what the parent has to do at its end
    channel = Channel(end)
    _be_main(launch)
    rank = object.__new__(ProcessRank)
    rank.join(launch, launch.ranks[index], channel)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, lambda *_: None)  # the parent ends its processes
    signal.signal(signal.SIGTERM, rank.end)
    os.register_at_fork(after_in_child=channel.close)
    try:
        if channel.receive() is None:
            os._exit(1)
        _run(launch, rank)
    except ReplicaEnded:
        pass
    finally:
        rank.ended = True  # no more ReplicaEnded
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(BaseException):
            flush_all()  # multiprocessing ends the process at once
        for stream in rank.streams:
            stream.send_line()


def _be_main(launch: ProcessLaunch) -> None:
    """Let Python take the process for one that nothing has forked, as torchrun's are."""
    multiprocessing.set_start_method(launch.start_method, force=True)  # a fork has set it
    multiprocessing.current_process().name = "MainProcess"
    threading.current_thread().name = "MainThread"
    module: Any = multiprocessing.process
    module._parent_process = None


def _run(launch: ProcessLaunch, rank: ProcessRank) -> None:
    sow(seeds_of(launch.seed, rank.index))  # after Python, which seeds anew in a fork
    os.environb.update(rank.environment)
    streams: Any = rank.streams
    sys.stdout, sys.stderr = streams
    state: Any = launch
    state.ranks[rank.index], state.run = rank, launch.program
    state.store_type, state.exchange, state.pid = ProcessStore, ProcessExchange(rank), os.getpid()
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
        message, payload = {"do": "raised", "error": encode_error(error, _trace(error))}, []
    else:
        message = {"do": "returned"}
    for stream in streams:
        stream.flush()
    rank.send(message, None, payload)


def _trace(error: BaseException) -> str:
    """The traceback from the program's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("gpusim."):
        trace = trace.tb_next
    shown = error.__traceback__ if trace is None else trace
    return "".join(traceback.format_exception(type(error), error, shown))
