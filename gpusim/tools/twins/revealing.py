"""Reveal an engine's trees of additions, and compare them with its twin's, element by element."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gpusim.fallback import fold

from ...twins import TWINS, Twin
from ..reveal import reveal_order
from ..reveal.starting import reveal_here
from .checking import LARGE, sizes_of
from .run_engines import Engine

__all__ = ["Revealed", "compare", "order_of_twin", "reveal", "revealed_sizes"]

#: Elements up to which all sizes are revealed; of the larger ones one is, of one type.
SMALL = 4096


@dataclass(frozen=True)
class Revealed:
    """How many elements of one twin, type and number of ranks have the engine's tree.

    **Attributes**:

    - `elements`, `agreeing`: of all sizes: with a tree, accumulator and rounding of the engine's.
    - `trees`: how many different ones the engine has.
    - `worst`: the size of a sum that differs, or None.
    """

    twin: str
    dtype: str
    ranks: int
    elements: int
    agreeing: int
    trees: int
    worst: int | None

    @property
    def equal(self) -> bool:
        return self.agreeing == self.elements


class TwinSums(reveal_order.Engine):
    """A twin as an engine: the fold of its schedule."""

    def __init__(self, twin: Twin, ranks: int) -> None:
        self.twin, self.ranks, self.local, self.name = twin, ranks, range(ranks), twin.name

    def all_reduce(
        self, rows: Sequence[np.ndarray], call: reveal_order.Call
    ) -> tuple[np.ndarray, bool]:
        """The twin's sum."""
        dtype = np.dtype(getattr(ml_dtypes, call.dtype, call.dtype))
        members = np.stack([row.astype(dtype) for row in rows])
        total = fold(members, order=self.twin.schedule)
        return np.asarray(total).astype(np.float64), True


def order_of_twin(twin: Twin, ranks: int, dtype: str, sizes: Sequence[int]) -> dict[str, Any]:
    """The contents of order.json that a twin has.

    >>> found = order_of_twin(TWINS["openmpi-linear"], 3, "float32", [2])
    >>> found["trees"][0]["tree"]
    [0, [1, 2]]
    """
    calls = [reveal_order.Call(size, dtype) for size in sizes]
    options = reveal_order.Options(repeats=1, verify=1)
    return reveal_order.reveal(TwinSums(twin, ranks), calls, options)


def revealed_sizes(twin: Twin, ranks: int, dtype: str, *, brief: bool = False) -> list[int]:
    """The sizes that are revealed: all small ones, and a large one of the first type."""
    sizes = [n for n in sizes_of(twin, ranks, dtype, brief=brief) if n <= SMALL]
    large = not brief and dtype == _dtypes(twin, None)[0]
    return [*sizes, *[LARGE] * large]


def _dtypes(twin: Twin, wanted: Sequence[str] | None) -> list[str]:
    return [
        dtype
        for dtype in twin.dtypes
        if dtype in reveal_order.FORMATS and (wanted is None or dtype in wanted)
    ]


def reveal(
    engine: Engine,
    *,
    twins: Iterable[str],
    ranks: Iterable[int],
    dtypes: Sequence[str] | None = None,
    brief: bool = False,
) -> list[Revealed]:
    """Reveal an engine for all its twins and compare; a row for each twin, type and ranks.

    **Raises**: EngineFailed if the processes of the engine fail.
    """
    wanted = set(twins)
    rows = []
    for twin in TWINS.values():
        if twin.worker != engine.name or twin.name not in wanted or not _dtypes(twin, dtypes):
            continue
        for n in ranks:
            rows += _reveal(engine, twin, n, _dtypes(twin, dtypes), brief)
    return rows


def _reveal(
    engine: Engine, twin: Twin, ranks: int, dtypes: list[str], brief: bool
) -> list[Revealed]:
    """One start of an engine for each list of sizes: all types that share it."""
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for dtype in dtypes:
        sizes = tuple(revealed_sizes(twin, ranks, dtype, brief=brief))
        by_sizes.setdefault(sizes, []).append(dtype)
    rows = {}
    with tempfile.TemporaryDirectory(prefix="gpusim-twin-") as name:
        out = Path(name) / "order.json"
        for sizes, together in by_sizes.items():
            words = ["--elements", ",".join(map(str, sizes)), "--dtype", ",".join(together)]
            words += ["--repeats", "1", "--verify", "1", "--quiet", "--out", str(out)]
            reveal_here(engine, ranks, words, settings=twin.settings, quiet=True)
            found = json.loads(out.read_text())
            for dtype in together:
                expected = order_of_twin(twin, ranks, dtype, sizes)
                rows[dtype] = compare(twin.name, dtype, found, expected)
    return [rows[dtype] for dtype in dtypes]


def compare(twin: str, dtype: str, found: dict[str, Any], expected: dict[str, Any]) -> Revealed:
    """Compare the calls of one type in two orders; an element without a tree agrees with none."""
    calls = {call["elements"]: call for call in expected["calls"] if call["dtype"] == dtype}
    elements = agreeing = 0
    worst, trees = None, set()
    for call in found["calls"]:
        if call["dtype"] != dtype:
            continue
        here, there = _trees(found, call), _trees(expected, calls[call["elements"]])
        same = 0
        for (a, b), count in _pairs(call, calls[call["elements"]]).items():
            same += count * (a >= 0 and b >= 0 and here[a] == there[b])
        trees |= {here[a] for a in {r[2] for r in call["ranges"]} if a >= 0}
        elements += call["elements"]
        agreeing += same
        worst = worst if same == call["elements"] else call["elements"]
    ranks = found["world_size"]
    return Revealed(twin, dtype, ranks, elements, agreeing, len(trees), worst)


def _pairs(call: dict[str, Any], other: dict[str, Any]) -> dict[tuple[int, int], int]:
    """How many elements have each pair of trees."""
    numbers = [
        np.concatenate([np.full(r[1] - r[0], r[2]) for r in each["ranges"]])
        for each in (call, other)
    ]
    pairs, counts = np.unique(np.stack(numbers), axis=1, return_counts=True)
    return {(int(a), int(b)): int(n) for (a, b), n in zip(pairs.T, counts, strict=True)}


def _trees(order: dict[str, Any], call: dict[str, Any]) -> dict[int, Any]:
    """The trees of a call, as values that do not depend on the order of terms.

    Subnormal numbers are not compared: a twin keeps those that its engine flushes.
    """
    found = {}
    for number in {r[2] for r in call["ranges"]} - {-1}:
        entry = order["trees"][number]
        kinds = {} if entry["adders"] == "rounded" else _keyed(entry["adders"])
        own = _keyed(entry.get("accumulators", []))
        common = {k: entry["accumulator"][k] for k in ("bits", "rounding")}
        found[number] = (
            _canonical(entry["tree"], (), kinds, own, common),
            json.dumps(entry["result"], sort_keys=True),
            entry["minus_zero"],
        )
    return found


def _keyed(pairs: list[Any]) -> dict[tuple[int, ...], Any]:
    return {tuple(path): value for path, value in pairs}


def _canonical(
    tree: Any, path: tuple[int, ...], kinds: dict[Any, Any], own: dict[Any, Any], common: Any
) -> Any:
    if not isinstance(tree, list):
        return tree
    terms = [_canonical(t, (*path, n), kinds, own, common) for n, t in enumerate(tree)]
    kind = json.dumps(kinds.get(path, "rounded"), sort_keys=True)
    how = json.dumps(own.get(path, common), sort_keys=True)
    return kind, how, frozenset(terms)
