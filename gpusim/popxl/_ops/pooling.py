"""Pools: the average and the maximum of each window of an image, over one to three spatial axes.
An average counts what of its window is image; padding takes no part in either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array, narrow, wide
from .windows import Windows, pad, unpad, windows

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]


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


def _input_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(tuple(attributes["shape"]), inputs[0].dtype)]


def _folded(
    xp: ModuleType, image: Array, w: Windows, fold: Callable[[Array, Array], Array]
) -> Array:
    """The taps of each window folded into one: [..., *out]."""
    out = None
    for _, where in w.taps():
        seen = image[(..., *where)]
        out = seen.copy() if out is None else fold(out, seen)
    return out


def _counts(xp: ModuleType, w: Windows) -> Array:
    """How many elements of each window are image, [*out]."""
    ones = pad(xp, xp.ones(w.image, np.float32), w)
    return _folded(xp, ones, w, xp.add)


def _average(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    w = _geometry(x.shape[3:], attributes)
    summed = _folded(xp, pad(xp, wide(x), w), w, xp.add)
    return [narrow(summed / _counts(xp, w).astype(summed.dtype), x.dtype)]


def _average_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (dy,) = inputs
    shape = tuple(attributes["shape"])
    w = _geometry(shape[2:], attributes)
    share = wide(dy) / _counts(xp, w).astype(wide(dy[:0]).dtype)
    image = xp.zeros((dy.shape[0], *shape[:2], *w.padded), share.dtype)
    for _, where in w.taps():
        image[(..., *where)] += share
    return [narrow(unpad(xp, image, w), dy.dtype)]


def _build_average_gradient(site: GradientSite) -> list[Any]:
    attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
    return [add_op(AVERAGE_POOL_GRAD, [site.gradient(0)], attributes)[0]]


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _maximum(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (x,) = inputs
    w = _geometry(x.shape[3:], attributes)
    return [_folded(xp, pad(xp, x, w, _lowest(x.dtype)), w, xp.maximum)]


def _max_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    """Each element that is its window's maximum gets the window's gradient, also of several."""
    dy, x, y = inputs
    w = _geometry(x.shape[3:], attributes)
    padded = pad(xp, x, w, _lowest(x.dtype))
    share = wide(dy)
    image = xp.zeros(padded.shape, share.dtype)
    for _, where in w.taps():
        image[(..., *where)] += xp.where(padded[(..., *where)] == y, share, 0)
    return [narrow(unpad(xp, image, w), dy.dtype)]


def _build_max_gradient(site: GradientSite) -> list[Any]:
    attributes = {**site.attributes, "shape": site.op.inputs[0].shape}
    given = [site.gradient(0), site.input(0), site.output(0)]
    return [add_op(MAX_POOL_GRAD, given, attributes)[0]]


AVERAGE_POOL_GRAD = Definition("AveragePoolGrad", infer=_input_spec, run=_average_gradient)
AVERAGE_POOL = Definition(
    "AveragePool", infer=_spec, run=_average, gradient=_build_average_gradient, names=("t",)
)
MAX_POOL_GRAD = Definition("MaxPoolGrad", infer=_input_spec, run=_max_gradient)
MAX_POOL = Definition(
    "MaxPool", infer=_spec, run=_maximum, gradient=_build_max_gradient, names=("t",)
)
