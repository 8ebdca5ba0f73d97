"""The orders of additions that `gpusim reveal` finds: its files, read and checked.

`docs/reveal.md` has the format.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import Any

from gpusim.fallback.graphs import Adder
from gpusim.fallback.schedules import Schedule, compile_order
from gpusim.fallback.trees import SumTree, Trees, trees_of_order
from gpusim.fallback.wide import ROUNDINGS

from .bounded_json import At, parse

__all__ = [
    "LIMITS",
    "OrderFile",
    "Precision",
    "RevealedCall",
    "RevealedTree",
    "Unexplained",
    "is_order_file",
    "read",
    "read_text",
    "trees_of",
]

FORMAT, VERSION = "gpusim order", 1
#: The most that a file may have; `bytes` of all, `depth` of a tree's lists.
LIMITS = {
    "bytes": 64 << 20,
    "world_size": 1024,
    "calls": 1000,
    "ranges": 1_000_000,
    "trees": 100_000,
    "elements": 1 << 48,
    "depth": 1040,
    "values": 20_000_000,
}
#: The bits of the significands of types, the hidden one included.
SIGNIFICANDS = {"float8_e4m3fn": 4, "float8_e5m2": 3, "float16": 11, "bfloat16": 8}
SIGNIFICANDS |= {"float32": 24, "float64": 53, "complex64": 24, "complex128": 53}
DTYPES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4}
DTYPES |= {"float64": 8, "complex64": 8, "complex128": 16}
#: Steps of a path that an error shows.
SHOWN = 12
NUMBER_ROUNDINGS = (
    *("nearest-even", "nearest-away", "toward-zero", "up", "down", "away"),
    *("stochastic", "unknown"),
)


@dataclass(frozen=True)
class Precision:
    """A rounding: to so many bits of significand, the hidden one included (None: none was seen)."""

    bits: int | None
    rounding: str = "nearest-even"
    subnormals: str = "unknown"

    def __str__(self) -> str:
        bits = "no rounding seen" if self.bits is None else f"{self.bits} bits, {self.rounding}"
        return bits + (", subnormals flushed" if self.subnormals == "flushed" else "")


@dataclass(frozen=True)
class RevealedTree:
    """A tree of the file.

    **Attributes**: the `tree`; the `accumulator` of its partial sums; how many nodes have another
    one (`others`), the first of them; the rounding of the `result`. `minus_zero`: whether a sum of
    negative zeros is -0. `unknown`: whether a node adds in a way that was not found.
    """

    tree: SumTree
    accumulator: Precision
    others: tuple[Precision, ...] = ()
    result: Precision | None = None
    minus_zero: bool = True
    unknown: bool = False


@dataclass(frozen=True)
class Unexplained:
    """Elements begin..end-1, whose results no tree explains."""

    begin: int
    end: int
    reason: str


@dataclass(frozen=True)
class RevealedCall:
    """An all-reduce of so many elements.

    **Attributes**:

    - `ranges`: (begin, end, number of the tree in the file), those that are explained.
    - `unexplained`: the other elements.
    - `same`: whether all repeats gave the same trees; `ranks_agree`: whether all ranks had the same
      results.
    - `verified`: of random values, how many elements had the description's bits, and their number.
    """

    elements: int
    dtype: str
    ranges: tuple[tuple[int, int, int], ...]
    unexplained: tuple[Unexplained, ...] = ()
    in_place: bool = True
    offset: int = 0
    repeats: int = 1
    same: bool = True
    bits_same: bool = True
    ranks_agree: bool = True
    probes: int = 0
    verified: tuple[int, int] | None = None


@dataclass(frozen=True)
class OrderFile:
    """A file of `gpusim reveal`."""

    engine: str
    world_size: int
    dtype: str
    op: str
    written: str
    calls: tuple[RevealedCall, ...]
    trees: tuple[RevealedTree, ...]
    digest: int = 0

    def trees_of_call(self, call: RevealedCall) -> Trees:
        """The tree of each element of a call whose elements are all explained."""
        return Trees.joined([(a, b, self.trees[which].tree) for a, b, which in call.ranges])


def is_order_file(name: Any) -> bool:
    """Whether an order's name is that of a file: it ends with .json."""
    return isinstance(name, str | os.PathLike) and os.fspath(name).endswith(".json")


def trees_of(schedule: Schedule | str, members: int, elements: int, itemsize: int) -> Trees:
    """The tree of additions of each element, in an order.

    **Arguments**: `schedule` is a Schedule or the name of an order; `itemsize` is an element's.

    **Returns**: ranges of elements with their trees, neighbours with equal trees in one range.

    **Raises**: ValueError for what the schedule does not know.

    >>> [(first, end, tree.nested) for first, end, tree in trees_of("ring", 3, 7, 4).ranges]
    [(0, 3, [[0, 1], 2]), (3, 5, [0, [1, 2]]), (5, 7, [[0, 2], 1])]
    """
    order = compile_order(schedule, members=members, elements=elements, itemsize=itemsize)
    return trees_of_order(order, members, elements)


# Reading


def read(path: str | os.PathLike[str]) -> OrderFile:
    """Read and check a file.

    **Raises**: OSError for a file that cannot be read; ValueError, with the place in it, for one
    of another kind, that is too large, or that contradicts itself.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        data = bytearray()
        # In parts: one read would take the memory of the largest file for each.
        while len(data) <= LIMITS["bytes"] and (part := file.read(1 << 18)):
            data += part
    try:
        if len(data) > LIMITS["bytes"]:
            raise ValueError(f"expected at most {LIMITS['bytes']:,} bytes")
        return read_text(data.decode("utf-8"), zlib.crc32(data))
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: byte {error.start}: expected UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_text(text: str, digest: int = 0) -> OrderFile:
    """The OrderFile of a text. **Raises**: ValueError, with the place in it."""
    given = At(parse(text, depth=LIMITS["depth"] + 8, values=LIMITS["values"]), "")
    given.expect(dict, "an object")
    if (found := given["format"].value) != FORMAT:
        raise ValueError(f"format: {found!r:.80}: expected {FORMAT!r}, of gpusim reveal")
    if (found := given["version"].value) != VERSION:
        raise ValueError(f"version: {found!r:.80}: expected {VERSION}; a newer gpusim may read it")
    ranks = given["world_size"].number(1, LIMITS["world_size"])
    dtype = given["dtype"].choice(DTYPES)
    if (op := given["op"].text()) != "sum":
        raise ValueError(f"op: {op!r:.80}: expected 'sum'")
    trees = tuple(_tree(each, ranks) for each in given["trees"].items(LIMITS["trees"]))
    calls: list[RevealedCall] = []
    room = LIMITS["ranges"]
    for each in given["calls"].items(LIMITS["calls"]):
        calls.append(_call(each, dtype, len(trees), room))
        room -= len(calls[-1].ranges) + len(calls[-1].unexplained)
    if not calls:
        raise ValueError("calls: []: expected at least one call")
    engine = given.get("engine", "").text()[:400]
    written = given.get("written", "").text()[:80]
    return OrderFile(engine, ranks, dtype, op, written, tuple(calls), trees, digest)


def _call(given: At, dtype: str, trees: int, most: int) -> RevealedCall:
    elements = given["elements"].number(1, LIMITS["elements"])
    at, ranges, unexplained = 0, [], []
    entries = given["ranges"]
    for entry in entries.items(most):
        parts = entry.items(4)
        if len(parts) < 3:
            raise entry.error("[begin, end, index of a tree]")
        begin, end = (part.number(0, elements) for part in parts[:2])
        index = parts[2].number(-1, trees - 1)
        if begin != at or end <= begin:
            raise ValueError(
                f"{entry.place}: elements {begin} to {end}: expected a range that begins at {at}, "
                "where the one before ends, and has elements"
            )
        at = end
        if index >= 0:
            ranges.append((begin, end, index))
        else:
            reason = (
                parts[3].text()[:400] if len(parts) > 3 else given.get("reason", "").text()[:400]
            )
            unexplained.append(Unexplained(begin, end, reason))
    if at != elements:
        raise ValueError(
            f"{entries.place}: the last one ends at {at}: expected elements, {elements}"
        )
    flags = {
        name: given.get(name, default).flag()
        for name, default in (
            *(("in_place", True), ("same", True), ("bits_same", True)),
            ("ranks_agree", True),
        )
    }
    verified = None
    if (part := given.get("verified", None)).value is not None:
        equal, number = (part[name].number(0, LIMITS["elements"]) for name in ("equal", "elements"))
        verified = equal, number
    return RevealedCall(
        elements,
        given.get("dtype", dtype).choice(DTYPES),
        tuple(ranges),
        tuple(unexplained),
        offset=given.get("offset", 0).number(0, LIMITS["elements"]),
        repeats=given.get("repeats", 1).number(1, 1_000_000),
        probes=given.get("probes", 0).number(0, 1 << 53),
        verified=verified,
        **flags,
    )


def _tree(given: At, ranks: int) -> RevealedTree:
    nested = given["tree"]
    wide = _check_ranks(nested, ranks)
    adders, unknown = _adders(given.get("adders", "rounded"), nested.value, ranks)
    listed = sum(len(_node(nested.value, path) or ()) > 2 for path in adders)
    others = []
    for entry in given.get("accumulators", []).items(ranks):
        _, precision = _keyed(entry, nested.value)
        others.append(_precision(At(precision, f"{entry.place}[1]")))
    result = given.get("result", None)
    return RevealedTree(
        SumTree.of(nested.value, adders),
        _precision(given.get("accumulator", {"bits": None})),
        tuple(others),
        None if result.value is None else _precision(result),
        given.get("minus_zero", True).flag(),
        unknown or listed < wide,
    )


def _check_ranks(given: At, ranks: int) -> int:
    """How many nodes have more than two terms. ValueError unless each rank is one leaf."""
    wide = 0
    seen: set[int] = set()
    waiting: list[tuple[Any, tuple[int, ...]]] = [(given.value, ())]
    while waiting:
        node, path = waiting.pop()  # of a path its beginning, for errors
        if not isinstance(node, list) or not 2 <= len(node) <= ranks:
            place = given.place + "".join(f"[{k}]" for k in path)
        if isinstance(node, list):
            if not 2 <= len(node) <= ranks:
                raise ValueError(f"{place}: {len(node):,} terms: expected 2 to {max(2, ranks)}")
            wide += len(node) > 2
            at = [(*path, k) if len(path) < SHOWN else path for k in range(len(node))]
            waiting += [*zip(reversed(node), reversed(at), strict=True)]
            continue
        rank = At(node, place).number(0, ranks - 1)
        if rank in seen:
            raise ValueError(f"{place}: rank {rank} is there twice")
        seen.add(rank)
    missing = [rank for rank in range(ranks) if rank not in seen]
    if missing:
        raise ValueError(f"{given.place}: rank {missing[0]} is missing, of {ranks} ranks")
    return wide


def _node(tree: Any, path: tuple[int, ...]) -> list[Any] | None:
    """The terms of the node to which a path leads, or None."""
    for index in path:
        if not isinstance(tree, list) or index >= len(tree):
            return None
        tree = tree[index]
    return tree if isinstance(tree, list) else None


def _keyed(entry: At, tree: Any) -> tuple[tuple[int, ...], Any]:
    """An entry [path, value], whose path leads to a node."""
    parts = entry.items(2)
    if len(parts) != 2:
        raise entry.error("[path of a node, an object]")
    path = tuple(each.number(0, LIMITS["world_size"]) for each in parts[0].items(LIMITS["depth"]))
    if _node(tree, path) is None:
        raise parts[0].error("the path of a node of the tree: indices from the root on")
    return path, parts[1].value


def _adders(given: At, tree: Any, ranks: int) -> tuple[dict[tuple[int, ...], Adder], bool]:
    """The adders by path, and whether one of them is unknown."""
    found: dict[tuple[int, ...], Adder] = {}
    unknown = False
    if isinstance(given.value, str):
        kind = given.choice(("rounded", "unknown"))
        return {}, kind == "unknown"
    for entry in given.items(ranks):
        path, value = _keyed(entry, tree)
        if path in found:
            raise ValueError(f"{entry.place}: the node is there twice")
        about = At(value, f"{entry.place}[1]")
        if value == "unknown":
            unknown = True
            continue
        kind = about["kind"].choice(("exact", "aligned", "rounded", "unknown"))
        if kind == "aligned":
            bits = about["bits"].number(2, 400)
            rounding = about.get("rounding", "toward-zero").choice(NUMBER_ROUNDINGS)
            found[path] = Adder(kind, bits, rounding)
            unknown = unknown or rounding not in ROUNDINGS
        elif kind == "exact":
            found[path] = Adder(kind)
        else:
            unknown = unknown or kind == "unknown" or len(_node(tree, path) or ()) > 2
    return found, unknown


def _precision(given: At) -> Precision:
    bits = given.get("bits", None)
    number = None if bits.value is None else bits.number(1, 4096)
    rounding = given.get("rounding", "nearest-even" if number is None else "unknown")
    subnormals = given.get("subnormals", "unknown").choice(("kept", "flushed", "unknown"))
    chosen = rounding.choice(NUMBER_ROUNDINGS) if rounding.value is not None else "unknown"
    return Precision(number, chosen, subnormals)
