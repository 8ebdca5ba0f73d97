"""The update of a weight by the term that Adam, LAMB or AdaMax has made."""

from __future__ import annotations

from ..._ops.definition import add_op
from ..._ops.optimisers import ADAM_VAR_UPDATE, UPDATE_INPUTS
from ...tensor import Tensor

__all__ = ["adam_var_update"]


def adam_var_update(
    t: Tensor,
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    learning_rate: float | Tensor | None = None,
    max_weight_norm: float | Tensor | None = None,
) -> Tensor:
    """``t -= min(norm(t), max_weight_norm) / norm(x) * learning_rate * x``; the updated weight.

    **Arguments**

    - `t`: the weight; it changes in place.
    - `x`: the term, of its shape.
    - `r1`, `r2`: the squares of the norms of `t` and of `x`, as scalars (`ops.lamb_square` makes
      them); where one of them is 0 their ratio is 1.
    - `learning_rate`: a number or scalar tensor, by default 1.
    - `max_weight_norm`: a number or scalar tensor; by default the norm has no limit.

    ValueError for other shapes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     t, x = popxl.variable([3.0, 4.0]), popxl.constant([1.0, 0.0])
    ...     norms = popxl.ops.lamb_square(t), popxl.ops.lamb_square(x)
    ...     popxl.ops.var_updates.adam_var_update(t, x, *norms, learning_rate=0.1)
    Tensor[adamvarupdate_out popxl.dtypes.float32 (2,)]
    """
    rate = 1.0 if learning_rate is None else learning_rate
    values = dict(zip(UPDATE_INPUTS, (t, x, r1, r2, rate, max_weight_norm), strict=True))
    given = tuple(name for name, value in values.items() if isinstance(value, Tensor))
    numbers = {
        name: None if value is None else float(value)
        for name, value in values.items()
        if not isinstance(value, Tensor)
    }
    inputs = [value for value in values.values() if isinstance(value, Tensor)]
    return add_op(ADAM_VAR_UPDATE, inputs, {**numbers, "given": given})[0]
