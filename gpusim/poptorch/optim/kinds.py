"""The kinds of optimizers: which one an optimizer is, its attributes, and its update rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from . import adam, rmsprop, sgd
from .rule import Exported, Rule

__all__ = ["KINDS", "Kind", "OptimizerType", "is_subclass", "kind_of"]

Types = Mapping[str, torch.dtype]


class OptimizerType(IntEnum):
    """SGD1 has one accumulator, SGD2 one for gradients and one for velocities."""

    SGD1 = 0
    SGD2 = 1
    ADAM = 2
    ADAMW = 3
    ADAMW_NO_BIAS = 4
    RMSPROP = 5
    RMSPROP_CENTERED = 6
    LAMB = 7
    LAMB_NO_BIAS = 8


@dataclass(frozen=True)
class Kind:
    """The common parts of optimizers of one kind.

    - `values`: the attributes that may differ among groups of parameters.
    - `types`: the attributes that are types of accumulators.
    - `rule`: makes the update rule, from those types and whether it is TensorFlow's variant.
    - `exported`: the numbers of `ipu_param`, from the values and the names of the constant ones.
    - `counts_steps`: whether the state has the number of steps of each parameter.
    """

    values: tuple[str, ...]
    types: tuple[str, ...]
    rule: Callable[[Types, bool], Rule]
    exported: Callable[[dict[str, Any], set[str]], tuple[Exported, ...]]
    counts_steps: bool = False


SGD_VALUES = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
COMBINED_VALUES = (*SGD_VALUES, "velocity_scaling")  # SGD2 ignores that of its groups
ADAM_VALUES = ("lr", "betas", "eps", "weight_decay")
RMSPROP_VALUES = ("lr", "momentum", "weight_decay", "alpha", "eps")
MOMENT_TYPES = ("first_order_momentum_accum_type", "second_order_momentum_accum_type")


def moments(types: Types) -> tuple[torch.dtype, torch.dtype]:
    return types[MOMENT_TYPES[0]], types[MOMENT_TYPES[1]]


def sgd_kind(number: int, attributes: tuple[str, ...], rule: Callable[[Types, bool], Rule]) -> Kind:
    def exported(values: dict[str, Any], constant: set[str]) -> tuple[Exported, ...]:
        return sgd.with_momentum(number) if sgd.has_momentum(values, constant) else sgd.PLAIN

    return Kind(attributes, ("accum_type", "velocity_accum_type"), rule, exported)


def adam_kind(*, decoupled: bool) -> Kind:
    return Kind(
        ADAM_VALUES,
        ("accum_type", *MOMENT_TYPES),
        lambda types, _: adam.AdamRule(moments(types), decoupled),
        lambda values, constant: adam.ADAM,
        counts_steps=True,
    )


def lamb_kind(*, corrected: bool) -> Kind:
    return Kind(
        (*ADAM_VALUES, "max_weight_norm"),
        ("accum_type", *MOMENT_TYPES),
        lambda types, _: adam.LAMBRule(moments(types), corrected),
        lambda values, constant: adam.LAMB_NUMBERS,
        counts_steps=corrected,
    )


def rmsprop_kind(*, centered: bool) -> Kind:
    return Kind(
        RMSPROP_VALUES,
        ("accum_type", *MOMENT_TYPES),
        lambda types, tensorflow: rmsprop.RMSpropRule(moments(types), centered, tensorflow),
        lambda values, constant: rmsprop.EXPORTED,
    )


KINDS = {
    OptimizerType.SGD1: sgd_kind(1, COMBINED_VALUES, lambda types, _: sgd.CombinedSGD()),
    OptimizerType.SGD2: sgd_kind(
        2, SGD_VALUES, lambda types, _: sgd.SeparateSGD(types["velocity_accum_type"])
    ),
    OptimizerType.ADAM: adam_kind(decoupled=False),
    OptimizerType.ADAMW: adam_kind(decoupled=True),
    # PopTorch compiles it to PopART's AdamMode.Adam: its moments are corrected all the same.
    OptimizerType.ADAMW_NO_BIAS: adam_kind(decoupled=True),
    OptimizerType.RMSPROP: rmsprop_kind(centered=False),
    OptimizerType.RMSPROP_CENTERED: rmsprop_kind(centered=True),
    OptimizerType.LAMB: lamb_kind(corrected=True),
    OptimizerType.LAMB_NO_BIAS: lamb_kind(corrected=False),
}


# ---------------------------------------------------------------- the kind of an optimizer

OWN = (sgd.SGD, adam.Adam, adam.AdamW, rmsprop.RMSprop, adam.LAMB)
TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)


def kind_of(optimizer: Any) -> OptimizerType:
    """The kind of an optimizer of poptorch.optim or torch.optim.

    **Raises**: AssertionError for others, and for groups of both kinds of RMSprop.
    """
    if isinstance(optimizer, torch.optim.SGD):
        combined = getattr(optimizer, "use_combined_accum", False)
        return OptimizerType.SGD1 if combined else OptimizerType.SGD2
    # before Adam: torch's AdamW is one, and its Adam may be an AdamW
    decoupled = getattr(optimizer, "defaults", {}).get("decoupled_weight_decay")
    if isinstance(optimizer, torch.optim.AdamW) or decoupled:
        if getattr(optimizer, "bias_correction", True):
            return OptimizerType.ADAMW
        return OptimizerType.ADAMW_NO_BIAS
    if isinstance(optimizer, torch.optim.Adam):
        return OptimizerType.ADAM
    if isinstance(optimizer, torch.optim.RMSprop):
        return OptimizerType.RMSPROP_CENTERED if is_centered(optimizer) else OptimizerType.RMSPROP
    if isinstance(optimizer, adam.LAMB):
        return OptimizerType.LAMB if optimizer.bias_correction else OptimizerType.LAMB_NO_BIAS
    raise AssertionError(f"Unsupported optimizer type. Types supported {list(OptimizerType)}")


def is_centered(optimizer: Any) -> bool:
    """Whether this RMSprop is centred. AssertionError if its groups disagree."""
    centered = optimizer.param_groups[0]["centered"]
    for number, group in enumerate(optimizer.param_groups):
        assert group["centered"] == centered, (
            "All parameter groups must have the same value for the 'centered' attribute (Group 0: "
            f"{centered} / Group {number}: {group['centered']})"
        )
    return bool(centered)


def is_subclass(optimizer: Any) -> bool:
    """Whether its class is derived from a known one. What it overrides does not run."""
    return type(optimizer) not in (*OWN, *TORCHS)
