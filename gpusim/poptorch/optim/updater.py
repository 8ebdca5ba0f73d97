"""The updates of an executor's weights: an optimizer's rule, types, clipping and loss scaling.

Weights, gradients and accumulators have a leading axis for the groups of replicas that share them.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._logging import logger
from ..enums import ConnectionType, MeanReductionStrategy
from .gradients import adjust_loss_scaling, clip
from .kinds import KINDS, kind_of
from .loaded import changed_numbers, with_numbers
from .log import log_values
from .optimizer import Optimizer
from .rule import Rounder, Row, blocks, run
from .settings import AttributeTracker, Settings, check_replacement, read_settings
from .sgd import has_momentum
from .state import OptimizerState, exported_values

__all__ = ["Updater", "updater_for"]

RUNNING = MeanReductionStrategy.Running
SHOWN = 8  # numbers in a message


def updater_for(
    optimizer: Any,
    options: Any,
    named_parameters: Mapping[str, Tensor],
    *,
    seed: int | None = None,
) -> Updater:
    """Make the Updater of a model's weights.

    **Arguments**

    - `optimizer`: of poptorch.optim, or SGD, Adam, AdamW or RMSprop of torch.optim.
    - `options`: the executor's own; `Training`'s strategy becomes Running if the optimizer
      accumulates in float16.
    - `named_parameters`: the user's parameters.
    - `seed`: of stochastic rounding. None: the options' random seed, or 0.

    **Raises**: AssertionError and ValueError for an optimizer that is not supported.
    """
    return Updater(optimizer, options, named_parameters, seed=seed)


class Updater:
    """Updates weights in place. Made by `updater_for`, with its arguments.

    **Attributes**:

    - `state`: the accumulators and numbers.
    - `automatic`: whether the loss scaling is automatic.
    """

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
        self.automatic = bool(popart.get("automaticLossScalingSettings.enabled"))
        self._tracker = AttributeTracker(options._relax_optimizer_checks)
        self.state = OptimizerState()
        self._groups: Mapping[str, Sequence[int]] | None = None
        self._compiled = False
        self._on_device = False  # an offline target is compiled for, and has no state
        self._used: Settings | None = None  # by the last update
        self._loaded: dict[str, float] = {}  # numbers of ipu_param that differ from the settings'
        self.optimizer: Any = None
        self.settings = self._declared = self._read(optimizer)  # the latter without the numbers
        self._adopt(optimizer, self.settings)

    # ---------------------------------------------------------------- the optimizer

    def set_optimizer(self, optimizer: Any) -> None:
        """Go on with another optimizer, or with the same one and changed values.

        **Raises**: ValueError after compilation, if the kind, types or constants differ, or if the
        new one would need the Running strategy.
        """
        if not self._compiled and kind_of(optimizer) != self.settings.kind:
            self._tracker.forget()
        settings = self._read(optimizer)
        if self._compiled:
            self._choose_strategy(settings)
            check_replacement(self._declared, settings)
        self._adopt(optimizer, settings)

    def _read(self, optimizer: Any) -> Settings:
        return read_settings(optimizer, self._names, self._tracker, self.automatic)

    def _adopt(self, optimizer: Any, settings: Settings) -> None:
        self._choose_strategy(settings)
        if optimizer is not self.optimizer:
            self.disconnect()
            self._connect(optimizer)
        if settings != self._declared:
            self._loaded = {}
        self._declared = settings
        self._use(with_numbers(settings, self._loaded))

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self.rule = settings.rule()
        self._values = [settings.values(group) for group in range(len(settings.groups))]

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
        """Let `state_dict` of a PopTorch optimizer return this state from now on."""
        self.optimizer = optimizer
        if not isinstance(optimizer, Optimizer):
            return
        if optimizer.host_state_is_dirty:
            optimizer.get_state_dict()  # the state of the model that had it before
        optimizer._read_state = self.state_dict
        if self._on_device:
            optimizer.host_state_is_dirty = not optimizer.ipu_state_is_dirty
        else:  # this model starts with the state that it has from another one
            optimizer.ipu_state_is_dirty = optimizer.has_state()

    def disconnect(self) -> None:
        """Copy the state to the optimizer, and forget the optimizer."""
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer) and optimizer._read_state == self.state_dict:
            optimizer.get_state_dict()
            optimizer._read_state = None
        self.optimizer = None

    # ---------------------------------------------------------------- the gradients that it expects

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next step."""
        return float(self.settings.loss_scaling.value) * self.state.factor

    @property
    def strategy(self) -> MeanReductionStrategy:
        """When means over micro-batches and replicas are divided."""
        training = self._options.Training
        return MeanReductionStrategy(training.meanAccumulationAndReplicationReductionStrategy)

    def accumulate_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients of type `dtype` accumulate over micro-batches.

        It is `dtype` without accumulation and for a combined accumulator, whose type gradients
        have; else the optimizer's `accum_type`.
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
    ) -> OptimizerState:
        """Make the state that training starts with: loaded from the optimizer, or new.

        **Arguments**

        - `parameters`: the weights, (groups, *shape) by name.
        - `groups`: the group that each replica is in, by parameter; None: groups are neighbours.
          Norms over the model depend on it.
        """
        self.state = OptimizerState()
        self._groups = groups
        self._compiled = True
        self._allocate(parameters)
        self._on_device = self._options.connection_type != ConnectionType.Never
        if self._on_device:
            if isinstance(self.optimizer, Optimizer) and not self.optimizer.ipu_state_is_dirty:
                self.optimizer.host_state_is_dirty = True
            self.pull()
        self._used = None
        self._use_settings()
        return self.state

    def _use_settings(self) -> None:
        """Log the settings if their values differ from those that the last update used."""
        used, self._used = self._used, self._declared
        if logger.isEnabledFor(logging.DEBUG) and used != self._declared:
            log_values(self._declared)

    def _allocate(self, parameters: Mapping[str, Tensor]) -> None:
        """Make the accumulators of parameters that have none yet."""
        for name, weight in parameters.items():
            if name in self.state.slots or name not in self.settings.group_of:
                continue
            group = self.settings.group_of[name]
            slots = self.rule.slots(self._values[group], self.settings.constant(group))
            with torch.no_grad():
                self.state.slots[name] = {
                    key: slot.initial(weight.float()).to(slot.dtype or weight.dtype)
                    for key, slot in slots.items()
                }
            self.state.steps[name] = 0

    def apply(
        self,
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: OptimizerState | None = None,
    ) -> None:
        """Update the weights, in place.

        **Arguments**

        - `parameters`: weights of any floating-point type, (groups, *shape). Those without a
          gradient, or that the optimizer does not update, stay as they are.
        - `gradients`: of the loss times `loss_scale`, reduced over replicas and micro-batches, by
          parameter. They are not changed.
        - `state`: the result of `init`; None: the last one.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.apply(parameters, gradients, state)
                return
        state = self.state = state or self.state
        self.pull()
        if self._used is not self._declared:
            self._use_settings()
        self._allocate(parameters)
        scale = self.loss_scale
        scaled = {
            name: gradients[name]
            for name in parameters
            if name in gradients and name in state.slots and name in self.settings.group_of
        }
        self._count_update()
        if self.automatic:
            own = float(self.settings.loss_scaling.value)
            state.factor, finite = adjust_loss_scaling([*scaled.values()], state.factor, own)
            if not finite:
                return
        unscaled = self._unscaled(scaled, scale)
        batches: defaultdict[tuple[int, float], list[Row]] = defaultdict(list)
        for name, gradient in unscaled.items():
            state.steps[name] += 1
            row = Row(parameters[name], gradient, state.slots[name], self._numbers[name])
            batches[self.settings.group_of[name], state.steps[name]].append(row)
        # random bits are numbered through a whole parameter, and norms are of one
        whole = self._rounder.stochastic or not self.rule.elementwise
        for (group, step), rows in batches.items():
            for part in [rows] if whole else blocks(rows):
                run(self.rule, part, self._values[group], step, self._rounder, state.updates)

    def _unscaled(self, scaled: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """The gradients of the loss, clipped, in float32. They are copied only if necessary."""
        found = list(map(Tensor.float, scaled.values()))
        if scale != 1 and found:
            found = list(torch._foreach_div(found, scale))
        unscaled = dict(zip(scaled, found, strict=True))
        norm = self.settings.max_grad_norm
        return unscaled if math.isinf(norm) else clip(unscaled, norm, self._groups)

    def _count_update(self) -> None:
        self.state.updates += 1
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # torch's schedulers check that there was a step
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.host_state_is_dirty = True

    # ---------------------------------------------------------------- as tensors by name

    def state_dict(self) -> dict[str, Any]:
        """Copies of `ipu_state` and `ipu_param` on the host; None without a state on a device."""
        if not self._on_device:
            return {"ipu_state": None, "ipu_param": None}
        logger.info("Writing optimiser state tensors from IPU to host.")
        tensors = self.state.tensors(
            self._shapes,
            counted=KINDS[self.settings.kind].counts_steps,
            automatic=self.automatic,
            stochastic=self._rounder.stochastic,
        )
        return {"ipu_state": tensors, "ipu_param": exported_values(self.settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over `ipu_state`; accumulators that it does not name stay.

        **Raises**: ValueError for a tensor of another size; then nothing has changed.
        """
        self.state.load(state["ipu_state"] or {})

    def _load_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Compute with the numbers of an `ipu_param` that a user has loaded."""
        changed = changed_numbers(self._declared, numbers)
        self._use(with_numbers(self._declared, changed))
        self._loaded = changed
        if changed:
            logger.warning(
                "The loaded ipu_param has other values than the optimizer's param_groups and "
                "loss_scaling, and counts until setOptimizer changes a value: %s%s",
                ", ".join(f"{name}={number:g}" for name, number in [*changed.items()][:SHOWN]),
                f", ... ({len(changed)} numbers)" if len(changed) > SHOWN else "",
            )

    def restore(self) -> None:
        """Copy the state that detaching has left on the host to the device again."""
        optimizer = self.optimizer
        if not isinstance(optimizer, Optimizer) or optimizer._read_state != self.state_dict:
            return  # another model has it
        if optimizer.ipu_state_is_dirty:
            self.pull()
        elif not optimizer.host_state_is_dirty:
            self.load_state_dict(optimizer._state_dict)

    def pull(self) -> None:
        """Take over a state that was loaded into the optimizer since the last update."""
        optimizer = self.optimizer
        if isinstance(optimizer, Optimizer) and optimizer.ipu_state_is_dirty:
            numbers = exported_values(self.settings)  # those of the device stay if none is loaded
            self.set_optimizer(optimizer)  # torch's part of what was loaded has its values
            loaded = optimizer._state_dict["ipu_param"] if optimizer._numbers_are_loaded else None
            if loaded is not None:
                self._load_numbers({**numbers, **loaded})
            self.load_state_dict(optimizer._state_dict)
            optimizer.ipu_state_is_dirty = optimizer._numbers_are_loaded = False
