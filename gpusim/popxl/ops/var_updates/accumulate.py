"""Accumulate into a tensor in place: sums, means and moving averages.

float16 tensors are computed in float32 and rounded once.
"""

from __future__ import annotations

from ..._ops.definition import add_op
from ..._ops.updates import ACCUMULATORS, SPARSE_ACCUMULATE
from ...tensor import Tensor
from .utils import handle_optimizer_value

__all__ = [
    "accumulate_",
    "accumulate_mean_",
    "accumulate_moving_average_",
    "accumulate_moving_average_square_",
    "accumulate_square_",
    "accumulator_scale_",
    "accumulator_zero_",
    "sparse_accumulate_",
]


def accumulate_(t: Tensor, X: Tensor, f: float | Tensor | None = None) -> Tensor:
    """t += X, or t += f * X; the updated tensor.

    **Arguments**: `f`: a number, or a tensor of one element.

    ValueError where `X` has another shape than `t`, or `f` more than one element.
    """
    if f is None:
        return accumulate("Add", t, X, 1.0)
    return accumulate("DampenedAdd", t, X, f)


def accumulate_square_(t: Tensor, X: Tensor, f: float | Tensor = 1.0) -> Tensor:
    """t += f * X**2; as `accumulate_`."""
    return accumulate("DampenedAddSquare", t, X, f)


def accumulate_mean_(t: Tensor, X: Tensor, step: float | Tensor) -> Tensor:
    """t = t * step / (step + 1) + X / (step + 1): the mean of one more value; as `accumulate_`."""
    return accumulate("Mean", t, X, step)


def accumulate_moving_average_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """t = f * t + (1 - f) * X; as `accumulate_`."""
    return accumulate("MovingAverage", t, X, f)


def accumulate_moving_average_square_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """t = f * t + (1 - f) * X**2; as `accumulate_`."""
    return accumulate("MovingAverageSquare", t, X, f)


def accumulator_scale_(t: Tensor, f: float | Tensor) -> Tensor:
    """t *= f; zeros where `f` is the number 0. As `accumulate_`."""
    if not isinstance(f, Tensor) and f == 0:
        return accumulator_zero_(t)
    return accumulate("Scale", t, None, f)


def accumulator_zero_(t: Tensor) -> Tensor:
    """t = 0, whatever it was; the updated tensor."""
    return accumulate("Zero", t, None, 0.0)


def sparse_accumulate_(
    t: Tensor,
    X: Tensor,
    indices: Tensor,
    axis: int = 0,
    f: float | Tensor | None = None,
    W: Tensor | None = None,
) -> Tensor:
    """t[indices] += f * X along an axis; indices that come twice count twice. The updated tensor.

    **Arguments**

    - `X`: of the shape of `t`, with as many entries along `axis` as there are `indices` (a vector).
    - `f`: a number, or a tensor of one element; by default 1.
    - `W`: what `t` accumulates for; it changes nothing here.

    ValueError for shapes other than these.
    """
    ins = {0: t, 1: X, 2: indices}
    attributes = {"axis": axis, "f": handle_optimizer_value(1.0 if f is None else f, ins, 3)}
    if W is not None:
        ins[len(ins)] = W
    return add_op(SPARSE_ACCUMULATE, list(ins.values()), attributes)[0]


def accumulate(kind: str, t: Tensor, X: Tensor | None, f: float | Tensor) -> Tensor:
    """Add an accumulation of a kind of `ACCUMULATORS`."""
    ins = dict(enumerate([t] if X is None else [t, X]))
    attributes = {"updates": X is not None, "f": handle_optimizer_value(f, ins, len(ins))}
    return add_op(ACCUMULATORS[kind], list(ins.values()), attributes)[0]
