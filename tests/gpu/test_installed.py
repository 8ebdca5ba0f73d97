"""What gpusim and its tests take CuPy to be, asked of the CuPy that is installed.
These need no GPU: arrays can lie in memory of the host, as long as no kernel touches them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim import libraries
from tests.cuda import cupy_surface

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no GPU, for one
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")

NAMES = (
    "asarray asnumpy ascontiguousarray empty zeros arange ones ndarray cuda.Device "
    "cuda.Event cuda.Stream cuda.get_current_stream cuda.get_elapsed_time "
    "cuda.runtime.getDeviceCount cuda.runtime.getDevice cuda.runtime.getDeviceProperties "
    "cuda.runtime.driverGetVersion cuda.runtime.runtimeGetVersion cuda.Stream.record "
    "cuda.Stream.wait_event cuda.Stream.synchronize cuda.Event.record cuda.Event.synchronize "
    "cuda.function.Module.load cuda.function.Module.get_function "
    "cuda.nvrtc.NVRTCError cuda.nvrtc.getVersion cuda.nvrtc.createProgram "
    "cuda.nvrtc.compileProgram cuda.nvrtc.getCUBIN cuda.nvrtc.getProgramLog "
    "cuda.nvrtc.destroyProgram cuda.Device.compute_capability "
    "cuda.Event.done cuda.Device.attributes ndarray.get ndarray.view ndarray.device ndarray.base"
)
OF_NCCL = (
    "get_unique_id get_version groupStart groupEnd NcclError NcclCommunicator.initAll "
    "NcclCommunicator.send NcclCommunicator.recv NcclCommunicator.allReduce "
    "NcclCommunicator.check_async_error NcclCommunicator.abort NcclCommunicator.destroy NCCL_UINT8 "
    "NCCL_SUM NCCL_PROD NCCL_MAX NCCL_MIN NCCL_FLOAT16 NCCL_BFLOAT16 NCCL_FLOAT32"
)


def find(root: Any, name: str) -> Any:
    for part in name.split("."):
        root = getattr(root, part)
    return root


@pytest.mark.parametrize("name", NAMES.split())
def test_what_gpusim_asks_for_is_there(name: str) -> None:
    assert find(cupy, name) is not None


@pytest.mark.parametrize("name", OF_NCCL.split())
def test_what_gpusim_asks_of_nccl_is_there(name: str) -> None:
    nccl = importlib.import_module("cupy.cuda.nccl")
    if nccl.available:
        assert find(nccl, name) is not None


def test_the_stand_ins_table_is_this_cupys() -> None:
    first = cupy_surface.TABLE.read_text().partition("\n")[0]
    if f"CuPy {cupy.__version__} " in first and f"NumPy {np.__version__}'s" in first:
        assert cupy_surface.text(cupy) == cupy_surface.TABLE.read_text()
    else:  # another version: what the rules call must be there all the same
        have = dict(cupy_surface.functions(cupy))
        assert {"where", "take_along_axis", "concatenate", "linalg.solve", "fft.fft"} <= have.keys()


def in_hosts_memory(host: np.ndarray) -> Any:
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(host.shape, host.dtype, pointer, host.strides)


def test_views_are_as_the_stand_ins() -> None:
    from tests.cuda.device_arrays import DeviceArray

    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    real, ours = in_hosts_memory(host), DeviceArray(host)
    assert libraries.on_device(real) and libraries.on_device(ours)
    views = (
        lambda x: x[1:, ::2],
        lambda x: x[0, 0],
        lambda x: x[None, ..., 0],
        lambda x: np.moveaxis(x, 0, 1),
        lambda x: np.broadcast_to(x, (2, 4, 6)),
        lambda x: np.reshape(x, (24,)),
        lambda x: np.flip(x, (0, 1)),
        lambda x: np.expand_dims(x, (0, 2)),
        lambda x: np.squeeze(x[None], 0),
        lambda x: np.diagonal(x, 0, -2, -1),
        lambda x: np.split(x, 2)[1],
        lambda x: np.transpose(x, (1, 0)),
        lambda x: x.T,
        lambda x: x.view(np.uint8),
        lambda x: x.view(np.uint8).view(ml_dtypes.float8_e4m3fn),
        lambda x: libraries.reshaped_view(x, (2, 2, 6)),
        lambda x: x.astype(np.float32, copy=False),
    )
    for view in views:
        mine, theirs = view(ours), view(real)
        assert (mine.shape, mine.strides, mine.dtype) == (
            theirs.shape,
            theirs.strides,
            theirs.dtype,
        )
        assert mine.data.ptr == theirs.data.ptr
        assert libraries.owner(theirs) is real and libraries.owner(mine) is ours
        assert mine.flags.c_contiguous == theirs.flags.c_contiguous


def test_refusals_are_as_the_stand_ins() -> None:
    from tests.cuda.device_arrays import DeviceArray

    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    for x in (in_hosts_memory(host), DeviceArray(host)):
        for refused in (
            lambda x: np.asarray(x),
            lambda x: np.empty_like(x, subok=False),
            lambda x: np.block([x]),
            lambda x: np.take(x, [0], mode="clip"),
            lambda x: np.sum(x, initial=0),
        ):
            with pytest.raises(TypeError):
                refused(x)
        with pytest.raises(ValueError, match="copy"):
            libraries.reshaped_view(x.T, (24,))
        with pytest.raises(NotImplementedError):
            np.maximum.reduce(x)
        assert not hasattr(x, "__index__")


def test_streams_and_events_take_what_they_are_given() -> None:
    stream, event = cupy.cuda.Stream.__init__.__doc__, cupy.cuda.Event.__init__.__doc__
    assert "non_blocking=False" in stream and "disable_timing=False" in event
    assert "event=None" in cupy.cuda.Stream.record.__doc__
    compiled = cupy.cuda.nvrtc.createProgram.__doc__, cupy.cuda.nvrtc.compileProgram.__doc__
    assert "headers, include_names" in compiled[0] and "options" in compiled[1]
