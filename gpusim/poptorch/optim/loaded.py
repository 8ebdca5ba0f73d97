"""Numbers of `ipu_param` that a user has loaded: a model computes with them.

On an IPU they are tensors: `load_state_dict` writes them, and `setOptimizer` writes all anew if a
value of the optimizer differs from before. Those of SGD are products, from which its attributes
cannot always be told; its rules take them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .kinds import KINDS, OptimizerType
from .settings import Settings, Value
from .sgd import NUMBERS, SCALING
from .state import LOSS_SCALING, SPECIFIC, exported_values

__all__ = ["changed_numbers", "with_numbers"]

SGDS = (OptimizerType.SGD1, OptimizerType.SGD2)


def changed_numbers(settings: Settings, loaded: Mapping[str, Tensor]) -> dict[str, float]:
    """The loaded numbers that differ from those of the settings, by their names in `ipu_param`.

    Names that these settings do not have are ignored.

    **Raises**: ValueError for a tensor of more or fewer elements than one, and for a loss scaling
    of 0.
    """
    found = {}
    for name, own in exported_values(settings).items():
        if name not in loaded:
            continue
        if loaded[name].numel() != 1:
            raise ValueError(
                f"{name}: the loaded state has the shape {tuple(loaded[name].shape)}, expected one "
                "number"
            )
        number = float(loaded[name].float())
        if number != float(own):
            found[name] = number
    if found.get(LOSS_SCALING) == 0:
        raise ValueError(f"{LOSS_SCALING}: the loaded loss scaling is 0")
    return found


def with_numbers(settings: Settings, numbers: Mapping[str, float]) -> Settings:
    """The settings with other numbers in `ipu_param`: `exported_values` gives them.

    Each parameter with a number of its own has a group of its own.

    **Raises**: ValueError for Nesterov's momentum: not all of PopART's numbers are in `ipu_param`.
    """
    if not numbers:
        return settings
    scaling = settings.loss_scaling
    if LOSS_SCALING in numbers:
        scaling = Value(numbers[LOSS_SCALING], constant=False)
    is_sgd = settings.kind in SGDS
    groups, group_of = list(settings.groups), dict(settings.group_of)
    for parameter, number in settings.group_of.items():
        suffix = f"{SPECIFIC}{parameter}"
        own = {
            name.removesuffix(suffix): value
            for name, value in numbers.items()
            if name.endswith(suffix)
        }
        if own or (is_sgd and LOSS_SCALING in numbers):
            group_of[parameter] = len(groups)
            changes = sgd_values if is_sgd else single_values
            groups.append({**groups[number], **changes(settings, number, own, scaling)})
    return replace(settings, loss_scaling=scaling, groups=tuple(groups), group_of=group_of)


def single_values(
    settings: Settings, group: int, own: Mapping[str, float], scaling: Value
) -> dict[str, Value]:
    """The attributes that numbers stand for; a pair has two numbers."""
    values = settings.values(group)
    for name, (attribute,), _ in KINDS[settings.kind].exported(values, settings.constant(group)):
        if name not in own:
            continue
        if attribute == "betas":
            first, second = values["betas"]
            pair = (own[name], second) if name.endswith("1") else (first, own[name])
            values["betas"] = pair
        else:
            values[attribute] = own[name]
    return {
        name: replace(value, value=values[name]) for name, value in settings.groups[group].items()
    }


def sgd_values(
    settings: Settings, group: int, own: Mapping[str, float], scaling: Value
) -> dict[str, Value]:
    """All numbers of a parameter; those that were not loaded stay what they are."""
    values: dict[str, Any] = settings.values(group)
    if values["nesterov"]:
        raise ValueError(
            "the loaded ipu_param differs from the optimizer's values: with nesterov=True they "
            "cannot differ, as it lacks numbers of PopART's"
        )
    values["loss_scaling"] = settings.loss_scaling.value
    exported = KINDS[settings.kind].exported(values, settings.constant(group))
    numbers = {
        name: own.get(name, combine(*(values[attribute] for attribute in attributes)))
        for name, attributes, combine in exported
    }
    return {NUMBERS: Value({**numbers, SCALING: scaling.value}, constant=False)}
