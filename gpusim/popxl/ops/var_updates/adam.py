"""Adam, LAMB and AdaMax: the term that a weight is updated by, and the update.

They are computed in float32 or wider. The step counter is increased by one, in place, before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..._definition import Array, Arrays, Attributes, Definition, Specs, add_op
from ...tensor import Tensor, TensorSpec
from .._stacked import narrow, wide

__all__ = [
    "adam_updater",
    "lamb_updater",
    "adamax_updater",
    "create_adamupdater",
    "weight_decay_is_required",
    "adam_var_update",
]

Factor = float | Tensor | None


def _as_inputs(values: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors as inputs of an op, and numbers as attributes; `names` are those of the inputs."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {
        name: None if value is None else float(value)
        for name, value in values.items()
        if name not in tensors
    }
    return list(tensors.values()), {**numbers, "names": tuple(tensors)}


def _by_name(inputs: list[Any], attributes: Attributes) -> dict[str, Any]:
    """The inputs and the attributes by name."""
    return {**attributes, **dict(zip(attributes["names"], inputs, strict=True))}


def _scalar(value: Any, like: Array) -> Any:
    """A number, or a replica's own scalar reshaped to broadcast to its tensor."""
    if isinstance(value, float):
        return value
    return narrow(wide(value), wide(like[:0]).dtype).reshape(-1, *(1,) * (like.ndim - 1))


# The term

#: The possible inputs of an updater, in order; the attribute `names` lists those of an op.
UPDATER_INPUTS = ("m", "v", "time_step", "weight", "weight_decay", "beta1", "beta2", "epsilon")


def _updater_spec(inputs: Specs, attributes: Attributes) -> Specs:
    specs = _by_name(inputs, attributes)
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
    """1 - beta ** t, in float64: float32 would lose half the digits."""
    factor = _scalar(values[beta], like[:0].astype(np.float64))
    power = values["time_step"].astype(np.float64).reshape(-1, *(1,) * (like.ndim - 1))
    return narrow(1 - factor**power, like.dtype)


def _updater(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    values = _by_name(inputs, attributes)
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
    """With a step counter, the third input, which changes in place; or without one."""
    return Definition(
        "AdamUpdater",
        _updater_spec,
        _updater,
        modifies=(2,) if step else (),
        names=UPDATER_INPUTS if step else UPDATER_INPUTS[:2] + UPDATER_INPUTS[3:],
    )


#: By whether there is a step counter.
ADAM_UPDATERS = {step: _updater_definition(step) for step in (False, True)}


def adam_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Factor = None,
    beta1: Factor = None,
    beta2: Factor = None,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Adam's term ``m / (sqrt(v) + epsilon) + weight_decay * weight``.

    With a `time_step` t, ``m / (1 - beta1**t)`` and ``v / (1 - beta2**t)`` replace m and v; t is
    first increased by one, in place.

    **Arguments**

    - `acc_first_order`, `acc_second_order`: m and v, of one shape; the term has the dtype of m.
    - `weight`: of that shape; required with a `weight_decay`.
    - `time_step`: a scalar of float32.
    - the others: numbers or scalar tensors.

    **Raises**: ValueError: for a weight decay without a weight, a time step without both betas, or
    other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.adam_updater(m, v)
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    _check(weight, weight_decay, time_step, beta1, beta2)
    values = weight, time_step, weight_decay, beta1, beta2, epsilon
    return create_adamupdater(acc_first_order, acc_second_order, None, "Adam", *values)


def lamb_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Factor = None,
    beta1: Factor = None,
    beta2: Factor = None,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """LAMB's term, which is Adam's; `adam_var_update` scales it by the norms.

    Arguments and errors as in `adam_updater`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.lamb_updater(m, v, weight=m, weight_decay=0.1)
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    _check(weight, weight_decay, time_step, beta1, beta2)
    values = weight, time_step, weight_decay, beta1, beta2, epsilon
    return create_adamupdater(acc_first_order, acc_second_order, None, "Lamb", *values)


def adamax_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Factor = None,
    beta1: float | Tensor = 0.9,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """AdaMax's term ``m / (1 - beta1**t) / (v + epsilon) + weight_decay * weight``.

    The `time_step` t is required, and is first increased by one, in place. Arguments as in
    `adam_updater`.

    **Raises**: ValueError: for a weight decay without a weight, no time step, or other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.adamax_updater(m, v, time_step=popxl.variable(0.0))
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    _check(weight, weight_decay)
    if time_step is None:
        raise ValueError("AdaMax requires time_step to not be None.")
    values = weight, time_step, weight_decay, beta1, 0.0, epsilon
    return create_adamupdater(acc_first_order, acc_second_order, None, "AdaMax", *values)


def create_adamupdater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    ins: dict[str, Any] | None,
    mode: str,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: Factor = None,
    beta1: Factor = None,
    beta2: Factor = None,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Add the op of an updater.

    **Arguments**: `mode`: "Adam", "Lamb" (the same term) or "AdaMax"; `ins`: further attributes;
    the others as in `adam_updater`. Without a weight decay the weight takes no part.
    """
    if not weight_decay_is_required(weight_decay):
        weight = weight_decay = None
    values = (
        acc_first_order,
        acc_second_order,
        time_step,
        weight,
        weight_decay,
        beta1,
        beta2,
        epsilon,
    )
    inputs, numbers = _as_inputs(dict(zip(UPDATER_INPUTS, values, strict=True)))
    attributes = {**numbers, "mode": mode, "root": mode != "AdaMax", **(ins or {})}
    return add_op(ADAM_UPDATERS[time_step is not None], inputs, attributes, "Updater")[0]


def weight_decay_is_required(weight_decay: Factor) -> bool:
    """Whether weights decay: by a tensor, or by a number other than 0.

    >>> weight_decay_is_required(None), weight_decay_is_required(0.01)
    (False, True)
    """
    return isinstance(weight_decay, Tensor) or bool(weight_decay)


def _check(
    weight: Tensor | None,
    weight_decay: Factor,
    time_step: Tensor | None = None,
    beta1: Factor = None,
    beta2: Factor = None,
) -> None:
    if weight_decay_is_required(weight_decay) and weight is None:
        raise ValueError("Weight decay requires weight to not be None.")
    if time_step is not None and (beta1 is None or beta2 is None):
        raise ValueError("Bias correction requires both beta1 and beta2 to not be None.")


# The update

UPDATE_INPUTS = ("t", "x", "r1", "r2", "learning_rate", "max_weight_norm")


def _var_update_spec(inputs: Specs, attributes: Attributes) -> Specs:
    t, x, r1, r2 = inputs[:4]
    if x.shape != t.shape:
        raise ValueError(f"x must have the shape {t.shape} of t, but it is {x.shape}")
    for name, spec in (("r1", r1), ("r2", r2)):
        if spec.shape not in ((), (1,)):
            raise ValueError(f"{name} must be a scalar, but its shape is {spec.shape}")
    return [TensorSpec(t.shape, t.dtype)]


def _var_update(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    values = _by_name(inputs, attributes)
    t, x = values["t"], wide(values["x"])
    weight, term = (xp.sqrt(_scalar(values[name], t)) for name in ("r1", "r2"))
    limit = values["max_weight_norm"]
    if limit is not None:
        weight = xp.minimum(weight, _scalar(limit, t))
    nonzero = (weight != 0) & (term != 0)
    trust = xp.where(nonzero, weight / xp.where(nonzero, term, 1), 1).astype(weight.dtype)
    t[...] = wide(t) - trust * _scalar(values["learning_rate"], t) * x
    return [t]


ADAM_VAR_UPDATE = Definition(
    "AdamVarUpdate",
    _var_update_spec,
    _var_update,
    aliases={0: 0},
    modifies=(0,),
    names=UPDATE_INPUTS,
)


def adam_var_update(
    t: Tensor,
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    learning_rate: float | Tensor | None = None,
    max_weight_norm: float | Tensor | None = None,
) -> Tensor:
    """``t -= min(norm(t), max_weight_norm) / norm(x) * learning_rate * x``. Returns `t`.

    **Arguments**

    - `t`: the weight; it changes in place.
    - `x`: the term, of its shape.
    - `r1`, `r2`: the squares of the norms of `t` and of `x`, as scalars (see `ops.lamb_square`). If
      one of them is 0 the ratio of norms is 1.
    - `learning_rate`: a number or scalar tensor, by default 1.
    - `max_weight_norm`: a number or scalar tensor; by default there is no limit.

    **Raises**: ValueError: for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, x = popxl.variable([3.0, 4.0]), popxl.constant([1.0, 0.0])
    ...     norms = popxl.ops.lamb_square(t), popxl.ops.lamb_square(x)
    ...     popxl.ops.var_updates.adam_var_update(t, x, *norms, learning_rate=0.1)
    Tensor[adamvarupdate_out popxl.dtypes.float32 (2,)]
    """
    rate = 1.0 if learning_rate is None else learning_rate
    values = dict(zip(UPDATE_INPUTS, (t, x, r1, r2, rate, max_weight_norm), strict=True))
    return add_op(ADAM_VAR_UPDATE, *_as_inputs(values))[0]
