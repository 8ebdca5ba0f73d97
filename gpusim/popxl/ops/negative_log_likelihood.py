"""`nll_loss` and `nll_loss_with_softmax_grad`: how unlikely labels are."""

from __future__ import annotations

from typing import Any, Literal

from .._ops import losses
from .._ops.definition import add_op
from ..tensor import Tensor, constant

__all__ = ["nll_loss", "nll_loss_with_softmax_grad"]

REDUCTION_TYPE = Literal["mean", "sum", "none"]


def nll_loss(
    probs: Tensor,
    labels: Tensor,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
    log_prob: bool = False,
) -> Tensor:
    """The negative logarithm of the labels' probabilities.

    **Arguments**

    - `probs`: (..., classes), as `ops.softmax` makes them.
    - `labels`: (...), integers.
    - `ignore_index`: a label that takes no part; a mean is over the others.
    - `reduction`: "mean" or "sum" over all labels, or "none".
    - `log_prob`: whether `probs` are logarithms of probabilities.

    A probability of less than 1e-7 (float16: 6.1e-5) counts as that, so that losses are finite.

    Raises:
        ValueError: for shapes that do not belong together, or another reduction.
        TypeError: for labels that are no integers.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     probs = popxl.ops.softmax(popxl.constant([[1.0, 2.0], [0.0, 3.0]]), axis=1)
    ...     popxl.ops.nll_loss(probs, popxl.constant([0, 1], popxl.int32))
    Tensor[nll_out popxl.dtypes.float32 ()]
    """
    attributes = _attributes(ignore_index, reduction) | {"log_prob": bool(log_prob)}
    return add_op(losses.NLL, [probs, labels], attributes)[0]


def nll_loss_with_softmax_grad(
    probs: Tensor,
    labels: Tensor,
    loss_grad: float | Tensor = 1,
    ignore_index: int | None = None,
    reduction: REDUCTION_TYPE = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of what went into the softmax that made `probs`.

    **Arguments**: `loss_grad`: the gradient of the loss; the others as those of `nll_loss`, with
    its errors.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     probs = popxl.ops.softmax(popxl.constant([[1.0, 2.0], [0.0, 3.0]]), axis=1)
    ...     labels = popxl.constant([0, 1], popxl.int32)
    ...     loss, gradient = popxl.ops.nll_loss_with_softmax_grad(probs, labels)
    >>> loss.shape, gradient.shape
    ((), (2, 2))
    """
    if not isinstance(loss_grad, Tensor):
        loss_grad = constant(loss_grad, losses.LOSS_GRAD_DTYPE)
    attributes = _attributes(ignore_index, reduction) | {"log_prob": False}
    loss, gradient = add_op(
        losses.NLL_WITH_SOFTMAX_GRAD,
        [probs, labels, loss_grad],
        attributes,
        output_names=["loss", "dx"],
    )
    return loss, gradient


def _attributes(ignore_index: int | None, reduction: str) -> dict[str, Any]:
    if reduction not in losses.REDUCTIONS:
        raise ValueError(
            f"Not a valid reduction: {reduction}. Must choose from: {', '.join(losses.REDUCTIONS)}"
        )
    return {"ignore_index": ignore_index, "reduction": reduction}
