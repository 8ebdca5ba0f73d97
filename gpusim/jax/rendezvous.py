"""The rendezvous of devices: the last device of a group to arrive has the collective computed.

XLA's threads flush subnormal numbers, so the folds run on a thread of gpusim's.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_char, c_uint32
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from gpusim.collectives import dispatch
from gpusim.collectives.kernels import FoldSpec, copy
from gpusim.collectives.record import COLLECTIVES
from gpusim.fallback import run_fold
from gpusim.fallback.members import Members
from gpusim.maps.records import Caller, called_by
from gpusim.reduction import Reduction

from .endings import PATIENCE, Endings, Habit
from .ffi import CallFailed, Entry, Future

#: How many runs of programs are remembered after their last call.
REMEMBERED_RUNS = 256

#: Seconds between two looks at devices that wait.
INTERVAL = 0.25

#: The distance between the call numbers of two executions of one call in a run, as in a loop.
EXECUTION = 2**32

REDUCTIONS: dict[str, Reduction] = {}
"""The Reductions of lowered programs, by their text; programs carry the text."""


class Kind(NamedTuple):
    """The dtype and shape of one device's operand or result."""

    dtype: str
    shape: tuple[int, ...]
    absent: bool = False  # no buffer: only dtype and shape matter


class Terms(NamedTuple):
    """A call in a program, as the program carries it.

    **Attributes**

    - `collective`: the key of the record in `gpusim.collectives`.
    - `groups`: the numbers of the devices (partitions of the program) of each group, in order.
    - `parameters`: the collective's, by name.
    - `reduction`: the text of the Reduction, for collectives that sum.
    - `number`: which of the program's calls it is, for stochastic rounding.
    - `operands`, `results`: of one device.
    - `text`: the call in words, for messages.
    - `site`, `place`: file:line of the call, and which of all calls of the program it is.
    """

    collective: str
    groups: Sequence[Sequence[int]]
    parameters: Mapping[str, Any]
    reduction: str | None
    number: int
    operands: Sequence[Kind]
    results: Sequence[Kind]
    text: str
    site: str
    place: int


# Made by XLA when it loads a program, on one thread, and then shared by all runs and devices of it.
# Nothing changes in it, but `_checked` and the habit.
class Site:
    """A place in a compiled program where a collective is called; all runs have it in common."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        terms = Terms(**json.loads(attributes["call"]))
        self.terms = terms._replace(
            operands=[Kind(*kind) for kind in terms.operands],
            results=[Kind(*kind) for kind in terms.results],
        )
        self.collective = COLLECTIVES[terms.collective]
        if terms.reduction is not None and terms.reduction not in REDUCTIONS:
            raise CallFailed(
                f"{terms.text}: this process has not lowered a program with {terms.reduction}; "
                "call gpusim.jax.install with it, and lower the program here"
            )
        self.reduction = None if terms.reduction is None else REDUCTIONS[terms.reduction]
        self.group_of = {
            member: number for number, group in enumerate(terms.groups) for member in group
        }
        devices = sum(map(len, terms.groups))
        self._callers = [Caller(group, devices, terms.site, terms.place) for group in terms.groups]
        self._operands = [None if kind.absent else Memory(kind) for kind in self.terms.operands]
        self._results = [Memory(kind) for kind in self.terms.results]
        self._specs = [self._spec(len(group)) for group in terms.groups]
        # Several of XLA's threads may check at a time; all find the same, and write True.
        self._checked = False
        self.habit = Habit()  # the board's thread's

    def check(self, entry: Entry) -> None:
        """Compare the buffers' shapes with the lowered ones, once."""
        if not self._checked:
            expected = [k.shape for k in self.terms.operands if not k.absent]
            expected += [kind.shape for kind in self.terms.results]
            found = entry.shapes()[1:]  # without the device's number
            if list(map(tuple, expected)) != found:
                raise CallFailed(f"{self.terms.text}: XLA passes {found}, expected {expected}")
            self._checked = True

    def _spec(self, size: int) -> FoldSpec | None:
        """The fold that the collective is in a group of this size, where it does nothing else."""
        terms, fold = self.terms, self.collective.fold
        if fold is None or self.reduction is None or terms.parameters:
            return None
        if terms.operands != terms.results or terms.operands[0].absent:
            return None
        return fold(self.reduction, size, self._results[0].dtype)

    def compute(self, group: int, execution: int, each: Sequence[Contribution]) -> None:
        """Run the collective on the devices' buffers, which are in the group's order."""
        # In the board's thread, without a lock: XLA keeps the buffers of all devices until their
        # futures are complete, and runs nothing that writes them before.
        spec = self._specs[group]
        if spec is not None and dispatch.record_call is None:
            self._fold(spec, group, execution, each)
        else:
            self._run(group, execution, each)

    def _fold(
        self, spec: FoldSpec, group: int, execution: int, each: Sequence[Contribution]
    ) -> None:
        """Fold into the first device's buffer, as `_run` has it done, and copy it to the others."""
        (memory,) = self._results
        addresses = [member.arguments[0] for member in each]
        members = Members([memory.at(address) for address in addresses])
        members.table = np.array(addresses, np.uint64)
        first, *others = [memory.at(member.results[0]) for member in each]
        place = group if self.reduction is not None and self.reduction.draws else 0
        run_fold(spec, members, call=execution, batch_offset=place, out=first)
        copy([(target, first) for target in others])

    def _run(self, group: int, execution: int, each: Sequence[Contribution]) -> None:
        terms = self.terms
        options: dict[str, Any] = dict(terms.parameters)
        if self.reduction is not None:
            options.update(reduction=self.reduction, call=execution, places=np.asarray(group))
        # Buffers are numbered without those that are absent.
        present = itertools.count()
        operands = []
        for kind, memory in zip(terms.operands, self._operands, strict=True):
            if memory is None:
                zero = np.broadcast_to(np.zeros((), np.dtype(kind.dtype)), kind.shape)
                operands.append([zero] * len(each))
            else:
                k = next(present)
                operands.append([memory.at(member.arguments[k]) for member in each])
        with called_by(self._callers[group]):
            found = self.collective.on(None, *operands, **options)
        pairs = []
        for k, (memory, (value, mapped)) in enumerate(
            zip(self._results, [found] if len(terms.results) == 1 else found, strict=True)
        ):
            for place, member in enumerate(each):
                target = memory.at(member.results[k])
                source = value[place] if mapped else value
                if source.dtype != target.dtype or source.shape != target.shape:
                    raise AssertionError(f"{source.dtype}{source.shape} for {terms.results[k]}")
                pairs.append((target, source))
        # Results are XLA's buffers, and a definition may return views of operands: so they are
        # copied, for all devices at once.
        copy(pairs)


class Memory:
    """Buffers of XLA's of one kind, as arrays that share them."""

    def __init__(self, kind: Kind) -> None:
        self.shape, self.dtype = tuple(kind.shape), np.dtype(kind.dtype)
        self._bytes: Any = c_char * (math.prod(self.shape) * self.dtype.itemsize)

    def at(self, address: int) -> NDArray[Any]:
        """The elements at an address."""
        # Nothing keeps the memory alive but XLA's promise: no array made here may outlive the call.
        # A buffer without elements may have no address.
        memory = self._bytes.from_address(address) if address else None
        return np.ndarray(self.shape, self.dtype, memory)


# Made on the device's thread of XLA's, read by the board's.
class Contribution(NamedTuple):
    """One device's part in a call: addresses of its buffers."""

    device: int
    arguments: list[int]
    results: list[int]
    future: Future


class Rendezvous:
    """The devices of a group that have come to a call, by their numbers in the program."""

    def __init__(self, site: Site, group: int, execution: int) -> None:
        self.site, self.group, self.execution = site, group, execution
        self.members = site.terms.groups[group]
        # Lock: the board's, until the last has come. Then it is the board's thread's alone.
        self.arrived: dict[int, Contribution] = {}


# All fields are the board's, under its lock. A run is known by XLA's number, which all its devices
# have in common.
class Run:
    """One execution of a program.

    `base` is added to its call numbers. `failure` says why the run cannot go on.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        # By site and group. Invariant: of each meeting in it at least one device has come, and at
        # least one is missing.
        self.pending: dict[tuple[int, int], Rendezvous] = {}
        # How often a site's group has met in this run: a call in a loop has a number for each time.
        # The count is raised by the first device to come, so that all of one meeting have the same.
        self.executions: dict[tuple[int, int], int] = {}
        # Once it is set it stays: devices that come later are told, and do not wait.
        self.failure: str | None = None
        self.last = time.monotonic()


class Board:
    """All runs in flight. `timeout` is in seconds; `base` is the call number of new runs."""

    def __init__(self) -> None:
        self.timeout = 60.0
        self.base = 0
        # Lock: `_lock`, which is held for steps on dictionaries alone. No call of XLA's is made
        # with it but the making of a future, which does not wait. `settle` reads copies without it.
        self._runs: OrderedDict[int, Run] = OrderedDict()
        self._met = 0  # complete meetings that are not computed yet
        self._lock = threading.Lock()
        self._endings = Endings()
        # From XLA's threads to the board's: complete meetings, each once.
        self._ready: queue.SimpleQueue[tuple[Run, Rendezvous]] = queue.SimpleQueue()
        # A new thread keeps subnormals if the one that starts it does.
        threading.Thread(target=self._work, name="gpusim.jax", daemon=True).start()

    def arrive(self, site: Site, entry: Entry) -> None:
        """One device comes to a call; the first argument is its number in the program.

        **Raises**: CallFailed where the run has failed already.
        """
        # On one of XLA's threads, which must not wait here: it may be the one that another device
        # needs.
        site.check(entry)
        number, *arguments = entry.arguments
        member: int = c_uint32.from_address(number).value
        key = id(site), site.group_of[member]
        with self._lock:
            run = self._run(entry.run)
            # The exception leaves through the handler, which returns XLA an error.
            if run.failure is not None:
                raise CallFailed(run.failure)
            meeting = run.pending.get(key)
            if meeting is None:
                count = run.executions.get(key, 0)
                run.executions[key] = count + 1
                execution = run.base + site.terms.number + count * EXECUTION
                meeting = run.pending[key] = Rendezvous(site, key[1], execution)
            if member in meeting.arrived:
                raise CallFailed(
                    f"{site.terms.text}: device {entry.device} comes again before the others "
                    "have come"
                )
            meeting.arrived[member] = Contribution(
                entry.device,
                arguments,
                entry.results,
                # Under the lock, as the last thing that can fail: a device that has come has a
                # future, which somebody completes.
                entry.future(),
            )
            run.last = time.monotonic()
            complete = len(meeting.arrived) == len(meeting.members)
            if complete:
                del run.pending[key]
                self._met += 1
        # Outside of the lock. In the dictionary the meeting is not any more, so that the next
        # execution of the site makes a new one while this one is computed.
        if complete:
            self._ready.put((run, meeting))

    def settle(self) -> None:
        """Wait at the end of the process, while threads can still enter Python, for what runs."""
        # In the main thread, at exit or at the end of a record.
        for array in jax.live_arrays():
            with suppress(Exception):
                array.block_until_ready()
        # A program whose results were dropped may have been started, and no device have come yet.
        began = time.monotonic()
        while self._is_busy() or time.monotonic() - max(self._last(), began) <= INTERVAL:
            time.sleep(INTERVAL / 5)

    def _is_busy(self) -> bool:
        """Whether a meeting lacks a device, is computed, or ends on a thread."""
        pending = any(run.pending for run in [*self._runs.values()])
        return pending or self._met > 0 or self._endings.is_busy()

    def _last(self) -> float:
        """When the last device came, or the last meeting was computed."""
        return max((run.last for run in [*self._runs.values()]), default=0.0)

    def _run(self, number: int) -> Run:
        run = self._runs.get(number)
        if run is None:
            run = self._runs[number] = Run(self.base)
            if len(self._runs) > REMEMBERED_RUNS:
                for old, found in self._runs.items():
                    # The oldest without anything pending is forgotten. If it were still in flight,
                    # its call numbers would begin anew: so there are many, and a run that waits is
                    # kept.
                    if not found.pending:
                        del self._runs[old]
                        break
        return run

    def _work(self) -> None:
        # The board's one thread. All collectives of a process are computed here, one after another:
        # folds share their work with helpers.
        looked, soon = time.monotonic(), False
        while True:
            try:
                run, meeting = self._ready.get(timeout=PATIENCE if soon else INTERVAL)
            except queue.Empty:
                pass
            else:
                self._complete(run, meeting)
                with self._lock:
                    self._met -= 1
                # Else the buffers' futures live until the next call comes.
                del run, meeting
            soon = self._endings.watch()
            if time.monotonic() - looked > INTERVAL:
                self._end_stalled()
                looked = time.monotonic()

    def _complete(self, run: Run, meeting: Rendezvous) -> None:
        each = [meeting.arrived[member] for member in meeting.members]
        try:
            meeting.site.compute(meeting.group, meeting.execution, each)
        # Of the definition too: a device that is not told would wait for ever.
        except BaseException as error:
            devices = ", ".join(str(member.device) for member in each)
            self._fail(
                run,
                f"{meeting.site.terms.text}: {type(error).__name__}: {error} "
                f"(replicas are numbered in the group, whose devices are {devices})",
                each,
            )
        else:
            with self._lock:
                run.last = time.monotonic()
            # Not here: XLA runs the rest of a device's program in the thread that completes its
            # future.
            self._endings.begin([member.future.complete for member in each], meeting.site.habit)

    def _fail(self, run: Run, failure: str, each: Sequence[Contribution] = ()) -> None:
        """End a run: all devices that wait in it, and those that come later."""
        with self._lock:
            run.failure = failure
            waiting = [*each]
            for meeting in run.pending.values():
                waiting += meeting.arrived.values()
            run.pending.clear()
        self._endings.begin(
            [
                partial(member.future.fail, f"gpusim, device {member.device}: {failure}")
                for member in waiting
            ]
        )

    def _end_stalled(self) -> None:
        now = time.monotonic()
        with self._lock:
            stalled = [
                run for run in self._runs.values() if run.pending and now - run.last > self.timeout
            ]
        for run in stalled:
            self._fail(run, describe_stall(run, self.timeout))


def describe_stall(run: Run, timeout: float) -> str:
    """Describe where devices wait, and which have not arrived."""
    lines = [f"no device has come to a collective for {timeout:g} seconds, and these wait:"]
    for meeting in [*run.pending.values()]:
        there = [member for member in meeting.members if member in meeting.arrived]
        missing = [member for member in meeting.members if member not in meeting.arrived]
        lines.append(f"{meeting.site.terms.text}: devices {there} have come, {missing} have not")
    return "\n  ".join([*lines, "All devices of a group have to make the same calls."])
