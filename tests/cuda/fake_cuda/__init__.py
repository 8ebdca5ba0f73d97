"""A CUDA that is this machine's processor, under the real CuPy: `install()` before CuPy's import.

CuPy checks arguments, chooses and compiles kernels and launches them as on a GPU; the runtime, the
driver and NVRTC below it are Python and g++. Every launch is executed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
from importlib import metadata
from typing import Any

from . import compiler

SWITCH = "GPUSIM_FAKE_CUDA"  # the environment variable that asks for it


def why_not() -> str | None:
    """Why CuPy does not run on it here; None if it does."""
    if importlib.util.find_spec("cupy_backends") is None:
        return "needs CuPy: pip install cupy-cuda13x"
    if not compiler.has_compiler():
        return f"needs {compiler.COMPILER}"
    if os.environ.get(SWITCH):
        return None
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return f"this machine has a GPU's driver: {SWITCH}=1 takes the fake all the same"


def machine() -> Any:
    """The devices (runtime.Machine), whose memory limit and counts tests look at."""
    from .runtime import machine

    return machine


def install() -> None:
    """Make CuPy run on this machine; RuntimeError if it is imported already."""
    if getattr(sys.modules.get("cupy_backends.cuda._softlink"), "ctypes", None) is _loader:
        return
    if "cupy" in sys.modules:
        raise RuntimeError("CuPy is imported already: install the fake CUDA before")
    _load_pytorch_for_cuda()
    # What is kept on disk is apart from that of GPUs. CuPy compiles its own kernels, not cub's.
    os.environ["CUPY_CACHE_DIR"] = str(compiler.folder() / "kernels")
    # gpusim's does not know which compiler says that it is NVRTC 13.0.
    os.environ["GPUSIM_CACHE_DIR"] = str(compiler.folder() / f"gpusim-{compiler.fingerprint()}")
    os.environ["CUPY_ACCELERATORS"] = ""
    import cupy_backends.cuda._softlink as softlink

    softlink.ctypes = _loader
    from cuda import pathfinder

    usual = pathfinder.load_nvidia_dynamic_lib
    compiler.find_nvrtc = functools.partial(usual, "nvrtc")
    pathfinder.load_nvidia_dynamic_lib = functools.partial(_find, usual)
    from cupy_backends.cuda.api import runtime

    from . import capsules
    from .runtime import CudaError, Runtime

    fake = Runtime()

    def functions(name: str) -> Any:
        function = getattr(fake, name, None)

        @functools.wraps(function or fake.__init__)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if function is None:
                raise NotImplementedError(f"the fake CUDA has no {name}")
            try:
                return function(*arguments, **keywords)
            except CudaError as error:
                raise runtime.CUDARuntimeError(error.status) from None

        return call

    capsules.replace(runtime, functions)
    from . import libraries, nccl

    libraries.install()
    nccl.install()


def _load_pytorch_for_cuda() -> None:
    """PyTorch's CUDA libraries have to be there first: the fake's have the same names."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("nvidia-cublas")
        with contextlib.suppress(Exception):  # it is missing or broken, which others say
            importlib.import_module("torch")


class _Found:
    """A library that the path finder would find."""

    def __init__(self, name: str) -> None:
        self.abs_path, self.found_via = f"/fake/lib/lib{name}.so", "fake"
        self._handle_uint = NVRTC if name == "nvrtc" else 0


NVRTC = 0xFA4E  # the handle of the fake libnvrtc


def _find(usual: Any, name: str) -> Any:
    fakes = ("nvrtc", "cublas", "cusolver", "cufft")
    return _Found(name) if name in fakes else usual(name)


class _Loader:
    """ctypes, as CuPy's loader of libraries uses it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)

    def CDLL(self, name: str | None, handle: int | None = None) -> Any:
        from . import driver

        if handle == NVRTC:
            return driver.nvrtc
        if name == "libcuda.so.1":
            return driver.cuda
        raise OSError(f"the fake CUDA has no {name}")


_loader = _Loader()
