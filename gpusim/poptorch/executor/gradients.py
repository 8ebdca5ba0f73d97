"""Gradients added up over micro-batches, in the accumulators' type, and then over the replicas.

The sum over replicas is gpusim's psum of the accumulators, with the bits of its contract: in the
reduction of the `gpusim.reduction` context in which the model is called.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import gpusim
import gpusim.torch as gt
from gpusim.collectives import Call, all_gather, psum
from gpusim.collectives.dispatch import run_leaves
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
            for groups, names in self._by_groups(gradients):
                stacked = {name: gradients[name] for name in names}
                if self.running:
                    places = [list(gradients).index(name) for name in names]
                    stacked = self._shares(stacked, places, groups, step)
                reduced |= self._divide(self._fold(stacked, groups), groups)
        return {name: reduced[name] for name in gradients}

    @contextmanager
    def _reduction(self, step: int) -> Iterator[None]:
        """The caller's reduction; without one, that of the options."""
        if self.stochastic and current().is_default:
            with gpusim.reduction(rounding="stochastic", seed=seed_of(self.seed, step)):
                yield
        else:
            yield

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
            found = run_leaves(Call(psum, (), None, groups), leaves, current_world())
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
