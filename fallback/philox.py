"""The uniform 32-bit numbers of stochastic rounding, drawn from Philox4x64-10.
The generator is counter-based: any element's number can be drawn anywhere, in any order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LANES_PER_BLOCK = 8  # four 64-bit words, the low half of each first


class Lanes:
    """Draws the lanes of one call: key (seed, 0), counter (1 + i // 8, step, call, place)."""

    def __init__(self, seed: int, call: int) -> None:
        self._call = call
        self._key = np.array([seed, 0], np.uint64)
        self._generator = np.random.Philox(key=self._key)

    def fill(self, out: NDArray[np.uint32], *, start: int, step: int, place: int) -> None:
        """Write the lanes of elements start, start + 1, ... into the one-dimensional `out`."""
        block, skipped = divmod(start, LANES_PER_BLOCK)
        # NumPy adds one to the counter before it computes a block; position 4: none is buffered.
        self._generator.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.array([block, step, self._call, place], np.uint64),
                "key": self._key,
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        words = self._generator.random_raw((skipped + out.size + 1) // 2)
        lanes = words.astype("<u8", copy=False).view("<u4")
        out[...] = lanes[skipped : skipped + out.size]
