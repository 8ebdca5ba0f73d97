"""Pools over one to three spatial axes: the average and the maximum of each window of an image.

Padding does not count: an average is over the elements of the window that lie in the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Literal

import numpy as np

from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    Specs,
    add_op,
    gradient_ops,
    shape_spec,
)
from ..tensor import Tensor, TensorSpec
from ._stacked import narrow, wide
from ._windows import Windows, pad, unpad, windows
from .convolution import PadType, Sizes, check_pad_type

__all__ = ["receptive_attributes", "average_pool", "max_pool"]


def receptive_attributes(
    strides: Sizes,
    pads: Sizes,
    out_pads: Sizes,
    dilations: Sizes,
    in_dilations: Sizes,
    auto_pad: PadType | None,
    ceil_mode: bool,
) -> dict[str, Any]:
    """The attributes of a pool: how its windows slide over an image.

    **Raises**

    - ValueError: for another `auto_pad`.
    - NotImplementedError: for `out_pads` other than 0 and `in_dilations` other than 1. An IPU has
      no pools of images with gaps either.
    """
    if any(out_pads or ()) or any(size != 1 for size in in_dilations or ()):
        raise NotImplementedError(
            f"A pool with out_pads={out_pads} and in_dilations={in_dilations}: only zeros and ones"
        )
    return {
        "stride": tuple(strides or ()),
        "padding": tuple(pads or ()),
        "dilation": tuple(dilations or ()),
        "pad_type": check_pad_type(auto_pad),
        "ceil_mode": bool(ceil_mode),
    }


def _geometry(image: tuple[int, ...], attributes: Attributes) -> Windows:
    return windows(
        image,
        attributes["kernel"],
        stride=attributes["stride"],
        padding=attributes["padding"],
        dilation=attributes["dilation"],
        pad_type=attributes["pad_type"],
        ceil_mode=attributes["ceil_mode"],
    )


def _spec(inputs: Specs, attributes: Attributes) -> Specs:
    (spec,) = inputs
    if len(spec.shape) < 3:
        raise ValueError(f"A pool needs a tensor (N, C, ...), but its shape is {spec.shape}")
    w = _geometry(spec.shape[2:], attributes)
    return [TensorSpec((*spec.shape[:2], *w.out), spec.dtype)]


def _fold_taps(
    xp: ModuleType, image: Array, w: Windows, fold: Callable[[Array, Array], Array]
) -> Array:
    """The taps of each window folded into one: [..., *out]."""
    out = None
    for _, where in w.taps():
        seen = image[(..., *where)]
        out = seen.copy() if out is None else fold(out, seen)
    return out


# Averages


def _counts(xp: ModuleType, w: Windows) -> Array:
    """The number of image elements in each window, [*out]."""
    ones = pad(xp, xp.ones(w.image, np.float32), w)
    return _fold_taps(xp, ones, w, xp.add)


def _average(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    w = _geometry(x.shape[3:], attributes)
    summed = _fold_taps(xp, pad(xp, wide(x), w), w, xp.add)
    return [narrow(summed / _counts(xp, w).astype(summed.dtype), x.dtype)]


def _average_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (dy,) = inputs
    shape = tuple(attributes["shape"])
    w = _geometry(shape[2:], attributes)
    share = wide(dy) / _counts(xp, w).astype(wide(dy[:0]).dtype)
    image = xp.zeros((dy.shape[0], *shape[:2], *w.padded), share.dtype)
    for _, where in w.taps():
        image[(..., *where)] += share
    return [narrow(unpad(xp, image, w), dy.dtype)]


AVERAGE_POOL_GRAD = Definition("AveragePoolGrad", shape_spec, _average_gradient)
AVERAGE_POOL = Definition("AveragePool", _spec, _average, gradient_ops((AVERAGE_POOL_GRAD, "")))


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
    """The mean of each window of an image, without padding.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `kernel_size`: the window's size along each spatial axis.
    - `stride`, `dilation`: a number for each spatial axis, by default 1.
    - `padding`: lengths before each spatial axis, then after each; by default 0.
    - `out_pads`, `in_dilations`: 0 and 1 only.
    - `auto_pad`: as `pad_type` of `ops.conv`.
    - `ceil_mode`: whether a last window that leaves the image counts.

    **Raises**

    - ValueError: if numbers do not fit, or for another `auto_pad`.
    - NotImplementedError: for other `out_pads` and `in_dilations`.

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
    return add_op(AVERAGE_POOL, [t], attributes)[0]


# Maxima


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _maximum(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    w = _geometry(x.shape[3:], attributes)
    return [_fold_taps(xp, pad(xp, x, w, _lowest(x.dtype)), w, xp.maximum)]


def _max_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    """Every element that equals its window's maximum gets the window's gradient."""
    dy, x, y = inputs
    w = _geometry(x.shape[3:], attributes)
    padded = pad(xp, x, w, _lowest(x.dtype))
    share = wide(dy)
    image = xp.zeros(padded.shape, share.dtype)
    for _, where in w.taps():
        image[(..., *where)] += xp.where(padded[(..., *where)] == y, share, 0)
    return [narrow(unpad(xp, image, w), dy.dtype)]


MAX_POOL_GRAD = Definition("MaxPoolGrad", shape_spec, _max_gradient)
MAX_POOL = Definition("MaxPool", _spec, _maximum, gradient_ops((MAX_POOL_GRAD, "xy")))


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
    """The greatest element of each window of an image, without padding.

    Every element that equals it gets the window's gradient. Arguments and errors as in
    `average_pool`; `storage_order` is an option of an IPU without effect here.

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
    return add_op(MAX_POOL, [t], attributes)[0]
