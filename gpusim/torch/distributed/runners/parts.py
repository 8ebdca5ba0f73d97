"""The tensors of a call of a rank's process, and their copies in the memory that it shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from torch import Tensor

from ..memory import Array, bits_of, kind_of
from .messages import ALIGNMENT, Copies
from .plans import Planned

__all__ = ["Parts", "Posted"]


class Done:
    """Whether a work is complete, as far as the process knows."""

    def __init__(self) -> None:
        self.number, self.done = 0, False


class Posted:
    """A call that the parent makes, as its Pending."""

    error: BaseException | None = None
    event = None
    title = ""

    def __init__(self) -> None:
        self.done = Done()


class Parts:
    """The tensors of a call, and where the copies of them are in its memory.

    **Attributes**: `size` is that of the memory, `sent` that of its first part, which has all that
    is read, and `spans` are the addresses of the tensors with their ends.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.read: list[bool] = []
        self.written: list[bool] = []
        self.own: list[Array] = []
        self.starts: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.size = self.sent = 0

    def mark(self, read: bool, written: bool) -> None:
        """Note of the tensors that have come last whether the call reads and writes them."""
        more = len(self.tensors) - len(self.read)
        self.read += [read] * more
        self.written += [written] * more

    def lay_out(self, operation: str) -> None:
        """Give each a start. **Raises**: TypeError for tensors that have no bits on the host."""
        self.own = own = [_bits(tensor, operation) for tensor in self.tensors]
        self.spans = [_span(bits) for bits in own]
        self.starts = [0] * len(own)
        for place in sorted(range(len(own)), key=lambda place: not self.read[place]):
            self.starts[place] = self.size  # those that are read come first: one piece to send
            start, end = self.spans[place]
            self.size += -(-(end - start) // ALIGNMENT) * ALIGNMENT
            self.sent = self.size if self.read[place] else self.sent

    def copy_to(self, copies: Copies, origin: int) -> list[Any]:
        """Copy what is read, and note where results go; the tensors there, for the message."""
        kinds = []
        for place, (start, tensor, bits) in enumerate(
            zip(self.starts, self.tensors, self.own, strict=True)
        ):
            kinds.append((kind_of(tensor).dtype, tensor.shape, tensor.stride(), origin + start))
            at = copies.start + start
            shared = np.ndarray(bits.shape, bits.dtype, copies.memory, at, bits.strides)
            if self.read[place]:
                np.copyto(shared, bits)
            if self.written[place]:
                first, end = self.spans[place]
                copies.pairs.append((bits, shared))
                copies.spans.append((first, end))
                copies.received.append((start, end - first))
        return kinds

    def plan(self, number: int, outputs: Sequence[int]) -> Planned:
        """The plan of calls that have such tensors."""
        moves = [
            (place, start, end - first)
            for place, (start, (first, end)) in enumerate(zip(self.starts, self.spans, strict=True))
        ]
        read = list(compress(moves, self.read))
        written = list(compress(moves, self.written))
        return Planned(number, self.size, read, written, outputs)


def _bits(tensor: Tensor, what: str) -> Array:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{what}: expected a tensor on the host, as ranks are processes; got one on "
            f"{tensor.device}"
        )
    return bits_of(tensor, what)


def _span(bits: Array) -> tuple[int, int]:
    """The addresses from an array's first element to behind its last one."""
    if not bits.size:
        return 0, 0
    steps = zip(bits.shape, bits.strides, strict=True)
    start: int = bits.__array_interface__["data"][0]
    return start, start + bits.itemsize + sum((size - 1) * stride for size, stride in steps)
