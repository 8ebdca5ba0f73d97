"""Values of a program as arrays of constants and variables; devices; tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim import popdist
from gpusim.devices import Connection, ConnectionType, Device, Table, select_by_count
from gpusim.errors import GpusimError
from gpusim.popdist.popart import DeviceInfo, UnlistedDevice

from . import dtypes
from .fp8_utils import host_pow2scale_cast_to_fp8
from .typing_ import HostScalarTensor

__all__ = [
    "downcast_np_dtypes",
    "host_pow2scale_cast_to_fp8",
    "table_to_string",
    "to_numpy",
]

#: 64-bit dtypes, which IPUs lack, and what they become.
downcast_np_dtypes = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}
FLOAT8 = (dtypes.float8_143, dtypes.float8_152)


def to_numpy(
    x: HostScalarTensor,
    dtype: dtypes.dtype | None = None,
    downcast: bool = True,
    copy: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> NDArray[Any]:
    """The values as a NumPy array in C order.

    **Arguments**

    - `x`: an array, a torch tensor, a number, or nested lists of numbers.
    - `dtype`: the dtype to convert to; by default that of `x`.
    - `downcast`: whether 64-bit values become 32-bit ones if `dtype` is not given.
    - `copy`: whether the array must not share its memory with `x`.
    - `log2_scale`, `nan_on_overflow`: for the float8 types. They scale by 2**log2_scale (default 0)
      before they round. Above their largest value they give NaN (the default) or that value.

    **Raises**

    - ValueError: for a memory-mapped array that would have to be copied.
    - TypeError: for float8 from other types than float16, float32 or float64.
    - RuntimeError: for `log2_scale` or `nan_on_overflow` with another dtype.

    >>> to_numpy([1.0, 2.5]), to_numpy(3, dtypes.float16)
    (array([1. , 2.5], dtype=float32), array(3., dtype=float16))
    """
    if isinstance(x, np.memmap):
        return _check_memmap(x, dtype, downcast)
    if hasattr(x, "detach") and hasattr(x, "cpu"):
        x = _from_torch(x)
    elif hasattr(x, "__cuda_array_interface__"):
        x = x.get()
    array = np.asarray(x)
    if dtype in FLOAT8:
        assert dtype is not None
        return _to_float8(array, dtype, log2_scale or 0, nan_on_overflow is not False)
    if log2_scale is not None:
        raise RuntimeError(
            "Non-default value for 'log2scale' is not supported for dtypes  that are not "
            "popxl.float8_143 or popxl.float8_152"
        )
    if nan_on_overflow is not None:
        raise RuntimeError(
            "Non-default value for 'nan_on_overflow' is not supported for  dtypes that are not "
            "popxl.float8_143 or popxl.float8_152"
        )
    if dtype is not None:
        target = dtype.as_numpy()
    else:
        target = downcast_np_dtypes.get(array.dtype, array.dtype) if downcast else array.dtype
    array = array.astype(target, order="C", copy=False)
    shared = isinstance(x, np.ndarray) and np.may_share_memory(array, x)
    return array.copy() if copy and shared else array


def _check_memmap(
    x: np.memmap[Any, Any], dtype: dtypes.dtype | None, downcast: bool
) -> NDArray[Any]:
    """A memory-mapped array itself: the variable's values are those of the file."""
    if dtype is not None and dtype.as_numpy() != x.dtype:
        raise ValueError(
            "When passing a memory-mapped NumPy array, the `dtype` parameter must be None or the "
            "same as the array's dtype"
        )
    if not (x.flags.c_contiguous and x.flags.aligned):
        raise ValueError(
            "When passing a memory-mapped NumPy array, it must already be in C-ordered and "
            "aligned form."
        )
    if dtype is None and downcast and x.dtype in downcast_np_dtypes:
        raise ValueError(
            f"When passing a memory-mapped NumPy array, the dtype {x.dtype} is not supported, as "
            "it requires downcasting the array into a new array with a dtype supported by PopXL."
        )
    return x


def _from_torch(tensor: Any) -> NDArray[Any]:
    """A torch tensor's values; bfloat16, which NumPy lacks, becomes float32."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def _to_float8(
    array: NDArray[Any], dtype: dtypes.dtype, log2_scale: int, nan_on_overflow: bool
) -> NDArray[Any]:
    if array.dtype == dtype.as_numpy():
        return array.copy()
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise TypeError(
            f"Type {array.dtype} is not supported for float8 tensors."
            "Please use float16, float32 or float64 types."
        )
    return host_pow2scale_cast_to_fp8(array, dtype, log2_scale, nan_on_overflow)


def _to_device_info(device_type: str, num_ipus: int = 1, use_popdist: bool = False) -> DeviceInfo:
    """PopART's description of a session's device, not attached.

    **Arguments**: `use_popdist`: whether it is the device that popdist names for this instance.

    **Raises**: the errors of `check_device` and `hardware`.
    """
    check_device(device_type, num_ipus)
    if device_type != "ipu_hw":
        return UnlistedDevice(num_ipus)
    replicas = popdist.getNumLocalReplicas() if use_popdist else None
    return DeviceInfo(Connection(hardware(num_ipus, replicas)[0], ConnectionType.OnDemand))


def check_device(device_type: str, num_ipus: int) -> None:
    """Raise ValueError for another type of device, or a CPU of several IPUs."""
    if device_type not in ("ipu_hw", "ipu_model", "cpu"):
        raise ValueError(
            f"Incorrect device type provided: {device_type}, must be one of: `ipu_hw`, "
            "`ipu_model`, `cpu`"
        )
    if device_type == "cpu" and num_ipus > 1:
        raise ValueError(
            f"For a cpu device, multiple devices (provided: {num_ipus}) are not supported."
        )


def hardware(num_ipus: int, replicas: int | None = None) -> tuple[Device, ...]:
    """The simulated devices with a number of IPUs, of which a session takes a free one.

    **Arguments**: `replicas`: their number, if popdist names the device for this instance.

    **Raises**: RuntimeError: if there is none.
    """
    try:
        if replicas is None:
            return select_by_count(num_ipus)
        return (Table.from_environment().device(popdist.getDeviceId(num_ipus // replicas)),)
    except GpusimError as error:
        raise RuntimeError(
            f"Failed to acquire device with {num_ipus} IPUs. Ensure that there are sufficient IPUs "
            "available. If you have enabled the Poplar SDK you can check device availability with "
            f"the `gc-monitor` command-line utility. {error}"
        ) from error


def table_to_string(
    rows: Sequence[Sequence[Any]], delimiter: str = " | ", header: bool = True
) -> str:
    """Rows as text with columns of one width, and a line below the first row if it is a `header`.

    >>> print(table_to_string([["op", "n"], ["Add", 12]]))
    op  | n
    ---------
    Add | 12
    """
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        delimiter.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in texts
    ]
    if header and lines:
        lines.insert(1, "-" * (sum(widths) + len(delimiter) * (len(widths) - 1) + 1))
    return "\n".join(lines)
