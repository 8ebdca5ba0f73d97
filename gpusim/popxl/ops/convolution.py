"""Convolutions over one to three spatial axes, their gradients, and transposed convolutions.

There is one matrix product for each position in the kernel, added in float32: no copies of windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from .. import dtypes
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
from ._stacked import narrow
from ._windows import PAD_TYPES, Windows, pad, unpad, windows
from .casts import FLOAT8, check_log2_scale

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


def _geometry(image: tuple[int, ...], kernel: tuple[int, ...], attributes: Attributes) -> Windows:
    return windows(
        image,
        kernel,
        stride=attributes["stride"],
        padding=attributes["padding"],
        dilation=attributes["dilation"],
        pad_type=attributes["pad_type"],
    )


def _check(data: TensorSpec, weight: TensorSpec, channels: int, attributes: Attributes) -> None:
    """Raise ValueError or TypeError if ranks, dtypes or numbers of channels do not fit."""
    groups = attributes["groups"]
    if len(data.shape) < 3 or len(weight.shape) != len(data.shape):
        raise ValueError(
            f"A convolution needs data (N, C, ...) and a weight of the same rank, at least 3, but "
            f"their shapes are {data.shape} and {weight.shape}"
        )
    if data.dtype != weight.dtype and attributes["output_type"] is None:
        raise TypeError(
            f"t and weight must have one data type, but they have {data.dtype.name} and "
            f"{weight.dtype.name}: use ops.cast"
        )
    if channels * groups != data.shape[1] or weight.shape[0] % groups:
        raise ValueError(
            f"A weight of shape {weight.shape} in {groups} groups does not fit data of shape "
            f"{data.shape}"
        )


def _in_float32(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


# y = conv(x, w), on arrays [R, N, C, *image], [R, M, C / groups, *kernel] -> [R, N, M, *out]


def _forward(xp: ModuleType, x: Array, weight: Array, w: Windows, groups: int) -> Array:
    """A product for each tap: [R, G, M/G, C/G] with [R, N, G, C/G, positions]."""
    r, n, c = x.shape[:3]
    m = weight.shape[1]
    image = pad(xp, x, w)
    filters = weight.reshape(r, 1, groups, m // groups, c // groups, *w.kernel)
    out: Array = 0
    for position, where in w.taps():
        seen = xp.ascontiguousarray(image[(..., *where)])
        seen = seen.reshape(r, n, groups, c // groups, -1)
        out += xp.matmul(xp.ascontiguousarray(filters[(..., *position)]), seen)
    return out.reshape(r, n, m, *w.out)


def _data_gradient(xp: ModuleType, dy: Array, weight: Array, w: Windows, groups: int) -> Array:
    """The gradient of x, [R, N, C, *image]: each tap's product added where it was read."""
    r, n, m = dy.shape[:3]
    c = weight.shape[2] * groups
    rows = xp.ascontiguousarray(dy).reshape(r, n, groups, m // groups, -1)
    filters = weight.reshape(r, 1, groups, m // groups, c // groups, *w.kernel)
    image = xp.zeros((r, n, c, *w.padded), dy.dtype)
    for position, where in w.taps():
        tap = xp.ascontiguousarray(filters[(..., *position)].swapaxes(-1, -2))
        image[(..., *where)] += xp.matmul(tap, rows).reshape(r, n, c, *w.out)
    return unpad(xp, image, w)


def _weight_gradient(xp: ModuleType, dy: Array, x: Array, w: Windows, groups: int) -> Array:
    """The gradient of the weight, [R, M, C / groups, *kernel]."""
    r, _, m = dy.shape[:3]
    c = x.shape[2]
    image = pad(xp, x, w)
    # The images of a batch side by side, so that one product adds them.
    rows = _side_by_side(xp, dy, groups, m)
    out = xp.empty((r, m, c // groups, *w.kernel), dy.dtype)
    for position, where in w.taps():
        seen = _side_by_side(xp, image[(..., *where)], groups, c)
        product = xp.matmul(rows, seen.swapaxes(-1, -2))
        out[(..., *position)] = product.reshape(r, m, c // groups)
    return out


def _side_by_side(xp: ModuleType, x: Array, groups: int, channels: int) -> Array:
    """[R, N, C, *positions] as [R, G, C/G, N * positions]."""
    r = x.shape[0]
    return xp.ascontiguousarray(xp.moveaxis(x, 1, 2)).reshape(r, groups, channels // groups, -1)


# Convolution


def _conv_spec(inputs: Specs, attributes: Attributes) -> Specs:
    data, weight = inputs[:2]
    _check(data, weight, weight.shape[1] if len(weight.shape) > 1 else 0, attributes)
    w = _geometry(data.shape[2:], weight.shape[2:], attributes)
    dtype = attributes["output_type"] or data.dtype
    return [TensorSpec((data.shape[0], weight.shape[0], *w.out), dtype)]


def _scale(xp: ModuleType, out: Array, inputs: Arrays, attributes: Attributes) -> Arrays:
    """The result of a convolution, times 2 ** log2_scale if that is a third input."""
    if len(inputs) == 3:
        out = xp.ldexp(out, inputs[2].reshape(-1, *(1,) * (out.ndim - 1)))
    dtype = attributes["output_type"]
    return [narrow(out, inputs[0].dtype if dtype is None else dtype.as_numpy())]


def _conv(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    x, weight = (_in_float32(value) for value in inputs[:2])
    w = _geometry(x.shape[3:], weight.shape[3:], attributes)
    return _scale(xp, _forward(xp, x, weight, w, attributes["groups"]), inputs, attributes)


def _conv_data_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, weight = (_in_float32(value) for value in inputs)
    w = _geometry(attributes["shape"][2:], weight.shape[3:], attributes)
    out = _data_gradient(xp, dy, weight, w, attributes["groups"])
    return [narrow(out, inputs[0].dtype)]


def _conv_weight_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, x = (_in_float32(value) for value in inputs)
    w = _geometry(x.shape[3:], attributes["shape"][2:], attributes)
    out = _weight_gradient(xp, dy, x, w, attributes["groups"])
    return [narrow(out, inputs[0].dtype)]


CONV_DATA_GRAD = Definition("ConvDataGrad", shape_spec, _conv_data_gradient)
CONV_WEIGHTS_GRAD = Definition("ConvWeightsGrad", shape_spec, _conv_weight_gradient)
CONV = Definition(
    "Conv",
    _conv_spec,
    _conv,
    gradient_ops((CONV_DATA_GRAD, "1"), (CONV_WEIGHTS_GRAD, "0")),
    names=("t", "weight"),
)
CONV_POW2SCALED = Definition("Conv", _conv_spec, _conv, names=("t", "weight", "log2_scale"))


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
    """The convolution of images with a weight. The kernel is not flipped, as in neural networks.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `weight`: (M, C / groups, ...): a kernel for each of the M channels of the result.
    - `stride`, `dilation`: a number for each spatial axis.
    - `padding`: the numbers of zeros before each spatial axis, then those after each.
    - `groups`: the number of groups of channels that C and M are split into.
    - `pad_type`: "not_set" takes `padding`; "valid" does not pad; "same_upper" and "same_lower" pad
      so that the result has size / stride elements, with an odd zero at the end or at the
      beginning.
    - the others are options of an IPU; no effect here: products are added in float32.

    **Raises**

    - ValueError: if shapes or numbers do not fit, or for another `pad_type`.
    - TypeError: if the dtypes differ.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8), np.float32))
    ...     weight = popxl.constant(np.ones((4, 3, 3, 3), np.float32))
    ...     popxl.ops.conv(t, weight, padding=(1, 1, 1, 1))
    Tensor[conv_out popxl.dtypes.float32 (1, 4, 8, 8)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    return add_op(CONV, [t, weight], sizes)[0]


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

    **Arguments**: `log2_scale`: a scalar of int32, -32 to 31; the others are those of `conv`.

    **Raises**

    - TypeError: for other dtypes.
    - ValueError: if the scale is not a scalar, and as `conv`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8)), popxl.float8_143)
    ...     weight = popxl.constant(np.ones((4, 3, 3, 3)), popxl.float8_143)
    ...     popxl.ops.conv_pow2scaled(t, weight, popxl.constant(1, popxl.int32))
    Tensor[conv_out popxl.dtypes.float16 (1, 4, 6, 6)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    return _add_scaled(CONV_POW2SCALED, t, weight, log2_scale, sizes)


# Transposed convolution: the gradient of a convolution as an op, [N, C, ...], [C, M / groups, ...]


def transposed_padding(
    data: tuple[int, ...], kernel: tuple[int, ...], attributes: Attributes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The spatial shape of a transposed convolution's result, and what is cut off its sides.

    A given `output_shape` decides how much is cut off. An odd element is cut off at the end for
    "same_upper", else at the beginning.
    """
    rank = len(data)
    padding = tuple(attributes["padding"])
    extra = tuple(attributes["output_padding"] or (0,) * rank)
    sizes = zip(data, kernel, attributes["stride"], attributes["dilation"], extra, strict=True)
    full = [(n - 1) * s + (k - 1) * d + 1 + e for n, k, s, d, e in sizes]
    target = tuple(attributes["output_shape"] or ())[-rank:]
    if not target and attributes["pad_type"] in ("same_upper", "same_lower"):
        target = tuple(n * s for n, s in zip(data, attributes["stride"], strict=True))
    if not target:
        if attributes["pad_type"] == "valid":
            padding = (0,) * (2 * rank)
        before, after = padding[:rank], padding[rank:]
        cut = zip(full, before, after, strict=True)
        return tuple(f - b - a for f, b, a in cut), padding
    total = [f - n for f, n in zip(full, target, strict=True)]
    less = [int(t / 2) for t in total]  # as C divides: negative where the result is longer
    more = [t - half for t, half in zip(total, less, strict=True)]
    sides = (less, more) if attributes["pad_type"] == "same_upper" else (more, less)
    return target, (*sides[0], *sides[1])


def _transposed(data: tuple[int, ...], kernel: tuple[int, ...], attributes: Attributes) -> Windows:
    """The windows of the convolution whose transpose this is."""
    image, padding = transposed_padding(data, kernel, attributes)
    rank = len(data)
    # The output's padding lies after the last window.
    return Windows(
        image,
        tuple(kernel),
        tuple(attributes["stride"]),
        tuple(attributes["dilation"]),
        tuple(padding[:rank]),
        tuple(padding[rank:]),
        tuple(data),
    )


def _transpose_spec(inputs: Specs, attributes: Attributes) -> Specs:
    data, weight = inputs[:2]
    groups = attributes["groups"]
    _check(data, weight, weight.shape[0] // groups if weight.shape else 0, attributes)
    image, _ = transposed_padding(data.shape[2:], weight.shape[2:], attributes)
    if min(image) < 1:
        raise ValueError(f"The padding leaves nothing of the result: its shape would be {image}")
    dtype = attributes["output_type"] or data.dtype
    return [TensorSpec((data.shape[0], weight.shape[1] * groups, *image), dtype)]


def _conv_transpose(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    x, weight = (_in_float32(value) for value in inputs[:2])
    w = _transposed(x.shape[3:], weight.shape[3:], attributes)
    return _scale(xp, _data_gradient(xp, x, weight, w, attributes["groups"]), inputs, attributes)


def _transpose_data_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, weight = (_in_float32(value) for value in inputs)
    w = _transposed(attributes["shape"][2:], weight.shape[3:], attributes)
    return [narrow(_forward(xp, dy, weight, w, attributes["groups"]), inputs[0].dtype)]


def _transpose_weight_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, x = (_in_float32(value) for value in inputs)
    w = _transposed(x.shape[3:], attributes["shape"][2:], attributes)
    return [narrow(_weight_gradient(xp, x, dy, w, attributes["groups"]), inputs[0].dtype)]


CONV_TRANSPOSE_DATA_GRAD = Definition("ConvTransposeDataGrad", shape_spec, _transpose_data_gradient)
CONV_TRANSPOSE_WEIGHTS_GRAD = Definition(
    "ConvTransposeWeightsGrad", shape_spec, _transpose_weight_gradient
)
CONV_TRANSPOSE = Definition(
    "ConvTranspose",
    _transpose_spec,
    _conv_transpose,
    gradient_ops((CONV_TRANSPOSE_DATA_GRAD, "1"), (CONV_TRANSPOSE_WEIGHTS_GRAD, "0")),
    names=("t", "weight"),
)
CONV_TRANSPOSE_POW2SCALED = Definition(
    "ConvTranspose", _transpose_spec, _conv_transpose, names=("t", "weight", "log2_scale")
)


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
    """The transpose of a convolution: the map that its gradient applies to the result's gradient.

    **Arguments**

    - `t`: (N, C, ...) with one to three spatial axes.
    - `weight`: (C, M / groups, ...).
    - `padding`: what is cut off the result before each spatial axis, then after each.
    - `output_padding`: how much longer the result is at the end of each axis.
    - `output_shape`: the shape of the result, or its spatial part; it determines the padding.
    - `pad_type`: with "same_upper" and "same_lower" the shape is size * stride, unless it is given.
    - the others, and the errors, are those of `conv`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8), np.float32))
    ...     weight = popxl.constant(np.ones((3, 4, 3, 3), np.float32))
    ...     popxl.ops.conv_transpose(t, weight, stride=(2, 2))
    Tensor[convtranspose_out popxl.dtypes.float32 (1, 4, 17, 17)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    sizes |= _output(output_padding, output_shape)
    return add_op(CONV_TRANSPOSE, [t, weight], sizes)[0]


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

    Arguments and errors as in `conv_transpose` and `conv_pow2scaled`.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t = popxl.constant(np.ones((1, 3, 8, 8)), popxl.float8_143)
    ...     weight = popxl.constant(np.ones((3, 4, 3, 3)), popxl.float8_143)
    ...     popxl.ops.conv_transpose_pow2scaled(t, weight, popxl.constant(-1, popxl.int32))
    Tensor[convtranspose_out popxl.dtypes.float16 (1, 4, 10, 10)]
    """
    sizes = _attributes(t, stride, padding, dilation, groups, pad_type)
    sizes |= _output(output_padding, output_shape)
    return _add_scaled(CONV_TRANSPOSE_POW2SCALED, t, weight, log2_scale, sizes)


# Arguments


def multi_conv_options(
    sess_opts: Any,
    attr_param: Any,
    available_memory_proportions: Sequence[float] | None,
    partials_types: Sequence[str] | None,
    enable_conv_dithering: Sequence[int] | None,
) -> dict[str, Any]:
    """The options of a convolution that are given, by name. They have no effect here."""
    options = {
        "availableMemoryProportions": available_memory_proportions,
        "partialsTypes": partials_types,
        "enableConvDithering": enable_conv_dithering,
    }
    return {name: value for name, value in options.items() if value}


def check_pad_type(mode: str | None) -> str:
    """The type of padding; ValueError for an unknown one."""
    pad_type = mode or "not_set"
    if pad_type not in PAD_TYPES:
        raise ValueError(
            f"pad type {mode} is not valid, must be not_set, same_upper, same_lower or valid"
        )
    return pad_type


def per_axis(sizes: Sizes, default: Sequence[int], count: int, fill: int) -> tuple[int, ...]:
    """Numbers for `count` axes. The default, which is that of images, fits any number of axes."""
    numbers = tuple(default if sizes is None else sizes)
    return (fill,) * count if numbers == tuple(default) else numbers


def _attributes(
    t: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int | None, mode: str | None
) -> dict[str, Any]:
    axes = t.rank - 2
    return {
        "stride": per_axis(stride, (1, 1), axes, 1),
        "padding": per_axis(padding, (0, 0, 0, 0), 2 * axes, 0),
        "dilation": per_axis(dilation, (1, 1), axes, 1),
        "groups": groups or 1,
        "pad_type": check_pad_type(mode),
        "output_type": None,
    }


def _output(padding: Sizes, shape: Sizes) -> dict[str, Any]:
    return {"output_padding": tuple(padding or ()), "output_shape": tuple(shape or ())}


def _add_scaled(
    definition: Definition, t: Tensor, weight: Tensor, log2_scale: Tensor, sizes: dict[str, Any]
) -> Tensor:
    if t.dtype not in FLOAT8 or weight.dtype not in FLOAT8:
        raise TypeError(
            "Scaled conv operands must be of dtype popxl.float8_143 or popxl.float8_152"
        )
    check_log2_scale(log2_scale)
    sizes["output_type"] = dtypes.float16
    return add_op(definition, [t, weight, log2_scale], sizes)[0]
