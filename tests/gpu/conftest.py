"""GPUSIM_FAKE_CUDA=1 runs these tests on this machine's processor (tests/cuda/fake_cuda)."""

from __future__ import annotations

import os

from tests.cuda import fake_cuda

if os.environ.get(fake_cuda.SWITCH):
    fake_cuda.install()
