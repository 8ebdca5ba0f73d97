"""Async calls in flight: their outputs are poison until they are waited for, their inputs watched.

A call in flight writes to tensors of the check's. Its own outputs get the result when the rank
waits for the work, or sees that it is complete: the latest moment that an engine may take. Until
then they are poison, and an operator that reads or writes them is named.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..private import mend_mode_key, without_modes
from .arguments import replaced
from .completions import Completion
from .findings import Finding
from .log import Log
from .reading import Operation
from .spans import Span, is_dense, meet, spans_of

if TYPE_CHECKING:
    from ..calls.exchange import RankWork
    from .watch import Call, Watch

__all__ = ["Flight", "Flights", "analyse", "install"]

MESSAGES = ("send", "recv")

MANY = 1024
"""Calls in flight from which on the oldest are ended: of programs that wait for none."""


class Content(NamedTuple):
    """The bytes of a tensor's memory, and its address."""

    start: int
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Content:
        return cls(tensor.data_ptr(), _bytes_of(tensor))

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether the memory has been written; if it was freed, that is not known."""
        return tensor.data_ptr() == self.start and _bytes_of(tensor) != self.data


@dataclass(eq=False)
class Flight:
    """A call in flight.

    **Attributes**: `written` and `read` is the memory of its tensors. `outputs` are the tensors of
    the program that it writes, `results` those of the check's that it writes in their place,
    `poison` the bytes that the outputs have meanwhile. `inputs` are those that it reads alone,
    `before` their bytes at the call. `named` says that something was found about its tensors: what
    follows from it is not said too. `batch` is the number of its batch of messages. `is_over` says
    that the outputs have their results, before the rank has waited.

    Once it is posted, `outputs` and `inputs` are aliases, as a program may give its tensors other
    memory by `.data` and `set_`.
    """

    call: Call
    written: list[Span]
    read: list[Span]
    outputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    before: list[Content] = field(default_factory=list)
    poison: list[Content] = field(default_factory=list)
    named: bool = False
    batch: int | None = None
    is_over: bool = False


# Owner: the rank's thread.
class Flights:
    """A rank's calls in flight: those that the program makes, and not torch's own modules."""

    def __init__(self, watch: Watch, completion: Completion) -> None:
        self.watch, self.completion = watch, completion
        self.open: dict[int, tuple[Flight, RankWork]] = {}
        #: The places whose sends the program has waited for.
        self.waited: set[str] = set()

    def begin(self, call: Call) -> Flight | None:
        """Look at a call that is about to be posted; its flight, if it is to have one."""
        given = call.given
        if call.inside == "torch":
            return None
        self._check_overlap(call)
        if not given.is_async:
            return None
        flight = Flight(call, spans_of(given.written), spans_of(given.only_read))
        if not all(map(_is_plain, [*given.written, *given.only_read])):
            return flight  # as it is: the call writes when it is made
        flight.outputs, flight.inputs = given.written, given.only_read
        with without_modes():
            by: dict[int, Tensor] = {}
            for output in flight.outputs:
                own = by.get(id(output))
                if own is None:
                    own = by[id(output)] = output.detach().clone()
                flight.results.append(own)
        for place, (name, value) in enumerate(given.arguments.items()):
            if name.startswith(("output", "tensors")):
                own = replaced(value, by)
                if place < len(given.args):
                    given.args[place] = own
                else:
                    given.named[name] = own
        return flight

    def follow(self, flight: Flight, work: RankWork) -> None:
        """Take a call that has been posted for one in flight."""
        back = {id(own): real for own, real in zip(flight.results, flight.outputs, strict=True)}
        work._outputs = [back.get(id(each), each) for each in work._outputs]
        with without_modes():
            flight.outputs = [each.detach() for each in flight.outputs]
            flight.inputs = [each.detach() for each in flight.inputs]
            for output in flight.outputs:
                _poison(output)
            flight.poison = [*map(Content.of, flight.outputs)]
            # After the poison: of an in-place form the output is a part of the input.
            flight.before = [*map(Content.of, flight.inputs)]
        flight.batch = self.watch.batch_of(flight.call.group)
        self.open[flight.call.id] = flight, work
        if flight.outputs or flight.inputs:
            self.watch.reading.add(self)
        if len(self.open) > MANY:
            oldest, first = next(iter(self.open.values()))
            if first.is_done():  # else it has no result yet
                self.end(oldest)
        self.complete_some()

    def end(self, flight: Flight) -> None:
        """Give the outputs the result, as the rank has waited for the call."""
        if self.open.pop(flight.call.id, None) is None:
            return
        call = flight.call
        if call.operation == "send":
            self.waited.add(call.site)
        with without_modes():
            for tensor, before in zip(flight.inputs, flight.before, strict=True):
                if not flight.named and before.has_changed(tensor):
                    self._find("write-before-wait", flight, call.site, "an input")
            # Once it has been given its result, a write of the program's is not told from it.
            poisoned = () if flight.is_over else zip(flight.outputs, flight.poison, strict=True)
            for output, poison in poisoned:
                if not flight.named and poison.has_changed(output):
                    self._find("write-before-wait", flight, call.site, "the output")
            if not flight.is_over:
                self._deliver(flight)
        if not self.open:
            self.watch.reading.remove(self)

    def complete_some(self) -> None:
        """Give outputs the results of calls that are complete, as the order of completions says."""
        for flight, work in list(self.open.values()):
            if flight.outputs and not flight.is_over and work.is_done() and self.completion():
                flight.is_over = True
                with without_modes():
                    self._deliver(flight)
                    if meet(flight.written, flight.read):
                        flight.before = [*map(Content.of, flight.inputs)]

    def _deliver(self, flight: Flight) -> None:
        for output, result in zip(flight.outputs, flight.results, strict=True):
            if _has_memory(output):
                _copy(output, result)

    def _find(self, kind: str, flight: Flight, site: str, which: str, by: str = "") -> None:
        flight.named = True
        call = flight.call
        how = "read" if kind == "read-before-wait" else "written"
        text = f"{which} of {call.words}, posted at {call.site}, is {how}{by} before wait()"
        related = [] if site == call.site else [f"{call.site}: {call.operation} is posted"]
        self.watch.find(kind, site, text, call.operation, related)

    def on_operation(self, operation: Operation) -> None:
        """Name an operator that reads or writes tensors of calls in flight."""
        self.complete_some()
        read, written = spans_of(operation.read), spans_of(operation.written)
        for flight, _ in list(self.open.values()):
            if flight.named:
                continue
            if meet(written, flight.written):
                which, kind = "the output", "write-before-wait"
            elif meet(written, flight.read):
                which, kind = "an input", "write-before-wait"
            elif meet(read, flight.written):
                which, kind = "the output", "read-before-wait"
            else:
                continue
            self._find(kind, flight, self.watch.site(), which, f" by {operation.name}")

    def on_read(self, tensor: Tensor, by: str) -> None:
        """Name a read past torch's operators, as by NumPy."""
        spans = spans_of([tensor])
        for flight, _ in list(self.open.values()):
            if not flight.named and meet(spans, flight.written):
                self._find("read-before-wait", flight, self.watch.site(), "the output", f" by {by}")

    def _check_overlap(self, call: Call) -> None:
        """Name a call on memory of another that is in flight.

        The later one takes the memory as the earlier one leaves it, as it does without the check;
        messages are in no order.
        """
        if not self.open:
            return
        given = call.given
        written, read = spans_of(given.written), spans_of(given.only_read)
        for flight, work in list(self.open.values()):
            mine, theirs = call.operation in MESSAGES, flight.call.operation in MESSAGES
            if not (meet(written, [*flight.written, *flight.read]) or meet(read, flight.written)):
                continue
            if not flight.named:
                flight.named = True
                self._name_overlap(call, flight)
            if not (mine and theirs):
                work.wait()

    def _name_overlap(self, call: Call, flight: Flight) -> None:
        first = flight.call
        batch = self.watch.batch_of(call.group)
        together = batch is not None and batch == flight.batch
        how = (
            f"{first.words} in the same batch: one of them writes it"
            if together
            else f"{first.words}, posted at {first.site}, which has not been waited for"
        )
        self.watch.find(
            "overlapping-buffers",
            call.site,
            f"{call.words} is posted on memory of {how}",
            call.operation,
            [f"{first.site}: {first.operation} is posted"],
        )

    def host_synced(self) -> None:
        """Wait for all calls in flight, as the host waits for all streams of the GPU."""
        for _, work in list(self.open.values()):
            work.wait()

    def finish(self) -> None:
        """Name the calls that the program has not waited for.

        Schedules of pipelines drop the works of their last sends, whose tensors they do not use
        again: a send is named if the program waits for none of its place.
        """
        if self.watch.log.ended:
            return
        for flight, work in self.open.values():
            call = flight.call
            if work.failed or (call.operation == "send" and call.site in self.waited):
                continue
            # A functional collective hands back its result, which waits as it is used.
            kind, text = (
                ("result-unread", f"the result of {call.words}, which it returns, is never used")
                if call.is_functional
                else (
                    "never-waited",
                    f"the work of {call.words} is never waited for, nor seen to be complete",
                )
            )
            self.watch.find(kind, call.site, text, call.operation)
        self.open.clear()
        self.watch.reading.remove(self)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is memory of the host that the check can copy and fill."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_conj() or tensor.is_neg())
        and is_dense(tensor)
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _has_memory(tensor: Tensor) -> bool:
    """Whether the storage has room for the tensor, and was not made smaller."""
    end = tensor.storage_offset() + tensor.numel()
    return tensor.untyped_storage().nbytes() >= end * tensor.element_size()


def _bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a dense tensor, in the order of memory; none if that was freed."""
    start, size = _span(tensor)
    return ctypes.string_at(start, size) if start and size and _has_memory(tensor) else b""


def _copy(target: Tensor, source: Tensor) -> None:
    start, size = _span(target)
    if start and size:
        ctypes.memmove(start, source.data_ptr(), size)


def _poison(tensor: Tensor) -> None:
    """Fill a tensor with ones: NaN of floats, -1 of integers."""
    start, size = _span(tensor)
    if start and size:
        ctypes.memset(start, 1 if tensor.dtype == torch.bool else 0xFF, size)


READERS = ("numpy", "tolist", "__array__", "__dlpack__")


def install(stack: ExitStack) -> None:
    """Hear of reads past torch's operators, and keep the check's mode in and behind blocks."""
    from .here import replace

    for name in READERS:
        replace(stack, Tensor, name, _reading(name))
    replace(stack, torch.inference_mode, "__exit__", _leave_inference)


def _leave_inference(watch: Watch, real: Any, /, *args: Any) -> Any:
    try:
        return real(*args)
    finally:
        mend_mode_key()


def _reading(name: str) -> Callable[..., Any]:
    def serve(watch: Watch, real: Any, tensor: Any, /, *args: Any, **named: Any) -> Any:
        if isinstance(tensor, Tensor):
            if watch.flights.open:
                watch.flights.on_read(tensor, f"Tensor.{name}")
            watch.results.on_read(tensor)
        result = real(tensor, *args, **named)
        watch.streams.host_reads(tensor, name)
        return result

    return serve


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """Nothing: its findings are each rank's own."""
    return []
