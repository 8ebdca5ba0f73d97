"""Streams of a GPU that the CPU plays: accesses that no stream and no host has waited for.

Each stream is a line of work with a vector clock (`clocks`), and so is NCCL's stream of each group.
The lines are followed in every program. What operators access (`races`) is followed from the moment
that the program uses a stream besides the default one: with a single stream, what can go wrong is
that a call is not waited for, which `flights` names.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpusim.maps.call_site import call_site

from ..accelerator.devices import current_mode
from ..accelerator.marks import ON_CPU
from ..calls.exchange import RankWork
from .accesses import Place, here
from .clocks import Clock, Clocks, Line
from .engines import engine_of_group
from .findings import Finding
from .here import replace
from .log import Log
from .races import NAME, Races

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["Streams", "analyse", "install"]

POOL = 32
"""torch.cuda's streams are taken from a pool of so many, in turn."""


class Posted:
    """A call on NCCL's stream: its number, the point behind it, and whether it was waited for."""

    __slots__ = ("call", "line", "point", "waited")

    def __init__(self, call: Call, line: Line, point: Clock) -> None:
        self.call, self.line, self.point = call, line, point
        self.waited = False


# Owner: the rank's own thread. Threads that the rank has started may call `waits` and `host_waits`.
class Streams:
    """The streams of a rank's GPU. It is the `StreamWatch` of the rank's simulated GPU."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.clocks = Clocks()
        self.mode = current_mode()
        self.races = Races(watch, self.clocks, self.mode, self.current, self._host_waits_here)
        #: What the host does not know to be complete: of each of NCCL's lines, calls and times.
        self.unseen: dict[int, deque[tuple[int, int]]] = {}
        self._nccl: dict[str, Line] = {}
        self._pool: list[Line] = []
        self._made = 0
        if self.mode is not None:
            self.default = self.clocks.new("the default stream")
            self.mode.default_stream.watch = self
            self.mode.default_stream.line = self.default
            self.mode.stream_watch = self

    def finish(self) -> None:
        """Hear of no more."""
        if self.mode is not None:
            self.mode.stream_watch = self.mode.default_stream.watch = None
        self.races.is_on = False

    # Lines and what they wait for. A stream without a line is one that other code has made: work on
    # it is not followed, and who waits for it is taken to have waited for all.

    def current(self) -> Line | None:
        """The line of the current stream."""
        return None if self.mode is None else self.line_of(self.mode.stream)

    def line_of(self, stream: Any) -> Line | None:
        """The line of a stream."""
        line: Line | None = stream.line
        return line if getattr(stream, "watch", None) is self else None

    def _behind(self, line: Line | None) -> Clock:
        return self.clocks.everything() if line is None else self.clocks.point(line)

    def chose_device(self) -> None:
        """Follow accesses if the calling file names a stream."""
        if not self.races.is_on and _has_streams(call_site().rpartition(":")[0]):
            self.races.begin()

    def made(self, stream: Any, is_own: bool) -> None:
        """Give a stream its line."""
        if not is_own:
            return
        place = here()
        name = f"the stream made at {place.site}"
        if len(self._pool) < POOL:
            self._pool.append(self.clocks.new(name))
        stream.line = self._pool[self._made % POOL]
        stream.line.name = name
        self._made += 1
        if not place.is_torchs:
            self.races.begin()

    def recorded(self, event: Any, stream: Any) -> None:
        event.point = self._behind(self.line_of(stream))

    def waits(self, stream: Any, source: Any) -> None:
        """Let a stream wait for an event or a stream."""
        line = self.line_of(stream)
        point = self._point_of(source)
        if line is not None and point is not None:
            self.clocks.wait(line, point)

    def _point_of(self, source: Any) -> Clock | None:
        """The point behind an event or a stream; None for an event that was never recorded."""
        if source is None:
            return self.clocks.everything()
        if hasattr(source, "point"):
            point: Clock | None = source.point
            return point
        return self._behind(self.line_of(source))

    def host_waits(self, source: Any, what: str) -> None:
        """Let the host wait, and note it if there is a call that it waits for."""
        if self.watch.is_busy:
            return
        point = self._point_of(source)
        if point is not None:
            self._host_waits_for(point, what)
        if source is None:
            self.watch.flights.host_synced()

    def _host_waits_for(self, point: Clock, what: str) -> None:
        self.clocks.host_waits(point)
        host = self.clocks.host
        complete = []
        for key, calls in self.unseen.items():
            known = host.get(key, 0)
            while calls and calls[0][1] <= known:
                complete.append(calls.popleft()[0])
        if complete and what:
            self.watch.host_waits(what, complete)

    def _host_waits_here(self, what: str) -> None:
        self._host_waits_for(self._behind(self.current()), what)

    # Calls

    def see_call(self, call: Call, work: Any) -> None:
        """Enqueue a call on its group's own stream, behind the current one."""
        if self.mode is None:
            return
        written, read = call.given.written, call.given.only_read
        places = [self.races.is_on_gpu(each) for each in (*written, *read)]
        if places and not any(place is not False for place in places):
            self._see_host_call(call)
            return
        key = call.group._key
        line = self._nccl.get(key.label)
        if line is None:
            line = self.clocks.new(f"NCCL's stream of {key}", is_nccl=True)
            self._nccl[key.label] = line
        self.clocks.wait(line, self._behind(self.current()))
        posted = Posted(call, line, {})
        if self.races.is_on:
            place = _place_of(call)
            for tensors, is_write in ((written, True), (read, False)):
                for tensor in tensors:
                    self.races.access(tensor, line, is_write, place, call.operation, posted)
        time = line.time
        posted.point = self.clocks.point(line)
        self.unseen.setdefault(line.key, deque()).append((call.id, time))
        if isinstance(work, RankWork):
            work.seen = functools.partial(self.see_wait, posted)

    def _see_host_call(self, call: Call) -> None:
        if self.races.is_on:
            for tensors, is_write in ((call.given.written, True), (call.given.only_read, False)):
                for tensor in tensors:
                    self.races.host_access(tensor, is_write, _place_of(call), call.operation)

    def see_wait(self, posted: Posted, by_host: bool) -> None:
        """Let the current stream wait for a call; and the host, if it is so."""
        if self.watch.is_busy:
            return
        posted.waited = True
        line = self.current()
        if line is not None:
            self.clocks.wait(line, posted.point)
        if by_host or engine_of_group(self.watch, posted.call.group, "cuda") == "gloo":
            self._host_waits_for(posted.point, "")
        elif posted.call.operation == "barrier":
            self._host_waits_here("barrier()")

    # Copies and the host

    def pinned(self, tensor: Tensor, is_new: bool) -> None:
        """Note that a tensor is in pinned memory."""
        memory = self.races.memory_of(tensor)
        if memory is None or memory.on_gpu is not False:
            memory = self.races.new_memory(tensor, False)
        if memory is not None:
            memory.is_pinned = True
            memory.is_shared = memory.is_shared or not is_new

    def moved(
        self, source: Tensor, result: Tensor, before: int | None, after: int, at_once: bool
    ) -> None:
        """Follow a copy between devices."""
        line = self.current()
        if self.watch.is_busy or line is None:
            return
        from_gpu, to_gpu = before not in (None, ON_CPU), after != ON_CPU
        if not (from_gpu or to_gpu):
            return
        if from_gpu and not to_gpu and not at_once:
            self.races.begin()
        if self.races.is_on:
            place = here()
            self.races.new_memory(result, to_gpu)
            own = self.races.memory_of(source)
            if from_gpu or (own is not None and own.is_pinned and not at_once):
                self.races.access(source, line, False, place, "to")
            if to_gpu or not at_once:
                # torch copies to the host past it into pinned memory.
                self.races.access(result, line, True, place, "to")
            if not to_gpu and not at_once:
                self.pinned(result, True)
        if at_once and from_gpu is not to_gpu:
            self._host_waits_here("a copy to the host" if from_gpu else "a copy from the host")

    def copied(self, target: Tensor, source: Tensor, at_once: bool) -> None:
        """Follow a `copy_` between devices, whose accesses are followed as an operator's."""
        if self.watch.is_busy or not isinstance(source, Tensor):
            return
        from_gpu, to_gpu = self.races.is_on_gpu(source), self.races.is_on_gpu(target)
        if from_gpu is to_gpu or None in (from_gpu, to_gpu):
            return
        line, memory = self.current(), self.races.memory_of(target)
        if at_once or (from_gpu and (memory is None or not memory.is_pinned)):
            self._host_waits_here("a copy to the host" if from_gpu else "a copy from the host")
        elif from_gpu and not self.races.is_on and line is not None:
            self.races.begin()
            self.races.access(target, line, True, here(), "copy_")

    def host_reads(self, tensor: Any, what: str) -> None:
        """Follow a read of the host's."""
        if self.mode is None or self.watch.is_busy or not isinstance(tensor, Tensor):
            return
        is_on_gpu = self.races.is_on_gpu(tensor)
        if is_on_gpu:
            self._host_waits_here(f"{what.strip('_')}()")
        elif is_on_gpu is False and self.races.is_on and what not in VIEWS:
            self.races.host_access(tensor, False, here(), what)

    def backward_begins(self) -> None:
        self.races.backward_begins()

    def backward_ends(self) -> None:
        self.races.backward_ends()


VIEWS = ("numpy", "__array__")
"""Methods whose result shares the tensor's memory: the host reads it later, if at all."""


def _place_of(call: Call) -> Place:
    file, _, line = call.site.rpartition(":")
    return Place(file, int(line) if line.isdigit() else 0, call.inside == "torch")


@functools.lru_cache(256)
def _has_streams(file: str) -> bool:
    """Whether a file of a program has to do with streams."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
        return re.search(r"\bStream\(", text) is not None
    except OSError:
        return False


def install(stack: ExitStack) -> None:
    """Hear of memory that is given back, and of the program's begin."""
    replace(stack, torch.UntypedStorage, "resize_", _resized)
    replace(stack, dist, "init_process_group", _initialised)
    replace(stack, torch, "save", _saved)


def _resized(watch: Watch, real: Callable[..., Any], storage: Any, /, *args: Any) -> Any:
    if getattr(storage, NAME, None) is not None:
        delattr(storage, NAME)
    return real(storage, *args)


def _initialised(watch: Watch, real: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    if watch.streams.mode is not None:
        watch.streams.chose_device()
    return real(*args, **named)


def _saved(watch: Watch, real: Callable[..., Any], value: Any, /, *args: Any, **named: Any) -> Any:
    if watch.streams.mode is not None:
        pending = [value]
        while pending:
            each = pending.pop()
            if isinstance(each, Tensor):
                watch.streams.host_reads(each, "save")
            elif isinstance(each, Mapping):
                pending += each.values()
            elif isinstance(each, list | tuple):
                pending += each
    return real(value, *args, **named)


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """Nothing: its findings are each rank's own."""
    return []
