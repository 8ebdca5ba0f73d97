"""Parameters of optimizers that are flat parts of a model's: which, and from where.

ZeRO, FSDP1 and distributed optimizers hold one-dimensional tensors, cut out of parameters that are
put one behind the other. A part is found by its memory if it is a view, by FSDP1's own account, or
by its elements, which are those of the model's parameters at the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .names import Names

__all__ = ["Piece", "Shards"]

ANCHORS = 8
"""Elements by which a part is looked for."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter in an optimizer's, from `begin` to `end`; all of it if `slice` is None.

    **Attributes**: `slice`, where the part begins in the flattened parameter, and its shape.
    """

    tag: str
    name: str
    begin: int = 0
    end: int = 0
    slice: tuple[int, tuple[int, ...]] | None = None

    def cut(self, tensor: Tensor) -> Tensor:
        """The part of a tensor that is laid out as the optimizer's parameter."""
        if self.slice is None:
            return tensor
        return tensor.detach().reshape(-1)[self.begin : self.end]


class Shards:
    """The tensors that optimizers' parameters are parts of. Owner: the rank's main thread."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[int, list[Piece]] = {}
        #: Of FSDP1's original parameters; they stay the same. For so many roots.
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._read = -1

    def of_parameter(self, tag: str, name: str, parameter: Tensor) -> list[Piece]:
        """The parts of a module's parameter: itself, or those of a flat one."""
        if hasattr(parameter, "_shard_param_infos"):
            return list(_of_fsdp(tag, name, parameter))
        cut = self._originals().get(id(parameter))
        if cut is not None:  # FSDP1 with use_orig_params: what is left of a parameter on this rank
            return [Piece(tag, name, 0, parameter.numel(), cut)] if parameter.numel() else []
        return [Piece(tag, name)]

    def _originals(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Of the parameters that FSDP1 keeps beside a flat one: where they begin, and the shape."""
        if self._read == len(self._names.roots):
            return self._kept
        self._read = len(self._names.roots)
        found = self._kept
        for root in self._names.roots.values():
            for module in root.modules():
                flat = getattr(getattr(module, "_handle", None), "flat_param", None)
                for parameter, shape, info in zip(
                    getattr(flat, "_params", None) or (),
                    getattr(flat, "_shapes", ()),
                    getattr(flat, "_shard_param_infos", ()),
                    strict=False,
                ):
                    if info.in_shard:
                        found[id(parameter)] = info.intra_param_start_idx, tuple(shape)
                    elif parameter.numel() == 0:
                        found[id(parameter)] = 0, tuple(shape)
        return found

    def of(self, parameter: Tensor) -> list[Piece]:
        """The parts of an optimizer's parameter; none if it is found in no module."""
        known = self._names.of_parameter(parameter)
        if known is not None:
            return self.of_parameter(*known, parameter)
        found = self._found.get(id(parameter))
        if found is None:
            found = self._found[id(parameter)] = list(self._search(parameter))
        return found

    def _search(self, parameter: Tensor) -> Iterator[Piece]:
        if hasattr(parameter, "_shard_param_infos"):
            yield from _of_fsdp("", "", parameter)
            return
        if parameter.dim() != 1 or hasattr(parameter, "placements"):
            return
        local = [
            (tag, name, each)
            for tag, name, each in self._names.weights()
            if not hasattr(each, "placements")
        ]
        viewed = list(_views(parameter, local))
        yield from viewed or _by_elements(parameter, local)


def _views(parameter: Tensor, local: list[tuple[str, str, Any]]) -> Iterator[Piece]:
    size = parameter.element_size()
    begin = parameter.data_ptr()
    end = begin + parameter.numel() * size
    for tag, name, each in local:
        if not each.is_contiguous() or each.element_size() != size:
            continue
        first = each.data_ptr()
        low, high = max(begin, first), min(end, first + each.numel() * size)
        if low < high:
            cut = (low - first) // size, tuple(each.shape)
            yield Piece(tag, name, (low - begin) // size, (high - begin) // size, cut)


def _by_elements(parameter: Tensor, local: list[tuple[str, str, Any]]) -> Iterator[Piece]:
    """Look for the part in the parameters, one behind the other, by elements that stand once."""
    if not local:
        return
    mine = parameter.detach().to(torch.float64).cpu().numpy()
    flat = np.concatenate([each.detach().double().cpu().numpy().reshape(-1) for *_, each in local])
    values, places, repeats = np.unique(flat, return_index=True, return_counts=True)
    at = np.searchsorted(values, mine).clip(max=max(len(values) - 1, 0))
    unique = (values[at] == mine) & (repeats[at] == 1) & (mine != 0)
    anchors = np.flatnonzero(unique)
    if not len(anchors):
        return
    distances = places[at[anchors]] - anchors
    # Of each run of one distance: the elements round its anchors that are equal too.
    start = 0
    for tag, name, each in local:
        size = each.numel()
        inside = (places[at[anchors]] >= start) & (places[at[anchors]] < start + size)
        if inside.any():
            shift = np.bincount(distances[inside] - distances[inside].min()).argmax()
            distance = int(shift + distances[inside].min())
            low, high = max(0, start - distance), min(len(mine), start + size - distance)
            same = mine[low:high] == flat[low + distance : high + distance]
            if same.all() and low < high:
                yield Piece(tag, name, low, high, (low + distance - start, tuple(each.shape)))
        else:
            yield from _constant(mine, flat, start, size, distances, tag, name, each)
        start += size


def _constant(
    mine: np.ndarray,
    flat: np.ndarray,
    start: int,
    size: int,
    distances: np.ndarray,
    tag: str,
    name: str,
    each: Any,
) -> Iterator[Piece]:
    """A parameter of equal elements lies between its neighbours, if all have one distance."""
    if len(set(distances.tolist())) != 1:
        return
    distance = int(distances[0])
    low, high = max(0, start - distance), min(len(mine), start + size - distance)
    if low < high and (mine[low:high] == flat[low + distance : high + distance]).all():
        yield Piece(tag, name, low, high, (low + distance - start, tuple(each.shape)))


def _of_fsdp(tag: str, name: str, parameter: Any) -> Iterator[Piece]:
    """The parts of a FlatParameter, by its own account."""
    prefix = name.rpartition(".")[0]
    at = 0
    for fqn, shape, info in zip(
        parameter._fqns, parameter._shapes, parameter._shard_param_infos, strict=True
    ):
        if not info.in_shard:
            continue
        inner = ".".join(p for p in fqn.split(".") if p != "_fsdp_wrapped_module")
        full = f"{prefix}.{inner}" if prefix else inner
        at = info.offset_in_shard
        cut = info.intra_param_start_idx, tuple(shape)
        yield Piece(tag, full, at, at + info.numel_in_shard, cut)
