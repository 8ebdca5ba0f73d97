"""A rule on stored tensors: in float32, rounded where it is kept, in blocks that fit a cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .rounding import FIRST_STEP, Rounder
from .rules import Batch, Rule

__all__ = ["Row", "blocks", "run"]

BLOCK = 2**18  # elements: 1 MiB for each of weight, gradient, accumulators and what a rule makes


@dataclass(frozen=True)
class Row:
    """A parameter, or a part of it.

    - `weight`, `stored`: the weight and its accumulators, which are changed.
    - `gradient`: in float32.
    - `place`: the parameter's number, for the random bits of its roundings.
    """

    weight: Tensor
    gradient: Tensor
    stored: dict[str, Tensor]
    place: int

    def parts(self, size: int) -> list[Row]:
        """Flat parts of `size` elements, of a row that lies in memory in one piece."""
        flat = {name: tensor.view(-1).split(size) for name, tensor in self.stored.items()}
        weights, gradients = self.weight.view(-1).split(size), self.gradient.reshape(-1).split(size)
        return [
            Row(weight, gradient, {name: parts[i] for name, parts in flat.items()}, self.place)
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))
        ]

    def can_be_cut(self) -> bool:
        """Whether parts of it are a gain, on a host, and possible."""
        kept = (self.weight, *self.stored.values())
        return self.weight.device.type == "cpu" and all(tensor.is_contiguous() for tensor in kept)


def blocks(rows: list[Row], size: int = BLOCK) -> Iterator[list[Row]]:
    """The rows, in lists of about `size` elements; larger ones are cut.

    Results of element by element arithmetic do not depend on it: it saves memory traffic.
    """
    waiting: list[Row] = []
    elements = 0
    for row in rows:
        cut = row.can_be_cut() and row.weight.numel() > size
        for part in row.parts(size) if cut else [row]:
            if waiting and elements + part.weight.numel() > size:
                yield waiting
                waiting, elements = [], 0
            waiting.append(part)
            elements += part.weight.numel()
    if waiting:
        yield waiting


def run(
    rule: Rule, rows: list[Row], values: dict[str, Any], step: float, rounder: Rounder, call: int
) -> None:
    """Let the rule work in float32: on what is stored itself, where that is float32.

    **Arguments**

    - `values`, `step`: the rule's settings, and the number of the step.
    - `rounder`, `call`: how results are rounded where they are kept, and the number of the update.
    """
    slots = {slot: [row.stored[slot].float() for row in rows] for slot in rows[0].stored}
    weights = [row.weight.float() for row in rows]
    numbers = itertools.count(FIRST_STEP + 1)

    def store(slot: str) -> None:
        number = next(numbers)
        for row, value in zip(rows, slots[slot], strict=True):
            kept = row.stored[slot]
            if value is not kept:
                rounder.write(kept, value, step=number, call=call, place=row.place)
                value.copy_(kept)

    rule.update(Batch(weights, [row.gradient for row in rows], values, step, slots, store))
    for row, value in zip(rows, weights, strict=True):
        if value is not row.weight:
            rounder.write(row.weight, value, step=FIRST_STEP, call=call, place=row.place)
