"""Copies of whole arrays, cut into pieces for all threads: one core does not use the memory's whole
bandwidth, and the system clears new memory page by page at the first access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kernels, limits, threads

Pair = tuple[NDArray[Any], NDArray[Any]]  # target, source


def copy(pairs: Iterable[Pair]) -> None:
    """Copy the second array of each pair into the first; shapes broadcast, targets do not overlap.

    >>> import numpy as np
    >>> out = np.empty((2, 3))
    >>> copy([(out[0], np.ones(3)), (out[1], np.zeros(()))])
    >>> out.tolist()
    [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    """
    listed = list(pairs)
    size = width = 0
    for target, _ in listed:
        size += target.size
        width = max(width, target.itemsize)
    if size * width < limits.COPIED_BYTES * limits.SHARED_WORK:
        for target, source in listed:
            if target.dtype == source.dtype:
                target[...] = source  # np.copyto enters a Python function for each
            else:
                np.copyto(target, source)
        return
    # Long copies go past the caches, which is faster: no shorter pieces than sharing needs.
    length = max(limits.BLOCK, size // (4 * threads.count()))
    pieces = [piece for pair in listed for piece in _pieces(*pair, length)]
    streams = sum(target.nbytes for target, _ in listed) >= limits.STREAMED
    compiled = kernels.compiled() if streams else None
    threads.run(partial(_copy_bundle, compiled), _bundles(pieces))


def _pieces(target: NDArray[Any], source: NDArray[Any], most: int) -> Iterator[Pair]:
    """The pair cut along the target's slowest axis into parts of about `most` elements."""
    if target.size <= most:
        yield target, source
        return
    source = np.broadcast_to(source, target.shape)
    axis = max(range(target.ndim), key=lambda a: (target.shape[a] > 1, abs(target.strides[a])))
    length = target.shape[axis]
    step = max(1, length * most // target.size)
    for start in range(0, length, step):
        part = (slice(None),) * axis + (slice(start, start + step),)
        yield target[part], source[part]


def _bundles(pieces: list[Pair]) -> Iterator[list[Pair]]:
    """Small pieces together, so that the overhead per work item is small."""
    bundle: list[Pair] = []
    size = 0
    for piece in pieces:
        bundle.append(piece)
        size += piece[0].size
        if size >= limits.BLOCK:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle


def _copy_bundle(compiled: kernels.Kernels | None, bundle: list[Pair]) -> None:
    for target, source in bundle:
        if compiled is None or not compiled.copy(target, source):
            np.copyto(target, source)
