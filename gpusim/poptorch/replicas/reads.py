"""Which lines of a model's forward pass read values on the host, for `gpusim run --check`.

PopTorch compiles the forward pass before its tensors have values. Here a model that reads some runs
in threads. A `Watch` sees each call of torch's functions, and tells the process's listener of those
that read a tensor of the device: an input, a parameter, a buffer, or one computed from these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...maps.call_site import is_users
from ...recording.reads import HostReads, listener
from ...torch.private import tree_leaves

__all__ = ["Watch", "watch"]

ON_DEVICE = "gpusim_is_on_device"
"""The attribute of tensors that depend on the model's inputs or state."""

READERS: dict[Any, str] = {
    getattr(Tensor, name): way.format(name)
    for way, names in {
        "Tensor.{}()": "item tolist numpy equal allclose is_nonzero",
        "NumPy": "__array__ __dlpack__",
        "bool()": "__bool__",
        "int()": "__int__",
        "float()": "__float__",
        "complex()": "__complex__",
        "an index": "__index__",
        "printing": "__repr__ __format__",
        "in": "__contains__",
    }.items()
    for name in names.split()
}
READERS |= {getattr(torch, name): f"torch.{name}()" for name in ("equal", "allclose", "is_nonzero")}
"""Functions that read all their tensors, and how a finding names them."""

FACTORIES: dict[Any, str] = {
    getattr(torch, name): f"torch.{name}()"
    for name in "full zeros ones empty rand randn arange tensor as_tensor".split()
}
"""Functions that take numbers. They read tensors in their place."""

COPYING = (torch.tensor, torch.as_tensor)
"""Those of them that copy a tensor as it is, and read those in a list."""

SIZED: dict[Any, str] = {
    getattr(module, name): f"{name}()"
    for module in (torch, Tensor)
    for name in (
        *("reshape expand repeat view tile narrow split chunk unflatten topk roll".split()),
        *("new_full new_zeros new_ones new_empty".split()),
    )
    if hasattr(module, name)
}
"""The same of functions whose first argument is a tensor."""

INDEXED = (Tensor.__getitem__, Tensor.__setitem__)

SERVING = frozenset(
    [
        *(__name__, __name__.replace("reads", "forward")),
        *("torch", "torch.overrides", "torch._tensor", "torch.functional"),
    ]
)
"""Modules with the frames between a line that calls a function of `READERS` and a `Watch`."""


def watch(replicas: Sequence[int]) -> Watch | None:
    """A watch of the forward pass of these replicas; None without a listener."""
    reads = listener()
    return None if reads is None else Watch(reads, replicas)


class Watch:
    """Sees the calls of one forward pass. Owner: the thread that runs it."""

    def __init__(self, reads: HostReads, replicas: Sequence[int]) -> None:
        self._reads, self._replicas = reads, replicas
        # By id, as an attribute of the model's own tensors would be saved with them.
        self._own: frozenset[int] = frozenset()

    def begin(self, substitutes: Mapping[int, Tensor], inputs: Sequence[Tensor]) -> None:
        """The forward pass begins, with these inputs, and state by the ids of the model's own."""
        self._own = frozenset(substitutes)
        _mark([*substitutes.values(), *inputs])

    def before(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function is called."""
        way = READERS.get(function)
        if way is not None:
            self._look(way, _tensors((args, kwargs)))
        elif function in FACTORIES:
            numbers = [*args, *(x for name, x in kwargs.items() if name != "out")]
            if function in COPYING:
                numbers = [x for x in numbers if not isinstance(x, Tensor)]
            self._look(FACTORIES[function], _tensors(numbers))
        elif function in SIZED:
            self._look(SIZED[function], _tensors((args[1:], kwargs)))
        elif function in INDEXED:
            self._look("an index", _numbers(args[1]))

    def after(self, operands: Sequence[Tensor], outcome: Sequence[Tensor]) -> None:
        """A function has computed, or changed, the tensors of `outcome`."""
        if any(map(self._is_on_device, operands)):
            _mark(outcome)

    def _look(self, way: str, tensors: Sequence[Tensor]) -> None:
        value = next(filter(self._is_on_device, tensors), None)
        if value is None:
            return
        frame = _reader()
        if frame is not None:
            site = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            shown = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
            self._reads.add(site, shown, way, _place(frame), self._replicas)

    def _is_on_device(self, x: Tensor) -> bool:
        # A result of a torch.autograd.Function may be another object than what was computed in it;
        # the model's own tensors are seen inside of slices.
        return getattr(x, ON_DEVICE, False) or x.grad_fn is not None or id(x) in self._own


def _mark(tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        setattr(each, ON_DEVICE, True)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _numbers(index: Any) -> list[Tensor]:
    """The tensors of an index that torch reads: bounds of slices, and single integers."""
    return [*_read_in(index if isinstance(index, tuple) else (index,))]


def _read_in(parts: tuple[Any, ...]) -> Iterator[Tensor]:
    for part in parts:
        if isinstance(part, slice):
            bounds = (part.start, part.stop, part.step)
            yield from (each for each in bounds if isinstance(each, Tensor))
        elif isinstance(part, Tensor) and part.dim() == 0:
            if not part.is_floating_point() and part.dtype not in (torch.bool, torch.uint8):
                yield part


def _reader() -> FrameType | None:
    """The frame of the program that reads; None where torch's modules or gpusim's do by themselves.

    A program that calls NumPy or Python's library with a tensor reads it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) in SERVING:
        frame = frame.f_back
    while frame is not None:
        if _module(frame).partition(".")[0] in ("torch", "gpusim"):
            return None
        if is_users(frame):
            return frame
        frame = frame.f_back
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType | None) -> str:
    """The innermost forward method around a frame."""
    while frame is not None:
        if frame.f_code.co_name == "forward":
            model = frame.f_locals.get("self")
            if isinstance(model, nn.Module):
                return f"the forward of {type(model).__name__}"
        frame = frame.f_back
    return "the forward pass"
