"""The order of a file of `gpusim reveal`, as a Schedule: the engine's trees.

It knows the sizes, types and numbers of ranks that the file has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from gpusim.fallback.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, kind_of, real_of
from gpusim.fallback.operators import ARITHMETIC_OPS
from gpusim.fallback.schedules import Case, Fold, Schedule, Trees, Walk
from gpusim.fallback.trees import SumTree
from gpusim.fallback.wide import ROUNDINGS

from ..revealed import (
    DTYPES,
    SIGNIFICANDS,
    OrderFile,
    RevealedCall,
    RevealedTree,
    read,
)

__all__ = ["RevealedOrder", "problem_of", "revealed_order"]

ACCUMULATORS: dict[int | None, np.dtype[Any]] = {
    8: BFLOAT16,
    11: FLOAT16,
    24: FLOAT32,
    53: FLOAT64,
    None: FLOAT64,
}
"""By the bits of significands; None where no rounding was seen."""

HOW = "gpusim reveal --write reveal_order.py makes the script that reveals others"


@dataclass(frozen=True, eq=False)
class RevealedOrder(Schedule):
    """An engine's order, from a file.

    It knows sums of the file's types, numbers of elements and number of ranks; of several calls of
    one size and type the first. Others are ValueErrors and TypeErrors that list what is known.
    max, min, logical operators and integers, whose bits do not depend on an order, are taken in any
    size, and so is a single member.

    **Attributes**: `name`, the file's as it was given; `file`; `dtype`, of members of one type
    alone, or "".
    """

    name: str = ""
    file: OrderFile | None = field(default=None, repr=False)
    dtype: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RevealedOrder) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        assert self.file is not None
        return f"<the order of {self.name}, CRC-32 {self.file.digest:08x}>"

    @property
    def family(self) -> str:
        """The twin of the same engine, "" if there is none: how it divides, joins and scatters."""
        assert self.file is not None
        engine = self.file.engine.lower()
        return "gloo-ring" if "gloo" in engine else "nccl-ring" if "nccl" in engine else ""

    @property
    def in_trees(self) -> bool:
        """True: trees do not say who sends what to whom."""
        return True

    @property
    def _key(self) -> tuple[str, int, str]:
        assert self.file is not None
        return self.name, self.file.digest, self.dtype

    def concerns(self, op: str, dtype: np.dtype[Any]) -> bool:
        """Whether the order of such members matters."""
        return op in ARITHMETIC_OPS and kind_of(dtype) in ("float", "complex")

    def of(self, dtype: np.dtype[Any]) -> Schedule:
        """The order of members of one type. TypeError for types that the file lacks."""
        self._check_type(dtype)
        return _of_dtype(self, dtype.name)

    def adds_zero(self, op: str, dtype: np.dtype[Any], members: int) -> bool:
        """Whether a fold has +0 added to it: a sum of negative zeros is +0 in the engine."""
        signs = {tree.minus_zero for tree in self._trees(dtype.name)}
        starts = op == "sum" and members > 1 and self.concerns(op, dtype)
        return starts and signs == {False}

    def accumulator(self, op: str, dtype: np.dtype[Any]) -> np.dtype[Any] | None:
        """The type that partial sums are rounded to.

        **Raises**: TypeError for types that the file lacks, ValueError for products, and where the
        file's accumulators differ or are none that kernels have.
        """
        if not self.concerns(op, dtype):
            return None
        if op != "sum":
            raise ValueError(f"op={op!r}: {self.name} has the order of sums")
        self._check_type(dtype)
        trees = self._trees(dtype.name)
        found = {tree.accumulator for tree in trees}
        if len({tree.minus_zero for tree in trees}) > 1:
            raise ValueError(
                f"{self.name}, {dtype.name}: sums of negative zeros are -0 by some trees and +0 by "
                "others: expected one rule for a type"
            )
        kinds = {each.bits for each in found}
        if len(kinds) > 1:
            raise ValueError(
                f"{self.name}, {dtype.name}: trees with accumulators of "
                f"{', '.join(sorted(map(str, found)))}: expected one for a type"
            )
        (bits,) = kinds or {None}
        if bits == SIGNIFICANDS[dtype.name]:
            return real_of(dtype)
        if bits not in ACCUMULATORS:
            raise ValueError(
                f"{self.name}, {dtype.name}: an accumulator of {bits} bits: expected 8, 11, 24 or "
                "53, which are those of bfloat16, float16, float32 and float64, or the type's own"
            )
        return ACCUMULATORS[bits]

    def fold_of(self, members: int, elements: int, itemsize: int) -> Fold:
        """The trees of such a value.

        **Raises**: ValueError for a size or a number of members that the file lacks, and for trees
        that cannot be replayed.
        """
        assert self.file is not None
        if members == 1 or not elements:
            return Walk()
        ranks = self.file.world_size
        if members != ranks:
            raise ValueError(
                f"{members} members: {self.name} was revealed with {ranks} ranks; {HOW}"
            )
        for call in self._calls(self.dtype):
            if call.elements == elements and DTYPES[call.dtype] == itemsize:
                problem = problem_of(self.file, call)
                if problem:
                    raise ValueError(
                        f"{self.name}, {elements:,} elements of {call.dtype}: {problem}"
                    )
                return _trees(self, self.file.calls.index(call))
        raise ValueError(f"{elements:,} elements: {self.name} knows {self._known()}; {HOW}")

    def _trees(self, dtype: str) -> list[RevealedTree]:
        """The trees of the calls of one type."""
        assert self.file is not None
        used = {which for call in self._calls(dtype) for _, _, which in call.ranges}
        return [self.file.trees[which] for which in sorted(used)]

    def _check_type(self, dtype: np.dtype[Any]) -> None:
        if not self._calls(dtype.name):
            raise TypeError(f"{dtype.name} members: {self.name} knows {self._known()}; {HOW}")

    def _calls(self, dtype: str) -> list[RevealedCall]:
        assert self.file is not None
        return [call for call in self.file.calls if dtype in ("", call.dtype)]

    def _known(self) -> str:
        assert self.file is not None
        sizes: dict[str, list[int]] = {}
        for call in self.file.calls:
            sizes.setdefault(call.dtype, []).append(call.elements)
        known = [f"{name} of {_listed(found)} elements" for name, found in sizes.items()]
        return f"sums of {self.file.world_size} ranks: {', and '.join(known)}"


def _listed(numbers: Iterable[int]) -> str:
    found = [f"{number:,}" for number in sorted({*numbers})]
    if len(found) > 12:
        found = [*found[:11], "...", found[-1]]
    return f"{'; '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


@lru_cache(maxsize=64)
def _trees(order: RevealedOrder, number: int) -> Trees:
    """The trees of a call, which may have very many ranges."""
    assert order.file is not None
    file, ranges = order.file, order.file.calls[number].ranges
    used = {which: _replayed(file.trees[which]) for which in {which for _, _, which in ranges}}
    return Trees.joined([(begin, end, used[which]) for begin, end, which in ranges])


def _replayed(tree: RevealedTree) -> SumTree:
    """The tree, with the rounding of its sums where that is not to nearest."""
    rounding = tree.accumulator.rounding
    if tree.accumulator.bits is None or rounding == "nearest-even" or len(tree.tree.postfix) == 1:
        return tree.tree
    return tree.tree.rounded(rounding)


@lru_cache(maxsize=64)
def _of_dtype(order: RevealedOrder, dtype: str) -> RevealedOrder:
    return RevealedOrder(order.cases, name=order.name, file=order.file, dtype=dtype)


def revealed_order(name: str | os.PathLike[str]) -> RevealedOrder:
    """The order of a file, whose name becomes the text of a Reduction.

    **Raises**: ValueError for a name with blanks or "=", which a text cannot hold, and as
    `gpusim.revealed.read`.
    """
    text = os.fspath(name)
    if not text or len(text.split()) != 1 or text != text.strip() or "=" in text:
        raise ValueError(
            f"order={text!r}: expected a file's name without blanks and '=', which separate a "
            "Reduction's words; rename the file, or give a relative path"
        )
    try:
        about = os.stat(text)
    except OSError as error:
        raise ValueError(
            f"order={text!r}: {error.strerror or error}; expected a file of gpusim reveal"
        ) from None
    return _read(text, about.st_mtime_ns, about.st_size, about.st_ino)


@lru_cache(maxsize=32)
def _read(name: str, modified: int, size: int, inode: int) -> RevealedOrder:
    """The order of a file that has not changed since it was read."""
    return RevealedOrder((Case(Walk()),), name=name, file=read(name))


def problem_of(file: OrderFile, call: RevealedCall) -> str | None:
    """The reason why a call cannot be replayed, or None."""
    if call.unexplained:
        first = call.unexplained[0]
        number = sum(each.end - each.begin for each in call.unexplained)
        return (
            f"{number:,} elements, from {first.begin:,} on, have results that no tree explains"
            f"{': ' if first.reason else ''}{first.reason}"
        )
    if not call.same:
        return "the trees change from run to run, so that there are no bits to reproduce"
    if file.world_size == 1:
        return None
    for which in sorted({which for _, _, which in call.ranges}):
        problem = _problem_of_tree(file.trees[which], SIGNIFICANDS[call.dtype])
        if problem:
            return f"trees[{which}]: {problem}"
    return None


def _problem_of_tree(tree: RevealedTree, own: int) -> str | None:
    """The reason why a tree cannot be replayed with values of `own` bits, or None."""
    if tree.unknown:
        wide = [-each for each in tree.tree.postfix if each < -2]
        terms = f"of {max(wide)} terms" if wide else "of two terms"
        return f"an adder {terms} adds in a way that was not found"
    if any(each.bits != tree.accumulator.bits for each in tree.others):
        return (
            f"partial sums have {tree.accumulator}, and some {tree.others[0]}: expected one "
            "accumulator"
        )
    if tree.result is not None and tree.result.bits not in (None, own):
        return f"result: {tree.result.bits} bits: expected {own}, those of the type"
    bits, rounding = tree.accumulator.bits, tree.accumulator.rounding
    if bits is not None and rounding != "nearest-even":
        if rounding not in ROUNDINGS:
            return f"accumulator: rounding {rounding!r}: expected one of {', '.join(ROUNDINGS)}"
        if bits not in (8, 11, 24):
            return f"accumulator: {bits} bits, {rounding}: expected 8, 11 or 24, or nearest-even"
    if any(each.bits is not None and each.rounding != rounding for each in tree.others):
        return f"partial sums are rounded {rounding}, and some {tree.others[0].rounding}"
    last = tree.result
    if last is not None and bits != own and last.rounding != "nearest-even" and last.bits:
        return f"result: rounding {last.rounding!r}: expected 'nearest-even'"
    return None
