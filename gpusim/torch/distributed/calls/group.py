"""RankGroup: torch's ProcessGroup of one simulated rank. Each method posts a call of torch's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ....maps.call_site import call_site
from ...tensors import on_stream_of
from ..memory import (
    Array,
    bits_of,
    device_of,
    dtype_name,
    kind_of,
    move,
    overlap,
    overlap_within,
)
from ..private import has_gpu, without_dynamo
from .arguments import RULES, Arguments, Rules, rules_of
from .dispatcher import through_dispatcher
from .exchange import Exchange, GroupKey, Posting, RankWork, Terms
from .folds import Chooser
from .names import NamedGroup, backend_name
from .operands import (
    copied,
    in_memory,
)
from .reductions import Reductions, listed
from .timeouts import LATER, SOON, group_limit, reached_in_vain, seconds_of

if TYPE_CHECKING:
    from ..runners.threads import Rank

__all__ = ["RankGroup"]

Tensors = Tensor | list[Tensor]


@without_dynamo
@through_dispatcher
class RankGroup(Reductions, NamedGroup):
    """The calling rank's end of a group.

    C++ and Python call its methods by torch's names; the older names of a method are aliases.

    **Attributes**: `keeps_values` says that operands are read when a call is posted; it is False
    where they are copies already. `in_kernel` is True while an operator of torch's posts a call,
    `dispatched` are the arguments of the method that dispatched it, and `posted` are the works that
    its operators return, several where a subclass calls several, until the method has them.
    Programs that call operators themselves have the last ones. All three are of the rank's thread
    alone. `limit` is the limit of a call in seconds, if the program has set a time-out.
    """

    keeps_values = True
    in_kernel = False
    dispatched: tuple[Any, ...] | None = None
    limit: float | None = None

    def __init__(
        self, rank: Rank, key: GroupKey, place: int, chooser: Chooser | None, options: Any = None
    ) -> None:
        super().__init__(place, key, rank.backend)
        self._rank, self._place, self._chooser = rank, place, chooser
        self._exchange: Exchange = rank.launch.exchange
        self._rules: dict[str, Rules] = {}  # by the type of device
        self.posted: list[dist.Work] | deque[dist.Work] = deque(maxlen=16)
        self._folds = 0
        self._coalesced: list[RankWork] | None = None
        self._closed = ""
        self.options = options  # as torch names what a split of the group inherits

    # What torch asks a group for

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._key.ranks)

    getRank, getSize = rank, size

    def _get_backend(self, device: Any) -> RankGroup:
        """The answer to torch's questions about optional abilities: there are none."""
        return self

    def setGroupDesc(self, description: str) -> None:
        super().setGroupDesc(description)
        self._exchange.descriptions[self._key] = description

    _set_group_desc = setGroupDesc

    def shutdown(self) -> None:
        """Close the group: later calls on it are errors."""
        self._closed = call_site()

    abort = shutdown

    def __repr__(self) -> str:
        return f"<RankGroup of rank {self._rank.index}, {self._key}>"

    supports_splitting = False  # by C++; private.py splits groups
    supports_window = supports_reconfigure = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later calls."""
        self.limit = group_limit(timeout, self._backend)

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors of a script's may be, and torch's own collectives put theirs.

        Objects travel at the first, and `monitored_barrier` asks for "cpu".
        """
        names = ("cuda", "cpu") if has_gpu() and self._rank.launch.device != "cpu" else ("cpu",)
        return [torch.device(name) for name in names]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return _AllWorks(works)

    # Posting

    def _post(
        self,
        operation: str,
        part: Any,
        outputs: list[Tensor],
        compute: Callable[[list[Any]], None],
        tensors: Sequence[Tensor] = (),
        uneven: Sequence[Tensor] = (),
        record: dict[str, Any] | None = None,
        **terms: Any,
    ) -> RankWork:
        """Post a call; `tensors` are like those of all ranks, `uneven` ones need not be.

        `record` are more fields for the record.
        """
        made = Posting(part, outputs, compute, [*tensors, *uneven], record)
        return self._post_as(made, self._terms(operation, outputs, tensors, uneven, terms))

    def _terms(
        self,
        operation: str,
        outputs: Sequence[Tensor],
        tensors: Sequence[Tensor],
        uneven: Sequence[Tensor],
        terms: dict[str, Any],
    ) -> Terms:
        """The terms that all ranks have to agree on."""
        device = device_of(operation, [*outputs, *tensors, *uneven])
        kinds = tuple(map(kind_of, tensors))
        return {"operation": operation, "tensors": kinds, "device": device, **terms}

    def _post_as(self, made: Posting, terms: Terms) -> RankWork:
        """Post what has been made for a call."""
        number, self._calls = self._calls, self._calls + 1
        work = self._exchange.post(self._rank, self._key, self._place, number, terms, made)
        work.group, work.limit = self, self.limit
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _begin(self, what: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> Arguments:
        """Begin a call: wait for results that it is to read or write; the check of its arguments.

        A call that is posted while another writes its tensors takes them as the other leaves them:
        engines run the calls of a group in their order. Messages are not in this order, and a send
        takes what its tensor has when it is posted.
        """
        self._check_open(what)
        tensors = written if read is written else [*read, *written]
        if self.keeps_values and self._rank.unfinished:
            self._wait_for_results_in(what, tensors)
        kind = tensors[0].device.type if tensors else "cpu"
        rules = self._rules.get(kind)
        if rules is None:
            rules = self._rules[kind] = self._rules_for(kind)
        return Arguments(what, self._key, len(self._key.ranks), rules)

    def _wait_for_results_in(self, what: str, tensors: Sequence[Tensor]) -> None:
        for work in list(self._rank.unfinished):
            if not isinstance(work, RankWork) or work.is_done() or work.message == "send":
                continue
            if work.message and what in ("send", "recv"):
                continue
            if overlap([x for x in work._outputs if not x.is_sparse], tensors):
                work.wait()

    def _rules_for(self, kind: str) -> Rules:
        """The rules of the engine that the program named, or whose twin adds."""
        if getattr(getattr(self._chooser, "reduction", None), "order", None) == "gloo-ring":
            return RULES["gloo" if backend_name(self._backend) == "gloo" else "gloo's twin"]
        plays = self._rank.launch.device == "cpu"  # "cuda" is the host
        return rules_of(self._backend, None if plays else kind)

    def _read(
        self,
        arrays: list[Array],
        opts: Any,
        read: Sequence[Tensor] = (),
        written: Sequence[Tensor] = (),
    ) -> list[Array]:
        """The arrays that a call reads, as they are now.

        The call is made when the last rank has posted it. A rank that does not wait for it may
        write its tensors before, and results may go to the memory of operands. torch calls both
        undefined; gloo's workers read at once or late, NCCL when its stream comes to it. Here
        operands are read when the call is posted, under threads as under processes, which copy
        them to another process then. A call that is waited for at once (asyncOp) needs no copy.
        """
        if not self.keeps_values:
            return arrays
        late = getattr(opts, "asyncOp", True) and all(isinstance(x, np.ndarray) for x in arrays)
        if not late and not overlap(read, written):
            return arrays
        with on_stream_of(read):
            return copied(arrays)

    def _check_open(self, operation: str) -> None:
        """Raise an error in other threads than the rank's, and after the group's end."""
        self._rank.check_thread(operation)
        if self._closed:
            raise ValueError(
                f"{operation} on {self._key} by rank {self._rank.index}: the rank destroyed the "
                f"group at {self._closed}"
            )

    # Rearrangements

    def broadcast(self, tensors: Tensors, root: Any = 0, timeout: Any = None) -> RankWork:
        """Copy the root's tensor; of a list, the one that the options name, into all of it."""
        given, what, opts, chosen = listed(tensors), "broadcast", root, 0
        if not isinstance(root, int):
            root, chosen = root.rootRank, root.rootTensor
        check = self._begin(what, given, given)
        check.one_unless_lists("tensors", given)
        check.root(root)
        check.root_tensor(chosen, given)
        check.alike("tensors", given, given[0])
        check.dtype(given[0])
        check.layout(given)
        check.written(given)
        target = in_memory(given[chosen], what)  # engines move memory, whatever its order is
        others = [bits_of(tensor, what) for n, tensor in enumerate(given) if n != chosen]
        like = bits_of(given[chosen], what) if others else target
        read = self._read([target], opts) if self._place == root else [target]
        part = (target, read[0], like, others)

        def compute(parts: list[Any]) -> None:
            sent = parts[root][1]
            move([(part[0], sent) for r, part in enumerate(parts) if r != root])
            if parts[root][0] is not sent:
                move([(parts[root][0], sent)])
            move([(other, like) for *_, like, others in parts for other in others])

        return self._post(what, part, given, compute, given, root=root)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what, given = "all_gather", listed(inputs)
        lists = [outputs] if outputs and isinstance(outputs[0], Tensor) else list(outputs)
        flat = [tensor for row in lists for tensor in row]
        check = self._begin(what, given, flat)
        check.one_unless_lists("inputs", given)
        check.count("outputs", lists, len(given))
        check.alike("inputs", given, given[0])
        for row in lists:
            check.count("outputs", row, self.size() * len(given))
            own = row[self._place * len(given)]
            check.alike("outputs", [given[0]], own)
            self._check_gathered(check, row, given[0])
        check.dtype(given[0])
        check.layout([*given, *flat])
        check.written(flat)
        arrays = [bits_of(tensor, what) for tensor in given]
        targets = [[bits_of(tensor, what) for tensor in row] for row in lists]
        part = (targets, self._read(arrays, opts, given, flat), overlap_within(flat))

        def compute(parts: list[Any]) -> None:
            sources = [source for _, read, _ in parts for source in read]
            for lists, _, in_order in parts:
                move([pair for row in lists for pair in zip(row, sources, strict=True)], in_order)

        return self._post(what, part, flat, compute, flat, record={"operands": given})

    def _check_gathered(self, check: Arguments, row: Sequence[Tensor], tensor: Tensor) -> None:
        """Where the engine gathers tensors of one shape, all outputs have the input's."""
        if check.rules.gathers_unlike:
            return
        differing = [kind_of(each) for each in row if kind_of(each) != kind_of(tensor)]
        if differing:
            check.fail(
                f"invalid tensor size: {check.rules.name} gathers tensors of one dtype and shape, "
                f"got an output {differing[0]!r} for the input {kind_of(tensor)!r}; pad the "
                "tensors, or use nccl without the reduction gloo-ring"
            )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:
        """As allgather for each input. `outputs` has a list for each rank, not for each input."""
        what, given, lists = "all_gather", listed(inputs), list(outputs)
        flat = [tensor for row in lists for tensor in row]
        check = self._begin(what, given, flat)
        check.some("inputs", given)
        check.count("outputs", lists)
        for rank, row in enumerate(lists):
            check.count("outputs", row, len(given))
            for tensor, output in zip(given, row, strict=True):
                if rank == self._place or not check.rules.gathers_unlike:
                    check.alike("outputs", [output], tensor)
        check.dtype(*given, kind="all_gather_coalesced")
        check.layout([*given, *flat])
        check.written(flat)
        arrays = [bits_of(tensor, what) for tensor in given]
        targets = [bits_of(tensor, what) for tensor in flat]
        part = (targets, self._read(arrays, opts, given, flat), overlap_within(flat))

        def compute(parts: list[Any]) -> None:
            sources = [source for _, read, _ in parts for source in read]
            for targets, _, in_order in parts:
                move(list(zip(targets, sources, strict=True)), in_order)

        return self._post(what, part, flat, compute, flat, record={"operands": given})

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        return self._gather_into([output], [input], opts, "all_gather_into_tensor")

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RankWork:
        return self._gather_into(outputs, inputs, opts, "all_gather_coalesced")

    def _gather_into(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, kind: str
    ) -> RankWork:
        what, count = "all_gather", self.size()
        check = self._begin(what, inputs, outputs)
        check.some("inputs", inputs)
        check.count("outputs", outputs, len(inputs))
        for output, given in zip(outputs, inputs, strict=True):
            check.whole("output", output, given)
            check.dtype(given, kind=kind)
            check.layout([given, output], "all_gather_into_tensor")
        check.written(outputs)
        targets = [bits_of(output, what) for output in outputs]
        sources = self._read([bits_of(x, what) for x in inputs], opts, inputs, outputs)
        part = list(zip(targets, sources, strict=True))

        def compute(parts: list[Any]) -> None:
            for leaf in zip(*parts, strict=True):
                first = leaf[0][0]  # gathered once, and then copied as a whole
                whole = first if first.flags.c_contiguous else first.copy(order="C")
                rows = whole.reshape(count, *leaf[0][1].shape)
                move([(rows[r, ...], source) for r, (_, source) in enumerate(leaf)])
                others = [target for target, _ in leaf if target is not whole]
                move([(target, whole.reshape(target.shape)) for target in others])

        return self._post(what, part, outputs, compute, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None) -> RankWork:
        what, given, opts = "gather", listed(inputs), root
        root = root if isinstance(root, int) else root.rootRank
        row = _row(outputs)
        check = self._begin(what, given, row)
        check.root(root)
        check.one("inputs", given)
        if self._place == root:
            check.count("outputs", row)
            check.alike("outputs", row, given[0])
        else:
            check.none("outputs", row, root)
        check.dtype(given[0])
        check.layout([*given, *row])
        check.written(row)
        read = self._read([bits_of(given[0], what)], opts, given, row)
        part = ([bits_of(tensor, what) for tensor in row], read[0], overlap_within(row))

        def compute(parts: list[Any]) -> None:
            targets, _, in_order = parts[root]
            move([(target, parts[r][1]) for r, target in enumerate(targets)], in_order)

        return self._post(what, part, row, compute, given, root=root)

    def gather_single(
        self, output: Tensor, input: Tensor, root: Any = 0, timeout: Any = None
    ) -> RankWork:
        """As gather, into one tensor, which other ranks than the root do not read."""
        if self.name() == "gloo":
            raise RuntimeError("Backend gloo does not support gather_single")
        row: list[Tensor] = []
        if self._place == (root if isinstance(root, int) else root.rootRank):
            check = self._begin("gather", [input], [output])
            if output.dtype != input.dtype or output.numel() != self.size() * input.numel():
                check.fail(
                    f"expected an output of {self.size()} times the input's elements, "
                    f"got {kind_of(output)!r} for {kind_of(input)!r}"
                )
            check.layout([output], "all_gather_into_tensor", "output")
            row = [*output.view(self.size(), *input.shape)]
        return self.gather([row] if row else [], [input], root, timeout)

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None) -> RankWork:
        what, outs, opts = "scatter", listed(outputs), root
        root = root if isinstance(root, int) else root.rootRank
        row = _row(inputs)
        check = self._begin(what, row, outs)
        check.root(root)
        check.one("outputs", outs)
        if self._place == root:
            check.count("inputs", row)
            check.alike("inputs", row, outs[0])
        else:
            check.none("inputs", row, root)
        check.dtype(outs[0])
        check.layout([*outs, *row])
        check.written(outs)
        read = self._read([in_memory(tensor, what) for tensor in row], opts, row, outs)
        part = (in_memory(outs[0], what), read)

        def compute(parts: list[Any]) -> None:
            move([(target, parts[root][1][r]) for r, (target, _) in enumerate(parts)])

        record = {"operands": row}
        return self._post(what, part, outs, compute, outs, record=record, root=root)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what = "all_to_all"
        check = self._begin(what, inputs, outputs)
        check.count("outputs", outputs)
        check.count("inputs", inputs)
        if not check.rules.gathers_unlike:
            check.alike("inputs", inputs, inputs[0])
            check.alike("outputs", outputs, inputs[0])
        check.one_dtype("outputs and inputs", [*outputs, *inputs])
        check.dtype(inputs[0])
        check.layout([*inputs, *outputs])
        check.written(outputs)
        read = self._read([bits_of(x, what) for x in inputs], opts, inputs, outputs)
        part = ([bits_of(tensor, what) for tensor in outputs], read, overlap_within(outputs))
        return self._post_exchange(what, part, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any = None,
        input_splits: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> RankWork:
        what = "all_to_all"
        check = self._begin(what, [input], [output])
        if output.dtype != input.dtype:
            check.fail(f"expected one dtype, got {output.dtype} and {input.dtype}")
        check.dtype(input)
        check.layout([input], "all_to_all_single", "input")
        check.written([output])
        rank = self._rank.index
        received = check.splits("output", output, output_splits, rank)
        sent = check.splits("input", input, input_splits, rank)
        (read,) = self._read([in_memory(input, what)], opts, [input], [output])
        part = (_pieces(in_memory(output, what), received), _pieces(read, sent), False)
        return self._post_exchange(what, part, [output], [input])

    alltoall_base = all_to_all_single

    def _post_exchange(
        self, what: str, part: Any, outputs: list[Tensor], inputs: list[Tensor]
    ) -> RankWork:
        ranks = self._key.ranks

        def compute(parts: list[Any]) -> None:
            for r, (targets, _, in_order) in enumerate(parts):
                pairs = []
                for s, target in enumerate(targets):
                    source = parts[s][1][r]
                    if source.size != target.size:
                        raise ValueError(
                            f"{what} on {self._key}: rank {ranks[s]} sends {source.size} elements "
                            f"to rank {ranks[r]}, which expects {target.size}"
                        )
                    pairs.append((target, source.reshape(target.shape)))
                move(pairs, in_order)

        dtype = dtype_name(inputs[0].dtype)
        received, sent = (tuple(bits.size for bits in side) for side in part[:2])
        record = {"send_counts": sent, "receive_counts": received}
        return self._post(what, part, outputs, compute, uneven=inputs, record=record, dtype=dtype)

    # Without tensors, and between two ranks

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:
        self._check_open("barrier")
        work = self._post("barrier", None, [], lambda parts: None)
        work.limit = self.barrier_limit(opts)
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._check_open("monitored_barrier")
        work = self._post("monitored_barrier", None, [], lambda parts: None)
        own = None if timeout is None else max(timeout.total_seconds(), SOON)
        limit = self.limit if own is None else own
        # The others wait for rank 0, in gloo without a limit: theirs is after rank 0's.
        work.limit = limit if limit is None or not self._place else LATER * limit
        work.names_all = wait_all_ranks
        try:
            work.wait()
        except RuntimeError as error:
            if error is not work._pending.error:
                raise
            raise RuntimeError(reached_in_vain(self._place, str(error))) from None

    def barrier_limit(self, opts: Any) -> float | None:
        """The limit of a barrier, in seconds."""
        own = seconds_of(getattr(opts, "timeout", None))
        return self.limit if own is None else own

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> RankWork:
        tensor = self._check_message("send", tensors, to, tag)
        exchange, kept = self._exchange, self.keeps_values
        return self._letter(
            exchange.send(self._rank, self._key, self._place, to, tensor, tag, kept)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RankWork:
        tensor = self._check_message("recv", tensors, source, tag)
        return self._letter(
            self._exchange.receive(self._rank, self._key, self._place, source, tensor, tag)
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RankWork:
        tensor = self._check_message("recv", tensors, None, tag)
        return self._letter(
            self._exchange.receive(self._rank, self._key, self._place, None, tensor, tag)
        )

    def _check_message(self, what: str, tensors: Tensors, other: int | None, tag: int) -> Tensor:
        given = listed(tensors)
        check = self._begin(what, *((given, []) if what == "send" else ([], given)))
        check.one("tensors", given)
        if other is not None and not 0 <= other < self.size():
            check.fail(f"there is no rank {other} in the group: expected 0 to {self.size() - 1}")
        if other == self._place and not check.rules.sends_to_itself:
            check.fail(f"rank {self._rank.index} cannot exchange messages with itself")
        if tag < 0 and check.rules.name == "gloo":
            check.fail(f"tag must be nonnegative, got {tag}")
        check.layout(given)
        if what == "recv":
            check.written(given)
        return given[0]

    def _letter(self, work: RankWork) -> RankWork:
        work.group, work.limit = self, self.limit
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


@without_dynamo
class _AllWorks(dist.Work):
    """The works of a coalesced block as one."""

    def __init__(self, works: list[RankWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def synchronize(self) -> None:
        self.wait()


def _pieces(memory: Array, rows: list[int]) -> list[Array]:
    """The memory of a tensor cut into those of so many rows each."""
    each = memory.size // max(1, sum(rows))
    return [memory[start * each : end * each] for start, end in pairwise([0, *accumulate(rows)])]


def _row(tensors: Any) -> list[Tensor]:
    """The list of tensors at the root, which torch puts into a list."""
    given = tensors or []
    return list(given if not given or isinstance(given[0], Tensor) else given[0])
