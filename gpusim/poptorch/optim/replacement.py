"""setOptimizer after compilation: what a new optimizer may have that the compiled one has not."""

from __future__ import annotations

from ..poptorch_core import Error
from .settings import Settings, Value

__all__ = ["OptimizerReplacementError", "check_replacement"]

#: What PopART calls the attributes.
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
    """OptimizerReplacementError, a ValueError too, unless only values that are variable differ."""
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
    """Constants keep their values, and nothing changes between constant and variable."""
    if old.constant != new.constant:
        was, now = ("constant" if value.constant else "variable" for value in (old, new))
        raise OptimizerReplacementError(f"Problem with {called}. Was {was}, and is {now}")
    if old.constant and old.value != new.value:
        raise OptimizerReplacementError(
            f"Problem with {called}. Constant, {old.value}, and given as {new.value}"
        )
