"""Compare twins with their engines, element by element, bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpusim.fallback import fold
from gpusim.fallback.schedules import Segments, Walk

from ...twins import TWINS, Twin
from .run_engines import Answer, Engine, Request, run, values

__all__ = ["Agreement", "check", "requests_of", "same_bits", "sizes_of"]

LARGE = 1_000_003
#: Small sums are repeated up to this number of elements, as few elements may agree by chance.
ELEMENTS, FEWER_ELEMENTS = 64, 8


@dataclass(frozen=True)
class Agreement:
    """How many elements of one twin, type and number of ranks agree with the engine.

    **Attributes**:

    - `version`: the engine's name and version.
    - `sizes`: how many different sizes were summed.
    - `elements`, `agreeing`: of all sums.
    - `worst`: the size, in elements, of a sum that differs, or None.
    - `alike`: whether all ranks received the same bits.
    """

    twin: str
    version: str
    dtype: str
    ranks: int
    sizes: int
    elements: int
    agreeing: int
    worst: int | None
    alike: bool

    @property
    def equal(self) -> bool:
        return self.agreeing == self.elements and self.alike


def sizes_of(twin: Twin, ranks: int, dtype: str, *, brief: bool = False) -> list[int]:
    """Elements of the sums to compare: around the number of ranks, and where the fold changes.

    `brief`: without the latter.
    """
    sizes = {1, 2, ranks - 1, ranks, ranks + 1, LARGE}
    if not brief:
        itemsize = values(dtype, 1, 1).itemsize
        for case in twin.schedule.cases:
            edges = [edge for edge in case.bytes if edge]
            if isinstance(case.fold, Walk) and isinstance(case.fold.cut, Segments):
                edges.append(case.fold.cut.most * case.fold.cut.least * ranks)
            for edge in edges:
                sizes |= {edge // itemsize - 1, edge // itemsize, edge // itemsize + 1}
    return sorted(sizes - {0, -1})


def requests_of(
    twin: Twin, ranks: Iterable[int], dtypes: Sequence[str] | None, *, brief: bool = False
) -> list[Request]:
    """The requests to an engine that check a twin."""
    elements = FEWER_ELEMENTS if brief else ELEMENTS
    return [
        Request(n, dtype, size, max(1, elements // size), twin.settings)
        for n in ranks
        for dtype in twin.dtypes
        if dtypes is None or dtype in dtypes
        for size in sizes_of(twin, n, dtype, brief=brief)
    ]


def check(
    engine: Engine,
    *,
    twins: Iterable[str] | None = None,
    ranks: Iterable[int] = range(2, 9),
    dtypes: Sequence[str] | None = None,
    brief: bool = False,
) -> list[Agreement]:
    """Run an engine for all its twins and compare the sums; one row for each twin, type and ranks.

    `twins`, `ranks`, `dtypes`: only these. `brief`: fewer sizes, see `sizes_of`.

    **Raises**: EngineFailed if the processes of the engine fail.
    """
    wanted = set(TWINS if twins is None else twins)
    numbers = tuple(ranks)
    requested: list[tuple[str, Request]] = []
    for twin in TWINS.values():
        if twin.worker == engine.name and twin.name in wanted:
            requests = requests_of(twin, numbers, dtypes, brief=brief)
            requested += [(twin.name, request) for request in requests]
    if not requested:
        return []
    version, answers, members = run(engine, [request for _, request in requested])
    rows: dict[tuple[str, str, int], list[tuple[Request, Answer]]] = {}
    for (name, request), answer in zip(requested, answers, strict=True):
        rows.setdefault((name, request.dtype, request.ranks), []).append((request, answer))
    return [
        _row(TWINS[name], version, members[dtype][:n], pairs)
        for (name, dtype, n), pairs in rows.items()
    ]


def _row(
    twin: Twin, version: str, members: np.ndarray, pairs: list[tuple[Request, Answer]]
) -> Agreement:
    elements = agreeing = 0
    worst = None
    for case, answer in pairs:
        given = members[:, : case.size * case.sums].reshape(len(members), case.sums, case.size)
        expected = fold(given, order=twin.schedule, batch_ndim=1)
        same = same_bits(expected.reshape(-1), answer.total)
        elements += same.size
        agreeing += int(same.sum())
        worst = worst if same.all() else case.size
    case, _ = pairs[0]
    alike = all(answer.alike for _, answer in pairs)
    return Agreement(
        twin.name, version, case.dtype, case.ranks, len(pairs), elements, agreeing, worst, alike
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays of one dtype have the same bits, or both have a NaN.

    >>> same_bits(np.array([0.0, 1.0, np.nan]), np.array([-0.0, 1.0, -np.nan])).tolist()
    [False, True, True]
    """
    if a.size == 0:
        return np.zeros(a.shape, bool)
    width = a.dtype.itemsize // (2 if a.dtype.kind == "c" else 1)
    parts = [np.ascontiguousarray(x).view(f"u{width}").reshape(a.size, -1) for x in (a, b)]
    same = (parts[0] == parts[1]).all(axis=1)
    with np.errstate(invalid="ignore"):
        return same | (np.isnan(a) & np.isnan(b)).reshape(-1)
