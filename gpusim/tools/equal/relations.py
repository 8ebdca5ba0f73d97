"""How the parts of a tensor on several ranks relate to the whole one: found from their elements.

A relation is a way to put parts together that gives the whole. It is a series of steps, each over
groups of ranks: take one of equal parts (R), put them one behind the other in a dimension (S), add
them (P). `relate` searches for one, in the dimensions of the mesh of ranks one after another, and
tries those first that other tensors had. Elements are in float64, where rounding is 1e-15 and a
wrong program is far off: what fits to 1e-9 is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Near",
    "Partition",
    "Parts",
    "Relation",
    "Step",
    "contains",
    "follow",
    "has_rows",
    "partitions",
    "relate",
    "scales_of",
]

Array = NDArray[Any]
Parts = dict[int, Array]
"""Of each rank that has one: its part."""
Partition = tuple[tuple[int, ...], ...]
"""Groups of ranks, each of one position in all other dimensions of the mesh."""
DEPTH = 3
"""Dimensions of the mesh over which one tensor is spread, at most."""
TRIED = 6000
"""Ways that are tried for a tensor, at most."""
LAYOUTS = ("", "zig-zag", "2 blocks", "3 blocks", "striped")
"""How a dimension is cut: in one piece for each rank; in two, from the front and from the back; as
in fused projections, each of whose 2 or 3 blocks is cut; one element for each rank in turn."""


@dataclass(frozen=True)
class Step:
    """One step of a relation.

    **Attributes**: `op`, R, S or P, or "pieces", where each row of a part is one of the whole's,
    and each of the whole's is in a part: fused projections whose keys several ranks share;
    `groups`, of ranks; `dim`, of S and pieces; `layout`, of S, from `LAYOUTS`.
    """

    op: str
    groups: Partition
    dim: int = 0
    layout: str = ""

    def __str__(self) -> str:
        if self.op == "pieces":
            return f"S({self.dim}) in pieces"
        if self.op == "S":
            return f"S({self.dim}{', ' + self.layout if self.layout else ''})"
        return self.op


@dataclass(frozen=True)
class Relation:
    """How parts give the whole.

    **Attributes**: `steps`; `scale`, the factor by which what they give is larger than the whole;
    `permuted`, over how many dimensions rows are in another order, 0 if they are not; `trivial`,
    whether all elements are equal, so that most relations fit.
    """

    steps: tuple[Step, ...]
    scale: float = 1.0
    permuted: int = 0
    trivial: bool = False

    @property
    def sums(self) -> bool:
        """Whether parts are added."""
        return any(step.op == "P" for step in self.steps)

    def __str__(self) -> str:
        found = [
            f"{step} over {len(step.groups[0])}" for step in self.steps if len(step.groups[0]) > 1
        ]
        text = ", ".join(found) or "the whole"
        text += ", rows in another order" if self.permuted else ""
        return text if self.scale == 1 else f"{text}, times {self.scale:.6g}"


@dataclass(frozen=True)
class Near:
    """When arrays are the same: up to `tolerance`, of the largest element or of `floor`.

    **Attributes**: `scales`: which factors the parts may have, beside 1; `absolute`: a difference
    that is rounding in any case.
    """

    tolerance: float
    floor: float = 0.0
    scales: tuple[float, ...] = ()
    absolute: float = 0.0

    def bound(self, whole: Array) -> float:
        largest = float(np.abs(whole).max(initial=0.0))
        return max(self.tolerance * max(largest, self.floor), self.absolute)

    def scale(self, part: Array, whole: Array) -> float | None:
        """The factor by which a part is the whole; None if it is not."""
        if part.shape != whole.shape:
            return None
        if not np.isfinite(part).all() or not np.isfinite(whole).all():
            return 1.0 if np.array_equal(part, whole, equal_nan=True) else None
        bound = self.bound(whole)
        square = float(np.vdot(whole, whole)) if self.scales else 0.0
        scale = 1.0
        if square:  # the nearest: where bounds are wide, several fit
            fitted = float(np.vdot(whole, part)) / square
            scale = min((1.0, *self.scales), key=lambda each: abs(each - fitted))
        if float(np.abs(part - scale * whole).max(initial=0.0)) <= bound * max(1.0, scale):
            return scale
        return None


def scales_of(*counts: int) -> tuple[float, ...]:
    """The factors that these counts, of ranks or of batches, may make, without 1.

    >>> scales_of(2)
    (0.25, 0.5, 2.0, 4.0)
    """
    products = {1}
    for count in counts:
        products |= {a * b for a in products for b in range(1, count + 1) if count % b == 0}
    found = {a / b for a in products for b in products} - {1.0}
    if len(counts) == 1:
        found |= {a * b for a in found for b in found if (a > 1) == (b > 1)}
    return tuple(sorted(found))


def partitions(ranks: int, groups: Sequence[Sequence[int]] = ()) -> list[Partition]:
    """The dimensions of meshes that the ranks may form: those of known groups first.

    >>> partitions(4)
    [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
    """
    found: list[Partition] = []
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(tuple(group))
    for known in by_size.values():
        for first in known:
            whole, seen = [first], set(first)
            for other in known:
                if not seen & set(other):
                    whole.append(other)
                    seen |= set(other)
            if len(seen) == ranks and len(first) > 1:
                found.append(tuple(sorted(whole)))
    found.append((tuple(range(ranks)),))
    primes = factors(ranks)
    for n in range(len(primes) - 1, 0, -1):
        for axes in itertools.combinations(range(len(primes)), n):
            mesh = np.moveaxis(np.arange(ranks).reshape(primes), axes, range(-n, 0)).reshape(
                -1, int(np.prod([primes[a] for a in axes]))
            )
            found.append(tuple(sorted(tuple(map(int, row)) for row in mesh)))
    return list(dict.fromkeys(found))


def factors(number: int) -> list[int]:
    """The prime factors."""
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


# ---------------------------------------------------------------- putting together


def put_together(parts: Parts, step: Step) -> Parts | None:
    """The parts after a step, by the first rank of each group; None if it does not apply.

    A group may lack ranks: those that hold no part.
    """
    found: Parts = {}
    left = set(parts)
    for group in step.groups:
        own = [parts[rank] for rank in group if rank in parts]
        if not own:
            continue
        at = next(rank for rank in group if rank in parts)
        joined = own[0] if len(own) == 1 else joined_by(own, step)
        if joined is None:
            return None
        found[at] = joined
        left -= set(group)
    return None if left else found  # a part that no group has must not be lost


def joined_by(own: Sequence[Array], step: Step) -> Array | None:
    first = own[0]
    if step.op == "S":
        dim = step.dim
        if first.ndim <= dim:
            return None
        others = first.shape[:dim] + first.shape[dim + 1 :]
        for each in own:
            if each.ndim != first.ndim or each.shape[:dim] + each.shape[dim + 1 :] != others:
                return None
        return cat(own, dim, step.layout)
    if any(each.shape != first.shape for each in own):
        return None
    return sum(own[1:], first) if step.op == "P" else first  # R: equality was seen


def cat(own: Sequence[Array], dim: int, layout: str) -> Array | None:
    """Put parts one behind the other, by a layout of `LAYOUTS`."""
    if not layout:
        return np.concatenate(own, dim)
    sizes = {each.shape[dim] for each in own}
    if len(sizes) > 1:
        return None
    size = sizes.pop()
    if layout == "striped":
        shape = list(own[0].shape)
        shape[dim] = size * len(own)
        return np.stack(own, dim + 1).reshape(shape)
    blocks = 2 if layout == "zig-zag" else int(layout[0])
    if size % blocks:
        return None
    pieces = [np.split(each, blocks, dim) for each in own]
    if layout == "zig-zag":
        ordered = [each[0] for each in pieces] + [each[1] for each in reversed(pieces)]
    else:
        ordered = [each[n] for n in range(blocks) for each in pieces]
    return np.concatenate(ordered, dim)


def equal_in_groups(parts: Parts, groups: Partition, near: Near, whole: Array) -> bool:
    """Whether the parts in each group are the same."""
    for group in groups:
        own = [parts[rank] for rank in group if rank in parts]
        for each in own[1:]:
            if each.shape != own[0].shape or near_parts(own[0], each, near, whole) is False:
                return False
    return True


def near_parts(one: Array, other: Array, near: Near, whole: Array) -> bool:
    """Whether two parts are the same, by the size of the whole tensor or of their own."""
    if one is other or not one.size:
        return True
    if not (np.isfinite(one).all() and np.isfinite(other).all() and np.isfinite(whole).all()):
        return np.array_equal(one, other, equal_nan=True)
    bound = max(near.bound(whole), near.tolerance * float(np.abs(one).max(initial=0.0)))
    return bool(np.abs(one - other).max() <= bound)


# ---------------------------------------------------------------- searching


def relate(
    parts: Mapping[int, Array],
    whole: Array,
    meshes: Sequence[Partition],
    near: Near,
    hints: Sequence[tuple[Step, ...]] = (),
    sums: bool = True,
    permutes: bool = False,
    pieces: bool = True,
) -> Relation | None:
    """Find how parts give the whole.

    **Arguments**:

    - `parts`: of each rank that has one, its part.
    - `whole`: what the reference has.
    - `meshes`: what `partitions` says.
    - `near`: when arrays are the same.
    - `hints`: steps that are tried first.
    - `sums`: whether parts may be added.
    - `permutes`: whether rows may be in another order.
    - `pieces`: whether parts may be any rows of the whole.

    **Returns**: the relation; None if there is none.

    >>> import numpy as np
    >>> whole = np.arange(6.0).reshape(2, 3)
    >>> parts = {0: whole[:, :2], 1: whole[:, 2:]}
    >>> str(relate(parts, whole, partitions(2), Near(1e-9)))
    'S(1) over 2'
    """
    given = {rank: np.asarray(part) for rank, part in parts.items()}
    whole = np.asarray(whole)
    trivial = bool(whole.size < 2 or (whole == whole.reshape(-1)[0]).all())
    for steps in hints:
        found = follow(given, steps, whole, near)
        if found is not None:
            return Relation(steps, found, trivial=trivial)
    search = Search(whole, meshes, near, sums)
    result = search.run(given)
    if result is not None:
        return Relation(*result, trivial=trivial)
    for dim in range(whole.ndim if pieces else 0):
        if in_pieces(given, whole, dim, near):
            return Relation((Step("pieces", (tuple(sorted(given)),), dim),), trivial=trivial)
    if permutes:
        for steps, joined in search.complete:
            for lead, axis in ((1, 0), (1, 1), (2, 0)):
                scale = rows_permuted(joined, whole, near, lead, axis)
                if scale is not None:
                    return Relation(steps, scale, lead, trivial)
    return None


def follow(parts: Parts, steps: Sequence[Step], whole: Array, near: Near) -> float | None:
    """The scale if these steps give the whole; None if they do not."""
    for step in steps:
        if step.op == "pieces":
            return 1.0 if in_pieces(parts, whole, step.dim, near) else None
        if step.op == "R" and not equal_in_groups(parts, step.groups, near, whole):
            return None
        found = put_together(parts, step)
        if found is None:
            return None
        parts = found
    if len(parts) != 1:
        return None
    return near.scale(next(iter(parts.values())), whole)


class Search:
    """A search for the steps from parts to a whole."""

    def __init__(self, whole: Array, meshes: Sequence[Partition], near: Near, sums: bool) -> None:
        self.whole, self.meshes, self.near, self.sums = whole, meshes, near, sums
        self.left = TRIED
        #: Ways to arrays of the whole's shape, which have other elements.
        self.complete: list[tuple[tuple[Step, ...], Array]] = []

    def run(self, parts: Parts) -> tuple[tuple[Step, ...], float] | None:
        everywhere = (tuple(sorted(parts)),)
        if equal_in_groups(parts, everywhere, self.near, self.whole):
            step = Step("R", everywhere)
            scale = self.near.scale(next(iter(parts.values())), self.whole)
            if scale is not None:
                return (step,), scale
        return self.go(parts, (), DEPTH)

    def go(
        self, parts: Parts, steps: tuple[Step, ...], depth: int
    ) -> tuple[tuple[Step, ...], float] | None:
        if len(parts) == 1:
            joined = next(iter(parts.values()))
            scale = self.near.scale(joined, self.whole)
            if scale is not None:
                return steps, scale
            if joined.shape == self.whole.shape and len(self.complete) < 16:
                self.complete.append((steps, joined))
            return None
        if not depth:
            return None
        for groups in self.restricted(parts):
            for step, found in self.moves(parts, groups, depth):
                self.left -= 1
                if self.left < 0:
                    return None
                result = self.go(found, (*steps, step), depth - 1)
                if result is not None:
                    return result
        return None

    def restricted(self, parts: Parts) -> Iterator[Partition]:
        """Partitions of the ranks that hold parts; groups that say the same come once."""
        seen = set()
        for mesh in self.meshes:
            groups = tuple(
                own for group in mesh if (own := tuple(rank for rank in group if rank in parts))
            )
            if groups not in seen and any(len(group) > 1 for group in groups):
                seen.add(groups)
                yield groups

    def moves(self, parts: Parts, groups: Partition, depth: int) -> Iterator[tuple[Step, Parts]]:
        """The steps over groups that may lead to the whole, with what they give."""
        sizes = {len(group) for group in groups}
        last = len(groups) == 1
        if equal_in_groups(parts, groups, self.near, self.whole):
            step = Step("R", groups)
            found = put_together(parts, step)
            if found is not None:
                yield step, found
        for dim in range(self.whole.ndim):
            for layout in LAYOUTS:
                if len(sizes) > 1 and layout:
                    continue
                step = Step("S", groups, dim, layout)
                found = put_together(parts, step)
                if found is not None and self.fits(found, last):
                    yield step, found
                elif not layout:
                    break  # others have the same shape
        if self.sums:
            step = Step("P", groups)
            found = put_together(parts, step)
            if found is not None and self.fits(found, last):
                yield step, found

    def fits(self, parts: Parts, last: bool) -> bool:
        """Whether parts are not larger than the whole; the last one has its shape."""
        shape = self.whole.shape
        for part in parts.values():
            if part.ndim != len(shape):
                return False
            if any(mine > own for mine, own in zip(part.shape, shape, strict=True)):
                return False
            if last and part.shape != shape:
                return False
        return True


def in_pieces(parts: Parts, whole: Array, dim: int, near: Near) -> bool:
    """Whether each row in a dimension of each part is one of the whole's, and none is left over."""
    size = whole.shape[dim]
    if size < 2 or not whole.size or any(part.ndim != whole.ndim for part in parts.values()):
        return False
    rows = np.moveaxis(whole, dim, 0).reshape(size, -1)
    if not rows.size or not np.isfinite(whole).all():
        return False
    if rows.shape[1] == 1 and len(np.unique(rows)) <= size // 2:
        return False  # the same numbers stand for too much
    shape = whole.shape[:dim] + whole.shape[dim + 1 :]
    own = []
    for part in parts.values():
        if part.ndim != whole.ndim or part.shape[:dim] + part.shape[dim + 1 :] != shape:
            return False
        own.append(np.moveaxis(part, dim, 0).reshape(part.shape[dim], rows.shape[1]))
    mine = np.concatenate(own)
    bound = near.bound(whole)
    return bool(len(mine)) and all_near(mine, rows, bound) and all_near(rows, mine, bound)


def has_rows(whole: Array, part: Array, near: Near) -> bool:
    """Whether each row of a part, by its first index, is one of the whole's."""
    if not part.size or not whole.size:
        return not part.size
    rows = whole.reshape(len(whole), -1)
    return all_near(part.reshape(len(part), -1), rows, near.bound(whole))


def all_near(rows: Array, others: Array, bound: float) -> bool:
    """Whether each row is one of the others."""
    weights = np.random.default_rng(rows.shape[1]).standard_normal(rows.shape[1])
    values, theirs = rows @ weights, others @ weights
    order = np.argsort(theirs)
    at = np.searchsorted(theirs[order], values).clip(0, len(order) - 1)
    left, right = order[(at - 1).clip(0)], order[at]
    nearest = np.where(abs(theirs[left] - values) < abs(theirs[right] - values), left, right)
    return bool(np.abs(rows - others[nearest]).max() <= bound)


def rows_permuted(part: Array, whole: Array, near: Near, lead: int, axis: int = 0) -> float | None:
    """The scale if the rows of a part are those of the whole in another order; else None.

    A row is all elements with the same `lead` indices, from `axis` on.
    """
    if whole.ndim <= lead + axis or whole.shape != part.shape or not whole.size:
        return None
    part, whole = np.moveaxis(part, axis, 0), np.moveaxis(whole, axis, 0)
    rows, own = (each.reshape(int(np.prod(each.shape[:lead])), -1) for each in (whole, part))
    if len(rows) < 2:
        return None
    weights = np.random.default_rng(len(rows)).standard_normal(rows.shape[1])
    order, mine = np.argsort(rows @ weights, kind="stable"), np.argsort(own @ weights)
    return near.scale(own[mine], rows[order])


def contains(whole: Array, part: Array, near: Near) -> bool:
    """Whether a part is the whole, or a block of it that begins at a multiple of its size.

    >>> import numpy as np
    >>> contains(np.arange(6.0), np.array([2.0, 3.0]), Near(1e-9))
    True
    """
    if part.ndim != whole.ndim or any(
        not mine or own % mine for mine, own in zip(part.shape, whole.shape, strict=True)
    ):
        return False
    counts = [own // mine for mine, own in zip(part.shape, whole.shape, strict=True)]
    if np.prod(counts) > 4096:
        return False
    for at in itertools.product(*map(range, counts)):
        block = whole[
            tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, part.shape, strict=True))
        ]
        if near.scale(part, block) is not None:
            return True
    return False
