"""Parts of a run's state that are no tensors: as JSON, or as digests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["groups_of", "random_state", "scaler_state", "scheduler_state"]

HOW = {
    "capturable",
    "differentiable",
    "foreach",
    "fused",
    "initial_lr",
    "param_names",
    "params",
}
"""Options of parameter groups that change no result, or that schedulers keep there."""


def random_state() -> dict[str, str]:
    """Digests of the states of this process's generators, by names for people.

    >>> sorted(random_state())
    ['numpy', 'python', 'torch']
    """
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002  # the programs' own
    return {
        "torch": _digest(torch.default_generator.get_state().numpy().tobytes()),
        "numpy": _digest(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()),
        "python": _digest(repr(random.getstate()).encode()),
    }


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def number(value: Any) -> Any:
    """A value as JSON has it: of numbers, texts and sequences of these; None for others."""
    if isinstance(value, Tensor):
        return number(value.tolist()) if value.numel() <= 16 and not value.is_meta else None
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return number(value.item())
    if isinstance(value, list | tuple):
        return [number(each) for each in value]
    return None


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each parameter group that have a say in the results."""
    return [
        {
            str(name): plain
            for name, value in group.items()
            if name not in HOW and (plain := number(value)) is not None
        }
        for group in optimizer.param_groups
    ]


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """The numbers of a scheduler, by their names in its state_dict; no private ones but the lr."""
    try:
        state = scheduler.state_dict()
    except Exception:  # of a class of the program's, which may need more than torch's
        state = vars(scheduler)
    return {
        name: plain
        for name, value in state.items()
        if (not name.startswith("_") or name == "_last_lr")
        and name not in ("verbose", "optimizer")
        and (plain := number(value)) is not None
    }


def scaler_state(scaler: Any) -> dict[str, Any]:
    """The numbers of a GradScaler; none of one that is switched off."""
    state = scaler.state_dict()
    return (
        {name: number(value) for name, value in state.items()} if isinstance(state, Mapping) else {}
    )
