"""`interpolate`: a tensor at another size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .._ops import resampling
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["interpolate"]

InterpolateType = Literal["nearest", "linear", "cubic"]
InterpolateNearestType = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
InterpolateCoordinateTransformationType = Literal[
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"
]


def interpolate(
    t: Tensor,
    scale_factor: Iterable[float] | None = (1.0, 1.0, 1.0, 1.0),
    mode: InterpolateType | None = "nearest",
    nearest_mode: InterpolateNearestType | None = "round_prefer_floor",
    coordinate_transformation_mode: InterpolateCoordinateTransformationType | None = "half_pixel",
) -> Tensor:
    """`t` at another size: each axis has floor(size * scale) elements.

    **Arguments**

    - `scale_factor`: a number for each axis.
    - `mode`: "nearest": the nearest element; "linear": the mean of two, by their distances;
      "cubic": the cubic convolution of four, with a = -0.75.
    - `nearest_mode`: which of two elements is the nearest.
    - `coordinate_transformation_mode`: where in `t` the result's elements lie, as in ONNX's Resize;
      "tf_crop_and_resize" has the whole of `t` as its region.

    ValueError for another mode, or factors that are not one for each axis.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.zeros((1, 2, 4, 4), np.float32))
    ...     popxl.ops.interpolate(t, (1.0, 1.0, 2.0, 1.5), "linear")
    Tensor[resize_out popxl.dtypes.float32 (1, 2, 8, 6)]
    """
    checked = (
        (mode, resampling.MODES),
        (nearest_mode, resampling.NEAREST_MODES),
        (coordinate_transformation_mode, resampling.COORDINATES),
    )
    for given, known in checked:
        if given not in known:
            listed = f"{', '.join(known[:-1])} or {known[-1]}"
            raise ValueError(f"interpolate type {given} is not valid, must be {listed}.")
    attributes = {
        "scales": tuple(float(scale) for scale in scale_factor or (1.0,) * t.rank),
        "mode": mode,
        "nearest_mode": nearest_mode,
        "coordinates": coordinate_transformation_mode,
    }
    return add_op(resampling.RESIZE, [t], attributes)[0]
