"""The negative log likelihood of labels, and its gradient with that of the softmax before it.
Probabilities of zero count as a least number, as on an IPU: losses and gradients stay finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from .. import dtypes
from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array, flattened, narrow, wide

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]

REDUCTIONS = ("mean", "sum", "none")
_LEAST = {np.dtype(np.float16): 6.104e-5}  # the smallest normal number; of wider types:
_LEAST_WIDE = 1e-7


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
    """Labels as places [R, ..., 1]; those to ignore are 0."""
    places = labels.astype(np.int64)
    if attributes["ignore_index"] is not None:
        places = places * (places != attributes["ignore_index"])
    return places[..., None]


def _counted(xp: ModuleType, labels: Array, attributes: Attributes) -> Array:
    """1 for each label that counts, and 0 for those to ignore."""
    ignored = attributes["ignore_index"]
    if ignored is None:
        return xp.ones(labels.shape, np.float32)
    return (labels != ignored).astype(np.float32)


def _least(dtype: Any) -> float:
    return _LEAST.get(np.dtype(dtype), _LEAST_WIDE)


def _share(xp: ModuleType, counted: Array, attributes: Attributes) -> Array:
    """What each label's loss is multiplied by before the sum."""
    if attributes["reduction"] != "mean":
        return counted
    axes = range(counted.ndim - 1)
    number = flattened(xp, counted, axes).sum(axis=-1)
    number = xp.maximum(number, 1)  # where all are ignored the mean is 0
    return counted / number.reshape(-1, *(1,) * (counted.ndim - 1))


def _loss(xp: ModuleType, probs: Array, labels: Array, attributes: Attributes) -> Array:
    picked = xp.take_along_axis(probs, _label(labels, attributes, probs.shape[-1]), axis=-1)
    logarithm = wide(picked)[..., 0]
    if not attributes["log_prob"]:
        logarithm = xp.log(xp.maximum(logarithm, _least(probs.dtype)))
    counted = _counted(xp, labels, attributes)
    losses = -logarithm * _share(xp, counted, attributes)
    if attributes["reduction"] != "none":
        losses = flattened(xp, losses, range(losses.ndim - 1)).sum(axis=-1)
    return narrow(losses, probs.dtype)


def _nll(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    probs, labels = inputs
    return [_loss(xp, probs, labels, attributes)]


def _weight(xp: ModuleType, dy: Array, labels: Array, attributes: Attributes) -> Array:
    """The loss's gradient for each label, [R, ..., 1]."""
    dy = wide(dy)
    if attributes["reduction"] != "none":
        dy = dy.reshape(-1, *(1,) * (labels.ndim - 1))
    return (dy * _share(xp, _counted(xp, labels, attributes), attributes))[..., None]


def _gradient_spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[1].shape, inputs[1].dtype)]


def _nll_gradient(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    dy, probs, labels = inputs
    places = _label(labels, attributes, probs.shape[-1])
    slope = -_weight(xp, dy, labels, attributes)
    if not attributes["log_prob"]:
        picked = wide(xp.take_along_axis(probs, places, axis=-1))
        slope = slope / xp.maximum(picked, _least(probs.dtype))
    chosen = places == xp.arange(probs.shape[-1])
    return [narrow(xp.where(chosen, slope, slope.dtype.type(0)), probs.dtype)]


def _build_gradient(site: GradientSite) -> list[Any]:
    given = [site.gradient(0), site.input(0), site.input(1)]
    return [add_op(NLL_GRAD, given, site.attributes)[0], None]


NLL_GRAD = Definition("NllGrad", infer=_gradient_spec, run=_nll_gradient)
NLL = Definition("Nll", infer=_specs, run=_nll, gradient=_build_gradient, names=("probs", "labels"))


# The loss, and the gradient of what went into the softmax that made the probabilities


def _direct_specs(inputs: Specs, attributes: Attributes) -> Specs:
    probs, labels, loss_grad = inputs
    _check(probs, labels)
    loss = _loss_spec(probs, labels, attributes)
    if loss_grad.shape not in ((), loss.shape):
        raise ValueError(f"loss_grad must have the shape {loss.shape}, but it is {loss_grad.shape}")
    return [loss, TensorSpec(probs.shape, probs.dtype)]


def _direct(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    probs, labels, dy = inputs
    loss = _loss(xp, probs, labels, attributes)
    if dy.ndim == 1:
        dy = dy.reshape(-1, *(1,) * (labels.ndim - 1))
    places = _label(labels, attributes, probs.shape[-1])
    right = (places == xp.arange(probs.shape[-1])).astype(wide(probs[:0]).dtype)
    weight = (wide(dy) * _share(xp, _counted(xp, labels, attributes), attributes))[..., None]
    return [loss, narrow((wide(probs) - right) * weight, probs.dtype)]


NLL_WITH_SOFTMAX_GRAD = Definition(
    "NlllWithSoftmaxGradDirect",
    infer=_direct_specs,
    run=_direct,
    names=("probs", "labels", "loss_grad"),
)
LOSS_GRAD_DTYPE = dtypes.float32  # of a loss_grad that is given as a number
