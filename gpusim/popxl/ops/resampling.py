"""Images at other sizes: interpolation along axes, and the averages of regions of interest.

Each output element is a weighted sum of inputs with known weights; so are the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
from .indexing import sum_rows

__all__ = ["interpolate", "roi_align"]

InterpolateType = Literal["nearest", "linear", "cubic"]
InterpolateNearestType = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
InterpolateCoordinateTransformationType = Literal[
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"
]
Floats = NDArray[np.float64]
MODES = ("nearest", "linear", "cubic")
NEAREST_MODES = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
COORDINATES = (
    "half_pixel",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
)
_CUBIC = -0.75  # the kernel's parameter, as in ONNX and PyTorch


# Interpolation: one axis after the other, as a matrix [out, in] of weights


def _coordinates(size: int, out: int, scale: float, kind: str) -> Floats:
    """The position in the input of each output element along an axis."""
    x = np.arange(out, dtype=np.float64)
    if kind == "asymmetric":
        return x / scale
    if kind in ("align_corners", "tf_crop_and_resize"):  # the region to crop is the whole image
        return x * ((size - 1) / (out - 1)) if out > 1 else x
    if kind == "pytorch_half_pixel" and out == 1:
        return x
    return (x + 0.5) / scale - 0.5


def _nearest(x: Floats, mode: str) -> NDArray[np.int64]:
    rounded = {
        "round_prefer_floor": lambda: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda: np.floor(x + 0.5),
        "floor": lambda: np.floor(x),
        "ceil": lambda: np.ceil(x),
    }[mode]()
    return rounded.astype(np.int64)


def _cubic_weights(t: Floats) -> list[Floats]:
    """The weights of four neighbours, beginning with the one before the element below."""
    a = _CUBIC

    def near(s: Floats) -> Floats:
        return (a + 2) * s**3 - (a + 3) * s**2 + 1

    def far(s: Floats) -> Floats:
        return a * s**3 - 5 * a * s**2 + 8 * a * s - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def weights(size: int, out: int, scale: float, attributes: Attributes) -> Floats:
    """The matrix [out, size] that interpolates an axis. Beyond the edge its last element counts.

    >>> attributes = {"mode": "linear", "nearest_mode": "floor", "coordinates": "align_corners"}
    >>> weights(2, 3, 1.5, attributes).tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    x = _coordinates(size, out, scale, attributes["coordinates"])
    if attributes["mode"] == "nearest":
        first, shares = _nearest(x, attributes["nearest_mode"]), [np.ones(out)]
    elif attributes["mode"] == "linear":
        x = np.clip(x, 0, size - 1)
        below = np.floor(x)
        first, shares = below.astype(np.int64), [1 - (x - below), x - below]
    else:
        below = np.floor(x)
        first, shares = below.astype(np.int64) - 1, _cubic_weights(x - below)
    matrix = np.zeros((out, size))
    for number, share in enumerate(shares):
        np.add.at(matrix, (np.arange(out), np.clip(first + number, 0, size - 1)), share)
    return matrix


def _output_shape(shape: Sequence[int], scales: Sequence[float]) -> tuple[int, ...]:
    return tuple(int(np.floor(n * s)) for n, s in zip(shape, scales, strict=True))


def _resize_spec(inputs: Specs, attributes: Attributes) -> Specs:
    (t,) = inputs
    scales = attributes["scales"]
    if len(scales) != len(t.shape):
        raise ValueError(
            f"scale_factor must have a number for each axis of {t.shape}, but it is {scales}"
        )
    shape = _output_shape(t.shape, scales)
    if min(shape, default=1) < 1:
        raise ValueError(f"scale_factor {scales} leaves nothing of a tensor of shape {t.shape}")
    return [TensorSpec(shape, t.dtype)]


def _matrices(shape: Sequence[int], attributes: Attributes) -> dict[int, Floats]:
    """The weights of each axis that changes."""
    scales = attributes["scales"]
    pairs = zip(shape, _output_shape(shape, scales), scales, strict=True)
    return {
        axis: weights(size, out, scale, attributes)
        for axis, (size, out, scale) in enumerate(pairs)
        if scale != 1
    }


def _along(xp: ModuleType, x: Array, matrix: Floats, axis: int) -> Array:
    """A matrix [out, in] applied to an axis of [R, *shape]."""
    moved = xp.ascontiguousarray(xp.moveaxis(x, axis + 1, -1))
    product = xp.matmul(moved, xp.asarray(matrix.T.astype(x.dtype)))
    return xp.moveaxis(product, -1, axis + 1)


def _resize(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (t,) = inputs
    out = wide(t)
    for axis, matrix in _matrices(t.shape[1:], attributes).items():
        if attributes["mode"] == "nearest":
            out = xp.take(out, xp.asarray(matrix.argmax(axis=1)), axis=axis + 1)
        else:
            out = _along(xp, out, matrix, axis)
    return [narrow(out, t.dtype)]


def _resize_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (dy,) = inputs
    out = wide(dy)
    for axis, matrix in _matrices(attributes["shape"], attributes).items():
        out = _along(xp, out, matrix.T, axis)
    return [narrow(out, dy.dtype)]


RESIZE_GRAD = Definition("ResizeGrad", shape_spec, _resize_gradient)
RESIZE = Definition("Resize", _resize_spec, _resize, gradient_ops((RESIZE_GRAD, "")))


def interpolate(
    t: Tensor,
    scale_factor: Iterable[float] | None = (1.0, 1.0, 1.0, 1.0),
    mode: InterpolateType | None = "nearest",
    nearest_mode: InterpolateNearestType | None = "round_prefer_floor",
    coordinate_transformation_mode: InterpolateCoordinateTransformationType | None = "half_pixel",
) -> Tensor:
    """Resize `t`: each axis gets floor(size * scale) elements.

    **Arguments**

    - `scale_factor`: a number for each axis.
    - `mode`: "nearest" takes the nearest element; "linear" averages two, by their distances;
      "cubic" is the cubic convolution of four, with a = -0.75.
    - `nearest_mode`: which of two elements is the nearest.
    - `coordinate_transformation_mode`: where in `t` the result's elements lie, as in ONNX's Resize;
      the region of "tf_crop_and_resize" is all of `t`.

    **Raises**: ValueError: for another mode, or if there is not a factor for each axis.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((1, 2, 4, 4), np.float32))
    ...     popxl.ops.interpolate(t, (1.0, 1.0, 2.0, 1.5), "linear")
    Tensor[resize_out popxl.dtypes.float32 (1, 2, 8, 6)]
    """
    checked = (
        (mode, MODES),
        (nearest_mode, NEAREST_MODES),
        (coordinate_transformation_mode, COORDINATES),
    )
    for value, allowed in checked:
        if value not in allowed:
            listed = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise ValueError(f"interpolate type {value} is not valid, must be {listed}.")
    attributes = {
        "scales": tuple(float(scale) for scale in scale_factor or (1.0,) * t.rank),
        "mode": mode,
        "nearest_mode": nearest_mode,
        "coordinates": coordinate_transformation_mode,
    }
    return add_op(RESIZE, [t], attributes)[0]


# Regions of interest: the mean of points in each bin, each from its four neighbours


def _roi_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, rois, batch = inputs
    if len(t.shape) != 4 or len(rois.shape) != 2 or rois.shape[1:] != (4,):
        raise ValueError(
            f"t must be (N, C, H, W) and rois (number, 4), but the shapes are {t.shape} and "
            f"{rois.shape}"
        )
    if batch.shape != rois.shape[:1] or not batch.dtype.is_int:
        raise ValueError(
            f"batch_index must have an integer for each of the {rois.shape[0]} regions, but it is "
            f"{batch}"
        )
    return [TensorSpec((rois.shape[0], t.shape[1], *attributes["output_size"]), t.dtype)]


def _points(
    xp: ModuleType, first: Array, last: Array, bins: int, samples: int, scale: float
) -> Array:
    """[R, K, bins * samples]: the points of each region along one axis of the image."""
    start = first * scale
    length = xp.maximum(last * scale - start, 1)  # a region is a pixel at least
    positions = (xp.arange(bins * samples, dtype=np.float64) + 0.5) / samples
    return start[..., None] + positions * (length / bins)[..., None]


def _neighbours(xp: ModuleType, x: Array, size: int) -> tuple[Array, Array, Array]:
    """The elements below and above each point, and the weight of the upper one.

    Points up to one element outside lie on the edge; the weight of those beyond is NaN.
    """
    inside = (x >= -1) & (x <= size)
    bounded = xp.clip(x, 0, size - 1)
    low = xp.floor(bounded)
    share = xp.where(inside, bounded - low, np.nan)
    below = low.astype(np.int64)
    return below, xp.minimum(below + 1, size - 1), share


def _roi_weights(
    xp: ModuleType, rois: Array, image: tuple[int, int], attributes: Attributes
) -> tuple[Array, Array]:
    """The positions in the flat image, and the weights, of each output: [R, K, bins, points]."""
    height, width = attributes["output_size"]
    samples, scale = attributes["sampling_ratio"], attributes["spatial_scale"]
    regions = rois.astype(np.float64)
    ys = _points(xp, regions[..., 1], regions[..., 3], height, samples, scale)
    xs = _points(xp, regions[..., 0], regions[..., 2], width, samples, scale)
    replicas, number = rois.shape[:2]
    positions, shares = [], []
    y_low, y_high, y_share = _neighbours(xp, ys, image[0])
    x_low, x_high, x_share = _neighbours(xp, xs, image[1])
    for y, wy in ((y_low, 1 - y_share), (y_high, y_share)):
        for x, wx in ((x_low, 1 - x_share), (x_high, x_share)):
            positions.append(y[..., :, None] * image[1] + x[..., None, :])
            shares.append(wy[..., :, None] * wx[..., None, :])
    shape = (replicas, number, height, samples, width, samples)
    order = (0, 1, 2, 4, 3, 5)

    def by_bin(parts: Arrays) -> Array:
        stacked = [part.reshape(shape).transpose(order) for part in parts]
        return xp.stack(stacked, axis=-1).reshape(replicas, number, height * width, -1)

    weight = by_bin(shares)
    return by_bin(positions), xp.where(xp.isnan(weight), 0, weight) / samples**2


def _roi_align(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, rois, batch = inputs
    replicas, _, channels, height, width = t.shape
    positions, weight = _roi_weights(xp, rois, (height, width), attributes)
    flat = wide(t).reshape(replicas, t.shape[1], channels, -1)
    r = xp.arange(replicas)[:, None, None, None, None]
    n = batch.astype(np.int64)[:, :, None, None, None]
    c = xp.arange(channels)[None, None, :, None, None]
    seen = flat[r, n, c, positions[:, :, None]]
    out = (seen * weight[:, :, None].astype(flat.dtype)).sum(axis=-1)
    shape = (replicas, rois.shape[1], channels, *attributes["output_size"])
    return [narrow(out, t.dtype).reshape(shape)]


def _roi_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, rois, batch = inputs
    images, channels, height, width = attributes["shape"]
    replicas, number = rois.shape[:2]
    positions, weight = _roi_weights(xp, rois, (height, width), attributes)
    share = wide(dy).reshape(replicas, number, channels, -1)
    parts = share[..., None] * weight[:, :, None].astype(share.dtype)
    rows = xp.moveaxis(parts, 2, -1).reshape(replicas, -1, channels)
    at = positions + (batch.astype(np.int64) * (height * width))[:, :, None, None]
    added = sum_rows(xp, rows, at.reshape(replicas, -1), images * height * width)
    image = xp.moveaxis(added.reshape(replicas, images, height, width, channels), -1, 2)
    return [narrow(image, dy.dtype)]


ROI_ALIGN_GRAD = Definition("RoiAlignGrad", shape_spec, _roi_gradient)
ROI_ALIGN = Definition(
    "RoiAlign",
    _roi_spec,
    _roi_align,
    gradient_ops((ROI_ALIGN_GRAD, "12"), None),
    names=("t", "rois", "batch_index"),
)


def roi_align(
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: Iterable[int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """The means of the bins of regions of images.

    **Arguments**

    - `t`: (N, C, H, W).
    - `rois`: (number, 4): x and y of each region's first and last corner.
    - `batch_index`: (number,), integers: the image of each region.
    - `output_size`: the numbers of bins along H and W.
    - `spatial_scale`: the factor from the regions' numbers to positions in `t`.
    - `sampling_ratio`: the number of points of a bin along each axis, at least 1.

    **Raises**: ValueError: for other shapes or numbers.

    Only `t` has a gradient.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((1, 2, 8, 8), np.float32))
    ...     rois = popxl.constant([[0.0, 0.0, 4.0, 4.0]])
    ...     images = popxl.constant([0], popxl.int32)
    ...     popxl.ops.roi_align(t, rois, images, (2, 2), 1.0, 2)
    Tensor[roialign_out popxl.dtypes.float32 (1, 2, 2, 2)]
    """
    size = tuple(output_size)
    if len(size) != 2 or min(size) < 1 or sampling_ratio < 1:
        raise ValueError(
            f"output_size must be two positive numbers and sampling_ratio positive, but they are "
            f"{size} and {sampling_ratio}"
        )
    attributes = {
        "output_size": size,
        "spatial_scale": float(spatial_scale),
        "sampling_ratio": sampling_ratio,
    }
    return add_op(ROI_ALIGN, [t, rois, batch_index], attributes)[0]
