"""The updates of a training model: gradients are accumulated, reduced and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from gpusim.poptorch.executor.executable import Executable
from gpusim.poptorch.executor.gradients import Accumulator, Reducer, seed_of
from gpusim.poptorch.optim.state import LOSS_SCALE, exported_values
from gpusim.poptorch.optim.updater import Updater
from gpusim.poptorch.replicas.program import find_name
from gpusim.poptorch.replicas.results import UPDATED

__all__ = ["Timed", "Training"]

#: Makes a block of the device's work, with a name and numbers.
Timed = Callable[..., AbstractContextManager[None]]

STOCHASTIC = "enableStochasticRounding"  # PopART's name
# Parts of the seeds of different roundings.
ACCUMULATORS, REDUCTIONS = 1, 2


class Training:
    """Updates the weights of an executable.

    **Arguments**

    - `executable`: it holds the weights; `updater`: the optimizer's arithmetic, which is
      initialized here.
    """

    def __init__(self, executable: Executable, updater: Updater) -> None:
        self._of, self._updater = executable, updater
        options = executable.options
        self._stochastic = bool(options._Popart.options.get(STOCHASTIC, False))
        self._scale = 1.0  # of the last update's loss
        self._reducer = Reducer(
            replicas=executable.instances.total,
            accumulations=executable.layout.accumulations,
            reduction=options.Training.accumulation_and_replication_reduction_type,
            strategy=updater.strategy,
            groups=executable.weights.groups,
            stochastic=self._stochastic,
            seed=seed_of(executable.progress.seed, REDUCTIONS),
        )
        groups = executable.weights.groups
        assigned = {name: one.assignment for name, one in groups.items()} if groups else None
        updater.init(executable.weights.parameters, assigned)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step."""
        return self._updater.loss_scale / self._reducer.loss_divisor

    @property
    def names(self) -> list[str]:
        """The names of the update's tensors: parameters afterwards, `ipu_param`'s, the scale."""
        settings = self._updater.settings
        trained = [name for name in self._of.program.trained if name in settings.group_of]
        scale = [LOSS_SCALE] if self._updater.automatic else []
        return [*(UPDATED + name for name in trained), *exported_values(settings), *scale]

    def tensors(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        """Tensors of the last update, (replicas, *shape), by the keys of their names.

        poptorch.Error for a value of a parameter that the optimizer has no longer.
        """
        parameters = self._of.weights.stacked_parameters()
        values = exported_values(self._updater.settings)
        values[LOSS_SCALE] = torch.tensor(self._scale)
        local = self._of.instances.local
        return {
            key: parameters[name.removeprefix(UPDATED)].clone()
            if name.startswith(UPDATED)
            else values[find_name(name, values)].expand(local)
            for key, name in names.items()
        }

    def accumulator(self) -> Accumulator:
        """An empty accumulator, for the next update."""
        progress = self._of.progress
        self._updater.pull()  # before the loss is scaled
        self._scale = self._updater.loss_scale  # which the update may change
        seed = seed_of(progress.seed, ACCUMULATORS, progress.updates) if self._stochastic else None
        return Accumulator(self._updater.accumulate_dtype, self._reducer.running, seed)

    def update(self, accumulator: Accumulator, timed: Timed) -> None:
        """Reduce the accumulated gradients, and update the weights; both are `timed`."""
        progress = self._of.progress
        with timed("reduction", update=progress.updates):
            reduced = self._reducer(accumulator.gradients, progress.updates)
        with timed("update", update=progress.updates):
            self._updater.apply(self._of.weights.parameters, reduced)
        progress.updates += 1
