"""ufunc.at on a device: one launch, whose threads take the values of one element each, in turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim.fallback.formats import FLOAT16, SUB_32_BIT, kind_of, real_of

from .device import Array, Device, Kernel, Launch
from .structs import SCATTER, struct
from .targets import NAMES, target

#: In the order of scatter.cu's enumeration.
OPERATIONS: tuple[np.ufunc, ...] = (
    np.add,
    np.subtract,
    np.multiply,
    np.true_divide,
    np.maximum,
    np.minimum,
)
#: bool is computed as 0 and 1.
OF_BOOL: dict[np.ufunc, np.ufunc] = {np.add: np.maximum, np.multiply: np.minimum}


def has_update(ufunc: np.ufunc, dtype: np.dtype[Any]) -> bool:
    """Whether `update_at` takes these."""
    if dtype == np.bool_:
        return ufunc in (*OF_BOOL, np.maximum, np.minimum)
    known = ufunc in OPERATIONS and real_of(dtype) in NAMES
    return known and (ufunc is not np.true_divide or kind_of(dtype) != "int")


def update_at(device: Device, ufunc: np.ufunc, x: Array, places: Array, values: Array) -> None:
    """``ufunc.at(x.reshape(-1), places, values)`` with NumPy's bits, in place.

    Elements that are named more than once take their values in the order of `values`.

    **Arguments**:

    - `ufunc`: one of `OPERATIONS`.
    - `x`: a C-contiguous array.
    - `places`: int64 (n,), from 0 to x.size - 1; they are not checked.
    - `values`: (n,), C-contiguous, of the dtype of `x`.

    """
    if x.dtype == np.bool_:
        x, values, ufunc = x.view(np.uint8), values.view(np.uint8), OF_BOOL.get(ufunc, ufunc)
    count = places.size
    if not count:
        return
    order = np.argsort(places, kind="stable")
    ascending = places[order]
    arguments = struct(
        SCATTER,
        array=device.pointer(x),
        values=device.pointer(values),
        places=device.pointer(ascending),
        order=device.pointer(order),
        count=count,
        op=OPERATIONS.index(ufunc),
        first_of_equals=x.dtype == FLOAT16,
        is_signed=x.dtype.kind == "i",
    )
    if x.dtype in SUB_32_BIT:
        arguments["target"] = target(x.dtype)
    device.run(Launch(template(x.dtype), arguments, count))


def template(dtype: np.dtype[Any]) -> Kernel:
    """The kernel for arrays of a dtype other than bool."""
    return Kernel("scatter.cu", f"scatter<{NAMES[real_of(dtype)]}, {1 + (dtype.kind == 'c')}>")
