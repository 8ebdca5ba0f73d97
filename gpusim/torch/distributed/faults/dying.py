"""A rank's process that a fault befalls: its calls are counted, and at call k the fault comes.

All here runs in the rank's process, and nothing of it is imported by a launch without faults. The
count is of calls that communicate, over all groups, in the program's order, from 1. Every call goes
through `MortalGroup._forward`, planned ones too, before anything of it is copied or sent. So a call
that a fault prevents leaves nothing behind.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..calls.exchange import RankWork
from ..calls.group import RankGroup
from ..private import without_dynamo
from ..runners.child import METHODS, ProcessRank, ProcessStore, trace_of
from . import watching
from .engines import ABORTS, group_limit, waits_block
from .values import operands

if TYPE_CHECKING:
    from ..runners.messages import Message
    from ..runners.threads import Launch
    from .happened import Happened
    from .plans import Fault

__all__ = ["Call", "Handler", "MortalRank", "begin", "happens", "kill"]

EXIT_CODE = 1
"""The exit code of a process whose program has raised an exception."""


@dataclass
class Call:
    """A call of the rank's program, which a handler sees before and after it is made.

    **Attributes**: `number` counts from 1; `method` is c10d's name of the call and `operation`
    torch's; `given` are the arguments by their names, which a handler may replace before the call;
    `work` is the call's handle after it, None of a call that has none.
    """

    number: int
    group: RankGroup
    method: str
    operation: str
    given: dict[str, Any]
    work: RankWork | None = None


# In the rank's process, in the program's main thread, which alone makes calls.
class Handler:
    """The part that carries out one fault. Its methods are called in the program's main thread."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def before(self, call: Call) -> None:
        """Called before each call, when nothing of it has been copied or sent."""

    def after(self, call: Call) -> None:
        """Called once a call has been posted."""


# In the rank's process. Set once, before the program's first line.
_me: MortalRank | None = None


def happens(fault: Fault) -> None:
    """Note that a fault comes now; it is noted before the deed, and a killed process loses none."""
    assert _me is not None
    _me.launch.happened.note(fault)
    watching.happened(fault, _me.call_site())


def kill() -> None:
    """End this process at once, by SIGKILL: no handler runs, and no buffer is written."""
    os.kill(os.getpid(), signal.SIGKILL)


class AtCall(Handler):
    """A fault that comes as one call of the rank begins."""

    def before(self, call: Call) -> None:
        if call.number == self.fault.call:
            happens(self.fault)
            self.come()

    def come(self) -> None:
        """Carry the fault out: abstract, each kind of fault has its own."""
        raise NotImplementedError(f"{type(self).__name__}.come")


class Exit(AtCall):
    """The program ends by sys.exit: what it has registered at its exit runs."""

    def come(self) -> None:
        sys.exit(EXIT_CODE if self.fault.code is None else self.fault.code)


class Kill(AtCall):
    """The process ends by SIGKILL."""

    def come(self) -> None:
        kill()


class Raise(AtCall):
    """The call raises an exception."""

    def come(self) -> None:
        raise RuntimeError(f"a fault that gpusim was asked for: {self.fault}")


class Hang(AtCall):
    """The call does not begin, and the rank waits for ever."""

    def come(self) -> None:
        assert _me is not None
        _me.ask("hang", site=_me.call_site(), what=str(self.fault))


class Late(AtCall):
    """The call begins later, in simulated time."""

    def come(self) -> None:
        assert _me is not None
        _me.ask("late", None, _me.call_site(), seconds=self.fault.seconds, what=str(self.fault))


class Values(Handler):
    """A bit or an element of a call's operands or results is another one on this rank."""

    def before(self, call: Call) -> None:
        from . import values

        if call.number == self.fault.call and self.fault.kind != "flip-result":
            values.change_operands(self.fault, call.method, call.given, happened_of_rank())

    def after(self, call: Call) -> None:
        from . import values

        if call.number == self.fault.call and self.fault.kind == "flip-result":
            happened = happened_of_rank()
            values.change_results(self.fault, call.work, call.method, call.given, happened)


def happened_of_rank() -> Happened:
    """The launch's memory of faults that came."""
    assert _me is not None
    happened: Happened = _me.launch.happened
    return happened


HANDLERS: dict[str, type[Handler]] = {
    "exit": Exit,
    "kill": Kill,
    "raise": Raise,
    "hang": Hang,
    "late": Late,
    "flip": Values,
    "flip-result": Values,
    "nan": Values,
}
"""By kind of fault: what carries it out at a call."""

CONTEXTS = (
    (("torn", "missing"), "files", "faulty_files"),
    (("store-timeout",), "stores", "faulty_stores"),
)
"""Kinds of faults that a block around the program carries out: its module and function."""


# In the rank's process. `calls` and `handlers` are the program's main thread's.
class MortalRank(ProcessRank):
    """The rank of this process, which may die, hang, or be late."""

    launch: Any  # a `survivors.MortalLaunch`, which imports this module
    #: How many calls the program has begun.
    calls = 0
    handlers: Sequence[Handler] = ()
    #: The size of the program's world and the rank's number there, and the launch's ranks in it.
    world = (0, 0)
    members: Sequence[int] = ()
    #: Whether a campaign asks for what the rank does.
    watched = False

    @contextmanager
    def faulty(self) -> Iterator[None]:
        """A block around the program, in which the rank's faults come."""
        global _me
        _me = self
        launch = self.launch
        mine = [
            fault
            for fault in launch.faults
            if (fault.rank, fault.attempt) == (self.index, launch.attempt)
        ]
        self.handlers = [HANDLERS[each.kind](each) for each in mine if each.kind in HANDLERS]
        self.watched = watching.is_asked()
        if self.watched:
            watching.begin_rank()
        with ExitStack() as stack:
            for kinds, module, name in CONTEXTS:
                some = [fault for fault in mine if fault.kind in kinds]
                if some or self.watched:
                    around = getattr(importlib.import_module(f"{__package__}.{module}"), name)
                    stack.enter_context(around(some, launch.happened))
            yield

    def new_group(
        self, name: str, ranks: Sequence[int], options: Any, timeout: Any = None
    ) -> RankGroup:
        if ranks:
            ranks = [self.members[each] for each in ranks]
        elif self.world == (self.launch.size, self.index):
            self.members = range(self.launch.size)
        else:
            # Survivors make a smaller world, whose ranks have numbers of their own.
            size, place = self.world
            limit = group_limit(timeout, self.backend, os.environ)
            about: dict[str, Any] = {"size": size, "place": place, "number": self.worlds}
            answer = self.ask("world", None, self.call_site(), limit=limit, **about)
            ranks = self.members = answer["members"]
            self.worlds += 1
        group = super().new_group(name, ranks, options, timeout)
        # Also a limit that the program has not set: a rank that is gone or hangs is noticed by it.
        group.limit = group_limit(timeout, self.backend, os.environ)
        if waits_block(os.environ):
            self.ask("blocks")
        self.ask("meet", site=self.call_site(), limit=group.limit)
        return group

    def store_of(self, launch: Launch) -> ProcessStore:
        return MortalStore(launch, self)

    def end(self, *given: Any) -> None:
        """End as by SIGTERM, which no program catches without a handler of its own; or by Ctrl-C.

        This is the handler of SIGTERM, in the program's main thread.
        """
        if self.interrupted[0]:
            super().end(*given)
            return
        self.interrupted[1 + self.index] = 1
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def last_words(self, error: BaseException) -> Message:
        """The last message. The traceback is shown as Python shows it of a process of its own."""
        ended = error if isinstance(error, SystemExit) else error.__context__
        trace, code = trace_of(error), EXIT_CODE
        if isinstance(ended, SystemExit) and type(error).__name__ in (
            "SystemExit",
            "ExitCodeError",
        ):
            # The command's runner of scripts has made words of it, for launches that end at once.
            given = ended.code
            code = given if isinstance(given, int) else EXIT_CODE
            if not isinstance(given, int):
                print(given, file=sys.stderr)
            return {**super().last_words(ended), "code": code % 256}
        for line in trace.splitlines():
            print(line, file=sys.stderr)
        return {**super().last_words(error), "code": code}


class MortalStore(ProcessStore):
    """The rank's end of the store, whose waits have torch's limits."""

    def _limit(self, timeout: timedelta | None = None) -> float | None:
        own: Any = self
        given = own.timeout if timeout is None else timeout
        seconds: float = given.total_seconds()
        return seconds if seconds > 0 else None


@without_dynamo
class QuietWork(RankWork):
    """A work of gloo's that says nothing of an error, except to those that wait for it."""

    def is_completed(self) -> bool:
        done = super().is_completed()
        return done and self._pending.error is None

    def is_success(self) -> bool:
        return self._pending.error is not None or super().is_success()

    def exception(self) -> BaseException | None:
        return None


QUIET = ("reduce_scatter", "send", "recv")
"""The operations whose works are such."""

_group: Any = ProcessRank.group_type


@without_dynamo
class MortalGroup(_group):
    """The rank's end of a group, whose calls are counted."""

    def _forward(
        self, method: str, given: dict[str, Any], args: Sequence[Any] | None
    ) -> RankWork | None:
        rank: Any = self._rank
        rank.check_thread(METHODS[method])
        rank.calls += 1
        if rank.watched:
            tensors = [
                (str(each.dtype).removeprefix("torch."), each.numel())
                for each in operands(method, given)
            ]
            watching.saw_call(METHODS[method], rank.call_site(), tensors)
        if not rank.handlers:
            return self._posted(method, given, args)
        call = Call(rank.calls, self, method, METHODS[method], given)
        for handler in rank.handlers:
            handler.before(call)
        if call.given is not given:
            # The arguments without names are the old ones: the call is not planned.
            args = None
        call.work = self._posted(method, call.given, args)
        for handler in rank.handlers:
            handler.after(call)
        return call.work

    def _posted(
        self, method: str, given: dict[str, Any], args: Sequence[Any] | None
    ) -> RankWork | None:
        work: RankWork | None = super()._forward(method, given, args)
        if work is not None and METHODS[method] in QUIET and self.name() not in ABORTS:
            work.__class__ = QuietWork
        return work


MortalRank.group_type = MortalGroup


def begin(program: Callable[[Any], Any], rank: Any) -> Any:
    """Run the program of a rank, in which its faults come."""
    with rank.faulty():
        return program(rank)
