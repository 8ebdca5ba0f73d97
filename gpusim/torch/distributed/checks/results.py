"""Results that are never read: the kind result-unread.

The outputs of a call are watched until something reads them. That costs a dispatch mode, so each
place of the program is watched until a result of it has been read once, and `MOST` times at most:
where it was watched less often than it was reached, nothing is said.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..private import without_modes
from ..private_checks import COMPILER, runs_backward
from .findings import Finding
from .here import replace
from .log import Log
from .reading import Operation
from .spans import Span, meet, spans_of

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["Results", "analyse", "install"]

MOST = 64
"""How often a place is watched at most."""

SMALL = 16
"""Elements up to which an operand of equal zeros or ones is a barrier's, without a result."""

PART = "results"


@dataclass
class Place:
    """A line of the program that makes calls: how many, and what became of the results."""

    calls: int = 0
    watched: int = 0
    unread: int = 0
    read: bool = False
    waits: bool = False
    """Whether a call was one by which ranks wait for each other; see `SMALL`."""
    words: str = ""


@dataclass(eq=False)
class Result:
    """The output of a call, until it is read or gone."""

    place: Place
    outputs: list[tuple[list[Span], Any]] = field(default_factory=list)
    """The memory of each tensor, and a weak reference to its storage."""

    @property
    def spans(self) -> list[Span]:
        return [span for spans, _ in self.outputs for span in spans]


# Owner: the rank's thread.
class Results:
    """The fate of the results of a rank's calls."""

    def __init__(self, watch: Watch, is_script: bool) -> None:
        self.watch, self.is_script = watch, is_script
        self.places: dict[tuple[str, str], Place] = {}
        self.open: list[Result] = []
        #: Storages that NumPy may read without torch, by their addresses.
        self.exported: set[int] = set()
        #: Whether the program has started threads, whose reads are not seen.
        self.has_threads = False

    def see_operands(self, call: Call) -> None:
        """Look at a call that is about to be posted, which reads results of others."""
        given = call.given
        if self.open:
            self._read(spans_of(given.read))
        if call.inside == "torch" or not given.written:
            return
        place = self.places.get((call.site, call.operation))
        if place is None:
            place = self.places[call.site, call.operation] = Place(words=call.words)
        place.calls += 1
        if not place.waits and _is_barrier(given.read):
            place.waits = True

    def see_result(self, call: Call) -> None:
        """Watch the outputs of a call that is complete, if nothing of its place was read yet."""
        place = self.places.get((call.site, call.operation))
        if place is None or call.inside == "torch" or not call.given.written:
            return
        if place.read or place.watched >= MOST:
            return
        spans = spans_of(call.given.written)
        # The nodes of a backward pass that follow run without the check's mode.
        is_hidden = self.has_threads or runs_backward()
        if is_hidden or not spans or any(start in self.exported for start, _ in spans):
            place.read = True
            return
        place.watched += 1
        outputs = [
            (spans_of([each]), weakref.ref(each.untyped_storage())) for each in call.given.written
        ]
        self.open.append(Result(place, outputs))
        self.watch.reading.add(self)

    def on_operation(self, operation: Operation) -> None:
        """Note what an operator reads, and results that it writes over."""
        if operation.read:
            self._read(spans_of(operation.read))
        pure = [each for each in operation.written if not any(each is x for x in operation.read)]
        if pure:
            written = spans_of(pure)
            for result in list(self.open):
                if all(any(a <= s and e <= b for a, b in written) for s, e in result.spans):
                    result.place.unread += 1
                    self._drop(result)

    def on_read(self, tensor: Tensor) -> None:
        """Note a read past torch's operators, also one that can come later."""
        if self.open:
            self._read(spans_of([tensor]))
        if tensor.layout is torch.strided and tensor.is_cpu:
            self.exported.update(start for start, _ in spans_of([tensor])[:1])

    def read_all(self) -> None:
        """Take all results for read, as something is saved or copied past torch's operators."""
        for result in list(self.open):
            result.place.read = True
        self._tidy()

    def _read(self, spans: Sequence[Span]) -> None:
        for result in list(self.open):
            if self._is_gone(result):
                continue
            if meet(spans, result.spans):
                result.place.read = True
        self._tidy()

    def _is_gone(self, result: Result) -> bool:
        """Whether the memory of a result was freed; it is unread then."""
        # A part may be freed before the others: gathered lists have a slot that programs replace.
        result.outputs = [each for each in result.outputs if each[1]() is not None]
        if result.outputs:
            return False
        result.place.unread += 1
        self._drop(result)
        return True

    def _drop(self, result: Result) -> None:
        self.open.remove(result)
        if not self.open:
            self.watch.reading.remove(self)

    def _tidy(self) -> None:
        self.open = [result for result in self.open if not result.place.read]
        if not self.open:
            self.watch.reading.remove(self)

    def finish(self) -> None:
        """Note the places whose results were never read."""
        for result in list(self.open):
            self._is_gone(result)
        if self.open and self.is_script and not self.watch.log.ended:
            # Of a function that `launch` runs, the result may be returned.
            weights = spans_of(
                [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
            )
            for result in self.open:
                if not meet(weights, result.spans):
                    result.place.unread += 1
        self.open.clear()
        if self.has_threads or COMPILER in sys.modules:  # what is compiled reads past operators
            return
        self.watch.log.rows[PART] = [
            [site, operation, *vars(place).values()]
            for (site, operation), place in self.places.items()
        ]


def _is_barrier(tensors: Sequence[Tensor]) -> bool:
    """Whether operands are a few zeros or ones: the call lets ranks wait for each other."""
    if sum(each.numel() for each in tensors) > SMALL or any(map(_is_sparse, tensors)):
        return False
    with without_modes():
        values = {value for each in tensors for value in each.detach().reshape(-1).tolist()}
    return len(values) <= 1 and values <= {0, 1}


def _is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor does not list all of its elements."""
    return tensor.layout is not torch.strided


COPIES = (
    "__deepcopy__",
    "__format__",  # of a tensor without axes, for which torch takes all modes off
    "__reduce_ex__",
    "__repr__",
    "share_memory_",
    "storage",
    "untyped_storage",
)
"""Methods of tensors by which their values are read past torch's operators."""
SHOWS = ("__format__", "__repr__")


def install(stack: ExitStack) -> None:
    """Hear of what reads tensors past torch's operators."""
    replace(stack, torch, "save", _saving)
    for name in COPIES:
        replace(stack, Tensor, name, _showing if name in SHOWS else _copying)
    for name in ("from_numpy", "frombuffer"):
        replace(stack, torch, name, _importing)
    replace(stack, threading.Thread, "start", _starting)


def _saving(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    watch.results.read_all()
    return real(*args, **named)


def _copying(watch: Watch, real: Any, tensor: Any, /, *args: Any, **named: Any) -> Any:
    if watch.results.open and type(tensor) in (Tensor, torch.nn.Parameter):
        watch.results._read(spans_of([tensor]))
    return real(tensor, *args, **named)


NOT_READING = ("gpusim.", "tqdm")
"""Modules whose threads are not the program's, or read no tensors. Ranks start those of others."""


def _starting(watch: Watch, real: Any, thread: threading.Thread, /) -> Any:
    if not type(thread).__module__.startswith(NOT_READING):
        watch.results.has_threads = True
        watch.results.read_all()
    return real(thread)


def _showing(watch: Watch, real: Any, tensor: Any, /, *args: Any, **named: Any) -> Any:
    if watch.flights.open and isinstance(tensor, Tensor):
        watch.flights.on_read(tensor, "printing it")
    return _copying(watch, real, tensor, *args, **named)


def _importing(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    tensor = real(*args, **named)
    watch.results.on_read(tensor)
    return tensor


def analyse(logs: Sequence[Log]) -> list[Finding]:
    """The places whose results no rank has read."""
    rows: dict[tuple[str, str], list[tuple[int, list[Any]]]] = {}
    for log in logs:
        if log.ended:
            return []
        for site, operation, *rest in log.rows.get(PART, ()):
            rows.setdefault((site, operation), []).append((log.rank, rest))
    found = []
    for (site, operation), own in rows.items():
        places = [(rank, Place(*row)) for rank, row in own]
        if any(place.read for _, place in places) or all(place.waits for _, place in places):
            continue
        reached = [(rank, place) for rank, place in places if place.watched]
        if reached and all(each.calls == each.watched == each.unread for _, each in reached):
            first = reached[0][1]
            times = f"{first.calls} call{'s' * (first.calls > 1)}"
            text = f"the result of {first.words} is read by no rank, in {times}"
            found.append(
                Finding("result-unread", site, [rank for rank, _ in reached], text, operation)
            )
    return found
