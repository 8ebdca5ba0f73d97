"""Update rules on stored tensors: computed in float32 and rounded to the stored types.

A rule works on lists of tensors, with torch's foreach operations, in place. Large parameters are
cut into blocks that fit a cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...collectives.kernels import kernels
from ...torch.tensors import as_array, as_tensor, dtype_of, on_stream_of

__all__ = ["FIRST_STEP", "Batch", "Exported", "Rounder", "Row", "Rule", "Slot", "blocks", "run"]

#: A number of `ipu_param`: PopART's name, the attributes that it is made of, and how.
Exported = tuple[str, tuple[str, ...], Callable[..., float]]


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Slot:
    """An accumulator that a rule has for each parameter.

    - `dtype`: its type; None is the weight's own.
    - `initial`: its first value for a weight, in float32.
    """

    dtype: torch.dtype | None = torch.float32
    initial: Callable[[Tensor], Tensor] = torch.zeros_like


@dataclass
class Batch:
    """Parameters with the same settings and the same number of steps.

    - `weights`, `gradients`: float32, by parameter; a leading axis is that of the groups of
      replicas. Gradients are those of the loss itself, clipped; a rule leaves them as they are.
    - `values`: the attributes' values, by PyTorch's names.
    - `step`: the number of this update, 1 for the first.
    - `slots`: accumulators by name, then by parameter.
    - `store`: rounds an accumulator to its type and stores it; the rounded value replaces it.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    values: dict[str, Any]
    step: float
    slots: dict[str, list[Tensor]]
    store: Callable[[str], None]

    def decayed(self) -> list[Tensor]:
        """The gradients of the loss with an L2 penalty of `weight_decay` / 2 on the weights."""
        decay = self.values["weight_decay"]
        if decay == 0:
            return self.gradients
        return list(torch._foreach_add(self.gradients, self.weights, alpha=decay))


class Rule(Protocol):
    """How an optimizer updates weights.

    - `elementwise`: whether an element's step depends on that element alone.
    """

    elementwise: bool

    def slots(self, values: dict[str, Any], constant: set[str]) -> dict[str, Slot]:
        """Its accumulators; `constant` names the values that never change."""

    def update(self, batch: Batch) -> None:
        """One step."""


# ---------------------------------------------------------------- stored tensors

#: `step` of a weight's rounding; that of accumulator k is k more. Reductions count from 1.
FIRST_STEP = 2**32

NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rounder:
    """Writes float32 values to tensors of any floating-point type, with one rounding.

    The random bits are those of gpusim's contract, with counters that no reduction uses.

    - `stochastic`: whether float16 and bfloat16 are rounded stochastically, or to nearest.
    - `seed`: of the random bits. Element i of a value, in each group of replicas, has the lane of
      (seed, step, call, place): which value it is, the number of the update, and the parameter's.
    """

    stochastic: bool
    seed: int

    def write(self, target: Tensor, values: Tensor, step: int, call: int, place: int) -> None:
        """Round `values` into `target`, in place; the leading axis is that of the groups."""
        if not self.stochastic or target.dtype not in NARROW:
            target.copy_(values)
            return
        with on_stream_of([values]):
            array = as_array(values.contiguous())
            rounded = kernels(array).round_to(
                array,
                dtype_of(target),
                rounding="stochastic",
                seed=self.seed,
                step=step,
                call=call,
                place=place,
                batch_ndim=1,
            )
            target.copy_(as_tensor(rounded))


BLOCK = 2**18  # elements: 1 MiB for each of weight, gradient, accumulators and temporaries


class Row(NamedTuple):
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
        """Flat parts of `size` elements. The row must be contiguous."""
        flat = {name: tensor.view(-1).split(size) for name, tensor in self.stored.items()}
        weights, gradients = self.weight.view(-1).split(size), self.gradient.reshape(-1).split(size)
        return [
            Row(weight, gradient, {name: parts[i] for name, parts in flat.items()}, self.place)
            for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True))
        ]

    def can_be_cut(self) -> bool:
        """Whether it is contiguous, and on a host: parts are faster only there."""
        tensors = (self.weight, *self.stored.values())
        return self.weight.device.type == "cpu" and all(x.is_contiguous() for x in tensors)


def blocks(rows: list[Row], size: int = BLOCK) -> Iterator[list[Row]]:
    """The rows, in lists of about `size` elements; larger ones are cut.

    Results of elementwise rules do not depend on it: it saves memory traffic.
    """
    block: list[Row] = []
    elements = 0
    for row in rows:
        count = row.weight.numel()
        for part in row.parts(size) if count > size and row.can_be_cut() else [row]:
            count = part.weight.numel()
            if block and elements + count > size:
                yield block
                block, elements = [], 0
            block.append(part)
            elements += count
    if block:
        yield block


def run(
    rule: Rule, rows: list[Row], values: dict[str, Any], step: float, rounder: Rounder, call: int
) -> None:
    """Apply a rule in float32. Tensors that are stored in float32 are not copied.

    **Arguments**

    - `values`, `step`: the rule's settings, and the number of the step.
    - `rounder`, `call`: how results are rounded to the stored types, and the number of the update.
    """
    slots = {slot: [row.stored[slot].float() for row in rows] for slot in rows[0].stored}
    weights = [row.weight.float() for row in rows]
    numbers = itertools.count(FIRST_STEP + 1)

    def store(slot: str) -> None:
        number = next(numbers)
        for row, value in zip(rows, slots[slot], strict=True):
            stored = row.stored[slot]
            if value is not stored:
                rounder.write(stored, value, step=number, call=call, place=row.place)
                value.copy_(stored)

    rule.update(Batch(weights, [row.gradient for row in rows], values, step, slots, store))
    for row, value in zip(rows, weights, strict=True):
        if value is not row.weight:
            rounder.write(row.weight, value, step=FIRST_STEP, call=call, place=row.place)
