"""Convolutions over one to three spatial axes, also of 8-bit floats, and their transposes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from .. import dtypes
from .._ops import casts, convolution
from .._ops.definition import Definition, add_op
from .._ops.windows import PAD_TYPES
from ..tensor import Tensor
from .cast import check_log2_scale

__all__ = [
    "PadType",
    "conv",
    "conv_pow2scaled",
    "conv_transpose",
    "conv_transpose_pow2scaled",
    "multi_conv_options",
]

PadType = Literal["not_set", "same_upper", "same_lower", "valid"]
Sizes = Iterable[int] | None


def multi_conv_options(
    sess_opts: Any,
    attr_param: Any,
    available_memory_proportions: Sequence[float] | None,
    partials_types: Sequence[str] | None,
    enable_conv_dithering: Sequence[int] | None,
) -> dict[str, Any]:
    """The options of a convolution by name, without those that were not given.

    They are an IPU's, and change nothing here.
    """
    given = {
        "availableMemoryProportions": available_memory_proportions,
        "partialsTypes": partials_types,
        "enableConvDithering": enable_conv_dithering,
    }
    return {name: value for name, value in given.items() if value}


def conv(
    t: Tensor,
    weight: Tensor,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0, 0, 0),
    dilation: Sizes = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """The convolution of images with a weight, as of neural networks: the kernel is not flipped.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `weight`: (M, C / groups, ...): a kernel for each of the M channels of the result.
    - `stride`, `dilation`: a number for each spatial axis.
    - `padding`: numbers of zeros before each spatial axis, then after each.
    - `groups`: into how many groups of channels C and M are split.
    - `pad_type`: "not_set": by `padding`; "valid": none; "same_upper" and "same_lower": so that the
      result has size / stride elements, an odd zero at the end, or at the beginning.
    - the others are an IPU's, and change nothing here: products are added up in float32.

    Raises:
        ValueError: for shapes or numbers that do not belong together, or another `pad_type`.
        TypeError: for different dtypes.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8), np.float32))
    ...     weight = popxl.constant(np.ones((4, 3, 3, 3), np.float32))
    ...     popxl.ops.conv(t, weight, padding=(1, 1, 1, 1))
    Tensor[conv_out popxl.dtypes.float32 (1, 4, 8, 8)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    return add_op(convolution.CONV, [t, weight], sizes)[0]


def conv_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0, 0, 0),
    dilation: Sizes = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """The convolution of 8-bit floats, times ``2 ** log2_scale``, as float16.

    **Arguments**: `log2_scale`: a scalar of int32, -32 to 31; the others as those of `conv`.

    Raises:
        TypeError: for other dtypes.
        ValueError: for a scale that is no scalar, and as `conv`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8)), popxl.float8_143)
    ...     weight = popxl.constant(np.ones((4, 3, 3, 3)), popxl.float8_143)
    ...     popxl.ops.conv_pow2scaled(t, weight, popxl.constant(1, popxl.int32))
    Tensor[conv_out popxl.dtypes.float16 (1, 4, 6, 6)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    return _scaled(convolution.CONV_POW2SCALED, t, weight, log2_scale, sizes)


def conv_transpose(
    t: Tensor,
    weight: Tensor,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0, 0, 0),
    dilation: Sizes = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    output_padding: Sizes = (),
    output_shape: Sizes = (),
    available_memory_proportions: list[float] | None = None,
    partials_types: list[str] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """The transpose of a convolution: what its gradient does to the gradient of its result.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `weight`: (C, M / groups, ...).
    - `padding`: what is cut off the result before each spatial axis, then after each.
    - `output_padding`: by how much the result is longer at the end of each axis.
    - `output_shape`: the result's shape, or its spatial part, from which the padding follows.
    - `pad_type`: with "same_upper" and "same_lower" the shape is size * stride, unless it is given.
    - the others as those of `conv`.

    Errors as those of `conv`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8), np.float32))
    ...     weight = popxl.constant(np.ones((3, 4, 3, 3), np.float32))
    ...     popxl.ops.conv_transpose(t, weight, stride=(2, 2))
    Tensor[convtranspose_out popxl.dtypes.float32 (1, 4, 17, 17)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    sizes |= _output(output_padding, output_shape)
    return add_op(convolution.CONV_TRANSPOSE, [t, weight], sizes)[0]


def conv_transpose_pow2scaled(
    t: Tensor,
    weight: Tensor,
    log2_scale: Tensor,
    stride: Sizes = (1, 1),
    padding: Sizes = (0, 0, 0, 0),
    dilation: Sizes = (1, 1),
    groups: int | None = 1,
    pad_type: PadType | None = "not_set",
    output_padding: Sizes = (),
    output_shape: Sizes = (),
    available_memory_proportions: list[float] | None = None,
    enable_conv_dithering: list[int] | None = None,
) -> Tensor:
    """The transposed convolution of 8-bit floats, times ``2 ** log2_scale``, as float16.

    Arguments and errors as those of `conv_transpose` and `conv_pow2scaled`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8)), popxl.float8_143)
    ...     weight = popxl.constant(np.ones((3, 4, 3, 3)), popxl.float8_143)
    ...     popxl.ops.conv_transpose_pow2scaled(t, weight, popxl.constant(-1, popxl.int32))
    Tensor[convtranspose_out popxl.dtypes.float16 (1, 4, 10, 10)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    sizes |= _output(output_padding, output_shape)
    return _scaled(convolution.CONV_TRANSPOSE_POW2SCALED, t, weight, log2_scale, sizes)


def checked_pad_type(mode: str | None) -> str:
    """The type of padding; ValueError for one that there is not."""
    found = mode or "not_set"
    if found not in PAD_TYPES:
        raise ValueError(
            f"pad type {mode} is not valid, must be not_set, same_upper, same_lower or valid"
        )
    return found


def per_axis(sizes: Sizes, default: Sequence[int], count: int, fill: int) -> tuple[int, ...]:
    """Numbers for `count` axes; the default, which is one for images, for as many as there are."""
    given = tuple(default if sizes is None else sizes)
    return (fill,) * count if given == tuple(default) else given


def _attributes(
    t: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int | None, mode: str | None
) -> dict[str, Any]:
    axes = t.rank - 2
    return {
        "stride": per_axis(stride, (1, 1), axes, 1),
        "padding": per_axis(padding, (0, 0, 0, 0), 2 * axes, 0),
        "dilation": per_axis(dilation, (1, 1), axes, 1),
        "groups": groups or 1,
        "pad_type": checked_pad_type(mode),
        "output_type": None,
    }


def _output(padding: Sizes, shape: Sizes) -> dict[str, Any]:
    return {"output_padding": tuple(padding or ()), "output_shape": tuple(shape or ())}


def _scaled(
    definition: Definition, t: Tensor, weight: Tensor, log2_scale: Tensor, sizes: dict[str, Any]
) -> Tensor:
    if t.dtype not in casts.FLOAT8 or weight.dtype not in casts.FLOAT8:
        raise TypeError(
            "Scaled conv operands must be of dtype popxl.float8_143 or popxl.float8_152"
        )
    check_log2_scale(log2_scale)
    sizes["output_type"] = dtypes.float16
    return add_op(definition, [t, weight, log2_scale], sizes)[0]
