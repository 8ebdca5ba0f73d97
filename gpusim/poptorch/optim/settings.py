"""The settings of an optimizer, read once: its kind, types, and values by group of parameters.

Values are constant or variable. For PopTorch's optimizers `variable_attrs` says which. A value of
torch's is constant if it equals torch's default; the learning rate never is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch

from .._logging import logger
from ..poptorch_core import Error
from .kinds import KINDS, OptimizerType, is_subclass, kind_of
from .optimizer import ACCUMULATION_TYPES
from .optimizer import DEFAULTS as OWN_ATTRIBUTES
from .rule import Rule

__all__ = ["AttributeTracker", "Settings", "Value", "check_replacement", "read_settings"]

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
    """The settings of an optimizer at the time that it was set.

    - `types`: the types of accumulators, by attribute.
    - `groups`: values by attribute, for each group of parameters; `defaults` are for new groups.
    - `group_of`: the group of each parameter of the model that the optimizer updates.
    """

    kind: OptimizerType
    loss_scaling: Value
    max_grad_norm: float
    tensorflow: bool
    types: dict[str, torch.dtype]
    defaults: dict[str, Value]
    groups: tuple[dict[str, Value], ...]
    group_of: dict[str, int] = field(compare=False)

    @property
    def combined(self) -> bool:
        """Whether gradients accumulate in the velocity."""
        return self.kind == OptimizerType.SGD1

    def rule(self) -> Rule:
        """The update rule."""
        return KINDS[self.kind].rule(self.types, self.tensorflow)

    def values(self, group: int) -> dict[str, Any]:
        """The values that a rule computes with."""
        return {name: value.value for name, value in self.scaled(self.groups[group]).items()}

    def constant(self, group: int) -> set[str]:
        """The names of the values that never change."""
        return {name for name, value in self.scaled(self.groups[group]).items() if value.constant}

    def scaled(self, group: Mapping[str, Value]) -> Mapping[str, Value]:
        """A group's values. Velocities of SGD2 stay multiplied by the loss scaling."""
        if self.kind == OptimizerType.SGD2:
            return {**group, "velocity_scaling": self.loss_scaling}
        return group


def read_settings(
    optimizer: Any,
    names: Mapping[int, str],
    tracker: AttributeTracker,
    automatic: bool = False,
) -> Settings:
    """Read the settings of an optimizer.

    **Arguments**

    - `optimizer`: of poptorch.optim, or SGD, Adam, AdamW or RMSprop of torch.optim.
    - `names`: the names of the model's parameters, by their `id`.
    - `tracker`: reports attributes that nothing reads.
    - `automatic`: whether the loss scaling is automatic, which makes it variable.

    **Raises**

    - AssertionError for other optimizers, and for values that are not numbers.
    - ValueError for AMSGrad, and for accumulation types other than float16 and float32.
    """
    kind = kind_of(optimizer)
    tracker.kind = kind.name
    variable = getattr(optimizer, "variable_attrs", None)
    if variable and automatic:
        variable.markAsVariable("loss_scaling")
    warn_of_ignored(optimizer, tracker)
    for group in (optimizer.defaults, *optimizer.param_groups):
        check_group(group)

    def is_constant(name: str, value: Any) -> bool:
        if variable:
            return variable.isConstant(name)
        if name == "weight_decay" and kind == OptimizerType.ADAMW:
            return bool(value == 0.01)
        return name in ALWAYS_CONSTANT or (name in DEFAULTS and value == DEFAULTS[name])

    expected = KINDS[kind].values
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
        types={name: accumulation_type(optimizer, name) for name in KINDS[kind].types},
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


def warn_of_ignored(optimizer: Any, tracker: AttributeTracker) -> None:
    if is_subclass(optimizer):
        tracker.report(
            f"Optimizer `{type(optimizer).__name__}` subclassed from classes in poptorch.optim or "
            "torch.optim are unlikely to behave as intended. Poptorch does not run Python "
            "optimizer code directly; but instead uses IPU native optimisers implemented in "
            "PopART.",
            logger.warning,
        )
    if kind_of(optimizer) == OptimizerType.ADAMW_NO_BIAS:
        message = "AdamW's bias_correction=False has no effect: PopTorch corrects the moments too"
        tracker.report(message, logger.warning)
    if any(group.get("maximize") for group in optimizer.param_groups):
        message = "maximize=True is ignored: PopTorch's optimizers minimize the loss"
        tracker.report(message, logger.warning)


# ---------------------------------------------------------------- one attribute


def read_group(
    group: Mapping[str, Any], expected: tuple[str, ...], is_constant: Callable[[str, Any], bool]
) -> dict[str, Value]:
    """The values of a group. AssertionError if one is missing or is not a number."""
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
    """Raise ValueError for settings that no kind supports."""
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


# ---------------------------------------------------------------- attributes that nothing reads

#: torch's own, and what groups have beside values.
KNOWN = ("defaults", "state", "param_groups", "params", "param_names", "variable_attrs")


class AttributeTracker:
    """Reports attributes that later optimizers have and the first one has not, once each.

    **Arguments**

    - `relaxed`: whether to report to the debug log, or else as a warning.
    """

    def __init__(self, relaxed: bool = False) -> None:
        self.kind = ""
        self._report = logger.debug if relaxed else logger.warning
        self._known: dict[str, set[str]] | None = None
        self._reported: set[str] = set()

    def check(self, optimizer: Any) -> None:
        """Check the optimizer, its defaults and its groups; the first one is only remembered."""
        groups = optimizer.param_groups
        of_groups = set(optimizer.defaults).union(*groups) - set(KNOWN)
        if self._known is None:
            self._known = {"group": of_groups, "optimizer": set(attributes(optimizer))}
            return
        self._compare("default group variable", self._known["group"], optimizer.defaults)
        self._compare("optimizer attribute", self._known["optimizer"], attributes(optimizer))
        for number, group in enumerate(groups):
            self._compare(f"group {number} attribute", self._known["group"], group)

    def forget(self) -> None:
        """Treat the next optimizer as the first one."""
        self._known = None

    def _compare(self, what: str, known: set[str], provided: Iterable[str]) -> None:
        extra = [name for name in provided if name not in known and name not in KNOWN]
        if extra:
            message = f"Ignoring unexpected {what} in {self.kind} optimizer: {extra}"
            self.report(message, self._report)

    def report(self, message: str, log: Callable[[str], None]) -> None:
        """Log a message unless it has been logged."""
        if message not in self._reported:
            self._reported.add(message)
            log(message)


def attributes(optimizer: Any) -> list[str]:
    """The attributes of an optimizer that nothing reads, without private ones."""
    read = {"host_state_is_dirty", "ipu_state_is_dirty", *KNOWN, *OWN_ATTRIBUTES}
    return [name for name in optimizer.__dict__ if not name.startswith("_") and name not in read]


# ---------------------------------------------------------------- setOptimizer after compilation

#: PopART's names of the attributes.
CALLED = {
    "lr": "learning rates",
    "weight_decay": "weight decays",
    "momentum": "momentums",
    "dampening": "dampenings",
    "velocity_scaling": "velocity scalings",
    "alpha": "alphas",
    "max_weight_norm": "max weight norms",
}


class OptimizerReplacementError(Error, ValueError):
    """The new optimizer would need another compilation."""

    type = "popart_exception"

    def __init__(self, message: str) -> None:
        self.message = f"New optimizer is not a valid replacement. {message}"
        super().__init__(f"'{self.type}': {self.message}")


def check_replacement(old: Settings, new: Settings) -> None:
    """Raise OptimizerReplacementError, a ValueError, unless only variable values differ."""
    if new.kind != old.kind:
        raise OptimizerReplacementError(
            f"Can not replace optimizer of type {old.kind.name} with new optimizer of type "
            f"{new.kind.name}"
        )
    if new.max_grad_norm != old.max_grad_norm:
        raise OptimizerReplacementError(
            f"Clip norm settings do not match: max_grad_norm was {old.max_grad_norm} and is "
            f"{new.max_grad_norm}"
        )
    if new.tensorflow != old.tensorflow:
        raise OptimizerReplacementError("use_tf_variant does not match")
    for name, dtype in old.types.items():
        if new.types[name] != dtype:
            raise OptimizerReplacementError(
                f"Accumulation types do not match: {name} was {dtype} and is {new.types[name]}"
            )
    check_value("loss scaling", old.loss_scaling, new.loss_scaling)
    for name, value in old.defaults.items():
        check_value(CALLED.get(name, name), value, new.defaults[name])
    for parameter, number in new.group_of.items():
        if parameter in old.group_of:  # one that joins has nothing yet that could differ
            for name, value in old.groups[old.group_of[parameter]].items():
                check_value(CALLED.get(name, name), value, new.groups[number][name])


def check_value(called: str, old: Value, new: Value) -> None:
    """Check that constants keep their values, and that no value becomes constant or variable."""
    if old.constant != new.constant:
        was, now = ("constant" if value.constant else "variable" for value in (old, new))
        raise OptimizerReplacementError(f"Problem with {called}. Was {was}, and is {now}")
    if old.constant and old.value != new.value:
        raise OptimizerReplacementError(
            f"Problem with {called}. Constant, {old.value}, and given as {new.value}"
        )
