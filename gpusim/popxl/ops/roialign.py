"""`roi_align`: regions of images, all at one size."""

from __future__ import annotations

from collections.abc import Iterable

from .._ops import resampling
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["roi_align"]


def roi_align(
    t: Tensor,
    rois: Tensor,
    batch_index: Tensor,
    output_size: Iterable[int],
    spatial_scale: float,
    sampling_ratio: int,
) -> Tensor:
    """The means of the bins that regions of images are cut into.

    **Arguments**

    - `t`: (N, C, H, W).
    - `rois`: (number, 4): x and y of each region's first and last corner.
    - `batch_index`: (number,), integers: the image of each region.
    - `output_size`: the numbers of bins along H and W.
    - `spatial_scale`: by what the regions' numbers are multiplied to be places in `t`.
    - `sampling_ratio`: how many points of a bin are taken along each axis, at least 1.

    ValueError for other shapes or numbers. Gradients go to `t` alone.

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
    return add_op(resampling.ROI_ALIGN, [t, rois, batch_index], attributes)[0]
