"""Without a GPU, or with GPUSIM_FAKE_CUDA=1, these tests run on this machine's processor."""

from __future__ import annotations

from tests.cuda import fake_cuda

if not fake_cuda.why_not():
    fake_cuda.install()
