"""The uniform 32-bit numbers of stochastic rounding, drawn from Philox4x64-10.
The generator is counter-based: any element's number can be drawn anywhere, in any order."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from . import kernels

LANES_PER_BLOCK = 8  # four 64-bit words, the low half of each first


class _Own(threading.local):
    """A thread's generator; setting a state costs less than making one."""

    def __init__(self) -> None:
        self.generator = np.random.Philox(0)


_own = _Own()


class Lanes:
    """Draws the lanes of one call: key (seed, stream), counter (1 + i // 8, step, call, place).

    Several threads may draw at once.
    """

    def __init__(self, seed: int, call: int, stream: int = 0) -> None:
        self._call = call
        self._key = np.array([seed, stream], np.uint64)

    def fill(self, out: NDArray[np.uint32], *, start: int, step: int, batch_offset: int) -> None:
        """Write the lanes of elements start, start + 1, ... into the one-dimensional `out`."""
        out[...] = self.draw(out.size, start=start, step=step, batch_offset=batch_offset)

    def draw(self, count: int, *, start: int, step: int, batch_offset: int) -> NDArray[np.uint32]:
        """The lanes of elements start, start + 1, ..., in new memory."""
        compiled = kernels.compiled()
        if compiled is not None:
            key = int(self._key[0]), int(self._key[1])
            lanes = compiled.draw(count, start, key, (step, self._call, batch_offset))
            if lanes is not None:
                return lanes
        block, skipped = divmod(start, LANES_PER_BLOCK)
        # NumPy adds one to the counter before it computes a block; position 4: none is buffered.
        generator = _own.generator
        generator.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([block, step, self._call, batch_offset], np.uint64),
                "key": self._key,
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        words = generator.random_raw((skipped + count + 1) // 2)
        lanes = words.astype("<u8", copy=False).view("<u4")
        return lanes[skipped : skipped + count]
