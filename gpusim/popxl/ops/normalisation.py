"""Softmax, and the norms of groups of channels and of batches, with sums in float32 or wider."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .. import dtypes
from .._definition import (
    Array,
    Arrays,
    Attributes,
    Definition,
    GradientSite,
    Specs,
    add_op,
    gradient_ops,
)
from ..tensor import Tensor, TensorSpec
from ._stacked import flatten_axes, narrow, normal_axes, total, wide

__all__ = ["softmax", "group_norm", "layer_norm", "batch_norm_inference"]

# Softmax


def _same_spec(inputs: Specs, attributes: Attributes) -> Specs:
    normal_axes(attributes["axis"], len(inputs[0].shape))
    return [TensorSpec(inputs[0].shape, inputs[0].dtype)]


def _sum_along(xp: ModuleType, x: Array, axis: int) -> Array:
    return total(xp, x, (axis,), keepdims=True)


def _softmax(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (x,) = inputs
    (axis,) = normal_axes(attributes["axis"], x.ndim - 1)
    value = wide(x)
    powers = xp.exp(value - value.max(axis=axis + 1, keepdims=True))
    return [narrow(powers / _sum_along(xp, powers, axis), x.dtype)]


def _softmax_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, y = inputs
    (axis,) = normal_axes(attributes["axis"], y.ndim - 1)
    weighted = wide(dy) * wide(y)
    return [narrow(weighted - wide(y) * _sum_along(xp, weighted, axis), y.dtype)]


SOFTMAX_GRAD = Definition("SoftmaxGrad", _same_spec, _softmax_gradient)
SOFTMAX = Definition("Softmax", _same_spec, _softmax, gradient_ops((SOFTMAX_GRAD, "y")))


def softmax(t: Tensor, axis: int) -> Tensor:
    """The exponentials of elements, divided by their sum along an axis.

    **Raises**: ValueError: if `t` has no such axis.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.softmax(popxl.constant([[1.0, 2.0]]), axis=-1)
    Tensor[softmax_out popxl.dtypes.float32 (1, 2)]
    """
    return add_op(SOFTMAX, [t], {"axis": axis})[0]


# Group norm: t is (N, C, ...), the channels in groups; outputs are t's norm, means and 1 / std


def _group_specs(inputs: Specs, attributes: Attributes) -> Specs:
    t, weight, bias = inputs
    groups = attributes["num_groups"]
    if len(t.shape) < 2 or groups < 1 or t.shape[1] % groups:
        raise ValueError(
            f"The channels, axis 1 of a tensor of shape {t.shape}, do not split into {groups} "
            "groups"
        )
    for name, spec in (("weight", weight), ("bias", bias)):
        if spec.shape != (t.shape[1],):
            raise ValueError(f"{name} must have the shape {(t.shape[1],)}, but it is {spec.shape}")
    statistics = TensorSpec((t.shape[0] * groups,), dtypes.float32)
    return [TensorSpec(t.shape, t.dtype), statistics, statistics]


def _by_group(x: Array, groups: int) -> Array:
    """[R, N, C, ...] as [R, N * groups, elements]."""
    return x.reshape(x.shape[0], x.shape[1] * groups, -1)


def _per_channel(value: Array, rank: int) -> Array:
    """[R, C] reshaped to broadcast to [R, N, C, ...]."""
    return wide(value).reshape(value.shape[0], 1, value.shape[1], *(1,) * (rank - 2))


def _group_norm(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, weight, bias = inputs
    rows = _by_group(wide(t), attributes["num_groups"])
    count = rows.shape[-1]
    mean = rows.sum(axis=-1) / count
    centred = rows - mean[..., None]
    variance = (centred * centred).sum(axis=-1) / count
    inverse = 1 / xp.sqrt(variance + rows.dtype.type(attributes["epsilon"]))
    normal = (centred * inverse[..., None]).reshape(t.shape)
    rank = t.ndim - 1
    out = normal * _per_channel(weight, rank) + _per_channel(bias, rank)
    statistics = dtypes.float32.as_numpy()
    return [narrow(out, t.dtype), narrow(mean, statistics), narrow(inverse, statistics)]


def _group_gradient_specs(inputs: Specs, attributes: Attributes) -> Specs:
    _, t, weight, *_ = inputs
    scale = TensorSpec(weight.shape, weight.dtype)
    return [TensorSpec(t.shape, t.dtype), scale, scale]


def _over_channel(xp: ModuleType, x: Array) -> Array:
    """The sum over all axes except that of channels, [R, C]."""
    axes = [axis for axis in range(x.ndim - 1) if axis != 1]
    return flatten_axes(xp, x, axes).sum(axis=-1)


def _group_norm_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, t, weight, mean, inverse = inputs
    groups = attributes["num_groups"]
    gradient, rank = wide(dy), t.ndim - 1
    rows = _by_group(wide(t), groups)
    mean, inverse = narrow(mean, rows.dtype), narrow(inverse, rows.dtype)
    normal = (rows - mean[..., None]) * inverse[..., None]
    shaped = normal.reshape(t.shape)
    inner = _by_group(gradient * _per_channel(weight, rank), groups)
    count = inner.shape[-1]
    offset = inner.sum(axis=-1, keepdims=True) / count
    slope = (inner * normal).sum(axis=-1, keepdims=True) / count
    dx = (inner - offset - normal * slope) * inverse[..., None]
    return [
        narrow(dx.reshape(t.shape), t.dtype),
        narrow(_over_channel(xp, gradient * shaped), weight.dtype),
        narrow(_over_channel(xp, gradient), weight.dtype),
    ]


def _build_group_gradient(site: GradientSite) -> list[Any]:
    dy = site.gradient(0)
    if dy is None:
        return [None, None, None]
    inputs = [dy, site.input(0), site.input(1), site.output(1), site.output(2)]
    return list(add_op(GROUP_NORM_GRAD, inputs, site.attributes))


GROUP_NORM_GRAD = Definition("GroupNormalizationGrad", _group_gradient_specs, _group_norm_gradient)
GROUP_NORM = Definition(
    "GroupNormalization",
    _group_specs,
    _group_norm,
    gradient=_build_group_gradient,
    names=("t", "weight", "bias"),
)


def group_norm(
    t: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float = 1e-05
) -> Tensor:
    """Normalise groups of each sample's channels to mean 0 and variance 1; then scale and shift.

    **Arguments**

    - `t`: (N, C, ...), with channels on axis 1.
    - `weight`, `bias`: (C,), the scale and the shift.
    - `num_groups`: the number of groups of neighbouring channels.
    - `eps`: a number that is added to the variance.

    Statistics are computed in float32 or wider.

    **Raises**: ValueError: for other shapes, or if `num_groups` does not divide the channels.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, ones = popxl.constant(np.zeros((2, 6))), popxl.constant(np.ones(6))
    ...     popxl.ops.group_norm(t, ones, ones, num_groups=3)
    Tensor[groupnormalization_out popxl.dtypes.float32 (2, 6)]
    """
    attributes = {"num_groups": num_groups, "epsilon": float(eps)}
    return add_op(GROUP_NORM, [t, weight, bias], attributes)[0]


def layer_norm(t: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-05) -> Tensor:
    """`group_norm` with all channels in one group.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, ones = popxl.constant(np.zeros((2, 6))), popxl.constant(np.ones(6))
    ...     popxl.ops.layer_norm(t, ones, ones)
    Tensor[groupnormalization_out popxl.dtypes.float32 (2, 6)]
    """
    return group_norm(t, weight, bias, num_groups=1, eps=eps)


# Batch norm with given statistics


def _batch_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t = inputs[0]
    for name, spec in zip(("scale", "bias", "mean", "var"), inputs[1:], strict=True):
        if len(t.shape) < 2 or spec.shape != (t.shape[1],):
            raise ValueError(
                f"{name} must have one element for each channel, axis 1 of {t.shape}, but its "
                f"shape is {spec.shape}"
            )
    return [TensorSpec(t.shape, t.dtype)]


def _normal(xp: ModuleType, t: Array, mean: Array, var: Array, epsilon: float) -> tuple[Any, Any]:
    """The normalised t, and 1 / std of its channels."""
    rank = t.ndim - 1
    spread = _per_channel(var, rank)
    inverse = 1 / xp.sqrt(spread + spread.dtype.type(epsilon))
    return (wide(t) - _per_channel(mean, rank)) * inverse, inverse


def _batch_norm(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    t, scale, bias, mean, var = inputs
    normal, _ = _normal(xp, t, mean, var, attributes["epsilon"])
    rank = t.ndim - 1
    out = normal * _per_channel(scale, rank) + _per_channel(bias, rank)
    return [narrow(out, t.dtype)]


def _batch_gradient_specs(inputs: Specs, attributes: Attributes) -> Specs:
    _, t, scale, *_ = inputs
    channels = TensorSpec(scale.shape, scale.dtype)
    return [TensorSpec(t.shape, t.dtype), channels, channels]


def _batch_norm_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, t, scale, mean, var = inputs
    normal, inverse = _normal(xp, t, mean, var, attributes["epsilon"])
    gradient = wide(dy)
    return [
        narrow(gradient * _per_channel(scale, t.ndim - 1) * inverse, t.dtype),
        narrow(_over_channel(xp, gradient * normal), scale.dtype),
        narrow(_over_channel(xp, gradient), scale.dtype),
    ]


def _statistics_gradient_specs(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(spec.shape, spec.dtype) for spec in inputs[3:]]


def _statistics_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, t, scale, mean, var = inputs
    normal, inverse = _normal(xp, t, mean, var, attributes["epsilon"])
    dx = wide(dy) * _per_channel(scale, t.ndim - 1) * inverse
    return [
        narrow(-_over_channel(xp, dx), mean.dtype),
        narrow(-_over_channel(xp, dx * normal * inverse) / 2, var.dtype),
    ]


def _build_batch_gradient(site: GradientSite) -> list[Any]:
    inputs = [site.gradient(0), *(site.input(i) for i in (0, 1, 3, 4))]
    gradients: list[Any] = list(add_op(BATCH_NORM_GRAD, inputs, site.attributes))
    if site.needs(3) or site.needs(4):
        return gradients + list(add_op(STATISTICS_GRAD, inputs, site.attributes))
    return [*gradients, None, None]


BATCH_NORM_GRAD = Definition("BatchNormalizationGrad", _batch_gradient_specs, _batch_norm_gradient)
STATISTICS_GRAD = Definition(
    "BatchNormalizationStatisticsGrad", _statistics_gradient_specs, _statistics_gradient
)
BATCH_NORM = Definition(
    "BatchNormalization",
    _batch_spec,
    _batch_norm,
    gradient=_build_batch_gradient,
    names=("t", "scale", "bias", "mean", "var"),
)


def batch_norm_inference(
    t: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float = 1e-05,
    momentum: float = 0.9,
) -> Tensor:
    """``scale * (t - mean) / sqrt(var + epsilon) + bias``, for each channel.

    **Arguments**

    - `t`: (N, C, ...), with channels on axis 1.
    - `scale`, `bias`, `mean`, `var`: one element for each channel.
    - `momentum`: of running statistics, which inference does not change.

    **Raises**: ValueError: for other shapes.

    >>> import numpy as np, gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     ones = popxl.constant(np.ones(3, np.float32))
    ...     t = popxl.constant(np.zeros((2, 3, 4), np.float32))
    ...     popxl.ops.batch_norm_inference(t, ones, ones, ones, ones)
    Tensor[batchnormalization_out popxl.dtypes.float32 (2, 3, 4)]
    """
    attributes = {"epsilon": float(epsilon), "momentum": float(momentum)}
    return add_op(BATCH_NORM, [t, scale, bias, mean, var], attributes)[0]
