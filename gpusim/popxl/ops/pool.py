"""`average_pool`, `max_pool`: one value for each window of an image."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from .._ops import pooling
from .._ops.definition import add_op
from ..tensor import Tensor
from .conv import PadType, checked_pad_type

__all__ = ["average_pool", "max_pool", "receptive_attributes"]

Sizes = Iterable[int] | None


def receptive_attributes(
    strides: Sizes,
    pads: Sizes,
    out_pads: Sizes,
    dilations: Sizes,
    in_dilations: Sizes,
    auto_pad: PadType | None,
    ceil_mode: bool,
) -> dict[str, Any]:
    """How windows slide over an image, by name.

    Raises:
        ValueError: for another `auto_pad`.
        NotImplementedError: for `out_pads` other than 0 and `in_dilations` other than 1: images
            with gaps in them have no pools on an IPU either.
    """
    if any(out_pads or ()) or any(size != 1 for size in in_dilations or ()):
        raise NotImplementedError(
            f"A pool with out_pads={out_pads} and in_dilations={in_dilations}: only zeros and ones"
        )
    return {
        "stride": tuple(strides or ()),
        "padding": tuple(pads or ()),
        "dilation": tuple(dilations or ()),
        "pad_type": checked_pad_type(auto_pad),
        "ceil_mode": bool(ceil_mode),
    }


def average_pool(
    t: Tensor,
    kernel_size: Iterable[int],
    stride: Sizes = None,
    padding: Sizes = None,
    out_pads: Sizes = None,
    dilation: Sizes = None,
    in_dilations: Sizes = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
) -> Tensor:
    """The mean of each window of an image; padding does not count.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `kernel_size`: the window's size along each spatial axis.
    - `stride`, `dilation`: a number for each spatial axis, by default 1.
    - `padding`: lengths before each spatial axis, then after each; by default 0.
    - `out_pads`, `in_dilations`: 0 and 1 only.
    - `auto_pad`: as `pad_type` of `ops.conv`.
    - `ceil_mode`: whether a last window that leaves the image counts.

    Raises:
        ValueError: for numbers that do not belong together, or another `auto_pad`.
        NotImplementedError: for other `out_pads` and `in_dilations`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((1, 2, 8, 8), np.float32))
    ...     popxl.ops.average_pool(t, (2, 2), stride=(2, 2))
    Tensor[averagepool_out popxl.dtypes.float32 (1, 2, 4, 4)]
    """
    attributes = receptive_attributes(
        stride, padding, out_pads, dilation, in_dilations, auto_pad, ceil_mode
    )
    attributes["kernel"] = tuple(kernel_size)
    return add_op(pooling.AVERAGE_POOL, [t], attributes)[0]


def max_pool(
    t: Tensor,
    kernel_size: Iterable[int],
    stride: Sizes = None,
    padding: Sizes = None,
    out_pads: Sizes = None,
    dilation: Sizes = None,
    in_dilations: Sizes = None,
    auto_pad: PadType | None = "not_set",
    ceil_mode: bool = False,
    storage_order: Literal["row", "column"] = "row",
) -> Tensor:
    """The greatest element of each window of an image; padding is never it.

    Arguments and errors as those of `average_pool`; `storage_order` is an IPU's, and changes
    nothing here. Each element that is the greatest of its window gets the window's gradient.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((1, 2, 8, 8), np.float32))
    ...     popxl.ops.max_pool(t, (3, 3), padding=(1, 1, 1, 1))
    Tensor[maxpool_out popxl.dtypes.float32 (1, 2, 8, 8)]
    """
    attributes = receptive_attributes(
        stride, padding, out_pads, dilation, in_dilations, auto_pad, ceil_mode
    )
    attributes["kernel"] = tuple(kernel_size)
    return add_op(pooling.MAX_POOL, [t], attributes)[0]
