"""RankGroup: torch's ProcessGroup of one simulated rank. Each method posts a call of torch's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ...maps.call_site import call_site
from ...reduction import Reduction
from ...twins import HALVES
from .dispatcher import through_dispatcher
from .exchange import Exchange, GroupKey, RankWork
from .folds import (
    Chooser,
    FoldCall,
    fold,
    fold_lists,
    fold_slices,
    fold_together,
    multiplied,
    settle,
)
from .memory import Array, array_of, bits_of, device_of, dtype_name, flat_bits, kind_of, move
from .names import NamedGroup
from .private import has_gpu, without_dynamo

if TYPE_CHECKING:
    from .ranks import Rank

__all__ = ["RankGroup"]

Tensors = Tensor | list[Tensor]


@without_dynamo
@through_dispatcher
class RankGroup(NamedGroup):
    """The calling rank's end of a group.

    C++ and Python call its methods by torch's names; the older names of a method are aliases.

    **Attributes**: `in_kernel` is True while an operator of torch's posts a call, `dispatched` are
    the arguments of the method that dispatched it, and `posted` are the works that its operators
    return, of which a subclass may call several, until the method has them. Programs that call
    operators themselves have the last ones. All are of the rank's thread alone.
    """

    in_kernel = False
    dispatched: tuple[Any, ...] | None = None

    def __init__(
        self, rank: Rank, key: GroupKey, place: int, chooser: Chooser | None, options: Any = None
    ) -> None:
        super().__init__(place, key, rank.backend)
        self._rank, self._place, self._chooser = rank, place, chooser
        self._exchange: Exchange = rank.launch.exchange
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
        """What torch asks for optional abilities, of which it has none."""
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

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors of a script's may be, and torch's own collectives put theirs.

        Objects travel at the first, and `monitored_barrier` asks for "cpu".
        """
        names = ("cuda", "cpu") if has_gpu() and self._rank.launch.device is None else ("cpu",)
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
        self._check_open(operation)
        device = device_of(operation, [*outputs, *tensors, *uneven])
        kinds = tuple(map(kind_of, tensors))
        number, self._calls = self._calls, self._calls + 1
        work = self._exchange.post(
            self._rank,
            self._key,
            self._place,
            number,
            {"operation": operation, "tensors": kinds, "device": device, **terms},
            part,
            outputs,
            compute,
            [*tensors, *uneven],
            record,
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_open(self, operation: str) -> None:
        """Raise an error in other threads than the rank's, and after the group's end."""
        self._rank.check_thread(operation)
        if self._closed:
            raise ValueError(
                f"{operation} on {self._key} by rank {self._rank.index}: the rank destroyed the "
                f"group at {self._closed}"
            )

    def _reduce(
        self,
        operation: str,
        name: str,
        tensors: Sequence[Tensor],
        part: Any,
        outputs: list[Tensor],
        compute: Callable[[list[Any], str, Any, int], None],
        **terms: Any,
    ) -> RankWork:
        """Post a call that reduces by the operator of this name.

        `compute` gets also the operator, Reduction and number.
        """
        self._check_open(operation)
        reduction, number = None, 0
        if tensors:
            size = sum([tensor.nbytes for tensor in tensors])
            told = FoldCall(operation, self._key.ranks, dtype_name(tensors[0].dtype), size)
            reduction, number = self._settle(told, len(tensors))
        if name == "PREMUL_SUM" and reduction is not None and reduction.order == "gloo-ring":
            raise ValueError(
                f"{operation}: gloo has no PREMUL_SUM, so its twin gloo-ring has none; choose "
                "another reduction, or sum and divide, as FSDP2 does after "
                "set_force_sum_reduction_for_comms(True)"
            )
        self._folds += len(tensors)
        counted: dict[str, Any] = {"number of reductions before": number}
        strides = [each.stride() for each in tensors if not each.is_contiguous()]
        if strides:
            terms["strides"] = strides
        return self._post(
            operation,
            part,
            outputs,
            lambda parts: compute(
                parts, "SUM" if name == "PREMUL_SUM" else name, reduction, number
            ),
            tensors,
            op=name,
            **terms,
            reduction=reduction,
            **counted,
        )

    def _settle(self, call: FoldCall, leaves: int) -> tuple[Reduction, int]:
        """The Reduction of a call, and the number of its first tensor."""
        return settle(self._chooser, call, self._folds, leaves)

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> RankWork:
        given = _listed(tensors)
        op = opts if isinstance(opts, _OPS) else getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        what = "all_reduce"
        name = _name_of(op)
        part = [_target_and_member(tensor, op, name, what) for tensor in given]

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            leaves = list(zip(*parts, strict=True))
            members = [[member for _, member in leaf] for leaf in leaves]
            totals = fold_together(members, op, what, reduction, number)
            for leaf, total in zip(leaves, totals, strict=True):
                move([(target, total) for target, _ in leaf])

        return self._reduce(what, name, given, part, given, compute)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> RankWork:
        return self.allreduce(tensors, opts)

    def reduce(
        self, tensors: Tensors, root: Any = 0, op: Any = dist.ReduceOp.SUM, timeout: Any = None
    ) -> RankWork:
        given, what = _listed(tensors), "reduce"
        if not isinstance(root, int):
            root, op = root.rootRank, root.reduceOp
        name = _name_of(op)
        part = [_target_and_member(tensor, op, name, what) for tensor in given]

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            for number_of_leaf, leaf in enumerate(zip(*parts, strict=True), number):
                members = [member for _, member in leaf]
                move([(leaf[root][0], fold(members, op, what, reduction, number_of_leaf, root))])

        return self._reduce(what, name, given, part, given, compute, root=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what = "reduce_scatter"
        op = opts if isinstance(opts, _OPS) else getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        (out,) = _listed(outputs)
        (given,) = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs]
        self._check_count(what, given)
        for tensor in given:
            _check_like(what, "inputs", tensor, out)
        name = _name_of(op)
        members = [_target_and_member(tensor, op, name, what)[1] for tensor in given]
        part = (_packed(out, what), members)

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            members = [slices for _, slices in parts]
            results = fold_lists(members, op, what, reduction, number)
            move([(target, result) for (target, _), result in zip(parts, results, strict=True)])

        return self._reduce(what, name, given, part, [out], compute)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RankWork:
        what, count = "reduce_scatter", self.size()
        op = opts if isinstance(opts, _OPS) else getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        name, part = _name_of(op), []
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype or output.numel() * count != given.numel():
                raise ValueError(
                    f"{what} on {self._key}: expected an input of {count} times the output's "
                    f"elements and its dtype, got {kind_of(given)!r} for {kind_of(output)!r}"
                )
            target = _packed(output, what)
            member = _target_and_member(given, op, name, what)[1]
            part.append((target, member.reshape(count, *target.shape)))

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            for leaf, pairs in enumerate(zip(*parts, strict=True)):
                members = [slices for _, slices in pairs]
                results = fold_slices(members, op, what, reduction, number + leaf)
                move([(target, one) for (target, _), one in zip(pairs, results, strict=True)])

        return self._reduce(what, name, inputs, part, outputs, compute)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Rearrangements

    def broadcast(self, tensors: Tensors, root: Any = 0, timeout: Any = None) -> RankWork:
        given, what = _listed(tensors), "broadcast"
        root = root if isinstance(root, int) else root.rootRank

        def compute(parts: list[list[Array]]) -> None:
            sent = parts[root]
            pairs = [zip(part, sent, strict=True) for part in parts if part is not sent]
            move([pair for each in pairs for pair in each])

        bits = [bits_of(tensor, what) for tensor in given]
        return self._post(what, bits, given, compute, given, root=root)

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what = "all_gather"
        given = _listed(inputs)
        lists = [outputs] if outputs and isinstance(outputs[0], Tensor) else list(outputs)
        if len(lists) != len(given):
            raise ValueError(
                f"{what} on {self._key}: expected a list of outputs for each of {len(given)} "
                f"inputs, got {len(lists)}"
            )
        for row, tensor in zip(lists, given, strict=True):
            self._check_count(what, row)
            _check_like(what, "input", tensor, row[self._place])
            differing = [kind_of(each) for each in row if kind_of(each) != kind_of(tensor)]
            if differing and self._is_gloo(tensor):
                raise ValueError(
                    f"{what} on {self._key}: gloo gathers tensors of one dtype and shape, got an "
                    f"output {differing[0]!r} for the input {kind_of(tensor)!r}; pad the tensors, "
                    "or use nccl"
                )
        flat = [tensor for row in lists for tensor in row]
        part = (
            [[bits_of(tensor, what) for tensor in row] for row in lists],
            [bits_of(tensor, what) for tensor in given],
        )

        def compute(parts: list[Any]) -> None:
            pairs = []
            for targets, _ in parts:
                for leaf, row in enumerate(targets):
                    pairs += [(row[r], parts[r][1][leaf]) for r in range(len(parts))]
            move(pairs)

        return self._post(what, part, flat, compute, flat, record={"operands": given})

    def _is_gloo(self, tensor: Tensor) -> bool:
        """Whether the program named gloo for tensors like this one, or its twin for sums."""
        if getattr(getattr(self._chooser, "reduction", None), "order", None) == "gloo-ring":
            return True
        plays = self._rank.launch.device is not None  # "cuda" is the host
        devices = ("",) if plays else ("", tensor.device.type)
        named = [each.rpartition(":") for each in self._backend.lower().split(",")]
        return any(name == "gloo" and device in devices for device, _, name in named)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RankWork:
        """As allgather, but `outputs` has a list for each rank, and not for each input."""
        self._check_count("all_gather", outputs)
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RankWork:
        what, count = "all_gather", self.size()
        part = []
        for output, given in zip(outputs, inputs, strict=True):
            if output.dtype != given.dtype or output.numel() != count * given.numel():
                raise ValueError(
                    f"{what} on {self._key}: expected an output of {count} times the input's "
                    f"elements and its dtype, got {kind_of(output)!r} for {kind_of(given)!r}"
                )
            source = bits_of(given, what)
            part.append((flat_bits(output, what).reshape(count, *source.shape), source))

        def compute(parts: list[Any]) -> None:
            for leaf in zip(*parts, strict=True):
                whole = leaf[0][0]  # gathered once, and then copied as a whole
                move([(whole[r], source) for r, (_, source) in enumerate(leaf)])
                move([(target, whole) for target, _ in leaf[1:]])

        return self._post(what, part, outputs, compute, inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None) -> RankWork:
        what, (given,) = "gather", _listed(inputs)
        root = root if isinstance(root, int) else root.rootRank
        row = _row(outputs) if self._place == root else []
        if self._place == root:
            self._check_count(what, row)
            for tensor in row:
                _check_like(what, "outputs", tensor, given)
        part = ([bits_of(tensor, what) for tensor in row], bits_of(given, what))

        def compute(parts: list[Any]) -> None:
            move([(target, parts[r][1]) for r, target in enumerate(parts[root][0])])

        return self._post(what, part, row, compute, [given], root=root)

    def scatter(self, outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None) -> RankWork:
        what, (out,) = "scatter", _listed(outputs)
        root = root if isinstance(root, int) else root.rootRank
        row = _row(inputs) if self._place == root else []
        if self._place == root:
            self._check_count(what, row)
            for tensor in row:
                _check_like(what, "inputs", tensor, out)
        part = (bits_of(out, what), [bits_of(tensor, what) for tensor in row])
        for bits in part[1]:
            _without_gaps(bits, what)

        def compute(parts: list[Any]) -> None:
            move([(target, parts[root][1][r]) for r, (target, _) in enumerate(parts)])

        record = {"operands": row}
        return self._post(what, part, [out], compute, [out], record=record, root=root)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what = "all_to_all"
        self._check_count(what, outputs)
        self._check_count(what, inputs)
        part = (
            [flat_bits(tensor, what) for tensor in outputs],
            [bits_of(tensor, what).reshape(-1) for tensor in inputs],
        )
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
        if output.dtype != input.dtype:
            raise ValueError(f"{what}: expected one dtype, got {output.dtype} and {input.dtype}")
        part = (
            self._split(what, "output", output, output_splits),
            self._split(what, "input", input, input_splits),
        )
        return self._post_exchange(what, part, [output], [input])

    alltoall_base = all_to_all_single

    def _split(self, what: str, name: str, tensor: Tensor, splits: Any) -> list[Array]:
        rows, count = (tensor.shape[0] if tensor.dim() else 1), self.size()
        sizes = list(splits) if splits is not None and len(splits) else []
        if not sizes and rows % count == 0:
            sizes = [rows // count] * count
        if len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"{what} on {self._key}, rank {self._rank.index}: expected {count} sizes of the "
                f"{name} that sum to its {rows} rows, got {sizes or 'an even split'}"
            )
        each = tensor.numel() // rows if rows else 0
        bits = flat_bits(tensor, f"{what}'s {name}")
        ends = np.cumsum([0, *sizes]) * each
        return [bits[a:b] for a, b in pairwise(ends)]

    def _post_exchange(
        self, what: str, part: Any, outputs: list[Tensor], inputs: list[Tensor]
    ) -> RankWork:
        ranks = self._key.ranks

        def compute(parts: list[Any]) -> None:
            pairs = []
            for r, (targets, _) in enumerate(parts):
                for s, target in enumerate(targets):
                    source = parts[s][1][r]
                    if source.size != target.size:
                        raise ValueError(
                            f"{what} on {self._key}: rank {ranks[s]} sends {source.size} elements "
                            f"to rank {ranks[r]}, which expects {target.size}"
                        )
                    pairs.append((target, source))
            move(pairs)

        dtype = dtype_name(inputs[0].dtype)
        received, sent = (tuple(bits.size for bits in side) for side in part)
        record = {"send_counts": sent, "receive_counts": received}
        return self._post(what, part, outputs, compute, uneven=inputs, record=record, dtype=dtype)

    # Without tensors, and between two ranks

    def barrier(self, opts: Any = None, timeout: Any = None) -> RankWork:
        return self._post("barrier", None, [], lambda parts: None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._post("monitored_barrier", None, [], lambda parts: None).wait()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> RankWork:
        (tensor,) = self._check_mail("send", tensors, to)
        return self._letter(
            self._exchange.send(self._rank, self._key, self._place, to, tensor, tag)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> RankWork:
        (tensor,) = self._check_mail("recv", tensors, source)
        return self._letter(
            self._exchange.receive(self._rank, self._key, self._place, source, tensor, tag)
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> RankWork:
        (tensor,) = self._check_mail("recv", tensors, 0)
        return self._letter(
            self._exchange.receive(self._rank, self._key, self._place, None, tensor, tag)
        )

    def _check_mail(self, what: str, tensors: list[Tensor], other: int) -> list[Tensor]:
        self._check_open(what)
        if not 0 <= other < self.size():
            raise ValueError(f"{what} on {self._key}: there is no rank {other} in the group")
        return _listed(tensors)

    def _letter(self, work: RankWork) -> RankWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check_count(self, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"{what} on {self._key}: expected a list of {self.size()} tensors, one for each "
                f"rank of the group, got {len(tensors)}"
            )


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


_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _name_of(op: Any) -> str:
    return _OP_NAMES[getattr(op, "op", op).value]


def _packed(tensor: Tensor, what: str) -> Array:
    """A tensor's memory in its own order, as engines fold it; complex numbers as pairs.

    **Raises**: TypeError for a tensor with gaps: NCCL refuses it, gloo takes what is in them.
    """
    array = _without_gaps(array_of(tensor, what), what)
    if tensor.is_complex():
        array = array.reshape(*array.shape, 1).view(array.real.dtype)
    return array


def _without_gaps(array: Array, what: str) -> Array:
    """The array with its axes in the order of its memory."""
    if not array.flags.c_contiguous:
        packed = array.transpose(sorted(range(array.ndim), key=lambda axis: -array.strides[axis]))
        if not packed.flags.c_contiguous:
            steps = tuple(stride // array.itemsize for stride in array.strides)
            raise TypeError(
                f"{what}: expected a tensor without gaps in its memory, got shape "
                f"{list(array.shape)} with strides {steps}; use contiguous()"
            )
        return packed
    return array


def _target_and_member(tensor: Tensor, op: Any, name: str, what: str) -> tuple[Array, Array]:
    """A tensor's memory as what is written and what is added.

    For a PREMUL_SUM the latter is a copy, times the factor of its rank.

    **Raises**: TypeError as NCCL's backend: for other dtypes, and for a factor of another one; and
    for an operator that complex numbers lack.
    """
    array = _packed(tensor, what)
    if tensor.is_complex() and name not in ("SUM", "AVG"):
        raise TypeError(f"{what}: ReduceOp.{name} is not defined for {tensor.dtype}")
    if name != "PREMUL_SUM":
        return array, array
    factor = op.factor
    if array.dtype.name not in HALVES:
        raise TypeError(f"{what}: PREMUL_SUM is for {', '.join(HALVES)}; got {tensor.dtype}")
    if isinstance(factor, Tensor):
        if factor.dtype != tensor.dtype:
            raise TypeError(
                f"{what}: expected a factor of PREMUL_SUM that is a number, or one element of "
                f"{tensor.dtype}; got {kind_of(factor)!r}"
            )
        factor = factor.item()
    return array, multiplied(array, factor)


def _row(tensors: Any) -> list[Tensor]:
    """The list of tensors at the root, which torch puts into a list."""
    return list(tensors if not tensors or isinstance(tensors[0], Tensor) else tensors[0])


def _check_like(what: str, name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        raise ValueError(
            f"{what}: expected {name} of one dtype and shape with the rank's own tensor, "
            f"{kind_of(other)!r}; got {kind_of(tensor)!r}"
        )
