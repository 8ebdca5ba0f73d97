"""One tensor of both programs: the whole of the reference, and the parts of the candidate's ranks.

A module may be called several times in a step, for microbatches or as it is shared. Its calls are
compared one by one where both programs make as many, else together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .relations import Array, Near, Partition, Parts, Relation
from .traces import Event

__all__ = [
    "OF_WEIGHTS",
    "TOLERANCE",
    "UNLIKE",
    "How",
    "Item",
    "arrangements",
    "largest",
    "one_array",
    "one_of",
    "unsliced",
    "unsliced_parts",
    "whole_of",
]

OF_WEIGHTS = ("weight", "weight gradient", "weight gradient, clipped", "optimizer state")
TOLERANCE = 1e-9
WORDS = {
    "bits": "random bits of ",
    "gradient": "gradient of the output of ",
    "logged": "log of ",
    "loss": "",
    "norm": "",
    "watched": "watched tensor ",
}
"""The text before a tensor's name, for kinds whose own name does not fit."""
UNLIKE = "the microbatches have different shapes"


@dataclass(eq=False)
class Item:
    """One tensor of the reference, with the parts of the candidate's ranks.

    **Attributes**: `order`, when the reference computed it; `relation`, None if there is none;
    `problem`, why it does not count as related; `near`, when it was the same; `bits`, of each rank,
    a digest of random bits; `calls`, how many are put one behind the other, in the dimension that
    `whole` and `parts` are given; `together`, all calls of the step as one tensor.
    """

    kind: str
    root: str
    name: str
    leaf: str
    step: int
    count: int
    order: int
    whole: Callable[..., Any]
    parts: Callable[..., Parts]
    ranks: tuple[int, ...]
    relation: Relation | None = None
    problem: str = ""
    compared: bool = True
    near: Near = field(default_factory=lambda: Near(TOLERANCE))
    calls: int = 1
    together: Item | None = None
    bits: dict[int, str] = field(default_factory=dict)
    narrow: str = ""
    added: int = 0
    claims: dict[int, Any] = field(default_factory=dict)

    @property
    def related(self) -> bool:
        return self.relation is not None and not self.problem

    @property
    def label(self) -> str:
        """The tensor, in a few words."""
        name = self.name or self.root
        leaf = self.leaf.lstrip(".")
        if leaf:
            name += f" ({leaf})" if self.kind == "optimizer state" else f"[{leaf}]"
        call = f", call {self.count + 1}" if self.count > 0 else ""
        what = WORDS.get(self.kind, f"{self.kind} of ")
        return f"{what}{name}{call}, step {self.step}"


How = int | str
"""How the calls of a step are put together: in a dimension, by "sum", or one of "same" ones."""


def one_array(events: Sequence[Event], how: How, pool: tuple[int, ...]) -> Array:
    """The calls of a step as one array. **Raises**: ValueError if they do not fit together.

    `pool` are the blocks in which large tensors are added, if any is large.
    """
    arrays = [event.coarse(pool) if pool else event.array for event in events]
    first = arrays[0]
    if len(arrays) == 1:
        return first
    if isinstance(how, int) and first.ndim > how:
        if len({each.shape[:how] + each.shape[how + 1 :] for each in arrays}) > 1:
            raise ValueError(UNLIKE)
        return np.concatenate(arrays, how)
    if len({each.shape for each in arrays}) > 1:
        raise ValueError(UNLIKE)
    if how == "same":
        if not all(np.allclose(each, first, TOLERANCE, 0, equal_nan=True) for each in arrays):
            raise ValueError(UNLIKE)
        return first
    return sum(arrays[1:], first)


def one_of(ranks: Mapping[int, list[Event]], how: How, pool: tuple[int, ...]) -> Any:
    """The whole tensor of the reference: of one rank, or what several have."""
    arrays = [one_array(events, how, pool) for events in ranks.values()]
    return arrays[0] if len(arrays) == 1 else arrays


def unsliced(ranks: Mapping[int, list[Event]]) -> list[Array]:
    """The tensors that flat slices of each rank give; NaN where a rank has none."""
    found = []
    for events in ranks.values():
        shape = next((event.slice.shape for event in events if event.slice), events[0].shape)
        flat = np.full(int(np.prod(shape)), np.nan)
        for event in events:
            begin = event.slice.start if event.slice else 0
            flat[begin : begin + event.array.size] = event.array.reshape(-1)
        found.append(flat.reshape(shape))
    return found


def unsliced_parts(ranks: Mapping[int, list[Event]], meshes: Sequence[Partition]) -> Parts:
    """The parts of ranks that hold flat slices: filled up by those of groups that have the rest."""
    own = dict(zip(ranks, unsliced(ranks), strict=True))
    if not any(np.isnan(each).any() for each in own.values()):
        return own
    for mesh in sorted(meshes, key=lambda mesh: len(mesh[0])):
        filled: Parts = {}
        for group in mesh:
            held = [rank for rank in group if rank in own]
            if not held:
                continue
            total = own[held[0]].copy()
            for rank in held[1:]:
                if own[rank].shape != total.shape:
                    break
                total = np.where(np.isnan(total), own[rank], total)
            filled |= dict.fromkeys(held, total)
        if all(not np.isnan(each).any() for each in filled.values()):
            return filled
    return own


def first_of(whole: Any) -> Array:
    """The whole tensor, of the reference's first rank if there are several."""
    found: Array = whole[0] if isinstance(whole, list) else whole
    return found


def arrangements(item: Item) -> Iterator[tuple[Array, Parts]]:
    """Yield candidates for the whole tensor, each with its parts."""
    ways: list[How] = [0]
    if item.calls > 1:
        ways += [1, "same"]
        ways += ["sum"] * (item.kind in ("gradient", "local gradient"))
    failed = 0
    for how in ways:
        try:
            wholes, parts = item.whole(how), item.parts(how)
        except ValueError:
            failed += 1
            if failed == len(ways):
                raise
            continue
        for whole in candidates(wholes):
            yield whole, parts
            if not item.name:
                # Of a pipeline's stages, the last one alone hands out what the whole model does.
                like = {r: p for r, p in parts.items() if p.shape[1:] == whole.shape[1:]}
                if 0 < len(like) < len(parts):
                    yield whole, like


def candidates(whole: Any) -> Iterator[Array]:
    """The candidates for the whole tensor: the one rank's, or what the reference's ranks give."""
    if not isinstance(whole, list):
        yield whole
        return
    first = whole[0]
    if all(each.shape == first.shape for each in whole):
        if all(np.allclose(each, first, rtol=1e-9, atol=0) for each in whole):
            yield first
            return
    for dim in range(first.ndim):
        try:
            yield np.concatenate(whole, dim)
        except ValueError:
            continue
    if all(each.shape == first.shape for each in whole):
        total = np.sum(whole, axis=0)
        yield total
        yield total / len(whole)


def whole_of(item: Item) -> Array | None:
    """The whole tensor, in whatever way its calls fit together; None if they do not."""
    try:
        return next(whole for whole, _ in arrangements(item))
    except (ValueError, StopIteration):
        return None


def largest(item: Item) -> float:
    whole = whole_of(item)
    return 0.0 if whole is None else float(np.abs(whole).max(initial=0.0))
