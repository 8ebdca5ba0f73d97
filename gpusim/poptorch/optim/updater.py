"""What an executor updates weights with: an optimizer's rule, types, clipping and loss scaling.

Weights, gradients and accumulators have a leading axis for the groups of replicas that share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..enums import MeanReductionStrategy
from .base import Optimizer
from .exported import exported_values
from .kinds import OptimizerType, kind_of
from .loss_scaling import adjusted
from .norms import clipped
from .replacement import check_replacement
from .rounding import Rounder
from .rules import LAMB, Adam, CombinedSGD, RMSprop, Rule, SeparateSGD, Slot
from .rules.sgd import has_momentum
from .settings import MOMENT_TYPES, Settings, read_settings
from .state import State
from .tensors import Row, blocks, run
from .tracker import AttributeTracker

__all__ = ["Updater", "updater_for"]

RUNNING = MeanReductionStrategy.Running
CORRECTED = (OptimizerType.ADAM, OptimizerType.ADAMW, OptimizerType.LAMB)


def updater_for(
    optimizer: Any,
    options: Any,
    named_parameters: Mapping[str, Tensor],
    *,
    seed: int | None = None,
) -> Updater:
    """What updates a model's weights.

    **Arguments**

    - `optimizer`: of poptorch.optim, or SGD, Adam, AdamW or RMSprop of torch.optim.
    - `options`: the executor's own; `Training`'s strategy becomes Running where the optimizer
      accumulates in float16.
    - `named_parameters`: the model's parameters, as the user has them.
    - `seed`: of stochastic rounding; the options' random seed, or 0.

    AssertionError and ValueError for optimizers that there are no updates for.
    """
    return Updater(optimizer, options, named_parameters, seed=seed)


class Updater:
    """Updates weights in place. Made by `updater_for`; the arguments are explained there."""

    def __init__(
        self,
        optimizer: Any,
        options: Any,
        named_parameters: Mapping[str, Tensor],
        *,
        seed: int | None,
    ) -> None:
        popart = options._Popart.options
        if seed is None:
            seed = options.random_seed if options.exists("random_seed") else 0
        self._options = options
        self._shapes = {name: parameter.shape for name, parameter in named_parameters.items()}
        self._numbers = {name: number for number, name in enumerate(named_parameters)}
        self._names = {id(parameter): name for name, parameter in named_parameters.items()}
        self._rounder = Rounder(bool(popart.get("enableStochasticRounding")), int(seed) % 2**64)
        self._automatic = bool(popart.get("automaticLossScalingSettings.enabled"))
        self._tracker = AttributeTracker(options._relax_optimizer_checks)
        self.state = State()
        self._groups: Mapping[str, Sequence[int]] | None = None
        self._compiled = False
        self.optimizer: Any = None
        self.settings = self._read(optimizer)
        self._adopt(optimizer, self.settings)

    # ---------------------------------------------------------------- the optimizer

    def set_optimizer(self, optimizer: Any) -> None:
        """Go on with another optimizer, or with the same one and changed values.

        Once there is a state, what is compiled in has to stay: the kind, types and constants.
        ValueError where it does not, and where the new one would need the Running strategy.
        """
        if not self._compiled and kind_of(optimizer) != self.settings.kind:
            self._tracker.forget()
        settings = self._read(optimizer)
        if self._compiled:
            self._choose_strategy(settings)
            check_replacement(self.settings, settings)
        self._adopt(optimizer, settings)

    def _read(self, optimizer: Any) -> Settings:
        return read_settings(optimizer, self._names, self._tracker, self._automatic)

    def _adopt(self, optimizer: Any, settings: Settings) -> None:
        self._choose_strategy(settings)
        if optimizer is not self.optimizer:
            self.disconnect()
            self._connect(optimizer)
        self.settings = settings
        self.rule = rule_of(settings)

    def _choose_strategy(self, settings: Settings) -> None:
        training = self._options.Training
        if settings.types["accum_type"] != torch.float16 or settings.combined:
            return
        if training.meanAccumulationAndReplicationReductionStrategy == RUNNING:
            return
        if self._compiled:
            raise ValueError(
                "Invalid optimizer: the new optimizer would require changing options.Training."
                "meanAccumulationAndReplicationReductionStrategy to "
                "poptorch.MeanReductionStrategy.Running but the executable is already compiled."
            )
        frozen = self._options._is_frozen
        self._options._unfreeze()
        training.setMeanAccumulationAndReplicationReductionStrategy(RUNNING)
        if frozen:
            self._options._freeze()

    def _connect(self, optimizer: Any) -> None:
        """From now on the optimizer's `state_dict` has this state; torch's own have none of it."""
        self.optimizer = optimizer
        if not isinstance(optimizer, Optimizer):
            return
        if optimizer.host_state_is_dirty:
            optimizer.get_state_dict()  # of the model that had it before
        optimizer._read_state = self.state_dict
        if self._compiled:
            optimizer.host_state_is_dirty = not optimizer.ipu_state_is_dirty
        else:  # what it has from another model is what this one starts with
            optimizer.ipu_state_is_dirty = optimizer.has_state()

    def disconnect(self) -> None:
        """Leave the optimizer the state as it is now, and forget it."""
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer) and optimizer._read_state == self.state_dict:
            optimizer.get_state_dict()
            optimizer._read_state = None
        self.optimizer = None

    # ---------------------------------------------------------------- what the executor asks

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is to be multiplied by."""
        return float(self.settings.loss_scaling.value) * self.state.factor

    @property
    def strategy(self) -> MeanReductionStrategy:
        """When means over micro-batches and replicas divide."""
        training = self._options.Training
        return MeanReductionStrategy(training.meanAccumulationAndReplicationReductionStrategy)

    def accumulate_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a parameter's gradients of type `dtype` accumulate in, over micro-batches.

        Their own type without accumulation; the weight's in a combined accumulator, whose type
        gradients have; else the optimizer's `accum_type`.
        """
        if self._options.Training.gradient_accumulation == 1:
            return dtype
        if self.settings.combined and name in self.settings.group_of:
            group = self.settings.group_of[name]
            if has_momentum(self.settings.values(group), self.settings.constant(group)):
                return dtype
        return self.settings.types["accum_type"]

    # ---------------------------------------------------------------- weights

    def init(
        self,
        parameters: Mapping[str, Tensor],
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> State:
        """The state that training starts with: what was loaded into the optimizer, or none yet.

        **Arguments**

        - `parameters`: the weights, (groups, *shape) by name.
        - `groups`: the group that each replica is in, by parameter. Norms over the model depend on
          it where several parameters differ among groups; groups of neighbours if None.
        """
        self.state = State()
        self._groups = groups
        self._compiled = True
        self._allocate(parameters)
        if isinstance(self.optimizer, Optimizer) and not self.optimizer.ipu_state_is_dirty:
            self.optimizer.host_state_is_dirty = True
        self._pull()
        return self.state

    @torch.no_grad()
    def _allocate(self, parameters: Mapping[str, Tensor]) -> None:
        """Accumulators for the parameters that have none: all at first, later those that joined."""
        for name, weight in parameters.items():
            if name in self.state.slots or name not in self.settings.group_of:
                continue
            self.state.slots[name] = {
                slot: kept.initial(weight.float()).to(kept.dtype or weight.dtype)
                for slot, kept in self._slots(self.settings.group_of[name]).items()
            }
            self.state.steps[name] = 0

    def _slots(self, group: int) -> dict[str, Slot]:
        return self.rule.slots(self.settings.values(group), self.settings.constant(group))

    @torch.no_grad()
    def apply(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: State | None = None,
    ) -> None:
        """Update the weights, in place.

        **Arguments**

        - `parameters`: weights of any floating-point type, (groups, *shape). Those that the
          optimizer has not, or that have no gradient, stay as they are.
        - `gradients`: as many, of the loss times `loss_scale`, reduced over replicas and
          micro-batches; they are not changed.
        - `state`: what `init` returned; the last one if None.
        """
        self.state = state or self.state
        self._pull()
        self._allocate(parameters)
        names = [name for name in parameters if name in gradients and name in self.state.slots]
        scale = self.loss_scale
        self._count_update()
        if self._automatic:
            scaled = [gradients[name] for name in names]
            own = float(self.settings.loss_scaling.value)
            self.state.factor, usable = adjusted(scaled, self.state.factor, own)
            if not usable:
                return
        unscaled = in_float32({name: gradients[name] for name in names}, scale)
        unscaled = clipped(unscaled, self.settings.max_grad_norm, self._groups)
        for (group, step), together in self._together(names).items():
            rows = [self._row(name, parameters[name], unscaled[name]) for name in together]
            values = self.settings.values(group)
            # random bits are numbered through a whole parameter, and norms are of one
            whole = self._rounder.stochastic or not self.rule.elementwise
            for part in [rows] if whole else blocks(rows):
                run(self.rule, part, values, step, self._rounder, self.state.updates)

    def _count_update(self) -> None:
        self.state.updates += 1
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # schedulers of torch ask if there was a step
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.host_state_is_dirty = True

    def _together(self, names: list[str]) -> dict[tuple[int, float], list[str]]:
        """The parameters by their group and the number of this update, which they count."""
        found = defaultdict(list)
        for name in names:
            self.state.steps[name] += 1
            found[self.settings.group_of[name], self.state.steps[name]].append(name)
        return found

    def _row(self, name: str, weight: Tensor, gradient: Tensor) -> Row:
        return Row(weight, gradient, self.state.slots[name], self._numbers[name])

    # ---------------------------------------------------------------- as tensors by name

    def state_dict(self) -> dict[str, Any]:
        """`ipu_state` and `ipu_param`, copies on the host; None of both before `init`."""
        if not self._compiled:
            return {"ipu_state": None, "ipu_param": None}
        tensors = self.state.tensors(
            self._shapes,
            counted=self.settings.kind in CORRECTED,
            automatic=self._automatic,
            stochastic=self._rounder.stochastic,
        )
        return {"ipu_state": tensors, "ipu_param": exported_values(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `ipu_state`; what it has not stays. The values are the optimizer's own.

        ValueError for a tensor of another size; then nothing has changed.
        """
        self.state.load(state["ipu_state"] or {})

    def _pull(self) -> None:
        """Take over what was loaded into the optimizer since the last update."""
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer) and optimizer.ipu_state_is_dirty:
            self.set_optimizer(optimizer)  # torch's part of what was loaded has its values
            self.load_state_dict(optimizer._state_dict)
            optimizer.ipu_state_is_dirty = False


def in_float32(gradients: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The gradients of the loss itself; those that are float32 and not scaled are not copied."""
    found = [gradient.float() for gradient in gradients.values()]
    if scale != 1 and found:
        found = list(torch._foreach_div(found, scale))
    return dict(zip(gradients, found, strict=True))


def rule_of(settings: Settings) -> Rule:
    """How an optimizer of this kind updates."""
    kind, types = settings.kind, settings.types
    if kind == OptimizerType.SGD1:
        return CombinedSGD()
    if kind == OptimizerType.SGD2:
        return SeparateSGD(types["velocity_accum_type"])
    moments = types[MOMENT_TYPES[0]], types[MOMENT_TYPES[1]]
    if kind in (OptimizerType.RMSPROP, OptimizerType.RMSPROP_CENTERED):
        return RMSprop(moments, kind == OptimizerType.RMSPROP_CENTERED, settings.tensorflow)
    if kind in (OptimizerType.LAMB, OptimizerType.LAMB_NO_BIAS):
        return LAMB(moments, kind in CORRECTED)
    return Adam(moments, kind in CORRECTED, decoupled=kind != OptimizerType.ADAM)
