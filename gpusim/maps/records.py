"""`gpusim.record`: a block in which the collectives of a program are recorded."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..collectives import Result, dispatch
from ..collectives.dispatch import Leaf, Resolved
from ..collectives.operand import Operand
from ..libraries import to_host
from ..runtime.world import current_world
from .axis_environment import axis_environment
from .call_site import call_site
from .scheduler import enclosing_replica

if TYPE_CHECKING:
    from ..recording import RecordedGroup, Recorder

__all__ = ["NOBODY", "Caller", "called_by", "record", "settling"]

OPERATIONS = {
    "psum": ("all_reduce", "SUM"),
    "pmean": ("all_reduce", "AVG"),
    "pmax": ("all_reduce", "MAX"),
    "pmin": ("all_reduce", "MIN"),
    "all_reduce": ("all_reduce", None),
    "psum_scatter": ("reduce_scatter", "SUM"),
    "all_gather": ("all_gather", None),
    "all_to_all": ("all_to_all", None),
    "pbroadcast": ("broadcast", None),
}
"""Operation and operator by the names of torch.distributed, which `gpusim compare` knows."""
OPERATORS = {"sum": "SUM", "prod": "PRODUCT", "max": "MAX", "min": "MIN"}
ALONG = {"axis", "scatter_dimension", "split_axis", "concat_axis"}
"""Parameters that are 0 where torch.distributed's call has the same elements in the same order."""


class Caller(NamedTuple):
    """The caller of a call on stacked arrays that no map makes.

    **Attributes**: `ranks` of the replicas, `total`, the number of all ranks, `site`, and
    `program_call`, the call's number in a compiled program.
    """

    ranks: Sequence[int]
    total: int
    site: str
    program_call: int


NOBODY = Caller((), 0, "", 0)
"""The caller of what gpusim itself has to know or to move: it is not recorded."""

_caller: ContextVar[Caller | None] = ContextVar("gpusim caller", default=None)


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    """A block whose calls on stacked arrays are recorded as the caller's; those of `NOBODY`, which
    may be in maps, are not."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


settling: list[Callable[[], None]] = []
"""Called before a record begins and ends: they wait for collectives that are on their way."""


@contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    arrays: bool | range = False,
    limit: int = 2 << 30,
) -> Iterator[Recorder]:
    """Record all collectives that the process runs in a block, for `gpusim compare`.

    Collectives of vmap, pmap and shard_map, of `gpusim.torch`, PopTorch and PopXL, and of
    `gpusim.collectives` are recorded by the names of torch.distributed: psum as an all_reduce. The
    ranks are the replicas, numbered row-major over the named axes around the call, outermost
    first; axes without a name belong to the shapes. A psum of a Python number that all replicas
    hold is not a call. In a `gpusim.World` each instance writes its own part into the folder. In a
    real process of torch.distributed, whose process group has to be there, a `TorchRecording`
    records its rank. A `gpusim.torch.distributed.launch` in the block is recorded as with
    `recorder`; then the block holds nothing else.

    **Arguments**:

    - `folder`: made if missing; a record that is there is replaced.
    - `arrays`: whether to keep whole operands and results, or a range of each rank's calls for
      which to keep them. Digests are always recorded.
    - `limit`: how many bytes the arrays of a process may take on the disk; the oldest are removed.

    **Returns**: a context manager that yields the `gpusim.recording.Recorder`.

    **Raises**: RuntimeError inside another block, a replica's thread or a simulated rank, for a
    second launch in one block, and for maps beside it; ValueError for a negative limit; OSError if
    the files cannot be made.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> with gpusim.record(getfixture("tmp_path") / "run-a", arrays=True) as recorder:
    ...     x = np.array([[1.0], [2.0]], np.float32)
    ...     total = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    >>> [(call.rank, call.operation, call.op, call.shapes) for call in recorder.calls]
    [(0, 'all_reduce', 'SUM', ((1,),)), (1, 'all_reduce', 'SUM', ((1,),))]
    """
    from ..recording import Recorder
    from ..recording import recorder as shared

    chosen = range(sys.maxsize) if arrays is True else None if arrays is False else arrays
    if chosen is not None and not isinstance(chosen, range):
        raise TypeError(f"record: arrays={arrays!r:.60}: expected True, False or a range of calls")
    if enclosing_replica() is not None:
        raise RuntimeError(
            f"record: {folder}: called by one replica of pmap; enter gpusim.record around the map"
        )
    if _has_process_group():
        from ..recording.torch_hook import TorchRecording

        with TorchRecording(folder, arrays=chosen, limit=limit) as hook:
            yield hook.recorder
        return
    _settle()
    recorder = Recorder(folder, digests=True, arrays=chosen, limit=limit)
    recording = ProgramRecording(recorder)
    if dispatch.record_call is not None:
        raise RuntimeError(f"record: {folder}: the process is inside another gpusim.record block")
    dispatch.record_call, shared.block_recorder = recording, recorder
    try:
        yield recorder
    finally:
        _settle()
        dispatch.record_call = shared.block_recorder = None
        recording.end(sys.exc_info()[1])
        if _has_process_group():
            warnings.warn(
                f"record: {folder} lacks torch.distributed's calls: enter gpusim.record after "
                "init_process_group",
                RuntimeWarning,
                stacklevel=3,
            )


def _settle() -> None:
    for wait in settling:
        wait()


def _has_process_group() -> bool:
    """Whether this is a real process of torch.distributed."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


class Part(NamedTuple):
    """The part of a leaf that some ranks hold: rows of their own, and one `entry` of the batch.

    `ranks` are those of all replicas of the call, `rows` the rows of operands and results of each
    rank that is here.
    """

    ranks: list[int]
    rows: dict[int, list[int]]
    entry: tuple[Any, ...]


class ProgramRecording:
    """The dispatcher's calls, recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._groups: dict[tuple[int, ...], RecordedGroup] = {}
        self._numbers: dict[str, int] = {}
        self._lock = threading.Lock()
        self._begun = False

    def __call__(
        self, call: Resolved, leaf: Leaf, number: int, operands: Sequence[Operand]
    ) -> Callable[[list[Result]], None]:
        """Record a leaf's calls; what is returned takes their results."""
        known = _caller.get()
        if known is NOBODY:
            return lambda results: None
        total, parts = _parts(leaf, operands[0], known)
        self._begin(total)
        site = _site() if known is None else known.site
        operation, about = _description(call, number)
        if known is not None:
            about["program_call"] = known.program_call
        made: list[tuple[Part, list[tuple[int, int]]]] = []
        for part in parts:
            calls: list[tuple[int, int]] = []
            for members in _groups(call, part.ranks):
                group = self._group(leaf, members)
                with self._lock:
                    count = self._numbers[group.group] = self._numbers.get(group.group, -1) + 1
                if "source" in call.parameters:
                    about["root"] = members[int(call.parameters["source"])]
                for rank in members:
                    if rank in part.rows:
                        rows = part.rows[rank]
                        values = [_value([x[row] for row in rows], part.entry) for x in operands]
                        kinds = [(dtype, shape, array.nbytes) for dtype, shape, array in values]
                        if operation == "all_to_all":
                            each = (values[0][2].size // len(members),) * len(members)
                            about |= {"send_counts": each, "receive_counts": each}
                        reads = about.get("root", rank) == rank
                        sequence = self.recorder.add(
                            *(group, rank, count, operation, kinds, site),
                            values if reads else (),
                            **about,
                        )
                        calls.append((rank, sequence))
            made.append((part, calls))
        return lambda results: self._finish(made, results)

    def _finish(
        self, made: list[tuple[Part, list[tuple[int, int]]]], results: list[Result]
    ) -> None:
        for part, calls in made:
            if not any(mapped for _, mapped in results):
                values = [_value([value], part.entry) for value, _ in results]
                self.recorder.add_results(calls, values)
                continue
            for rank, sequence in calls:
                values = [
                    _value(
                        [value[row] for row in part.rows[rank]] if mapped else [value], part.entry
                    )
                    for value, mapped in results
                ]
                self.recorder.add_results([(rank, sequence)], values)

    def _begin(self, ranks: int) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                world = current_world()
                if world is None or world.instances == 1:
                    self.recorder.begin(ranks)
                else:
                    self.recorder.begin(ranks, world.instance, instances=world.instances)

    def end(self, error: BaseException | None) -> None:
        """End the record, with the error that ended the block."""
        if not self.recorder.begun:
            self._begin(1)
        self.recorder.end(error)

    def _group(self, leaf: Leaf, ranks: tuple[int, ...]) -> RecordedGroup:
        """The group of these ranks, with the same label in all processes."""
        from ..recording import RecordedGroup

        with self._lock:
            group = self._groups.get(ranks)
            if group is None:
                label = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
                entries = leaf.axes[0] if leaf.axes is not None else ()
                names = ", ".join(str(entry.name) for entry in entries if entry.name is not None)
                group = self._groups[ranks] = RecordedGroup(label, label, names, ranks)
            return group


def _parts(leaf: Leaf, operand: Operand, known: Caller | None) -> tuple[int, list[Part]]:
    """The number of all ranks, and who holds which parts of a leaf's operands."""
    layout = leaf.layout
    if leaf.axes is None:
        numbers = [*range(operand.size if layout is None else layout.size)]
        total = len(numbers)
        if known is not None:
            numbers, total = [*known.ranks], known.total
        local = range(operand.size) if layout is None else layout.local.tolist()
        return total, [Part(numbers, {numbers[k]: [row] for row, k in enumerate(local)}, ())]
    group, batch = leaf.axes
    environment = axis_environment()
    named = [entry for entry in environment if entry.name is not None]
    steps, total = {}, 1
    for entry in reversed(named):
        steps[entry.depth], total = total, total * entry.total
    # Entries of one axis may be different objects, with the same depth.
    depths = {
        entry.depth: position for position, entry in enumerate(group) if entry.name is not None
    }
    members = np.indices([entry.total for entry in group]).reshape(len(group), -1)
    rank_of = np.zeros(members.shape[1], np.int64)
    here = np.ones(members.shape[1], bool)
    others = []
    for entry in named:
        position = depths.get(entry.depth)
        if position is not None:
            rank_of += members[position] * steps[entry.depth]
            here &= (entry.offset <= members[position]) & (
                members[position] < entry.offset + entry.size
            )
        elif entry.index is not None:
            others.append([(entry.depth, entry.index, entry.offset + entry.index)])
        else:
            others.append([(entry.depth, k, entry.offset + k) for k in range(entry.size)])
    stored = np.arange(len(rank_of)) if layout is None else layout.local
    parts = []
    for place in itertools.product(*others):
        ranks = rank_of + sum(steps[depth] * number for depth, _, number in place)
        rows: dict[int, list[int]] = {}
        for row, member in enumerate(stored.tolist()):
            if here[member]:
                rows.setdefault(int(ranks[member]), []).append(row)
        index = {depth: k for depth, k, _ in place}
        chosen = tuple(index.get(axis.depth, slice(None)) for axis in batch)
        parts.append(Part(ranks.tolist(), rows, chosen))
    return total, parts


def _groups(call: Resolved, ranks: list[int]) -> Iterator[tuple[int, ...]]:
    """The ranks of each group of a call."""
    if call.groups is None:
        yield tuple(dict.fromkeys(ranks))  # several members may be one rank's
    else:
        for group in call.groups.members:
            yield tuple(dict.fromkeys(ranks[member] for member in group))


def _value(rows: list[Any], entry: tuple[Any, ...]) -> tuple[str, tuple[int, ...], Any]:
    """One rank's value, of several rows where positional axes are reduced too."""
    found = [to_host(row[entry]) if entry else to_host(row) for row in rows]
    array = found[0] if len(found) == 1 else np.stack(found)
    return array.dtype.name, array.shape, array


def _description(call: Resolved, number: int) -> tuple[str, dict[str, Any]]:
    """The operation, and the call's other fields."""
    from ..recording import settings_of

    operation, op = OPERATIONS.get(call.name, (call.name, None))
    if any(call.parameters.get(name, 0) != 0 for name in ALONG):
        operation = call.name
    about: dict[str, Any] = {} if op is None else {"op": op}
    if call.reduction is not None:
        chosen = call.reduction.op
        about["op"] = op or OPERATORS.get(chosen, chosen.upper())
        about |= {"reduction": settings_of(call.reduction), "reductions_before": number}
    return operation, about


def _site() -> str:
    """file:line of the nearest frame that is neither gpusim's nor a library's."""
    return call_site(outside="gpusim.")
