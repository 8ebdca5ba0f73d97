"""What an optimizer says, read once: its kind, its types, and its values by group of parameters.

Values are constant or variable: those of PopTorch's optimizers as their `variable_attrs` has it,
those of torch's are constant where they equal torch's default, and the learning rate never is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch

from .._logging import logger
from .base import ACCUMULATION_TYPES
from .kinds import OptimizerType, is_subclass, kind_of
from .tracker import AttributeTracker

__all__ = ["Settings", "Value", "read_settings"]

#: What may differ among groups, by kind; SGD1 to LAMB_NO_BIAS.
SGD_VALUES = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "velocity_scaling")
ADAM_VALUES = ("lr", "betas", "eps", "weight_decay")
RMSPROP_VALUES = ("lr", "momentum", "weight_decay", "alpha", "eps")
GROUP_VALUES = {
    OptimizerType.SGD1: SGD_VALUES,
    OptimizerType.SGD2: SGD_VALUES,
    OptimizerType.ADAM: ADAM_VALUES,
    OptimizerType.ADAMW: ADAM_VALUES,
    OptimizerType.ADAMW_NO_BIAS: ADAM_VALUES,
    OptimizerType.RMSPROP: RMSPROP_VALUES,
    OptimizerType.RMSPROP_CENTERED: RMSPROP_VALUES,
    OptimizerType.LAMB: (*ADAM_VALUES, "max_weight_norm"),
    OptimizerType.LAMB_NO_BIAS: (*ADAM_VALUES, "max_weight_norm"),
}

MOMENT_TYPES = ("first_order_momentum_accum_type", "second_order_momentum_accum_type")
SGD_TYPES = ("accum_type", "velocity_accum_type")
TYPES = {
    kind: SGD_TYPES if GROUP_VALUES[kind] is SGD_VALUES else ("accum_type", *MOMENT_TYPES)
    for kind in OptimizerType
}

#: Values of torch's optimizers that count as constant; alpha and betas are, whatever they are.
DEFAULTS = {
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "velocity_scaling": 1.0,
    "max_weight_norm": 65500.0,
    "nesterov": False,
}
ALWAYS_CONSTANT = ("alpha", "betas")


@dataclass(frozen=True)
class Value:
    """An attribute's value, and whether it is compiled in."""

    value: Any
    constant: bool


@dataclass(frozen=True)
class Settings:
    """An optimizer's, at the time that it was set.

    - `types`: those of accumulators, by attribute.
    - `groups`: values by attribute, for each group of parameters; `defaults` are for new groups.
    - `group_of`: the group of each parameter of the model that the optimizer has.
    """

    kind: OptimizerType
    loss_scaling: Value
    max_grad_norm: float
    tensorflow: bool
    combined: bool
    types: dict[str, torch.dtype]
    defaults: dict[str, Value]
    groups: tuple[dict[str, Value], ...]
    group_of: dict[str, int] = field(compare=False)

    def values(self, group: int) -> dict[str, Any]:
        """The values that a rule computes with."""
        found = {name: value.value for name, value in self.groups[group].items()}
        if self.kind == OptimizerType.SGD2:
            # velocities stay multiplied by the loss scaling
            found["velocity_scaling"] = self.loss_scaling.value
        return found

    def constant(self, group: int) -> set[str]:
        """The names of the values that never change."""
        return {name for name, value in self.groups[group].items() if value.constant}


def read_settings(
    optimizer: Any,
    names: Mapping[int, str],
    tracker: AttributeTracker,
    automatic: bool = False,
) -> Settings:
    """What the optimizer says.

    **Arguments**

    - `optimizer`: of poptorch.optim, or SGD, Adam, AdamW or RMSprop of torch.optim.
    - `names`: the model's parameters' names, by their `id`.
    - `tracker`: reports attributes that nothing reads.
    - `automatic`: whether the loss scaling is automatic, which makes it variable.

    AssertionError for other optimizers and for values that are no numbers; ValueError for AMSGrad
    and for accumulation types other than float16 and float32.
    """
    kind = kind_of(optimizer)
    tracker.kind = kind.name
    variable = getattr(optimizer, "variable_attrs", None)
    if variable and automatic:
        variable.markAsVariable("loss_scaling")
    warn_of_what_is_ignored(optimizer, tracker)
    for group in (optimizer.defaults, *optimizer.param_groups):
        check_group(group)

    def is_constant(name: str, value: Any) -> bool:
        if variable:
            return variable.isConstant(name)
        if name == "weight_decay" and kind == OptimizerType.ADAMW:
            return bool(value == 0.01)
        return name in ALWAYS_CONSTANT or (name in DEFAULTS and value == DEFAULTS[name])

    expected = GROUP_VALUES[kind]
    scaling = of_optimizer(optimizer, "loss_scaling", 1.0)
    check_number("loss_scaling", scaling)
    if scaling == 0:
        raise ValueError("Loss scaling cannot be 0")
    fixed = variable.isConstant("loss_scaling") if variable else scaling == 1.0 and not automatic
    settings = Settings(
        kind=kind,
        loss_scaling=Value(scaling, fixed),
        max_grad_norm=largest_norm(optimizer),
        tensorflow=is_tensorflow(optimizer, kind),
        combined=kind == OptimizerType.SGD1,
        types={name: accumulation_type(optimizer, name) for name in TYPES[kind]},
        defaults=read_group(optimizer.defaults, expected, is_constant),
        groups=tuple(read_group(group, expected, is_constant) for group in optimizer.param_groups),
        group_of={
            names[id(parameter)]: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) in names
        },
    )
    tracker.check(optimizer)
    logger.debug("Python optimizer %s", settings)
    return settings


def warn_of_what_is_ignored(optimizer: Any, tracker: AttributeTracker) -> None:
    if is_subclass(optimizer):
        tracker.warn(
            f"Optimizer `{type(optimizer).__name__}` subclassed from classes in poptorch.optim or "
            "torch.optim are unlikely to behave as intended. Poptorch does not run Python "
            "optimizer code directly; but instead uses IPU native optimisers implemented in "
            "PopART."
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        tracker.warn("maximize=True is ignored: PopTorch's optimizers minimize the loss")


# ---------------------------------------------------------------- one attribute


def read_group(
    group: Mapping[str, Any], expected: tuple[str, ...], is_constant: Callable[[str, Any], bool]
) -> dict[str, Value]:
    """The values of a group. AssertionError where one is missing or is no number."""
    found = {}
    for name in expected:
        value = group.get(name, 1.0 if name == "velocity_scaling" else None)
        assert value is not None, f"Mandatory attribute {name} not found in optimizer group"
        (check_pair if name == "betas" else check_number)(name, value)
        found[name] = Value(value, is_constant(name, value))
    return found


def check_number(name: str, value: Any) -> None:
    assert isinstance(value, Number), f"Expected a number for {name} but got {value} instead"


def check_pair(name: str, value: Any) -> None:
    pair = isinstance(value, tuple) and len(value) == 2
    assert pair, f"Expected a pair for {name} but got {value} instead"
    for number, part in enumerate(value):
        check_number(f"{name}[{number}]", part)


def check_group(group: Mapping[str, Any]) -> None:
    """ValueError for what no kind has."""
    if group.get("amsgrad"):
        raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    if group.get("nesterov") and group.get("dampening"):
        raise ValueError(
            f"When nesterov momentum is enabled, dampening has to be 0, not {group['dampening']}"
        )


def of_optimizer(optimizer: Any, name: str, default: Any) -> Any:
    """An attribute that is the same for all groups. AssertionError if it is None."""
    value = getattr(optimizer, name, default)
    assert value is not None, f"Mandatory attribute {name} not found in optimizer attributes"
    return value


def accumulation_type(optimizer: Any, name: str) -> torch.dtype:
    found = of_optimizer(optimizer, name, torch.float32)
    if found not in ACCUMULATION_TYPES:
        raise ValueError(f"{name} must be set to either torch.float16 or torch.float32 not {found}")
    return found


def largest_norm(optimizer: Any) -> float:
    norm = of_optimizer(optimizer, "max_grad_norm", math.inf)
    check_number("max_grad_norm", norm)
    if math.isnan(norm):
        raise ValueError("max_grad_norm must not be NaN")
    return float(norm)


def is_tensorflow(optimizer: Any, kind: OptimizerType) -> bool:
    chosen = bool(of_optimizer(optimizer, "use_tf_variant", False))
    if chosen and kind not in (OptimizerType.RMSPROP, OptimizerType.RMSPROP_CENTERED):
        raise ValueError("use_tf_variant is only available with RMSProp optimizers.")
    return chosen
