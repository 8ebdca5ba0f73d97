"""The launches that compute-sanitizer sees, and what they say of a write beyond an array."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cuda import fake_cuda
from tests.gpu import launches
from tests.gpu.cupy_arrays import cupy


@pytest.fixture(autouse=True)
def without_the_pool() -> Iterator[None]:
    allocator = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(None)
    yield
    cupy.cuda.set_allocator(allocator)


def test_every_kernel_is_launched_and_has_the_cpus_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert launches.judge(launches.cases()) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) >= 40 and all(line.endswith(": equal") for line in said)


@pytest.mark.skipif(bool(fake_cuda.why_not()), reason="on a GPU compute-sanitizer finds it")
def test_a_write_beyond_an_array_fails(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = cupy.RawKernel('extern "C" __global__ void beyond(float* x) { x[9] = 1; }', "beyond")

    def run() -> tuple[object, np.ndarray]:
        x = cupy.zeros(8, np.float32)
        kernel((1,), (1,), (x,))
        return x, np.zeros(8, np.float32)

    assert launches.judge([("beyond", run)]) == 1
    assert "beyond: equal, cudaErrorIllegalAddress" in capsys.readouterr().out
