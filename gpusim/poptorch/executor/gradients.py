"""Gradients added up over micro-batches, in the accumulators' type, and then over the replicas.

The sum over replicas is gpusim's psum of the accumulators, with the bits of its contract: in the
reduction of the `gpusim.reduction` context in which the model is called.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gpusim
import gpusim.torch as gt
from gpusim.collectives import Call, all_gather, dispatch, psum
from gpusim.collectives.joining import SMALL, joins, split
from gpusim.groups import Groups
from gpusim.maps.records import NOBODY, called_by
from gpusim.poptorch.enums import MeanReductionStrategy, ReductionType
from gpusim.reduction import current
from gpusim.runtime.world import current_world
from gpusim.torch.tensors import TO_NUMPY, on_stream_of

__all__ = ["Accumulator", "Reducer", "seed_of"]


def seed_of(seed: int, *numbers: int) -> int:
    """A seed of its own for each tuple of numbers: 64 bits of BLAKE2b."""
    packed = struct.pack(f"<Q{len(numbers)}q", seed % 2**64, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def round_to_dtype(value: Tensor, dtype: torch.dtype, seed: int | None) -> Tensor:
    """The value in another dtype, in one rounding: stochastic if there is a seed."""
    if seed is None or torch.finfo(dtype).bits >= 32 or value.dtype == dtype:
        return value.to(dtype)
    with on_stream_of([value]):
        array = gt.as_array(value)
        target = TO_NUMPY[dtype]
        return gt.as_tensor(
            gpusim.round_to(array, target, rounding="stochastic", seed=seed, axis_name=())
        )


def _join(gradients: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The gradients, with those of these names as one (replicas, elements) under the first name."""
    each = [gradients[name] for name in names]
    whole = torch.cat([x.reshape(x.shape[0], x.shape[1:].numel()) for x in each], 1)
    left = set(names)
    return {names[0]: whole} | {name: x for name, x in gradients.items() if name not in left}


def _split(whole: Tensor, like: Mapping[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The sum (1, elements) of joined gradients as theirs, by name."""
    parts = split(gt.as_array(whole)[0], [(1, *like[name].shape[1:]) for name in names])
    return dict(zip(names, map(torch.from_numpy, parts), strict=True))


class Accumulator:
    """The gradients of one update, added up over its micro-batches on each replica.

    **Arguments**

    - `dtype`: the accumulator's dtype for a parameter, by name and gradient's dtype.
    - `running`: whether it holds their mean so far; else their sum.
    - `seed`: of stochastic rounding into the accumulators; None rounds to nearest.

    A sum is rounded once for each micro-batch; so is a mean, s f/(f+1) + g/(f+1) after f others.
    """

    def __init__(
        self, dtype: Callable[[str, torch.dtype], torch.dtype], running: bool, seed: int | None
    ) -> None:
        self._dtype, self._running, self._seed = dtype, running, seed
        self._count = 0
        self.gradients: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's gradients, (replicas, *shape) by name."""
        before = self._count
        for place, (name, gradient) in enumerate(gradients.items()):
            dtype = self._dtype(name, gradient.dtype)
            if not before and dtype == gradient.dtype:
                self.gradients[name] = gradient
                continue
            wide = torch.promote_types(torch.promote_types(dtype, gradient.dtype), torch.float32)
            value = gradient.to(wide)
            if before:
                held = self.gradients[name].to(wide)
                if self._running:
                    value = held * (before / (before + 1)) + value / (before + 1)
                else:
                    value = held + value
            seed = None if self._seed is None else seed_of(self._seed, before, place)
            self.gradients[name] = round_to_dtype(value, dtype, seed)
        self._count += 1


@dataclass(frozen=True)
class Reducer:
    """The reduction of the replicas' accumulated gradients.

    - `replicas`: how many there are on all instances.
    - `accumulations`: how many micro-batches were accumulated.
    - `reduction`: Mean divides by both numbers, for parameters that are grouped too; Sum does not.
    - `strategy`: when a mean is divided. Running divides what each replica holds, a mean already,
      before the sum; Post divides the sum; PostAndLoss divides the loss by the replicas, and the
      sum by the accumulations.
    - `groups`: those of grouped parameters, by name.
    - `stochastic`: whether to round stochastically where no `gpusim.reduction` context says how;
      `seed`: of that.
    """

    replicas: int
    accumulations: int
    reduction: ReductionType
    strategy: MeanReductionStrategy
    groups: Mapping[str, Groups]
    stochastic: bool
    seed: int

    @property
    def running(self) -> bool:
        """Whether accumulators hold means over the micro-batches."""
        mean = self.reduction is ReductionType.Mean
        return mean and self.strategy is MeanReductionStrategy.Running

    @property
    def loss_divisor(self) -> int:
        """The divisor of the loss before it is differentiated."""
        mean = self.reduction is ReductionType.Mean
        early = mean and self.strategy is MeanReductionStrategy.PostAndLoss
        return self.replicas if early else 1

    def __call__(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """(groups, *shape) by name, from (replicas, *shape): ready for the update.

        They are in the accumulators' dtype, divided, if they are, in float32 and left in it.
        """
        reduced: dict[str, Tensor] = {}
        with self._reduction(step):
            together = self._small_together(gradients)
            joined = _join(gradients, together) if together else gradients
            for groups, names in self._by_groups(joined):
                stacked = {name: joined[name] for name in names}
                if self.running:
                    places = [list(joined).index(name) for name in names]
                    stacked = self._shares(stacked, places, groups, step)
                reduced |= self._divide(self._fold(stacked, groups), groups)
            if together:
                current().next_calls(len(together) - 1)
                reduced |= _split(reduced[together[0]], gradients, together)
        return {name: reduced[name] for name in gradients}

    def _small_together(self, gradients: Mapping[str, Tensor]) -> list[str]:
        """The parameters whose gradients are folded as one value; [] where none are."""
        if self.replicas == 1 or self.stochastic or not joins(current().reduction):
            return []
        if dispatch.record_call is not None or current_world() is not None:
            return []
        found = [
            name
            for name, x in gradients.items()
            if x.dtype == torch.float32 and x.is_cpu and x.nbytes <= SMALL
        ]
        if self.groups:
            found = [name for name in found if name not in self.groups]
        return found if len(found) > 1 else []

    def _reduction(self, step: int) -> AbstractContextManager[Any]:
        """The caller's reduction; without one, that of the options."""
        if self.stochastic and current().is_default:
            return gpusim.reduction(rounding="stochastic", seed=seed_of(self.seed, step))
        return nullcontext()

    def _by_groups(
        self, gradients: Mapping[str, Tensor]
    ) -> Iterator[tuple[Groups | None, list[str]]]:
        """Parameters with the same groups: each is one call, ordinary ones first."""
        together: dict[Groups | None, list[str]] = {None: []}
        for name in gradients:
            together.setdefault(self.groups.get(name), []).append(name)
        yield from ((groups, names) for groups, names in together.items() if names)

    def _shares(
        self, stacked: dict[str, Tensor], places: list[int], groups: Groups | None, step: int
    ) -> dict[str, Tensor]:
        """Each replica's share of its group's mean, rounded once, so that no sum is larger."""
        size = self.replicas if groups is None else groups.group_size
        if size == 1:
            return stacked
        shares = {}
        for place, (name, value) in zip(places, stacked.items(), strict=True):
            share = value.to(torch.promote_types(value.dtype, torch.float32)) / size
            seed = seed_of(self.seed, step, place) if self.stochastic else None
            shares[name] = round_to_dtype(share, value.dtype, seed)
        return shares

    def _fold(self, stacked: dict[str, Tensor], groups: Groups | None) -> dict[str, Tensor]:
        """The sums of each group's replicas: (groups, *shape)."""
        if self.replicas == 1:
            return stacked
        names = sorted(stacked)  # as a pytree's leaves are numbered
        with on_stream_of([*stacked.values()]):
            leaves = [(gt.as_array(stacked[name]),) for name in names]
            found = dispatch.run_leaves(Call(psum, (), None, groups), leaves, current_world())
            folded = {name: value for name, ((value, _),) in zip(names, found, strict=True)}
            if groups is None:
                return {name: gt.as_tensor(value[None]) for name, value in folded.items()}
            leaders = [group[0] for group in groups.members]
            with called_by(NOBODY):
                return {
                    name: gt.as_tensor(all_gather(value).value[leaders])
                    for name, value in folded.items()
                }

    def _divide(self, sums: dict[str, Tensor], groups: Groups | None) -> dict[str, Tensor]:
        if self.reduction is not ReductionType.Mean:
            return sums
        divisor: float = self.accumulations * (self.replicas // self.loss_divisor)
        if self.running:  # divided by a group's size and the micro-batches already
            divisor = 1 if groups is None else self.replicas / groups.group_size
        if divisor == 1:
            return sums
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in sums.values()]
        return dict(zip(sums, torch._foreach_div(wide, divisor), strict=True))
