"""What tests/gpu/test_nccl.py runs: `threads`, `rank NUMBER [IDENTITY]`, or `pmap`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import gpusim
from gpusim import lax
from gpusim.cuda.launch import require_cupy
from gpusim.runtime.engines import nccl

PATIENCE = 60.0


def work(rank: int, identity: bytes) -> None:
    """Each of two ranks sends to the other, and both sum."""
    cupy = require_cupy()
    gpu = rank % cupy.cuda.runtime.getDeviceCount()
    engine = nccl.NcclEngine(2, rank, identity, gpu, PATIENCE)
    other = 1 - rank
    with cupy.cuda.Device(gpu), cupy.cuda.Stream(non_blocking=True):
        for dtype in (np.float32, np.complex64, np.int16):
            for size in (1, 1000, 1 << 20):
                mine = cupy.arange(size).astype(dtype) + rank
                room = cupy.empty(size, dtype)
                pending = engine.exchange([(mine, other)], [(room, other)], tag=1)
                mine += 5  # behind the sending
                pending.wait()
                expected = np.arange(size).astype(dtype) + np.array(other).astype(dtype)
                assert np.array_equal(room.get(), expected), (dtype, size)
        engine.barrier()
        total = engine.all_reduce(cupy.full(1000, rank + 1, np.float32), "sum")
        assert np.array_equal(total.get(), np.full(1000, 3, np.float32))
    engine.close()


def over_two_gpus() -> None:
    cupy = require_cupy()

    def f(x: Any) -> Any:
        return lax.psum(x * 2, "i") + lax.ppermute(x, "i", [(0, 1), (1, 0)])

    x = np.random.default_rng(0).normal(size=(2, 100_000)).astype(np.float16)
    expected = gpusim.pmap(f, "i")(x)
    for _ in range(5):
        found = gpusim.pmap(f, "i", devices=[0, 1])(cupy.asarray(x))
        assert np.array_equal(found.get().view(np.uint16), expected.view(np.uint16))
    assert nccl._communicators, "NCCL was not used"


def main(what: str, *rest: str) -> None:
    if what == "threads":
        identity = nccl.unique_id()
        with ThreadPoolExecutor(2) as threads:
            for future in [threads.submit(work, rank, identity) for rank in (0, 1)]:
                future.result()
    elif what == "rank":
        identity = bytes.fromhex(rest[1]) if len(rest) > 1 else nccl.unique_id()
        print(identity.hex(), flush=True)
        work(int(rest[0]), identity)
    else:
        over_two_gpus()
    print("bits as expected")


if __name__ == "__main__":
    main(*sys.argv[1:])
