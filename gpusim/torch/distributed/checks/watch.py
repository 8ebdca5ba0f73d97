"""A rank's watch: what sees its calls, and what it notes and finds."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gpusim.errors import DeadlockError
from gpusim.maps.call_site import call_site, is_users

from ..calls.exchange import RankWork
from ..private import functional, without_function_modes
from .arguments import Given, given_of
from .completions import Values, completion_of
from .draws import Draws
from .engines import engine_of_group
from .files import Files
from .findings import Finding
from .flights import Flights
from .log import Log
from .means import Means
from .operands import check_operands, device_of
from .reading import Reading
from .replicas import Replicas
from .results import Results
from .streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..calls.group import RankGroup
    from ..runners.threads import Rank
    from .session import Check

__all__ = ["GAVE_UP", "Call", "Watch"]

MAKERS = (
    "torch.autograd.graph",
    "torch.distributed._composable",
    "torch.distributed.algorithms",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.utils",
    "torch.nn.modules",
    "torch.nn.parallel",
)
"""Modules of torch's that make calls of their own; others of torch's pass the program's on."""


GAVE_UP = "gave up"
"""The rows of a log about parts of the check that failed."""


# Owner: the rank's own thread, which alone makes calls and runs the program. In processes the
# object is made after the fork.
class Watch:
    """The knowledge of a rank's part of the check.

    **Attributes**: `engine` is the engine whose rules hold, "" for the one that the program names;
    `is_busy` says that the check's own code runs, whose operators are not the program's.
    """

    def __init__(self, rank: Rank, check: Check) -> None:
        self.rank, self.engine = rank, check.engine
        self.log = Log(rank.index, rank.launch.size, check.engine)
        self.is_busy = False
        #: Whether what calls are posted with is kept, for other orders to be compared.
        self.keeps_values = check.keeps_values
        #: How deep the program is in calls of modules.
        self.depth = 0
        self.in_backward = False
        #: The number of the batch_isend_irecv that runs, and how many there were.
        self.batch: int | None = None
        self.batches = 0
        self._calls = 0
        self._found: dict[tuple[str, str, str], Finding] = {}
        self.reading = Reading(self)
        self.flights = Flights(self, completion_of(check.order, rank.index))
        self.values = Values(self)
        self.results = Results(self, check.is_script)
        self.files = Files(self)
        self.replicas = Replicas(self)
        self.draws = Draws(self)
        self.means = Means(self)
        self.streams = Streams(self)
        self.parts = (
            self.flights,
            self.results,
            self.files,
            self.replicas,
            self.draws,
            self.means,
            self.streams,
        )

    # What parts use

    def site(self) -> str:
        """file:line of the program."""
        return call_site()

    def note(self, *event: Any) -> None:
        """Add an event to the log."""
        self.log.events.append(list(event))

    def find(
        self, kind: str, site: str, text: str, call: str = "", related: Sequence[str] = ()
    ) -> None:
        """Note a finding of this rank; one of the same kind, site and call is counted."""
        key = kind, site, call
        found = self._found.get(key)
        if found is not None:
            found.seen += 1
            return
        own = Finding(kind, site, [self.rank.index], text, call, related=list(related))
        self._found[key] = own
        self.log.findings.append(own)

    def host_waits(self, what: str, calls: Sequence[int] = ()) -> None:
        """Note that the host waits for the GPU, in the program's words `what`.

        `calls` are the numbers of those that it now knows to be complete, and did not before.
        """
        self.note("host", what, self.site(), list(calls))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """A block of the check's own operators."""
        before, self.is_busy = self.is_busy, True
        try:
            # A mode of the program's hears of its own functions alone.
            with without_function_modes():
                yield
        finally:
            self.is_busy = before

    def tell(self, part: Callable[..., Any], *args: Any) -> Any:
        """Call a part, which may fail where the program must not: what fails is reported."""
        try:
            return part(*args)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.log.rows.setdefault(GAVE_UP, []).append(
                f"{getattr(part, '__qualname__', part)}: {type(error).__name__}: {error} "
                f"({Path(place.filename).name}:{place.lineno})"
            )
            return None

    # What a group calls

    def call(
        self,
        group: RankGroup,
        method: str,
        post: Callable[..., Any],
        args: Sequence[Any],
        named: dict[str, Any],
    ) -> Any:
        """Post a call by the method `post` of the group, and watch it."""
        if self.is_busy:  # of a method that calls others
            return post(group, *args, **named)
        self.is_busy = True
        try:
            given = given_of(group, method, post, args, named)
            site = self.site()
            call = Call(self._calls, group, given, site, *self._place())
            self._calls += 1
            self.tell(self.replicas.see_call, call)  # before the call, which may change its tensors
            self.tell(self.means.see_call, call)
            refused = self.tell(check_operands, self, call) or []
            flight = self.flights.begin(call)
            self.tell(self.results.see_operands, call)
            self.values.see_operands(call)
            # Before the call, which may wait in vain.
            self._note_post(call)
            try:
                work = post(group, *given.args, **given.named)
            except Exception as error:
                if not isinstance(error, DeadlockError):
                    self._take_back_post(call)
                raise
            # After the call: one that raises an error names what is wrong with it itself.
            for kind, text in refused:
                self.find(kind, site, text, call.operation)
            if isinstance(work, RankWork):
                self._follow(work, call, flight)
            elif work is None:  # of monitored_barrier
                self.note("done", call.id)
            self.tell(self.streams.see_call, call, work)
            return work
        finally:
            self.is_busy = False
            self.reading.settle()

    def place(self) -> str:
        """Where the program is: "torch", "forward" or ""; see `Log.events`."""
        return self._place()[0]

    def _place(self) -> tuple[str, bool]:
        """The place, and whether a functional collective of torch's makes the call."""
        frame: Any = sys._getframe(2)
        is_functional = False
        while frame is not None:
            name = frame.f_globals.get("__name__") or ""
            if name.startswith(MAKERS):
                return "torch", is_functional
            is_functional = is_functional or name == functional.__name__
            if not name.startswith(("torch.", "gpusim.torch")) and is_users(frame):
                break
            frame = frame.f_back
        return "forward" if self.depth else "", is_functional

    def _note_post(self, call: Call) -> None:
        group, given = call.group, call.given
        key = group._key
        self.log.groups.setdefault(key.label, list(key.ranks))
        about: dict[str, Any] = {"async": given.is_async, "inside": call.inside}
        batch = self.batch_of(group)
        if batch is not None:
            about["batch"] = batch
        inside = range(len(key.ranks))  # others are refused when the call is posted
        if given.root in inside:
            about["root"] = key.ranks[given.root]
        if given.peer in inside:
            about["peer"] = key.ranks[given.peer]
        if given.tag:
            about["tag"] = given.tag
        tensors = [*given.written, *given.only_read]
        about["engine"] = engine_of_group(self, group, device_of(self, tensors))
        number = None
        if given.operation in ("send", "recv"):
            if group.bound_device_id is not None:
                about["bound"] = True
        else:
            counts = vars(group).setdefault("watched_calls", [0])
            number = counts[0]
            counts[0] += 1
        self.note("post", call.id, key.label, number, given.operation, call.site, about)

    def _take_back_post(self, call: Call) -> None:
        """Forget a call that was refused."""
        events = self.log.events
        place = max(n for n, event in enumerate(events) if event[:2] == ["post", call.id])
        if events.pop(place)[3] is not None:
            vars(call.group)["watched_calls"][0] -= 1

    def batch_of(self, group: RankGroup) -> int | None:
        """The number of the batch of messages, or of the coalesced block, that is being posted."""
        if self.batch is not None:
            return self.batch
        return None if group._coalesced is None else id(group._coalesced)

    def _follow(self, work: RankWork, call: Call, flight: Any) -> None:
        """Hear when the rank knows that the call is complete."""
        before = work.finish

        def finish() -> None:
            if before is not None:
                before()
            self.note("done", call.id)
            if flight is not None:
                with self.busy():
                    self.flights.end(flight)
            if flight is None or not flight.named:
                self.results.see_result(call)

        work.finish = finish
        if flight is not None:
            self.flights.follow(flight, work)

    def finish(self, ended: str) -> None:
        """Note what is known at the end of the rank's program only."""
        self.is_busy = True
        self.log.ended = ended
        for part in self.parts:
            self.tell(part.finish)
        self.reading.listeners.clear()
        self.reading.settle()


class Call(NamedTuple):
    """A call that a rank posts: its number on the rank, group, arguments, site, and `place`."""

    id: int
    group: Any
    given: Given
    site: str
    inside: str
    is_functional: bool = False
    """Whether it is one of torch's functional collectives."""

    @property
    def operation(self) -> str:
        return self.given.operation

    @property
    def words(self) -> str:
        """The call in words: the operation, its tensors, and its group."""
        tensors: Sequence[Tensor] = [*self.given.written, *self.given.only_read]
        kinds = [f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors[:2]]
        more = ", ..." if len(tensors) > 2 else ""
        return f"{self.operation}({', '.join(kinds)}{more}) of {self.group._key}"
