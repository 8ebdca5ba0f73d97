"""The memory limit: how fast this machine copies on all cores, in turns with the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.cases import MI, Case
from bench.machine import cores
from bench.timing import timed

from .base import Peer, Samples

COPY_BYTES = 128 * MI  # several times the largest caches
FIRST_COPIES = 20


class Limit(Peer):
    """Copies a large array; from its seconds follow those of any number of bytes."""

    name = "memory limit"

    def __init__(self, copy_bytes: int = COPY_BYTES) -> None:
        self.copy_bytes = copy_bytes
        self.fastest = math.inf  # seconds of a copy, over the whole run
        self._pool: ThreadPoolExecutor | None = None
        self._copy: Callable[[], Any] | None = None

    def prepare(self, case: Case) -> None:
        """The same copy for every case."""
        if self._copy is not None:
            return
        threads = cores()
        self._pool = ThreadPoolExecutor(threads)
        source, target = np.ones(self.copy_bytes, np.uint8), np.zeros(self.copy_bytes, np.uint8)
        parts = list(
            zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
        )
        pool = self._pool
        self._copy = lambda: list(pool.map(lambda part: np.copyto(*part), parts))
        self.run(1)
        self.fastest = math.inf  # the first met untouched memory
        self.run(FIRST_COPIES)

    def run(self, repeats: int) -> list[float]:
        assert self._copy is not None
        seconds = timed(self._copy, repeats)
        self.fastest = min(self.fastest, *seconds)
        return seconds

    @property
    def bandwidth(self) -> float:
        """Bytes read and written in a second, by the fastest copy of the run."""
        return 2 * self.copy_bytes / self.fastest

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        return {}  # without a result

    def release(self) -> None:
        pass  # the buffers serve all cases

    def needs_bytes(self, case: Case) -> int:
        return 2 * self.copy_bytes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._copy = None
