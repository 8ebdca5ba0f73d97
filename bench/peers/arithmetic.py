"""The arithmetic limit of sums with a float16 accumulator: their operations alone, in registers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import Case
from bench.machine import cores
from bench.results import ARITHMETIC
from gpusim.compiled.build import ADDRESS, INTEGER, TILE, compiler, library

from .base import LocalPeer, Samples, Unserved, pick
from .inputs import stacked

SOURCE = Path(__file__).with_name("arithmetic.cpp")
VARIANTS = ("float16", "float8_e5m2", "float8_e4m3fn")
ROWS = 8  # members at a time


class Arithmetic(LocalPeer):
    """As many steps as the case has, on all cores, over the first tile of the members again and
    again: it lies in the nearest cache. The samples are of the whole sum, by the same loop."""

    name = ARITHMETIC

    def operation(self, case: Case) -> Callable[[], Any]:
        if case.collective != "psum" or case.variant not in VARIANTS:
            raise Unserved("measured for sums with a float16 accumulator")
        if case.replicas % ROWS or case.elements % TILE:
            raise Unserved(f"measured for multiples of {ROWS} replicas and {TILE} elements")
        if compiler() is None:
            raise Unserved("the loop needs ziglang: pip install 'gpusim[fast]'")
        loop: Any = getattr(library(SOURCE.read_text()), f"{case.variant}_tiles")
        loop.argtypes, loop.restype = (ADDRESS, ADDRESS, *[INTEGER] * 4, ADDRESS), None
        members = stacked(case)[0]
        result = np.empty(case.elements, members.dtype)
        parts = np.array_split(np.arange(case.elements // TILE), cores())
        pool = ThreadPoolExecutor(len(parts))

        def add(tiles: Any, step: int) -> None:
            bits, first = np.zeros(1, np.uint32), int(tiles[0]) * step * members.itemsize
            addresses = [array.ctypes.data + first for array in (members, result)]
            loop(*addresses, case.replicas, case.elements, len(tiles), step, bits.ctypes.data)
            assert not bits[0] & 0x40000000, "a sum left float16's range"

        def whole() -> Any:
            list(pool.map(lambda part: add(part, TILE), parts))
            return result

        self._sum = whole
        return lambda: list(pool.map(lambda part: add(part, 0), parts))

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        return dict.fromkeys(replicas, pick(self._sum(), positions))
