"""The names of parameters, and the ranks that have copies of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch import nn

from ..memory import array_of
from ..private import is_dtensor

__all__ = ["called_by_dtensor", "ddp_groups", "names_of", "replicas_of", "settings_of"]


def names_of(modules: Sequence[nn.Module]) -> dict[int, str]:
    """The names of parameters, by their ids: those of the module with most parameters."""
    tables = [list(each.named_parameters()) for each in modules]
    found: dict[int, str] = {}
    taken: dict[str, int] = {}
    for table in sorted(tables, key=len, reverse=True):
        for name, each in table:
            if id(each) not in found:
                taken[name] = taken.get(name, 0) + 1
                found[id(each)] = name if taken[name] == 1 else f"{name} ({taken[name]})"
    return found


def ddp_groups(modules: Sequence[Any]) -> dict[int, list[int]]:
    """The ranks over which DDP reduces the gradients of parameters, by their ids."""
    found: dict[int, list[int]] = {}
    for module in modules:
        if module is None:  # of a weak reference
            continue
        ranks = list(dist.get_process_group_ranks(module.process_group))
        ignored = getattr(module, "parameters_to_ignore", ())
        for name, each in module.module.named_parameters():
            if each.requires_grad and name not in ignored:
                found[id(each)] = ranks
    return found


def called_by_dtensor() -> bool:
    """Whether DTensor makes the call that is posted now, to give a tensor other placements."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if (frame.f_globals.get("__name__") or "").startswith("torch.distributed.tensor"):
            return True
        frame = frame.f_back
    return False


def replicas_of(parameter: Any) -> list[int] | None:
    """The ranks that have the same part of a DTensor's values; None for other tensors."""
    if not is_dtensor(parameter):
        return None
    mesh = parameter.device_mesh
    whole: Any = array_of(mesh.mesh, "check")  # whatever dispatch modes the program has
    here = mesh.get_coordinate()
    if here is None:
        return None
    index = tuple(
        slice(None) if each.is_replicate() else at
        for each, at in zip(parameter.placements, here, strict=True)
    )
    return sorted(whole[index].flatten().tolist())


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group of parameters that are numbers."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, int | float):
            found[name] = value
        elif isinstance(value, tuple) and all(isinstance(each, int | float) for each in value):
            found[name] = list(value)
    return found
