"""CuPy as a library for the shared tests; a module that imports this is skipped without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpusim.fallback.formats import SUB_32_BIT
from tests.cuda import fake_cuda
from tests.cuda.on_device import Library

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
try:
    GPUS = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    GPUS = 0
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)

#: Whether the GPU is this machine's processor, which is slow, and does all work at once.
FAKE = not fake_cuda.why_not()
#: Python's arguments that run a module in another process.
AS_MODULE = ("-m", "tests.cuda.fake_cuda") if FAKE else ("-m",)


def to_device(values: Any) -> Any:
    """A copy on the GPU, of any dtype that ml_dtypes has, too."""
    if isinstance(values, cupy.ndarray):
        return values
    host = np.asarray(values)
    if host.dtype in SUB_32_BIT and host.dtype != np.float16:
        bits = np.ascontiguousarray(host).view(f"u{host.dtype.itemsize}")
        return cupy.asarray(bits).view(host.dtype).reshape(host.shape)
    return cupy.asarray(host)


def to_host(array: Any) -> np.ndarray:
    if array.dtype in SUB_32_BIT and array.dtype != np.float16:
        bits = array.view(f"u{array.dtype.itemsize}").get()
        found: np.ndarray = bits.view(array.dtype)
        return found
    found = array.get()
    return found


def library() -> Library:
    return Library("CuPy", to_device, to_host, exact=False)
