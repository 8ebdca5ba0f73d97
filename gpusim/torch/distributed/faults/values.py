"""Faults of values: bits that change, and NaNs, in the memory of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import watching
from .happened import Happened
from .plans import Fault

__all__ = ["AT_CALL", "change", "change_operands", "change_results", "operands", "results"]

AT_CALL = frozenset({"flip", "flip-result", "nan"})
"""The kinds that change values at a call."""

IN_PLACE = frozenset(
    {"allreduce", "allreduce_coalesced", "allreduce_sparse", "broadcast", "reduce"}
)
"""The methods of a group whose operands are their results."""


def operands(method: str, given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of a group reads, in the order of its arguments.

    **Arguments**: `method` is the group's, such as "allreduce"; `given` are its arguments by name.
    """
    if method in ("recv", "recv_anysource"):
        return []
    return [tensor for name, tensor in _tensors(given) if not name.startswith("output")]


def results(method: str, given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of a group writes, in the order of its arguments."""
    if method == "send":
        return []
    outputs = [tensor for name, tensor in _tensors(given) if name.startswith("output")]
    if outputs or method not in (*IN_PLACE, "recv", "recv_anysource"):
        return outputs
    return [tensor for _, tensor in _tensors(given)]


def change_operands(
    fault: Fault, method: str, given: Mapping[str, Any], happened: Happened
) -> None:
    """Change a call's operand as the fault says, before the call reads it.

    The rank's own tensor changes: the fault is one of its memory, and not of the wire.
    """
    _note(fault, change(fault, operands(method, given)), happened)


def change_results(
    fault: Fault, work: Any, method: str, given: Mapping[str, Any], happened: Happened
) -> None:
    """Change a call's result on this rank as the fault says, as soon as the rank has it.

    That is at the end of the call, or of the wait for it.
    """
    tensors = results(method, given)

    def when_there() -> None:
        _note(fault, change(fault, tensors), happened)

    if work is None or work._pending.done.done:
        when_there()
    else:
        _after(work, when_there)


def _note(fault: Fault, why_not: str, happened: Happened) -> None:
    """Note whether a value has changed."""
    happened.note(fault, why_not)
    if not why_not:
        watching.happened(fault)


def change(fault: Fault, tensors: Sequence[Tensor]) -> str:
    """Change one element of one of the tensors, in place.

    **Arguments**: `fault` says which: a `flip` turns its bit, a `nan` puts a NaN there.

    **Returns**: a word of `REASONS` if that cannot be done; else nothing.

    >>> from gpusim.torch.distributed.faults.plans import Fault
    >>> x = torch.tensor([1.0, 2.0])
    >>> change(Fault("flip", rank=0, call=1, bit=30, element=1), [x])
    ''
    >>> x
    tensor([1., 0.])
    >>> change(Fault("flip", rank=0, call=1, bit=30, element=2), [x])
    'element'
    """
    place, element = fault.tensor or 0, fault.element or 0
    if place >= len(tensors):
        return "none"
    tensor = tensors[place]
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return "layout"
    if not tensor.numel():
        return "empty"
    if element >= tensor.numel():
        return "element"
    if fault.kind == "nan":
        return _put_nan(tensor, element)
    return _flip(tensor, element, fault.bit or 0)


def _put_nan(tensor: Tensor, element: int) -> str:
    """Put a NaN into a tensor of a format that has one."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return "kind"
    one = _element(tensor, element)
    before = one.clone()
    one.copy_(torch.full_like(one, math.nan))
    wide = one.to(torch.complex128 if one.is_complex() else torch.float64)
    if bool(wide.isnan()):
        return ""
    one.copy_(before)  # the format has no NaN
    return "kind"


def _flip(tensor: Tensor, element: int, bit: int) -> str:
    """Turn a bit of an element; bit 0 is the least significant one."""
    if bit >= 8 * tensor.element_size():
        return "bit"
    part = _element(tensor, element).view(torch.uint8)
    part[bit // 8] ^= 1 << bit % 8
    return ""


def _element(tensor: Tensor, element: int) -> Tensor:
    """One element of a tensor of any strides, as a tensor of one that shares its memory.

    A change of it is not counted as one of the program's: `backward` sees the new value and does
    not refuse it, as it is with memory that changes by itself.
    """
    where = tensor.storage_offset()
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        element, index = divmod(element, size)
        where += index * stride
    data = tensor.data
    if data.is_conj():
        data = data.conj()
    return data.as_strided((1,), (1,), where)


def _after(work: Any, act: Callable[[], None]) -> None:
    """Do something as soon as the work's results are in its tensors, in the rank's thread."""
    finish = work._rank.works[work._pending.done.number][1]
    before = finish.finish

    def both() -> None:
        before()
        act()

    finish.finish = both


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, with the argument's name, in their order."""
    for name, value in given.items():
        for tensor in _flat(value):
            yield name, tensor


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
