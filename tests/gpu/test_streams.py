"""pmap on the streams of one GPU, and of several where there are several."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax
from gpusim.devices import Ipu, Placement
from tests.cuda.host_cuda.values import same
from tests.cuda.test_device_streams import busy
from tests.gpu.cupy_arrays import FAKE, GPUS, cupy

WHERE: dict[str, Any] = {
    "where the arguments are": None,
    "one GPU": [0],
    "a GPU and the host": [0, "cpu"],
    "placements": [Placement(0, 3), Placement(None, 1)],
    "IPUs": [Ipu(2), Ipu(5)],
    "all GPUs": list(range(GPUS)),
}


@pytest.mark.parametrize("name", WHERE)
@pytest.mark.parametrize("size", [4, 200_000])
def test_replicas_have_the_hosts_bits_wherever_they_are(name: str, size: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, size // 3 * 3)).astype(np.float32)
    shaped = x.reshape(3, 3, -1)
    expected = gpusim.pmap(busy, "i")(shaped)
    run = gpusim.pmap(busy, "i", devices=WHERE[name])
    for _ in range(10):  # the streams of one call serve the next, and their memory too
        for ours, theirs in zip(run(cupy.asarray(shaped)), expected, strict=True):
            same(ours.get(), theirs)


def test_each_replica_has_a_stream_of_its_own() -> None:
    seen = set()
    lock = threading.Lock()

    def f(x: Any) -> Any:
        with lock:
            seen.add(cupy.cuda.get_current_stream().ptr)
        return lax.psum(x, "i")

    gpusim.pmap(f, "i")(cupy.ones((4, 2)))
    assert len(seen) == 4 and 0 not in seen


def test_work_of_the_caller_and_of_replicas_is_in_order() -> None:
    """Long kernels before each exchange: who does not wait reads what is not there yet."""
    x = cupy.zeros((8, 1 << 8 if FAKE else 1 << 22), np.float32)

    def f(row: Any) -> Any:
        row = row + 1
        for _ in range(20):
            row = row * 1 + 0
        total = lax.psum(row, "i")
        for _ in range(20):
            total = total * 1 + 0
        return total

    for _ in range(5):
        x += 1
        found = gpusim.pmap(f, "i")(x) - 8
        assert bool((found == 8 * x[:1]).all())


@pytest.mark.parametrize("schedule", ["cores", "one"])
def test_nested_maps_keep_their_order(schedule: str) -> None:
    def f(x: Any) -> Any:
        inner = gpusim.pmap(lambda y: lax.psum(y * y, ("j", "i")) + lax.psum(y, "j"), "j")
        return lax.psum(inner(x * 2), "i") + x

    x = np.random.default_rng(1).normal(size=(2, 3, 1000))
    expected = gpusim.pmap(f, "i", schedule=schedule)(x)
    same(gpusim.pmap(f, "i", schedule=schedule)(cupy.asarray(x)).get(), expected)
