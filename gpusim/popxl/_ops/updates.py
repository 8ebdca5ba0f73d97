"""Updates of variables in place: copies and accumulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition

__all__ = ["ACCUMULATORS", "COPY", "SPARSE_ACCUMULATE"]

Array = Any
Attributes = Mapping[str, Any]


def target_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    """The updated tensor's; ValueError where an update of another shape is given."""
    target = inputs[0]
    update = inputs[1] if attributes.get("updates", True) else target
    if update.shape != target.shape:
        raise ValueError(f"X must have the shape {target.shape} of t, got {update.shape}")
    return [target]


def factor(inputs: list[Array], attributes: Attributes, name: str, ndim: int) -> Any:
    """A factor that is a number, or the values of a tensor of one element (replicas, 1, ...)."""
    given = attributes[name]
    if isinstance(given, float):
        return given
    values = inputs[given]
    return values.reshape(len(values), *[1] * (ndim - 1))


def copied(xp: Any, inputs: list[Array], attributes: Attributes) -> list[Array]:
    target, update = inputs
    target[...] = update
    return [target]


def accumulator(
    rule: Callable[[Array, Array, Any], Array],
) -> Callable[[Any, list[Array], Attributes], list[Array]]:
    """An update by rule(t, X, f): 16-bit values are computed in float32, and rounded once."""

    def run(xp: Any, inputs: list[Array], attributes: Attributes) -> list[Array]:
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


def updating(op_type: str, run: Any, names: tuple[str, ...] = ("t", "X", "f")) -> Definition:
    return Definition(op_type, target_spec, run, aliases={0: 0}, modifies=(0,), names=names)


COPY = updating("CopyVarUpdate", copied, ("t", "X"))
ACCUMULATORS = {
    name: updating(
        {"Scale": "AccumulatorScale", "Zero": "AccumulatorZero"}.get(name, "Accumulate"),
        accumulator(rule),
    )
    for name, rule in RULES.items()
}


def sparse_accumulated(xp: Any, inputs: list[Array], attributes: Attributes) -> list[Array]:
    """t[..., indices, ...] += f * X, where an index may come several times."""
    target, update, indices = inputs[:3]
    axis = attributes["axis"] + 1
    f = factor(inputs, attributes, "f", update.ndim)
    wide = np.promote_types(target.dtype, np.float32)
    total = xp.moveaxis(target, axis, 1).astype(wide)
    rows = xp.arange(len(target)).reshape(-1, *[1] * (indices.ndim - 1))
    moved = xp.moveaxis((update * f).astype(wide), axis, 1)
    add_at(xp, total, (rows, indices.astype(np.int64)), moved)
    target[...] = xp.moveaxis(total, 1, axis)
    return [target]


def add_at(xp: Any, total: Array, where: Any, values: Array) -> None:
    """total[where] += values, with every one of repeated indices."""
    if xp is np:
        np.add.at(total, where, values)
    else:
        xp.add.at(total, where, values)


def sparse_spec(inputs: list[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    target, update, indices = inputs[:3]
    axis = attributes["axis"]
    if not 0 <= axis < len(target.shape):
        raise ValueError(f"axis={axis}: out of range for t of shape {target.shape}")
    wanted = (*target.shape[:axis], *indices.shape, *target.shape[axis + 1 :])
    if len(indices.shape) != 1 or update.shape != wanted:
        raise ValueError(
            f"X must have the shape {wanted} of t with its axis {axis} indexed by a vector of "
            f"indices, got {update.shape} and indices of shape {indices.shape}"
        )
    return [target]


SPARSE_ACCUMULATE = Definition(
    "SparseAccumulate",
    sparse_spec,
    sparse_accumulated,
    aliases={0: 0},
    modifies=(0,),
    names=("t", "X", "indices", "f", "W"),
)
