"""The terms that Adam, LAMB and AdaMax update weights by."""

from __future__ import annotations

from typing import Any

from ..._ops.definition import add_op
from ..._ops.optimisers import ADAM_UPDATERS, UPDATER_INPUTS
from ...tensor import Tensor

__all__ = [
    "adam_updater",
    "adamax_updater",
    "create_adamupdater",
    "lamb_updater",
    "weight_decay_is_required",
]

Factor = float | Tensor | None


def weight_decay_is_required(weight_decay: Factor) -> bool:
    """Whether weights decay: by a tensor, or by a number that is not 0.

    >>> weight_decay_is_required(None), weight_decay_is_required(0.01)
    (False, True)
    """
    return isinstance(weight_decay, Tensor) or bool(weight_decay)


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
    """The op of all updaters.

    **Arguments**: `mode`: "Adam", "Lamb" (which makes the same term) or "AdaMax"; `ins`: further
    attributes; the others as for `adam_updater`. Without a weight decay the weight takes no part.
    """
    decays = weight_decay_is_required(weight_decay)
    values: dict[str, Any] = {
        "m": acc_first_order,
        "v": acc_second_order,
        "time_step": time_step,
        "weight": weight if decays else None,
        "weight_decay": weight_decay if decays else None,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
    }
    given = tuple(name for name in UPDATER_INPUTS if isinstance(values[name], Tensor))
    numbers = {
        name: None if value is None else float(value)
        for name, value in values.items()
        if not isinstance(value, Tensor)
    }
    attributes = {**numbers, "given": given, "mode": mode, "root": mode != "AdaMax", **(ins or {})}
    inputs = [values[name] for name in given]
    return add_op(ADAM_UPDATERS[time_step is not None], inputs, attributes, "Updater")[0]


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

    With a `time_step` t, ``m / (1 - beta1**t)`` and ``v / (1 - beta2**t)`` take the place of m and
    v: t counts up by one, in place, first.

    **Arguments**

    - `acc_first_order`, `acc_second_order`: m and v, of one shape; the term has the dtype of m.
    - `weight`: of that shape; needed with a `weight_decay`.
    - `time_step`: a scalar of float32.
    - the others: numbers or scalar tensors.

    Raises:
        ValueError: for a weight decay without a weight, a time step without both betas, and for
            other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.adam_updater(m, v)
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    _check(weight, weight_decay, time_step, beta1, beta2)
    return create_adamupdater(
        acc_first_order,
        acc_second_order,
        None,
        "Adam",
        weight,
        time_step,
        weight_decay,
        beta1,
        beta2,
        epsilon,
    )


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
    """LAMB's term, which is Adam's: `adam_var_update` scales it by the norms.

    Arguments and errors as those of `adam_updater`.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.lamb_updater(m, v, weight=m, weight_decay=0.1)
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    _check(weight, weight_decay, time_step, beta1, beta2)
    return create_adamupdater(
        acc_first_order,
        acc_second_order,
        None,
        "Lamb",
        weight,
        time_step,
        weight_decay,
        beta1,
        beta2,
        epsilon,
    )


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

    The `time_step` t, which is needed, counts up by one, in place, first. Arguments as those of
    `adam_updater`.

    Raises:
        ValueError: for a weight decay without a weight, no time step, and for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     m, v = popxl.variable([1.0, 2.0]), popxl.variable([1.0, 4.0])
    ...     popxl.ops.var_updates.adamax_updater(m, v, time_step=popxl.variable(0.0))
    Tensor[Updater_out popxl.dtypes.float32 (2,)]
    """
    if weight_decay_is_required(weight_decay) and weight is None:
        raise ValueError("Weight decay requires weight to not be None.")
    if time_step is None:
        raise ValueError("AdaMax requires time_step to not be None.")
    return create_adamupdater(
        acc_first_order,
        acc_second_order,
        None,
        "AdaMax",
        weight,
        time_step,
        weight_decay,
        beta1,
        0.0,
        epsilon,
    )


def _check(
    weight: Tensor | None,
    weight_decay: Factor,
    time_step: Tensor | None,
    beta1: Factor,
    beta2: Factor,
) -> None:
    if weight_decay_is_required(weight_decay) and weight is None:
        raise ValueError("Weight decay requires weight to not be None.")
    if time_step is not None and (beta1 is None or beta2 is None):
        raise ValueError("Bias correction requires both beta1 and beta2 to not be None.")
