"""The reductions of a group: a mixin of RankGroup."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch import distributed as dist

from ....reduction import Reduction
from ..memory import Array, array_of, dtype_name, move
from ..private import without_dynamo
from .arguments import Arguments, Layout
from .exchange import GroupKey, Posting, RankWork, Terms
from .folds import (
    RECIPROCAL,
    Chooser,
    FoldCall,
    engine_of,
    fold,
    fold_lists,
    fold_rows,
    fold_together,
    settle,
)
from .operands import (
    addends,
    in_order_of_memory,
    member_of,
    packed,
    result_like,
)
from .sparse import add_rows, all_reduce_sparse

__all__ = ["Reducing", "Reductions", "listed", "name_of", "operator_of"]

Tensors = Tensor | list[Tensor]


@without_dynamo
class Reductions:
    """The calls that reduce."""

    _key: GroupKey
    _place: int
    _chooser: Chooser | None
    _folds: int

    if TYPE_CHECKING:  # of RankGroup

        def size(self) -> int: ...

        def _begin(
            self, what: str, read: Sequence[Tensor], written: Sequence[Tensor]
        ) -> Arguments: ...

        def _read(
            self,
            arrays: list[Array],
            opts: Any,
            read: Sequence[Tensor] = (),
            written: Sequence[Tensor] = (),
        ) -> list[Array]: ...

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
        ) -> RankWork: ...

        def _terms(
            self,
            operation: str,
            outputs: Sequence[Tensor],
            tensors: Sequence[Tensor],
            uneven: Sequence[Tensor],
            terms: dict[str, Any],
        ) -> Terms: ...

        def _post_as(self, made: Posting, terms: Terms) -> RankWork: ...

    def _reduce(
        self,
        operation: str,
        name: str,
        tensors: Sequence[Tensor],
        part: Any,
        outputs: list[Tensor],
        compute: Callable[[list[Any], str, Any, int], None],
        in_memory: bool = True,
        **terms: Any,
    ) -> RankWork:
        """Post a call that reduces by the operator of this name.

        `compute` gets also the operator, Reduction and number. Tensors that are reduced in the
        order of their memory (`in_memory`) have the same strides on all ranks.
        """
        strides = [each.stride() for each in tensors if not each.is_contiguous()]
        if strides and in_memory:
            terms["strides"] = strides
        size = sum([tensor.nbytes for tensor in tensors])
        told = FoldCall(operation, self._key.ranks, dtype_name(tensors[0].dtype), size)
        own = self._terms(operation, outputs, tensors, (), {"op": name, **terms})
        return self._reduce_as(Reducing(told, name, own, part, outputs, compute, tensors))

    def _reduce_as(self, made: Reducing) -> RankWork:
        """Post what has been made for a call that reduces: by the Reduction that is chosen now."""
        told, name, own, part, outputs, compute, tensors = made
        reduction, number = self._settle(told, len(tensors))
        if name == "PREMUL_SUM" and engine_of(reduction) == "gloo-ring":
            raise ValueError(
                f"{told.operation}: gloo has no PREMUL_SUM, so its twin gloo-ring has none; choose "
                "another reduction, or sum and divide, as FSDP2 does after "
                "set_force_sum_reduction_for_comms(True)"
            )
        self._folds += len(tensors)
        operator = "SUM" if name == "PREMUL_SUM" else name
        if name == "AVG" and tensors[0].is_complex():
            # torch divides gloo's sum by a complex number, which multiplies by its reciprocal.
            operator = RECIPROCAL if engine_of(reduction) == "gloo-ring" else name
        terms = {**own, "reduction": reduction, "number of reductions before": number}
        total = functools.partial(_computed, compute, operator, reduction, number)
        return self._post_as(Posting(part, outputs, total, tensors), terms)

    def _settle(self, call: FoldCall, leaves: int) -> tuple[Reduction, int]:
        """The Reduction of a call, and the number of its first tensor."""
        return settle(self._chooser, call, self._folds, leaves)

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> RankWork:
        """Reduce a tensor in place. A list of tensors is reduced too: over it, and the ranks."""
        what, op = "all_reduce", operator_of(opts)
        given, name = listed(tensors), name_of(op)
        check = self._begin(what, given, given)
        check.one_unless_lists("tensors", given)
        check.alike("tensors", given, given[0])
        if given[0].is_sparse:
            return all_reduce_sparse(self, check, given, name)
        check.dtype(given[0])
        check.operator(name, given[0])
        check.layout(given)
        targets = [packed(tensor, what) for tensor in given]
        members = [
            member_of(tensor, array, op, name, what)
            for tensor, array in zip(given, targets, strict=True)
        ]
        if len(members) > 1:
            if name == "AVG":
                check.fail("ReduceOp.AVG of a list of tensors: gloo divides the first one alone")
            alone = "SUM" if name == "PREMUL_SUM" else name
            targets = [array.reshape(-1) for array in targets]  # strides may differ in a list
            members = [array.reshape(-1) for array in members]
            # gloo rounds each of its own additions to the dtype.
            halves = members[0].dtype.name == "bfloat16"
            own = Reduction(accumulate="bfloat16" if halves else None)
            read = [fold(members, alone, what, own, 0)]
        else:
            read = self._read(members, opts)
        part = (targets, read[0])

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            total = fold([member for _, member in parts], op, what, reduction, number)
            move([(target, total) for targets, _ in parts for target in targets])

        return self._reduce(what, name, given, part, given, compute)

    def allreduce_sparse(
        self, outputs: list[Tensor], inputs: list[Tensor], shape: list[int]
    ) -> RankWork:
        """The all-reduce of indices and values, as `sparse.all_reduce_sparse` asks for it."""
        what = "all_reduce"
        part = [array_of(tensor, what) for tensor in (*outputs, *inputs)]

        def compute(parts: list[Any]) -> None:
            indices, values = add_rows([(each[3], each[4]) for each in parts], shape)
            count = len(values)
            for number, all_indices, all_values, *_ in parts:
                number[...] = count
                all_indices[:, :count] = indices
                all_values[:count] = values

        kind = dtype_name(inputs[1].dtype)
        return self._post(
            what, part, outputs, compute, uneven=inputs, op="SUM", sparse=[kind, *shape]
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> RankWork:
        """Reduce each of several tensors in place, in one call."""
        what, op = "all_reduce", operator_of(opts)
        given, name = listed(tensors), name_of(op)
        check = self._begin(what, given, given)
        check.some("tensors", given)
        if check.rules.name:
            check.one_dtype("tensors", given)
        for tensor in given:
            check.dtype(tensor)
            check.operator(name, tensor)
        check.layout(given, "all_reduce_coalesced")
        check.written(given)
        members = [member_of(x, addends(x, what), op, name, what) for x in given]
        part = ([array_of(x, what) for x in given], self._read(members, opts))

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            leaves = list(zip(*[members for _, members in parts], strict=True))
            totals = fold_together(leaves, op, what, reduction, number)
            for targets, _ in parts:
                pairs = zip(targets, totals, strict=True)
                move([(target, result_like(target, total)) for target, total in pairs])

        return self._reduce(what, name, given, part, given, compute, in_memory=False)

    def reduce(
        self, tensors: Tensors, root: Any = 0, op: Any = dist.ReduceOp.SUM, timeout: Any = None
    ) -> RankWork:
        given, what, opts = listed(tensors), "reduce", root
        if not isinstance(root, int):
            root, op = root.rootRank, root.reduceOp
        name = name_of(op)
        check = self._begin(what, given, given)
        check.one("tensors", given)
        check.root(root)
        check.dtype(given[0])
        check.operator(name, given[0])
        check.layout(given)
        target = packed(given[0], what)
        (member,) = self._read([member_of(given[0], target, op, name, what)], opts)

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            members = [member for _, member in parts]
            move([(parts[root][0], fold(members, op, what, reduction, number, root))])

        return self._reduce(what, name, given, (target, member), given, compute, root=root)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        what, op, outs = "reduce_scatter", operator_of(opts), listed(outputs)
        lists = inputs if inputs and not isinstance(inputs[0], Tensor) else [inputs]
        given, name = list(lists[0]), name_of(op)
        check = self._begin(what, given, outs)
        check.one("outputs", outs)
        check.one("inputs", lists)
        check.count("inputs", given)
        unlike = check.rules.gathers_unlike and any(x.shape != given[0].shape for x in given)
        if unlike:
            check.one_dtype("inputs", given)
            check.alike("outputs", outs, given[self._place])
        else:
            check.alike("inputs", given, outs[0])
        check.dtype(outs[0])
        check.operator(name, outs[0])
        in_memory = check.layout([*given, *outs]) is Layout.DENSE
        check.written(outs)
        arrays = packed if in_memory else addends
        if in_memory:
            check.one_order([*outs, *given])
        members = [member_of(x, arrays(x, what), op, name, what) for x in given]
        target = packed(outs[0], what) if in_memory else array_of(outs[0], what)
        part = (target, self._read(members, opts))

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            members = [slices for _, slices in parts]
            if unlike:  # NCCL makes a reduce of each
                columns = enumerate(zip(*members, strict=True))
                results = [fold(x, op, "reduce", reduction, number, root) for root, x in columns]
            else:
                results = fold_lists(members, op, what, reduction, number)
            pairs = zip(parts, results, strict=True)
            move([(target, result_like(target, result)) for (target, _), result in pairs])

        return self._reduce(what, name, given, part, outs, compute, in_memory)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None, timeout: Any = None
    ) -> RankWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> RankWork:
        what, count, op, part = "reduce_scatter", self.size(), operator_of(opts), []
        name = name_of(op)
        check = self._begin(what, inputs, outputs)
        check.some("inputs", inputs)
        check.count("outputs", outputs, len(inputs))
        for output, given in zip(outputs, inputs, strict=True):
            check.whole("input", given, output)
            check.dtype(given)
            check.operator(name, given)
            check.layout([given, output], "reduce_scatter_tensor")
            check.written([output])
            # gloo adds the memory of a clone, whose order is that of the input, and cuts the sum.
            block, axes = in_order_of_memory(given, what)
            member = member_of(given, block, op, name, what)
            part.append((array_of(output, what), axes, member))
        members = self._read([member for _, _, member in part], opts)
        part = [(*one[:2], member) for one, member in zip(part, members, strict=True)]

        def compute(parts: list[Any], op: str, reduction: Any, number: int) -> None:
            for leaf, pairs in enumerate(zip(*parts, strict=True)):
                shape = (count, *pairs[0][0].shape)
                members = [member for *_, member in pairs]
                results = fold_rows(members, pairs[0][1], shape, op, what, reduction, number + leaf)
                both = zip(pairs, results, strict=True)
                move([(target, result_like(target, one)) for (target, *_), one in both])

        return self._reduce(what, name, inputs, part, outputs, compute)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class Reducing(NamedTuple):
    """A call that reduces, without the Reduction: the same in each call of the same memory."""

    told: FoldCall
    name: str
    terms: Terms
    part: Any
    outputs: list[Tensor]
    compute: Callable[[list[Any], str, Any, int], None]
    tensors: Sequence[Tensor]


def _computed(
    compute: Callable[[list[Any], str, Any, int], None],
    operator: str,
    reduction: Reduction,
    number: int,
    parts: list[Any],
) -> None:
    compute(parts, operator, reduction, number)


_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_OP_NAMES = {op.value: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def name_of(op: Any) -> str:
    """The name of an operator of ReduceOp."""
    return _OP_NAMES[getattr(op, "op", op).value]


def operator_of(opts: Any) -> Any:
    """The operator that a call's options have, or that is passed in their stead."""
    return opts if isinstance(opts, _OPS) else getattr(opts, "reduceOp", dist.ReduceOp.SUM)
