"""Copies into a tensor, and accumulators, in place: sums, means and moving averages.

float16 tensors are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....maps.mapped_array.updates import update_at
from ..._definition import Array, Arrays, Attributes, Definition, Specs, add_op
from ...tensor import Tensor

__all__ = [
    "handle_optimizer_value",
    "copy_var_update_",
    "accumulate_",
    "accumulate_square_",
    "accumulate_mean_",
    "accumulate_moving_average_",
    "accumulate_moving_average_square_",
    "accumulator_scale_",
    "accumulator_zero_",
    "sparse_accumulate_",
]


def factor(inputs: Arrays, attributes: Attributes, name: str, ndim: int) -> Any:
    """A factor: a number, or the values of a tensor of one element as (replicas, 1, ...)."""
    value = attributes[name]
    if isinstance(value, float):
        return value
    values = inputs[value]
    return values.reshape(len(values), *[1] * (ndim - 1))


def target_spec(inputs: Specs, attributes: Attributes) -> Specs:
    """The spec of the updated tensor; ValueError if the update has another shape."""
    target = inputs[0]
    update = inputs[1] if attributes.get("updates", True) else target
    if update.shape != target.shape:
        raise ValueError(f"X must have the shape {target.shape} of t, got {update.shape}")
    return [target]


def updating(op_type: str, run: Any, names: tuple[str, ...] = ("t", "X", "f")) -> Definition:
    return Definition(op_type, target_spec, run, aliases={0: 0}, modifies=(0,), names=names)


def handle_optimizer_value(f: Any, ins: dict[int, Tensor], index: int) -> float | int:
    """The attribute for a factor: its number, or `index` for a tensor, which becomes an input.

    **Raises**

    - TypeError: if `f` is neither a number nor a tensor.
    - ValueError: if a tensor has several elements.
    """
    if not isinstance(f, Tensor):
        return float(f)
    if f.nelms != 1:
        raise ValueError(f"A factor must have one element, got {f}")
    ins[index] = f
    return index


# Copies


def copy_values(xp: Any, inputs: Arrays, attributes: Attributes) -> Arrays:
    target, update = inputs
    target[...] = update
    return [target]


COPY = updating("CopyVarUpdate", copy_values, ("t", "X"))


def copy_var_update_(t: Tensor, X: Tensor) -> Tensor:
    """Set `t` to `X`, in place, and return it.

    **Raises**: ValueError: if the shapes differ.
    """
    return add_op(COPY, [t, X])[0]


# Accumulators

#: By PopART's AccumulationType: from the accumulator, the update and a factor.
RULES: dict[str, Callable[[Array, Array, Any], Array]] = {
    "Add": lambda t, x, f: t + x,
    "DampenedAdd": lambda t, x, f: t + f * x,
    "DampenedAddSquare": lambda t, x, f: t + f * (x * x),
    "Mean": lambda t, x, f: t * (f / (f + 1)) + x * (1 / (f + 1)),
    "MovingAverage": lambda t, x, f: t * f + x * (1 - f),
    "MovingAverageSquare": lambda t, x, f: t * f + (x * x) * (1 - f),
    "Scale": lambda t, x, f: t * f,
    "Zero": lambda t, x, f: np.zeros_like(t),
}


def accumulator(
    rule: Callable[[Array, Array, Any], Array],
) -> Callable[[Any, Arrays, Attributes], Arrays]:
    """An update by rule(t, X, f). 16-bit values are computed in float32, and rounded once."""

    def run(xp: Any, inputs: Arrays, attributes: Attributes) -> Arrays:
        target = inputs[0]
        update = inputs[1] if attributes["updates"] else target
        f = factor(inputs, attributes, "f", target.ndim)
        wide = xp.promote_types(target.dtype, np.float32) if target.dtype.kind == "f" else None
        if wide is not None:
            update = update.astype(wide, copy=False)
            f = f if isinstance(f, float) else f.astype(wide, copy=False)
            target[...] = rule(target.astype(wide, copy=False), update, f)
        else:
            target[...] = rule(target, update, f)
        return [target]

    return run


ACCUMULATORS = {
    name: updating(
        {"Scale": "AccumulatorScale", "Zero": "AccumulatorZero"}.get(name, "Accumulate"),
        accumulator(rule),
    )
    for name, rule in RULES.items()
}


def accumulate_(t: Tensor, X: Tensor, f: float | Tensor | None = None) -> Tensor:
    """t += X, or t += f * X. Returns the updated tensor.

    **Arguments**: `f`: a number, or a tensor of one element.

    **Raises**: ValueError: if `X` has another shape than `t`, or `f` several elements.
    """
    if f is None:
        return accumulate("Add", t, X, 1.0)
    return accumulate("DampenedAdd", t, X, f)


def accumulate_square_(t: Tensor, X: Tensor, f: float | Tensor = 1.0) -> Tensor:
    """t += f * X**2. Otherwise as `accumulate_`."""
    return accumulate("DampenedAddSquare", t, X, f)


def accumulate_mean_(t: Tensor, X: Tensor, step: float | Tensor) -> Tensor:
    """t = t * step / (step + 1) + X / (step + 1): a mean. Otherwise as `accumulate_`."""
    return accumulate("Mean", t, X, step)


def accumulate_moving_average_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """t = f * t + (1 - f) * X. Otherwise as `accumulate_`."""
    return accumulate("MovingAverage", t, X, f)


def accumulate_moving_average_square_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """t = f * t + (1 - f) * X**2. Otherwise as `accumulate_`."""
    return accumulate("MovingAverageSquare", t, X, f)


def accumulator_scale_(t: Tensor, f: float | Tensor) -> Tensor:
    """t *= f; zeros if `f` is the number 0. Otherwise as `accumulate_`."""
    if not isinstance(f, Tensor) and f == 0:
        return accumulator_zero_(t)
    return accumulate("Scale", t, None, f)


def accumulator_zero_(t: Tensor) -> Tensor:
    """t = 0. Returns the updated tensor."""
    return accumulate("Zero", t, None, 0.0)


def accumulate(kind: str, t: Tensor, X: Tensor | None, f: float | Tensor) -> Tensor:
    """Add an accumulator of a kind in `ACCUMULATORS`."""
    ins = dict(enumerate([t] if X is None else [t, X]))
    attributes = {"updates": X is not None, "f": handle_optimizer_value(f, ins, len(ins))}
    return add_op(ACCUMULATORS[kind], list(ins.values()), attributes)[0]


# Accumulation at indices


def sparse_accumulate(xp: Any, inputs: Arrays, attributes: Attributes) -> Arrays:
    """t[..., indices, ...] += f * X. An index may occur several times."""
    target, update, indices = inputs[:3]
    axis = attributes["axis"] + 1
    f = factor(inputs, attributes, "f", update.ndim)
    wide = np.promote_types(target.dtype, np.float32)
    total = xp.moveaxis(target, axis, 1).astype(wide, order="C")
    rows = xp.arange(len(target)).reshape(-1, *[1] * (indices.ndim - 1))
    moved = xp.moveaxis((update * f).astype(wide), axis, 1)
    update_at(np.add, total, (rows, indices.astype(np.int64)), moved)
    target[...] = xp.moveaxis(total, 1, axis)
    return [target]


def sparse_spec(inputs: Specs, attributes: Attributes) -> Specs:
    target, update, indices = inputs[:3]
    axis = attributes["axis"]
    if not 0 <= axis < len(target.shape):
        raise ValueError(f"axis={axis}: out of range for t of shape {target.shape}")
    shape = (*target.shape[:axis], *indices.shape, *target.shape[axis + 1 :])
    if len(indices.shape) != 1 or update.shape != shape:
        raise ValueError(
            f"X must have the shape {shape} of t with its axis {axis} indexed by a vector of "
            f"indices, got {update.shape} and indices of shape {indices.shape}"
        )
    return [target]


SPARSE_ACCUMULATE = Definition(
    "SparseAccumulate",
    sparse_spec,
    sparse_accumulate,
    aliases={0: 0},
    modifies=(0,),
    names=("t", "X", "indices", "f", "W"),
)


def sparse_accumulate_(
    t: Tensor,
    X: Tensor,
    indices: Tensor,
    axis: int = 0,
    f: float | Tensor | None = None,
    W: Tensor | None = None,
) -> Tensor:
    """t[indices] += f * X along an axis, once for every occurrence of an index. Returns `t`.

    **Arguments**

    - `X`: of the shape of `t`, with as many entries along `axis` as there are `indices` (a vector).
    - `f`: a number, or a tensor of one element; by default 1.
    - `W`: the tensor that `t` accumulates for; no effect here.

    **Raises**: ValueError: for other shapes.
    """
    ins = {0: t, 1: X, 2: indices}
    attributes = {"axis": axis, "f": handle_optimizer_value(1.0 if f is None else f, ins, 3)}
    if W is not None:
        ins[len(ins)] = W
    return add_op(SPARSE_ACCUMULATE, list(ins.values()), attributes)[0]
