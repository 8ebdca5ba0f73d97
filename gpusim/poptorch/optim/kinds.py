"""PopTorch's kinds of optimizers, and which of them one of poptorch.optim or torch.optim is."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from .adam import Adam, AdamW
from .lamb import LAMB
from .rmsprop import RMSprop
from .sgd import SGD

__all__ = ["OptimizerType", "kind_of"]


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


OWN = (SGD, Adam, AdamW, RMSprop, LAMB)
TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)


def kind_of(optimizer: Any) -> OptimizerType:
    """What kind it is. AssertionError for others, and for groups of both kinds of RMSprop."""
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
    if isinstance(optimizer, LAMB):
        return OptimizerType.LAMB if optimizer.bias_correction else OptimizerType.LAMB_NO_BIAS
    raise AssertionError(f"Unsupported optimizer type. Types supported {list(OptimizerType)}")


def is_centered(optimizer: Any) -> bool:
    """Whether this RMSprop is centred, which all groups have to agree on."""
    centered = optimizer.param_groups[0]["centered"]
    for number, group in enumerate(optimizer.param_groups):
        assert group["centered"] == centered, (
            "All parameter groups must have the same value for the 'centered' attribute (Group 0: "
            f"{centered} / Group {number}: {group['centered']})"
        )
    return bool(centered)


def is_subclass(optimizer: Any) -> bool:
    """Whether somebody derived it from one that is known: what that changes is not run."""
    return type(optimizer) not in (*OWN, *TORCHS)
