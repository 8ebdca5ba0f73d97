"""The negative log likelihood of labels, and its gradient with that of the softmax before it.

Probabilities are limited from below, as on an IPU, so that losses and gradients stay finite.
"""

from __future__ import annotations

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
from ..tensor import Tensor, TensorSpec, constant
from ._stacked import flatten_axes, narrow, wide

__all__ = ["nll_loss", "nll_loss_with_softmax_grad"]

REDUCTION_TYPE = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
_LEAST = {np.dtype(np.float16): 6.104e-5}  # the least normal number
_LEAST_WIDE = 1e-7  # of wider dtypes


def _check(probs: TensorSpec, labels: TensorSpec) -> None:
    if not probs.shape or labels.shape != probs.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of probs without its last axis, {probs.shape[:-1]}, but "
            f"it is {labels.shape}"
        )


def _loss_spec(probs: TensorSpec, labels: TensorSpec, attributes: Attributes) -> TensorSpec:
    shape = labels.shape if attributes["reduction"] == "none" else ()
    return TensorSpec(shape, probs.dtype)


def _specs(inputs: Specs, attributes: Attributes) -> Specs:
    probs, labels = inputs
    _check(probs, labels)
    if not labels.dtype.is_int:
        raise TypeError(f"labels must be integers, but they are {labels.dtype.name}")
    return [_loss_spec(probs, labels, attributes)]


def _label(labels: Array, attributes: Attributes, classes: int) -> Array:
    """Labels as positions [R, ..., 1]; ignored labels are 0."""
    positions = labels.astype(np.int64)
    if attributes["ignore_index"] is not None:
        positions = positions * (positions != attributes["ignore_index"])
    return positions[..., None]


def _count_mask(xp: ModuleType, labels: Array, attributes: Attributes) -> Array:
    """1 for each label that counts, and 0 for ignored labels."""
    ignored = attributes["ignore_index"]
    if ignored is None:
        return xp.ones(labels.shape, np.float32)
    return (labels != ignored).astype(np.float32)


def _least(dtype: Any) -> float:
    return _LEAST.get(np.dtype(dtype), _LEAST_WIDE)


def _share(xp: ModuleType, counted: Array, attributes: Attributes) -> Array:
    """The factor of each label's loss before the sum."""
    if attributes["reduction"] != "mean":
        return counted
    axes = range(counted.ndim - 1)
    number = flatten_axes(xp, counted, axes).sum(axis=-1)
    number = xp.maximum(number, 1)  # if all are ignored the mean is 0
    return counted / number.reshape(-1, *(1,) * (counted.ndim - 1))


def _loss(xp: ModuleType, probs: Array, labels: Array, attributes: Attributes) -> Array:
    picked = xp.take_along_axis(probs, _label(labels, attributes, probs.shape[-1]), axis=-1)
    logarithm = wide(picked)[..., 0]
    if not attributes["log_prob"]:
        logarithm = xp.log(xp.maximum(logarithm, _least(probs.dtype)))
    counted = _count_mask(xp, labels, attributes)
    losses = -logarithm * _share(xp, counted, attributes)
    if attributes["reduction"] != "none":
        losses = flatten_axes(xp, losses, range(losses.ndim - 1)).sum(axis=-1)
    return narrow(losses, probs.dtype)


def _nll(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    probs, labels = inputs
    return [_loss(xp, probs, labels, attributes)]


def _weight(xp: ModuleType, dy: Array, labels: Array, attributes: Attributes) -> Array:
    """The loss's gradient for each label, [R, ..., 1]."""
    dy = wide(dy)
    if attributes["reduction"] != "none":
        dy = dy.reshape(-1, *(1,) * (labels.ndim - 1))
    return (dy * _share(xp, _count_mask(xp, labels, attributes), attributes))[..., None]


def _nll_gradient(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    dy, probs, labels = inputs
    positions = _label(labels, attributes, probs.shape[-1])
    slope = -_weight(xp, dy, labels, attributes)
    if not attributes["log_prob"]:
        picked = wide(xp.take_along_axis(probs, positions, axis=-1))
        slope = slope / xp.maximum(picked, _least(probs.dtype))
    chosen = positions == xp.arange(probs.shape[-1])
    return [narrow(xp.where(chosen, slope, slope.dtype.type(0)), probs.dtype)]


NLL_GRAD = Definition("NllGrad", shape_spec, _nll_gradient)
NLL = Definition(
    "Nll", _specs, _nll, gradient_ops((NLL_GRAD, "01"), None), names=("probs", "labels")
)


def nll_loss(
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
    log_prob: bool = False,
) -> Tensor:
    """The negative logarithm of the labels' probabilities.

    **Arguments**

    - `probs`: (..., classes), the result of `ops.softmax`.
    - `labels`: (...), integers.
    - `ignore_index`: a label to ignore; a mean is over the others.
    - `reduction`: "mean" or "sum" over all labels, or "none".
    - `log_prob`: whether `probs` are logarithms of probabilities.

    Probabilities below 1e-7 (float16: 6.1e-5) count as that, so that losses are finite.

    **Raises**

    - ValueError: if the shapes do not fit, or for another reduction.
    - TypeError: if the labels are not integers.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     probs = popxl.ops.softmax(popxl.constant([[1.0, 2.0], [0.0, 3.0]]), axis=1)
    ...     popxl.ops.nll_loss(probs, popxl.constant([0, 1], popxl.int32))
    Tensor[nll_out popxl.dtypes.float32 ()]
    """
    attributes = _attributes(ignore_index, reduction) | {"log_prob": bool(log_prob)}
    return add_op(NLL, [probs, labels], attributes)[0]


# The loss, and the gradient of the input of the softmax that made the probabilities


def _direct_specs(inputs: Specs, attributes: Attributes) -> Specs:
    probs, labels, loss_grad = inputs
    _check(probs, labels)
    loss = _loss_spec(probs, labels, attributes)
    if loss_grad.shape not in ((), loss.shape):
        raise ValueError(f"loss_grad must have the shape {loss.shape}, but it is {loss_grad.shape}")
    return [loss, TensorSpec(probs.shape, probs.dtype)]


def _direct(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    probs, labels, dy = inputs
    loss = _loss(xp, probs, labels, attributes)
    if dy.ndim == 1:
        dy = dy.reshape(-1, *(1,) * (labels.ndim - 1))
    positions = _label(labels, attributes, probs.shape[-1])
    right = (positions == xp.arange(probs.shape[-1])).astype(wide(probs[:0]).dtype)
    weight = (wide(dy) * _share(xp, _count_mask(xp, labels, attributes), attributes))[..., None]
    return [loss, narrow((wide(probs) - right) * weight, probs.dtype)]


NLL_WITH_SOFTMAX_GRAD = Definition(
    "NlllWithSoftmaxGradDirect", _direct_specs, _direct, names=("probs", "labels", "loss_grad")
)


def nll_loss_with_softmax_grad(
    probs: Tensor,
    labels: Tensor,
    loss_grad: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the input of the softmax that made `probs`.

    **Arguments**: `loss_grad`: the gradient of the loss; the others, and the errors, are those of
    `nll_loss`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     probs = popxl.ops.softmax(popxl.constant([[1.0, 2.0], [0.0, 3.0]]), axis=1)
    ...     labels = popxl.constant([0, 1], popxl.int32)
    ...     loss, gradient = popxl.ops.nll_loss_with_softmax_grad(probs, labels)
    >>> loss.shape, gradient.shape
    ((), (2, 2))
    """
    if not isinstance(loss_grad, Tensor):
        loss_grad = constant(loss_grad, dtypes.float32)
    attributes = _attributes(ignore_index, reduction) | {"log_prob": False}
    loss, gradient = add_op(
        NLL_WITH_SOFTMAX_GRAD, [probs, labels, loss_grad], attributes, output_names=["loss", "dx"]
    )
    return loss, gradient


def _attributes(ignore_index: int | None, reduction: str) -> dict[str, Any]:
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"Not a valid reduction: {reduction}. Must choose from: {', '.join(REDUCTIONS)}"
        )
    return {"ignore_index": ignore_index, "reduction": reduction}
