"""Why the first tensor has no relation: a reason by its kind, from the tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .comparing import Comparison
from .items import OF_WEIGHTS, Item, arrangements
from .relations import Array, Relation, Search, contains, relate, scales_of

__all__ = ["Finding", "explain"]

FACTOR = 16
"""The largest number of a fraction that is looked for where a tensor is too large or too small."""
ROUNDING = 2e-2
"""The largest error that narrow numbers make, by bfloat16's 8 bits after some operations."""
BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


@dataclass(frozen=True)
class Finding:
    """All that is known of the first tensor without a relation.

    **Attributes**: `reason`, one of a few words; `text`, a sentence; `error`, its largest
    difference by the largest element, NaN if no parts have the shape; `right`, ranks whose part is
    one of the reference's; `module`, class and file:line; `call`, the last collective before it.
    """

    reason: str
    text: str
    error: float
    right: tuple[int, ...]
    module: tuple[str, str]
    call: str


def explain(found: Comparison) -> Finding | None:
    """The reason for a comparison's first tensor; None if there is none."""
    item = found.first
    if item is None:
        return None
    whole, parts = next(arrangements(item))
    right = tuple(rank for rank, part in parts.items() if contains(whole, part, item.near))
    search = Search(whole, found.meshes, replace(item.near, scales=()), True)
    search.run(parts)
    error = min((_error(joined, whole) for _, joined in search.complete), default=float("nan"))
    if item.related or item.problem:
        error = 0.0 if item.problem else error
    reason, text = _reason(found, item, whole, parts, right, error)
    return Finding(reason, text, error, right, _module(found, item), _call(found, item))


def _error(part: Array, whole: Array) -> float:
    size = float(np.abs(whole).max(initial=0.0))
    return float(np.abs(part - whole).max(initial=0.0)) / size if size else float("inf")


def _reason(
    found: Comparison,
    item: Item,
    whole: Array,
    parts: dict[int, Array],
    right: Sequence[int],
    error: float,
) -> tuple[str, str]:
    kind, _, rest = item.problem.partition(" ")
    if kind == "bits":
        how, one, other = rest.split(" ")
        if how == "again":
            return "other random bits", (
                f"rank {one} draws other random bits as it computes the module again in backward"
            )
        if how == "differ":
            return "other random bits", (
                f"ranks {one} and {other} hold the same tensor and draw other random bits for it"
            )
        return "the same random bits", (
            f"ranks {one} and {other} hold different shards and draw the same random bits for them"
        )
    if kind == "copies":
        return "copies", "the shards of this weight are copies of each other: one seed for all"
    if kind == "steps":
        return "ranks differ", f"ranks make other numbers of optimizer steps: {rest}"
    if kind == "order":
        return (
            "another order",
            "it has the reference's rows, over batch and sequence, in another order",
        )
    if kind == "scale" and item.kind != "gradient":
        return _scaled(float(rest), found, "than the reference's, or its mean over the ranks")
    if kind == "scale":
        return _scaled(float(rest), found, "than the gradients that came before it in backward")
    if item.kind == "weight" and item.step == 0:
        wrong = [rank for rank in parts if rank not in right]
        return "weights differ", (
            f"the weight of rank{'s' * (len(wrong) > 1)} {_list(wrong)} is not the reference's"
            if wrong and right
            else "the ranks' weights are parts of the reference's that do not make up the whole"
            if not wrong
            else "the weight is no part of the reference's"
        )
    relaxed = _relaxed(found, item, whole, parts)
    if relaxed is not None:
        if relaxed.sums and item.kind in (*OF_WEIGHTS, "norm"):
            return "never reduced", (
                f"the ranks' parts add up to the reference's ({relaxed}): they were not reduced"
            )
        if relaxed.scale != 1:
            return _scaled(relaxed.scale, found, "than the reference's")
    by_bias = _up_to_a_bias(found, item, whole, parts)
    if by_bias:
        return by_bias
    if item.narrow or error < 1e-5:
        narrow = _narrow(found)
        if error < ROUNDING and narrow:
            where = ", ".join(f"{name} in the {place}" for name, place in narrow.items())
            return "only rounding", f"only rounding: {error:.1e}; {where}"
    values = [part.reshape(-1) for part in parts.values()]
    if item.kind == "norm" and any(not np.array_equal(each, values[0]) for each in values):
        return "never reduced", "each rank has a norm of its own, of the gradients that it holds"
    source = _partial_source(found, item)
    if source is not None:
        return "never reduced", (
            f"it is computed from parts that add up: the {source.label} is {source.relation}"
        )
    if right and len(right) < len(parts):
        wrong = [rank for rank in parts if rank not in right]
        return "ranks differ", f"it is wrong on rank{'s' * (len(wrong) > 1)} {_list(wrong)} alone"
    return "other values", "its elements are computed otherwise"


def _partial_source(found: Comparison, item: Item) -> Item | None:
    """The output or gradient just before the item, if it is spread in parts that add up."""
    kinds = {"output": ("output",), "loss": ("output",), "gradient": ("gradient",)}
    for each in reversed(found.before(5)):
        if each.kind in kinds.get(item.kind, ()):
            sums = each.relation is not None and each.relation.sums
            return each if sums else None
    return None


def _scaled(scale: float, found: Comparison, than: str) -> tuple[str, str]:
    if scale > 1:
        return "reduced twice", (
            f"it is {scale:.6g} times larger {than}: reduced twice, or not divided"
        )
    return "divided by the wrong size", (
        f"it is {1 / scale:.6g} times smaller {than}: divided by the wrong size"
    )


def _relaxed(
    found: Comparison, item: Item, whole: Array, parts: dict[int, Array]
) -> Relation | None:
    """The relation that the tensor has if sums and factors are allowed."""
    ranks = found.candidate.ranks
    small = range(1, FACTOR + 1)
    any_scale = tuple({a / b for a in small for b in small} - {1.0})
    for sums, scales in (
        (False, scales_of(ranks)),
        (True, ()),
        (True, scales_of(ranks)),
        (False, any_scale),
        (item.kind == "loss", any_scale),
    ):
        near = replace(item.near, scales=scales)
        relation = relate(parts, whole, found.meshes, near, sums=sums)
        if relation is not None and (not relation.trivial or whole.size == 1):
            return relation
    return None


def _up_to_a_bias(
    found: Comparison, item: Item, whole: Array, parts: dict[int, Array]
) -> tuple[str, str] | None:
    """Whether all rows of an output are wrong by the same: a bias."""
    if item.kind != "output" or whole.ndim < 2:
        return None
    search = Search(whole, found.meshes, replace(item.near, scales=()), True)
    search.run(parts)
    for steps, joined in search.complete:
        apart = (joined - whole).reshape(-1, whole.shape[-1])
        if float(np.abs(apart - apart[0]).max(initial=0.0)) <= item.near.bound(whole) * 4:
            if any(step.op == "P" for step in steps):
                return "never reduced", (
                    "the ranks' parts add up to the reference's and a bias: they were not reduced"
                )
            return "bias", "all rows are wrong by the same: a bias is added more than once, or not"
    return None


def _narrow(found: Comparison) -> dict[str, str]:
    narrow: dict[str, str] = {}
    for own in (*found.reference.ends("narrow"), *found.candidate.ends("narrow")):
        narrow |= own or {}
    return narrow


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _module(found: Comparison, item: Item) -> tuple[str, str]:
    """The class and file:line of the item's module, or of the one that holds the parameter."""
    about: dict[str, Any] = {}
    for own in (*found.candidate.ends("modules"), *found.reference.ends("modules")):
        about = {**(own or {}), **about}
    name = item.name
    while True:
        known = about.get(f"{item.root}/{name}")
        if known is not None:
            return known[0], known[1]
        if not name:
            return "", ""
        name = name.rpartition(".")[0]


def _call(found: Comparison, item: Item) -> str:
    """The last collective that a rank which is wrong made before the tensor."""
    for rank in found.candidate.by_rank:
        orders = [
            event.order
            for event in rank.events
            if (event.kind, event.leaf, event.step) == (item.kind, item.leaf, item.step)
            and found.matching.key(event) == (item.root, item.name)
        ]
        if not orders:
            continue
        calls = rank.end.get("calls") or []
        before = [call for call in calls if call[0] < min(orders)]
        if before:
            _, name, site, ranks = before[-1]
            return f"{name} of ranks {_list(ranks)} at {site}" if ranks else f"{name} at {site}"
    return ""
