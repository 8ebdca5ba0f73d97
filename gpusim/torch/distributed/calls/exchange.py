"""Where ranks meet: the calls of each group, matched by their number, and the mail between ranks.

A rank posts its part of a call and goes on; the last one does the work for all. A rank waits in
`RankWork.wait` only, where it gives up its turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ....errors import CollectiveMismatchError
from ....libraries import on_device
from ....maps.completion import Completion
from ....maps.ending import ReplicaEnded
from ....recording import RecordedGroup, settings_of
from ....recording.recorder import Value
from ....words import named
from ...tensors import on_stream_of
from ..memory import bits_of, kind_of, move
from ..private import without_dynamo
from ..private_calls import complete_future
from . import apart, streams
from .timeouts import expired, seconds_of

if TYPE_CHECKING:
    from ..runners.threads import Launch, Rank

__all__ = ["Exchange", "GroupKey", "Pending", "Posting", "RankWork", "Terms"]

SAME = frozenset(["all_reduce", "all_gather", "broadcast", "barrier"])
"""Operations that give all ranks of a group the same bits."""

TYPES = {
    "broadcast": 0,
    "allreduce": 1,
    "allreduce_coalesced": 1,
    "reduce": 3,
    "allgather": 4,
    "all_gather_single": 4,
    "_allgather_base": 4,
    "allgather_coalesced": 6,
    "gather": 7,
    "scatter": 8,
    "all_to_all_single": 11,
    "alltoall_base": 11,
    "alltoall": 11,
    "send": 12,
    "recv": 13,
    "recv_anysource": 14,
    "barrier": 15,
}
"""c10d's OpType of a gloo work, by the method that returns it."""

NCCL_TYPES = {
    "allreduce_coalesced": 17,
    "all_gather_single": 5,
    "_allgather_base": 5,
    "all_to_all_single": 10,
    "alltoall_base": 10,
    "reduce_scatter": 9,
    "reduce_scatter_single": 16,
    "_reduce_scatter_base": 16,
    "all_gather_single_coalesced": 17,
    "reduce_scatter_single_coalesced": 17,
}
"""The same of an NCCL work, where it differs."""

GATHERED_AT_ONCE = (
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
)
"""Methods that gather several tensors; gloo's result is a list of lists, one for each rank."""

UNKNOWN_TYPE = 100

FITTING = ("dtype", "device")
"""The properties that both tensors of a message have in common."""

Terms = Mapping[str, Any]
NONE: Terms = {}


@dataclass(frozen=True)
class GroupKey:
    """A group of ranks: its name, its global ranks, and which of several of that name it is."""

    name: str
    ranks: tuple[int, ...]
    copy: tuple[int, int]

    @property
    def label(self) -> str:
        """A name that no other group has."""
        # Groups of one rank may share their name, except for "0", the group of all ranks.
        alone = len(self.ranks) == 1 and self.name != "0"
        name = f"{self.name}@{self.ranks[0]}" if alone else self.name
        return name if self.copy == (1, 0) else f"{name}/{'.'.join(map(str, self.copy))}"

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        whole = self.ranks == tuple(range(first, last + 1)) and len(self.ranks) > 2
        members = f"{first} to {last}" if whole else ", ".join(map(str, self.ranks))
        return f"group {self.name!r} (rank{'s' * (len(self.ranks) > 1)} {members})"


# Owner: the exchange, under its lock, until the last part is there. Then it is the last rank's
# alone, which computes. `done` is completed after `error` and `event` have been set: who sees it
# done, under the scheduler's lock or by the flag, sees these too.
class Pending:
    """A call that some ranks of a group have posted: all that they pass, by their group rank.

    On a GPU `ready` are the events behind the ranks' work before the call, and `event` is the one
    behind the call. `key` is the group of a collective.
    """

    __slots__ = (
        "done",
        "error",
        "event",
        "key",
        "parts",
        "ready",
        "recorded",
        "sites",
        "terms",
        "title",
    )

    def __init__(
        self, title: str, done: Completion, terms: Terms = NONE, key: GroupKey | None = None
    ) -> None:
        self.title, self.done, self.terms, self.key = title, done, terms, key
        # By the rank in the group. They hold views of all ranks' tensors, so they are dropped as
        # soon as the call is complete.
        self.parts: dict[int, Any] = {}
        self.sites: dict[int, str] = {}
        # Of whom results are to be recorded, once there are any: the rank that computes does it for
        # all.
        self.recorded: list[tuple[int, int, list[Tensor]]] = []
        # One event of each rank, None on the host. The order does not matter: all are waited for.
        self.ready: list[Any] = []
        self.event: Any = None
        # Raised by each rank that waits: one exception object for all.
        self.error: BaseException | None = None


# Made in the rank's own thread, before any lock is taken: checking arguments and copying operands
# is the long part of a call, and ranks do it side by side.
class Posting(NamedTuple):
    """The part of a collective that a rank posts.

    **Attributes**: `compute` gets the `part` of each rank, in the group's order, from the last rank
    to post. The rank's `tensors` are for the record, and `record` has more fields of it, with
    "operands" if the call reads others than `tensors`.
    """

    part: Any
    outputs: list[Tensor]
    compute: Callable[[list[Any]], None]
    tensors: Sequence[Tensor] = ()
    record: Mapping[str, Any] | None = None


# Owner: the rank's own thread, which alone waits and asks. C++ may hold it from other threads, but
# calls it in the rank's.
@without_dynamo
class RankWork(dist.Work):
    """One rank's handle on a call.

    The rank holds it until it has been waited for, or seen to be complete: C++ that is handed a
    Work of Python's, as DDP is in a join, does not keep the Python object alive.

    **Attributes**: `message` is "send" or "recv" for a message, whose tensor is only read or only
    written; `finish` is called once, in the rank's thread, when the rank sees that the call is
    complete.
    """

    message = ""
    finish: Callable[[], None] | None = None
    #: Of a watched rank: called whenever the rank waits for the call (False), and with True when
    #: its host has seen that the call is complete.
    seen: Callable[[bool], None] | None = None
    #: Whether a wait for it has raised an error.
    failed = False
    _source = -1
    _future: Any = None
    #: Of the method that posted the call; see `returned_by`.
    _method, _chunks, _is_nccl = "", 1, False
    _is_nested = False
    #: The group, its limit of a call in seconds, and whether monitored_barrier names all ranks.
    group: Any = None
    limit: float | None = None
    names_all = False

    def __init__(
        self,
        rank: Rank,
        pending: Pending,
        outputs: list[Tensor],
        site: str,
        part: Any = None,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._rank, self._pending, self._outputs = rank, pending, outputs
        self._site = site
        # Memory of a GPU may be used again when the rank's stream has waited for the call.
        # Invariant: on a GPU the part lives until the rank's stream waits for the call. CuPy and
        # torch use memory again as soon as nothing refers to it.
        self._part, self._tensors = part, tensors
        # Until it has been waited for or seen to be complete: else Python would collect a work that
        # C++ alone holds.
        rank.unfinished.add(self)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the call, without the turn. Without a limit, a call in vain is known at once."""
        pending = self._pending
        # Read without a lock: it only goes from False to True. A stale False costs a wait that ends
        # at once.
        if not pending.done.done:
            own = seconds_of(timeout, is_set=True)
            limit = self.limit if own is None else own
            what = f"{pending.title} at {self._site}"
            # Here the rank gives up its turn. When it returns, the process's globals are the rank's
            # again.
            try:
                self._rank.wait_for_work(self, what, limit, own is not None)
            except Exception:
                self.failed = True
                raise
        self._rank.unfinished.discard(self)
        if pending.error is not None:
            self.failed = True
            raise pending.error
        # On a GPU only the rank's current stream waits: the host goes on.
        streams.wait(pending.event, self._tensors)
        self._part = None
        self._finish()
        if self.seen is not None:
            self.seen(False)
        return True

    def _finish(self) -> None:
        # Taken out first: it is called once, also if it waits itself or raises.
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()

    def is_done(self) -> bool:
        """Whether the call is complete, without giving way to other ranks."""
        return self._pending.done.done

    def expire(self, limit: float, own: bool, stall: str | None) -> None:
        """Raise what gloo raises after a time-out; see `timeouts.expired`."""
        raise expired(self, limit, own, stall)

    def returned_by(self, method: str, group_size: int, backend: str) -> None:
        """Note which method of a group returns the work, on which its answers depend.

        gloo gathers into a tensor as into a list of its parts, and NCCL as a whole.
        """
        self._method, self._is_nccl = method, backend == "nccl"
        whole = self._is_nccl or method not in ("all_gather_single", "_allgather_base")
        self._chunks = 1 if whole else group_size
        if not self._is_nccl and method in GATHERED_AT_ONCE:
            self._chunks, self._is_nested = group_size, True

    def _values(self) -> list[Tensor]:
        if self._chunks == 1 or self._is_nested:
            return self._outputs
        return [part for each in self._outputs for part in each.chunk(self._chunks)]

    def _values_of_future(self) -> list[Any]:
        """The outputs as the future has them: of several inputs at once, a list for each rank."""
        if not self._is_nested:
            return self._values()
        if self._method == "allgather_coalesced":
            count = len(self._outputs) // self._chunks
            return [self._outputs[r * count : (r + 1) * count] for r in range(self._chunks)]
        parts = [each.chunk(self._chunks) for each in self._outputs]
        return [list(row) for row in zip(*parts, strict=True)]

    def get_future(self) -> Any:
        """The future of the outputs, which is complete: C++ waits for futures with the turn."""
        # C++ waits for futures with the interpreter's lock released, but with the turn: other ranks
        # would never run. So a future is complete when it is handed out.
        self.wait()
        if self.seen is not None:
            # Who waits for the future, and in which stream, is not known.
            self.seen(True)
        if self._future is None:
            devices = streams.futures_on(self._outputs)
            self._future = complete_future(self._values_of_future(), devices)
        return self._future

    def get_future_result(self) -> Any:
        """As torch says it of gloo's works, and of all but NCCL's."""
        if not self._is_nccl:
            raise RuntimeError("Work::getFutureResult not implemented.")
        self.wait()
        return complete_future(0, [])  # WorkResult::SUCCESS

    def is_completed(self) -> bool:
        """Whether the call is complete. Others run first, so that asking again and again ends."""
        pending = self._pending
        if not pending.done.done:
            what = f"{pending.title} at {self._site}"
            # A program that polls would keep its turn for ever. Where all that can go on only ask,
            # again and again, nothing can complete the call: that is a deadlock (`Clock.asked`).
            if not self._rank.give_way(asks=what) and not pending.done.done:
                self._rank.fail_waiting(what)
        if pending.done.done:
            self._rank.unfinished.discard(self)
            if pending.error is None:
                self._finish()
                if self.seen is not None:
                    self.seen(True)
        return pending.done.done and (pending.event is None or pending.event.query())

    def is_success(self) -> bool:
        return self._pending.done.done and self._pending.error is None

    def exception(self) -> BaseException | None:
        return self._pending.error

    def result(self) -> list[Tensor]:
        """The outputs.

        **Raises**: RuntimeError before the call is complete, as of gloo.
        """
        if not (self._is_nccl or self._pending.done.done):
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before "
                "result()."
            )
        if self._is_nested:
            raise RuntimeError(
                "work result does not support list of lists, use .getFuture() and value()"
            )
        return self._values()

    def _get_op_type(self) -> int:
        if self._is_nccl:
            return NCCL_TYPES.get(self._method, TYPES.get(self._method, UNKNOWN_TYPE))
        return TYPES.get(self._method, UNKNOWN_TYPE)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        # gloo blocks CUDA's current stream, and fails in a build for the CPU ("Failed to create
        # StreamBlock"). Here the host waits, behind which no stream can be.
        self.wait()

    def source_rank(self) -> int:
        """The rank in the group that sent the message.

        **Raises**: RuntimeError for other calls, as of gloo.
        """
        if self._method not in ("recv", "recv_anysource", ""):
            raise RuntimeError(
                "sourceRank() may only be called on work objects that correspond to a recv or "
                "recv-from-any call."
            )
        return self._source

    _source_rank = source_rank


@dataclass(eq=False)
class Letter:
    """One end of a message: of a sender, or of a receiver (`source` None takes any sender)."""

    tensor: Tensor
    source: int | None
    tag: int
    pending: Pending
    site: str
    recorded: tuple[int, int] = (0, 0)
    work: RankWork | None = None
    bits: Any = None  # that a sender had when it posted the message


# One for each launch, in the process that launches: ranks that are processes have proxies here.
class Exchange:
    """All calls of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.recorder = launch.recorder
        # Written by the ranks' threads; all ranks of a group say the same.
        self.descriptions: dict[GroupKey, str] = {}
        self.groups: dict[GroupKey, RecordedGroup] = {}
        # Guards the dictionaries below. Held for a few lines: no call of torch's, no copy, no wait,
        # and no other lock while it is. It is needed in turns too: proxies of processes, and free
        # ranks, are threads that run at a time. ReplicaEnded may come while it is held; `with` lets
        # go of it.
        self.lock = threading.Lock()
        #: By the group's name, copy and first rank, which are one group's alone, and the call's
        #: number.
        # Invariant: a call that at least one rank has posted, and at least one has not.
        self.calls: dict[tuple[str, tuple[int, int], int, int], Pending] = {}
        #: Who has made groups of a name and copy: their ranks, a rank that made it, and where.
        self.makers: dict[tuple[str, tuple[int, int]], list[tuple[tuple[int, ...], int, str]]] = {}
        #: Groups that a time-out has broken, by name, copy and first rank, and what broke them.
        self.broken: dict[tuple[str, tuple[int, int], int], str] = {}
        # By group and receiver: letters of senders, and of receivers. Invariant: no letter of one
        # fits one of the other: a fitting one takes it out when it is posted.
        self.mail: dict[tuple[GroupKey, int], tuple[deque[Letter], deque[Letter]]] = {}
        # For each rank, the groups that it has called from each line of its program. Written by the
        # rank's thread alone; read at a stall, when no rank posts.
        self.chosen: dict[int, dict[str, apart.Choices]] = {}

    def admit(self, key: GroupKey, rank: Rank) -> None:
        """Note that a rank makes a group; all that are in it must name the same ranks.

        Groups of one rank may be made where others make other groups: `new_subgroups` of a group
        makes those of its own members only. Groups of several ranks meet under their name, and
        real engines mix up those of one name.
        """
        # Before the lock: it walks up the stack, or, of a process, came with the request.
        site = rank.call_site()
        with self.lock:
            makers = self.makers.setdefault((key.name, key.copy), [])
            same = [made for made in makers if made[0] == key.ranks]
            if not same:
                makers.append((key.ranks, rank.index, site))
            others = [made for made in makers if made[0] != key.ranks]
            clash = next((made for made in others if _meet(made[0], key.ranks)), None)
        if clash is not None:
            ranks, other, there = clash
            self._mismatch(
                f"ranks do not make the same groups in the same order: rank {other} makes group "
                f"{key.name!r} of ranks {list(ranks)} at {there}, rank {rank.index} of ranks "
                f"{list(key.ranks)} at {site}"
            )

    def post(
        self, rank: Rank, key: GroupKey, place: int, number: int, terms: Terms, made: Posting
    ) -> RankWork:
        """Post the part of the rank at `place` of the group in the group's call `number`.

        `terms` must be equal on all ranks. An exception in the computation, which the last rank to
        post makes, is raised by all that wait.
        """
        if self.broken:
            # Without the lock: a group is broken by a rank that has waited in vain, and one that
            # hears of it later finds its error in the call.
            self._check_whole(key)
        site = rank.call_site()
        self._chose(rank.index, site, key)
        count = (
            None
            if self.recorder is None
            else self._noted(rank, key, place, number, terms, made, site)
        )
        involved = [*made.outputs, *made.tensors]
        # Behind the work that the rank has queued until now, on its own current stream.
        ready = streams.record(involved)
        slot = key.name, key.copy, key.ranks[0], number
        # Matching is all that happens here. Whose part is the last is decided here too, once:
        # `complete` is True for one rank alone, which takes the call out of the dictionary.
        with self.lock:
            pending = self.calls.get(slot)
            if pending is None:
                title = f"{describe(terms)}, call {number} of {key},"
                pending = Pending(title, Completion(self.launch.scheduler), terms, key)
                self.calls[slot] = pending
            # Before the part is noted: a call whose terms differ is never computed.
            differ = pending.terms != terms
            if not differ:
                pending.parts[place], pending.sites[place] = made.part, site
                if count is not None and self.recorder is not None and self.recorder.digests:
                    received = terms["operation"] != "reduce" or terms["root"] == place
                    outputs = made.outputs if received else []
                    pending.recorded.append((rank.index, count, outputs))
                pending.ready.append(ready)
            complete = len(pending.parts) == len(key.ranks)
            if complete:
                del self.calls[slot]
        if differ:
            self._differ(rank, pending, number, terms, site)
        if complete:
            self._complete(pending, made.compute, involved, site)
        # On the host nothing has to be held: what is to be read late was copied when the call was
        # posted.
        held = None if ready is None else made.part
        return RankWork(rank, pending, made.outputs, site, held, involved)

    def _chose(self, rank: int, site: str, key: GroupKey) -> None:
        """Note the group that a rank calls from a line of its program. (In the rank's thread.)"""
        lines = self.chosen.get(rank)
        if lines is None:
            lines = self.chosen[rank] = {}
        choices = lines.get(site)
        if choices is None:
            choices = lines[site] = apart.Choices()
        choices.add((key.name, key.ranks))

    def apart(self) -> str:
        """Which ranks called another group than those that wait for them. (At a stall.)"""
        calls = []
        for pending in [*self.calls.values()]:
            key = pending.key
            assert key is not None  # of collectives
            posted = {key.ranks[place]: site for place, site in [*pending.sites.items()]}
            waits = {
                rank.index
                for rank in self.launch.ranks
                if (rank.waits_for or rank.asks_for).startswith(pending.title)
            }
            sites = {rank: site for rank, site in posted.items() if rank in waits}
            missing = [rank for rank in key.ranks if rank not in posted]
            calls.append(apart.Open((key.name, key.ranks), sites, missing))
        return apart.explain(calls, self.chosen)

    def _noted(
        self,
        rank: Rank,
        key: GroupKey,
        place: int,
        number: int,
        terms: Terms,
        made: Posting,
        site: str,
    ) -> int:
        """Record a rank's part of a collective; how many calls the rank has made before."""
        more = _fields_of(terms, key.ranks) | {"operands": made.tensors, **(made.record or {})}
        if terms["operation"] == "broadcast" and terms["root"] != place:
            more["operands"] = ()
        return self._record(key, rank, number, terms["operation"], made.tensors, site, **more)

    def _differ(self, rank: Rank, pending: Pending, number: int, terms: Terms, site: str) -> None:
        """End all ranks, as the terms of one differ from those of the first."""
        key = pending.key
        assert key is not None
        others = sorted(pending.sites)  # parts that have failed are gone
        same = [other for other in others if pending.sites[other] == pending.sites[others[0]]]
        both = {**pending.terms, **terms}
        names = [name for name in both if pending.terms.get(name) != terms.get(name)]
        if "operation" in names:  # the others follow from it
            names = ["operation"]
        # Without the lock, as it takes the scheduler's.
        self._mismatch(
            f"ranks of {key} do not make the same call {number}: "
            f"{named('rank', [key.ranks[other] for other in same])} "
            f"{'calls' if len(same) == 1 else 'call'} {describe(pending.terms)} at "
            f"{pending.sites[others[0]]}, rank {rank.index} calls {describe(terms)} at {site}; "
            f"they differ in {', '.join(names)}"
        )

    def _complete(
        self,
        pending: Pending,
        compute: Callable[[list[Any]], None],
        involved: Sequence[Tensor],
        site: str,
    ) -> None:
        """Make a call that all ranks have posted."""
        try:
            # `compute` runs here: in the thread of the last rank to post, in its turn, without a
            # lock. It writes the tensors of all ranks. They wait, or have promised by not waiting
            # that they do not look.
            with streams.after(pending.ready, involved):
                compute([pending.parts[place] for place in range(len(pending.parts))])
                if pending.recorded:
                    self._record_results(pending.recorded, pending.terms["operation"] in SAME)
            pending.event = streams.record(involved)
        except Exception as error:
            # Of the call, so it is every rank's. ReplicaEnded is not: it ends this rank as it ends
            # the others, and none waits for the call any more.
            error.add_note(f"raised in {pending.title} at {site}")
            pending.error = error
        # Before `complete`: a rank that goes on may resize or free what a part is a view of.
        pending.parts.clear()
        # Last, and under the scheduler's lock: it orders all of the above before what other ranks
        # do. Those that wait become ready in the order in which they came.
        pending.done.complete()

    def send(
        self,
        rank: Rank,
        key: GroupKey,
        me: int,
        to: int,
        tensor: Tensor,
        tag: int,
        keeps_values: bool = True,
    ) -> RankWork:
        """Post a message, which is complete when it has been received.

        The receiver gets the values that the tensor has now (`keeps_values`), also if the sender
        receives into it meanwhile.
        """
        what = f"send to rank {key.ranks[to]}"
        return self._mail(rank, key, to, 0, tensor, me, tag, what, keeps_values)

    def receive(
        self, rank: Rank, key: GroupKey, me: int, source: int | None, tensor: Tensor, tag: int
    ) -> RankWork:
        """Post a tensor that receives a message, of any rank if `source` is None."""
        who = "any rank" if source is None else f"rank {key.ranks[source]}"
        return self._mail(rank, key, me, 1, tensor, source, tag, f"recv from {who}")

    def _mail(
        self,
        rank: Rank,
        key: GroupKey,
        receiver: int,
        side: int,
        tensor: Tensor,
        source: int | None,
        tag: int,
        what: str,
        keeps_values: bool = False,
    ) -> RankWork:
        self._check_whole(key)
        site = rank.call_site()
        title = f"{what} of {kind_of(tensor)!r}, tag {tag}, of {key},"
        pending = Pending(title, Completion(self.launch.scheduler))
        own = Letter(tensor, source, tag, pending, site)
        own.work = RankWork(rank, pending, [tensor], site, tensors=[tensor])
        own.work.message = ("send", "recv")[side]
        # A view; it becomes a copy only if the letter has to lie in the box.
        own.bits = bits_of(tensor, what)
        if self.recorder is not None:
            peer = (receiver, source)[side]
            far = None if peer is None else key.ranks[peer]
            name = ("send", "recv")[side]
            read = [] if side else [tensor]
            made = self._record(key, rank, None, name, [tensor], site, read, peer=far, tag=tag)
            own.recorded = rank.index, made
        with self.lock:
            boxes = self.mail.setdefault((key, receiver), (deque(), deque()))
            # The oldest that fits, as messages of one tag do not overtake each other.
            other = next((letter for letter in boxes[1 - side] if _fits(letter, own)), None)
            if other is None:
                if keeps_values:
                    with on_stream_of([tensor]):
                        own.bits = own.bits.copy(order="K")
                pending.ready.append(streams.record([tensor]))
                boxes[side].append(own)
                return own.work
            # From here on both letters are this thread's: no other finds them.
            boxes[1 - side].remove(other)
        sent, received = (own, other) if side == 0 else (other, own)
        assert received.work is not None and sent.source is not None
        received.work._source = sent.source
        same = [getattr(sent.tensor, name) == getattr(received.tensor, name) for name in FITTING]
        if not all(same) or sent.tensor.numel() != received.tensor.numel():
            self._mismatch(
                f"a message of {key} does not fit: rank {key.ranks[sent.source]} sends "
                f"{kind_of(sent.tensor)!r}{_where(sent.tensor.device)} at {sent.site}, rank "
                f"{key.ranks[receiver]} receives {kind_of(received.tensor)!r}"
                f"{_where(received.tensor.device)} at {received.site}"
            )
        both = [sent.tensor, received.tensor]
        # In the thread of the one that came second, sender or receiver, without the lock. The other
        # one waits, or is yet to look.
        with torch.no_grad(), streams.after(other.pending.ready, both):
            move([(received.bits, sent.bits.reshape(received.bits.shape))])
            if self.recorder is not None and self.recorder.digests:
                self._record_results([(*received.recorded, [received.tensor])], same=True)
        own.bits = other.bits = None
        own.pending.event = other.pending.event = streams.record(both)
        # The other's first: this rank goes on by itself.
        other.pending.done.complete()
        own.pending.done.complete()
        return own.work

    def _check_whole(self, key: GroupKey) -> None:
        """**Raises**: RuntimeError if a call of the group has timed out, as gloo does."""
        why = self.broken.get((key.name, key.copy, key.ranks[0]))
        if why is not None:
            raise RuntimeError(f"Application timeout caused pair closure: {why}")

    def _record(
        self,
        key: GroupKey,
        rank: Rank,
        number: int | None,
        operation: str,
        tensors: Sequence[Tensor],
        site: str,
        operands: Sequence[Tensor],
        **more: Any,
    ) -> int:
        """Record a call; how many the rank has made before."""
        assert self.recorder is not None
        group = self.groups.get(key)
        if group is None:
            about = self.descriptions.get(key, "")
            group = self.groups[key] = RecordedGroup(key.label, key.name, about, key.ranks)
        kinds = [(*kind_of(tensor), tensor.nbytes) for tensor in tensors]
        values = map(_value_of, operands) if self.recorder.digests else ()
        return self.recorder.add(
            group, rank.index, number, operation, kinds, site, tuple(values), **more
        )

    def _record_results(self, calls: list[tuple[int, int, list[Tensor]]], same: bool) -> None:
        """Record the outputs of calls, of rank and sequence; `same` if all have the same bits."""
        assert self.recorder is not None
        parts = [calls] if same else [[call] for call in calls]
        for part in parts:
            self.recorder.add_results([call[:2] for call in part], list(map(_value_of, part[0][2])))

    def _mismatch(self, message: str) -> None:
        """End all ranks with this error."""
        call = self.launch.call
        # Never with the exchange's lock held. This rank is ended with the others; ReplicaEnded
        # takes it out of its call, and the error is what `launch` raises.
        with self.launch.scheduler.lock:
            call.abort(CollectiveMismatchError(message))
        raise ReplicaEnded


def _meet(ranks: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether two groups of one name cannot be told apart."""
    return min(len(ranks), len(others)) > 1 or bool({*ranks} & {*others})


def _value_of(tensor: Tensor) -> Value:
    """A tensor for the record, on the host."""
    bits: Any = bits_of(tensor, "record")
    if on_device(bits):
        with on_stream_of([tensor]):
            bits = bits.get()
    return (*kind_of(tensor), bits)


def _fits(one: Letter, other: Letter) -> bool:
    return one.tag == other.tag and (
        one.source is None or other.source is None or one.source == other.source
    )


def _fields_of(terms: Terms, ranks: tuple[int, ...]) -> dict[str, Any]:
    """The terms of a call by the names of RecordedCall's fields."""
    found: dict[str, Any] = {}
    if "root" in terms:
        found["root"] = ranks[terms["root"]]
    if "op" in terms:
        found["op"] = terms["op"]
    if terms.get("reduction") is not None:
        found["reduction"] = settings_of(terms["reduction"])
        found["reductions_before"] = terms["number of reductions before"]
    return found


def describe(terms: Terms) -> str:
    """A call in words: its operation, and what else all ranks have to agree on."""
    rest: list[str] = []
    for name, value in terms.items():
        if name == "operation":
            continue
        if name in ("tensors", "op"):
            shown = value if isinstance(value, str) else ", ".join(map(repr, value))
            rest += [shown] if shown else []
        elif name == "root":
            rest.append(f"root {value}")
        elif name == "reduction" and value is not None:
            rest.append(str(value))
    return f"{terms['operation']}({', '.join(rest)}){_where(terms['device'])}"


def _where(device: Any) -> str:
    """The device of tensors in words, where it is not the host."""
    return "" if str(device) == "cpu" else f" on {device}"
