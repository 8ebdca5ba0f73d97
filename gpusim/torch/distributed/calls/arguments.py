"""The arguments of a call, checked before it is posted, by the rules of the engine that is named.

What an engine accepts is a row of `RULES`. A call that the real engine would refuse is refused here
with the engine's type of exception and with its key words, and with what was passed and expected.
Where the engine itself gives undefined results, the call is refused as well.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..memory import kind_of

__all__ = [
    "RULES",
    "Arguments",
    "Layout",
    "Rules",
    "is_contiguous_in_format",
    "rules_of",
    "split_sizes",
]


class Layout(Enum):
    """Which elements of a tensor a call reads and writes, and in which order."""

    ANY = "its elements, in logical order"
    DENSE = "its memory, in the memory's order; tensors with gaps are refused"
    CONTIGUOUS = "contiguous tensors only"
    FORMAT = "tensors that are contiguous in their own memory format"


#: The order that calls have under an engine without a row of its own.
ORDERS: Mapping[str, Layout] = {
    "all_reduce": Layout.DENSE,
    "all_reduce_coalesced": Layout.ANY,
    "all_gather": Layout.ANY,
    "all_to_all": Layout.ANY,
    "all_to_all_single": Layout.FORMAT,
    "broadcast": Layout.DENSE,
    "gather": Layout.ANY,
    "recv": Layout.ANY,
    "reduce": Layout.DENSE,
    "reduce_scatter": Layout.ANY,
    "reduce_scatter_tensor": Layout.ANY,
    "scatter": Layout.DENSE,
    "send": Layout.ANY,
}

BITWISE = frozenset(["BAND", "BOR", "BXOR"])


@dataclass(frozen=True)
class Rules:
    """The arguments that an engine accepts.

    **Attributes**:

    - `name`: as messages name it; "" for engines that gpusim has no rules of.
    - `error`: the type of exception that it raises for an argument.
    - `layouts`: by operation, which layouts it takes.
    - `dtypes`: those of its collectives; None for all that gpusim has. Complex numbers are pairs
      of real ones, except in the operations of `not_complex`.
    - `averages_integers`: whether ReduceOp.AVG of integers divides the sum, toward zero.
    - `lists`: whether a group's `allreduce` and `broadcast` take several tensors, which become one
      operand: `allreduce([a, b])` adds over the list and the ranks.
    - `gathers_unlike`: whether `all_gather`, and `reduce_scatter` of a list, take tensors of
      several shapes.
    - `stacks`: whether `all_gather_into_tensor` and `reduce_scatter_tensor` go by the number of
      elements, so that tensors may be stacked; else their first axis counts.
    - `sends_to_itself`: whether a rank can send to itself.
    - `sparse`: whether `all_reduce` takes sparse tensors.
    """

    name: str = ""
    error: type[Exception] = ValueError
    layouts: Mapping[str, Layout] = field(default_factory=lambda: ORDERS)
    dtypes: frozenset[torch.dtype] | None = None
    not_complex: frozenset[str] = frozenset()
    averages_integers: bool = False
    lists: bool = True
    gathers_unlike: bool = True
    stacks: bool = True
    sends_to_itself: bool = True
    sparse: bool = True

    def fail(self, message: str) -> NoReturn:
        """Raise the engine's exception."""
        raise self.error(message)


_GLOO = Rules(
    name="gloo",
    error=RuntimeError,
    layouts={
        **ORDERS,
        # A rank's own tensor is added in the order of the output's memory, others in theirs.
        "reduce_scatter": Layout.DENSE,
        "send": Layout.CONTIGUOUS,
        "recv": Layout.CONTIGUOUS,
    },
    dtypes=frozenset(
        [
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.int32,
            torch.int64,
        ]
    ),
    not_complex=frozenset(["all_gather", "all_gather_coalesced", "gather"]),
    gathers_unlike=False,
    stacks=False,
    sends_to_itself=False,
)

#: By the name of a backend. gloo's are measured (tests/torch/test_random_calls.py); NCCL's are
#: those of its backend in torch: "Tensors must be contiguous", one tensor for each call.
RULES: Mapping[str, Rules] = {
    "": Rules(),
    "gloo": _GLOO,
    # Of a program that names NCCL and whose sums are gloo's. torch makes the calls that NCCL takes
    # then: SyncBatchNorm gathers its sums into a tensor of one row.
    "gloo's twin": replace(_GLOO, stacks=True),
    "nccl": Rules(
        name="nccl",
        layouts={
            **dict.fromkeys(ORDERS, Layout.FORMAT),
            # NCCL cuts these in the order of memory: other elements than the tensors' own slices.
            "all_gather_into_tensor": Layout.CONTIGUOUS,
            "reduce_scatter_tensor": Layout.CONTIGUOUS,
            "all_to_all_single": Layout.CONTIGUOUS,
        },
        averages_integers=True,
        lists=False,
    ),
}


def rules_of(backend: str, device: str | None, default: str = "") -> Rules:
    """The rules of the engine that a program names for tensors of a device.

    **Arguments**: `backend` is the name that it gave ("gloo", "cpu:gloo,cuda:nccl", ...); `device`
    a type of device, or None if the host plays all of them; `default` the engine where the program
    names none that has rules.
    """
    for part in backend.lower().split(","):
        kind, _, name = part.rpartition(":")
        if name in RULES and name and (not kind or kind == device):
            return RULES[name]
    return RULES[default]


class Arguments:
    """The arguments of one call, and the checks that several kinds of calls share.

    **Arguments**: `what` is the operation, `where` says which group and rank, `size` is that of the
    group, and `rules` are the engine's.
    """

    def __init__(self, what: str, where: object, size: int, rules: Rules) -> None:
        self.what, self.where, self.size, self.rules = what, where, size, rules

    def fail(self, message: str) -> NoReturn:
        """Raise the engine's exception, with the call before the message."""
        self.rules.fail(f"{self.what} on {self.where}: {message}")

    def root(self, root: int) -> None:
        """A root has to be a rank of the group."""
        if not 0 <= root < self.size:
            self.fail(
                f"invalid root rank: {root}; expected a rank of the group, 0 to {self.size - 1}"
            )

    def root_tensor(self, number: int, tensors: Sequence[Tensor]) -> None:
        if not 0 <= number < len(tensors):
            self.fail(f"invalid root tensor: {number}, in a list of {len(tensors)} tensors")

    def some(self, name: str, tensors: Sequence[Any]) -> None:
        """A list must not be empty. torch's dispatcher refuses one with NotImplementedError."""
        if not tensors:
            raise NotImplementedError(
                f"{self.what} on {self.where}: there were no tensor arguments: {name} is an empty "
                "list; expected at least one tensor"
            )

    def one(self, name: str, tensors: Sequence[Any]) -> None:
        self.some(name, tensors)
        if len(tensors) != 1:
            self.fail(f"requires a single-element tensor list as {name}, got {len(tensors)}")

    def one_unless_lists(self, name: str, tensors: Sequence[Any]) -> None:
        """As `one`, for engines that take no lists."""
        self.some(name, tensors)
        if len(tensors) != 1 and not self.rules.lists:
            self.fail(f"expecting one tensor only but got {len(tensors)} in {name}")

    def count(self, name: str, tensors: Sequence[Any], count: int | None = None) -> None:
        expected = self.size if count is None else count
        if len(tensors) != expected:
            self.fail(
                f"expected a list of {expected} tensors as {name}, got {len(tensors)}; the group "
                f"has {self.size} ranks"
            )

    def none(self, name: str, tensors: Sequence[Any], root: int) -> None:
        """A list that the root alone passes. (Python's c10d passes an empty one elsewhere.)"""
        if tensors:
            self.fail(f"{name} is for rank {root} of the group alone, which is the root")

    def alike(self, name: str, tensors: Sequence[Tensor], other: Tensor) -> None:
        """Tensors of the dtype and shape of another."""
        for index, tensor in enumerate(tensors):
            if tensor.dtype != other.dtype or tensor.shape != other.shape:
                which = "dtype" if tensor.dtype != other.dtype else "size"
                self.fail(
                    f"invalid tensor {which} at index {index} of {name}: expected "
                    f"{kind_of(other)!r}, got {kind_of(tensor)!r}"
                )

    def one_dtype(self, name: str, tensors: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.dtype != tensors[0].dtype:
                self.fail(
                    f"tensors must all have the same type: {name} has {kind_of(tensors[0])!r} at "
                    f"index 0 and {kind_of(tensor)!r} at index {index}"
                )

    def dtype(self, *tensors: Tensor, kind: str = "") -> None:
        """The engine has to have the dtype, in this kind of the operation."""
        known = self.rules.dtypes
        if known is None:
            return
        for tensor in tensors:
            if tensor.dtype.is_complex and (kind or self.what) not in self.rules.not_complex:
                continue
            if tensor.dtype not in known:
                names = ", ".join(sorted(str(each)[6:] for each in known))
                self.fail(
                    f"invalid scalar type: {self.rules.name} has no {str(tensor.dtype)[6:]}; it "
                    f"has {names}"
                )

    def operator(self, name: str, tensor: Tensor) -> None:
        """The engine, and the dtype, have to have the operator of a reduction.

        **Raises**: the engine's exception, where it has one; else TypeError.
        """
        error = self.rules.error if self.rules.name else TypeError
        floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if name in BITWISE and floating:
            raise error(
                f"{self.what} on {self.where}: cannot use ReduceOp.{name} with non-integral dtype: "
                f"{name} is for integers and bool, got {kind_of(tensor)!r}"
            )
        if name == "AVG" and not floating:
            if self.rules.averages_integers and tensor.dtype != torch.bool:
                return
            raise error(
                f"{self.what} on {self.where}: ReduceOp.AVG is not defined for "
                f"{str(tensor.dtype)[6:]}; convert it first"
            )

    def layout(self, tensors: Sequence[Tensor], kind: str = "", role: str = "tensor") -> Layout:
        """The order in which the engine takes the tensors of an operation.

        **Raises**: its exception for tensors whose layout it refuses.
        """
        layout = self.rules.layouts.get(kind or self.what, Layout.ANY)
        if layout is Layout.ANY or layout is Layout.DENSE:
            return layout
        for tensor in tensors:
            if not tensor.is_contiguous() and not (
                layout is Layout.FORMAT and is_contiguous_in_format(tensor)
            ):
                # gloo's all_to_all_single raises another type than it does elsewhere
                error = ValueError if self.what == "all_to_all" else self.rules.error
                raise error(
                    f"{self.what} on {self.where}: tensors must be contiguous: the {role} of shape "
                    f"{list(tensor.shape)} has strides {tuple(tensor.stride())}; it has to be "
                    "contiguous, use contiguous()"
                )
        return Layout.DENSE if layout is Layout.FORMAT else Layout.ANY

    def one_order(self, tensors: Sequence[Tensor]) -> None:
        """Tensors whose memory is in one order."""
        if all(tensor.is_contiguous() for tensor in tensors):
            return
        for index, tensor in enumerate(tensors):
            if tensor.stride() != tensors[0].stride() and tensor.numel():
                self.fail(
                    "expected tensors that are contiguous, or of the same strides: the output "
                    f"has {tuple(tensors[0].stride())}, input {index - 1} has "
                    f"{tuple(tensor.stride())}; use contiguous()"
                )

    def written(self, tensors: Sequence[Tensor]) -> None:
        """Each element that is written needs memory of its own."""
        for tensor in tensors:
            if not tensor.is_contiguous() and _repeats(tensor):
                raise RuntimeError(
                    f"{self.what} on {self.where}: unsupported: more than one element of the "
                    f"written-to tensor of shape {list(tensor.shape)}, strides "
                    f"{tuple(tensor.stride())}, refers to a single memory location; use clone()"
                )

    def whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """A tensor of all ranks' parts: `whole` has their elements, one after another."""
        if whole.dtype != part.dtype:
            self.fail(f"expected one dtype, got {kind_of(whole)!r} as {name} and {kind_of(part)!r}")
        if self.rules.stacks:
            fits = whole.numel() == self.size * part.numel()
        else:
            first = part.shape[0] if part.dim() else 0
            fits = part.dim() > 0 and whole.shape == (self.size * first, *part.shape[1:])
        if not fits:
            other = {"input": "output", "output": "input"}[name]
            how = "elements" if self.rules.stacks else "first axis"
            self.fail(
                f"invalid tensor size: expected an {name} of {self.size} times the "
                f"{other}'s {how}, "
                f"got {kind_of(whole)!r} for {kind_of(part)!r}"
            )

    def splits(self, name: str, tensor: Tensor, splits: Any, rank: int) -> list[int]:
        """The rows for each rank, which the program passes, or an even split."""
        rows = tensor.shape[0] if tensor.dim() else 1
        sizes = list(splits or [])
        if not sizes and rows % self.size == 0:
            return [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows or min(sizes) < 0:
            self.fail(
                f"rank {rank}: expected {self.size} sizes of the {name} that sum to its {rows} "
                f"rows, got {sizes or 'an even split'}"
            )
        return sizes


def split_sizes(sizes: Any) -> list[int] | None:
    """The sizes of a split, of any sequence or generator that C++ takes for a vector of integers.

    **Raises**: TypeError, as C++, for tensors, sets and what else is no sequence of integers.
    """
    if sizes is None or (type(sizes) is list and all(type(each) is int for each in sizes)):
        return sizes
    sequence = hasattr(type(sizes), "__getitem__") or isinstance(sizes, Generator)
    if sequence and not isinstance(sizes, (str, bytes, Mapping, Tensor)):
        try:
            return [operator.index(each) for each in sizes]
        except TypeError:
            pass  # an element is no integer
    raise TypeError(
        "all_to_all_single(): incompatible function arguments: expected split sizes as a sequence "
        f"of integers, got {sizes!r}"
    )


def is_contiguous_in_format(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory = formats.get(tensor.dim())
    return memory is not None and tensor.is_contiguous(memory_format=memory)


def _repeats(tensor: Tensor) -> bool:
    """Whether several elements are one in memory, as in an expanded tensor."""
    if not tensor.numel():
        return False
    both = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in both)
