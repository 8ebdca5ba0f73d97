"""Adam, LAMB and AdaMax: the term that a weight is updated by, and the update.
Computed in float32 or wider; the step counter goes up by one, in place, before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..tensor import TensorSpec
from .definition import Definition
from .stacked import Array, narrow, wide

__all__ = ["ADAM_UPDATERS", "ADAM_VAR_UPDATE", "UPDATER_INPUTS"]

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]

#: What may be among the inputs of an updater, in this order; the attribute `given` says what is.
UPDATER_INPUTS = ("m", "v", "time_step", "weight", "weight_decay", "beta1", "beta2", "epsilon")
UPDATE_INPUTS = ("t", "x", "r1", "r2", "learning_rate", "max_weight_norm")


def _named(inputs: list[Any], attributes: Attributes) -> dict[str, Any]:
    """The inputs by name, and the numbers that are attributes."""
    found = dict(attributes)
    found.update(zip(attributes["given"], inputs, strict=True))
    return found


def _scalar(value: Any, like: Array) -> Any:
    """A number, or a replica's own scalar in a form that broadcasts to its tensor."""
    if isinstance(value, float):
        return value
    return narrow(wide(value), wide(like[:0]).dtype).reshape(-1, *(1,) * (like.ndim - 1))


def _updater_spec(inputs: Specs, attributes: Attributes) -> Specs:
    specs = _named(inputs, attributes)
    first = specs["m"]
    for name in ("v", "weight"):
        spec = specs.get(name)
        if isinstance(spec, TensorSpec) and spec.shape != first.shape:
            raise ValueError(
                f"{name} must have the shape {first.shape} of the first momentum, "
                f"but it is {spec.shape}"
            )
    return [TensorSpec(first.shape, first.dtype)]


def _correction(values: Mapping[str, Any], beta: str, like: Array) -> Array:
    """1 - beta ** t, of which float32 would lose half the digits."""
    factor = _scalar(values[beta], like[:0].astype(np.float64))
    power = values["time_step"].astype(np.float64).reshape(-1, *(1,) * (like.ndim - 1))
    return narrow(1 - factor**power, like.dtype)


def _updater(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    values = _named(inputs, attributes)
    m, v = wide(values["m"]), wide(values["v"])
    second = v
    if values.get("time_step") is not None:
        values["time_step"] += 1
        m = m / _correction(values, "beta1", m)
        if attributes["root"]:
            second = v / _correction(values, "beta2", v)
    if attributes["root"]:
        second = xp.sqrt(second)
    x = m / (second + _scalar(values["epsilon"], m))
    if values.get("weight") is not None:
        x = x + _scalar(values["weight_decay"], m) * wide(values["weight"])
    return [narrow(x, values["m"].dtype)]


def _updater_definition(step: bool) -> Definition:
    """With a step counter, which is the third input and changes in place, or without one."""
    return Definition(
        "AdamUpdater",
        infer=_updater_spec,
        run=_updater,
        modifies=(2,) if step else (),
        names=UPDATER_INPUTS if step else UPDATER_INPUTS[:2] + UPDATER_INPUTS[3:],
    )


#: By whether there is a step counter.
ADAM_UPDATERS = {step: _updater_definition(step) for step in (False, True)}


def _var_update_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, x, r1, r2 = inputs[:4]
    if x.shape != t.shape:
        raise ValueError(f"x must have the shape {t.shape} of t, but it is {x.shape}")
    for name, spec in (("r1", r1), ("r2", r2)):
        if spec.shape not in ((), (1,)):
            raise ValueError(f"{name} must be a scalar, but its shape is {spec.shape}")
    return [TensorSpec(t.shape, t.dtype)]


def _var_update(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    values = _named(inputs, attributes)
    t, x = values["t"], wide(values["x"])
    weight, term = (xp.sqrt(_scalar(values[name], t)) for name in ("r1", "r2"))
    limit = values["max_weight_norm"]
    if limit is not None:
        weight = xp.minimum(weight, _scalar(limit, t))
    known = (weight != 0) & (term != 0)
    trust = xp.where(known, weight / xp.where(known, term, 1), 1).astype(weight.dtype)
    t[...] = wide(t) - trust * _scalar(values["learning_rate"], t) * x
    return [t]


ADAM_VAR_UPDATE = Definition(
    "AdamVarUpdate",
    infer=_var_update_spec,
    run=_var_update,
    aliases={0: 0},
    modifies=(0,),
    names=UPDATE_INPUTS,
)
