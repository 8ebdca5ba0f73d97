"""The engine that runs a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

from ..private import has_gpu

if TYPE_CHECKING:
    from ..calls.group import RankGroup
    from .watch import Watch

__all__ = ["engine_of_group"]


def engine_of_group(watch: Watch, group: RankGroup, device: str) -> str:
    """The engine that runs a group's calls on tensors of a device, "" for a call without tensors.

    The engine of the check stands for that of the program's world. A group that the program gives
    gloo beside a world of another backend stays gloo's.
    """
    engines: dict[str, str] = vars(group).setdefault("watched_engines", {})
    if device not in engines:
        engines[device] = _engine(watch, group, device)
    return engines[device]


def _engine(watch: Watch, group: RankGroup, device: str) -> str:
    if not device and watch.rank.launch.device is None and not has_gpu():
        device = "cpu"
    named = _by_device(group, device)
    if not watch.engine or watch.engine == named:
        return named
    world = dist.group.WORLD
    others = world is not None and world.name() != "gloo"
    mixed = "," in group._backend or group._backend.lower() in ("", "undefined")
    plays = watch.rank.launch.device == "cpu"
    if named == "gloo" and (others or (mixed and plays)):
        return "gloo"
    return watch.engine


def _by_device(group: RankGroup, device: str) -> str:
    """The name of the backend that the program gives the group for tensors of the device."""
    default = "gloo" if device == "cpu" else "nccl"
    for part in group._backend.lower().split(","):
        kind, _, name = part.rpartition(":")
        if name in ("", "undefined"):
            return default
        if kind in ("", device or "cuda"):
            return name
    return group.name()
