"""JAX's casts between values that are equal on all replicas and values that may differ.

Here any value may be used as either, and shard_map compares the values themselves where out_specs
declare them equal (check_vma).
"""

from __future__ import annotations

from typing import Any

from ..maps.names import AxisName, resolve_names


def pcast(x: Any, axis_name: AxisName, *, to: str) -> Any:
    """`x` itself: in JAX the cast changes the type of a value inside shard_map.

    **Arguments**:

    - `x`: a pytree of arrays.
    - `axis_name`: a mapped axis, or a tuple of them.
    - `to`: "varying", or "reduced", which differs in gradients only.

    **Raises**:

    - NameError: for an axis that is not bound.
    - ValueError: for other `to`; arrays are never unreduced here.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> f = lambda x: x + lax.pcast(1, "i", to="varying")
    >>> gpusim.vmap(f, axis_name="i")(np.array([1, 2]))
    array([2, 3])
    """
    if to not in ("varying", "reduced"):
        raise ValueError(f"pcast to must be 'varying' or 'reduced', but got {to!r}")
    resolve_names(axis_name)
    return x


def pvary(x: Any, axis_name: AxisName) -> Any:
    """``pcast(x, axis_name, to="varying")``, the name that it had before JAX 0.9.

    >>> import numpy as np, gpusim
    >>> from gpusim import lax
    >>> gpusim.vmap(lambda x: lax.pvary(x, "i"), axis_name="i")(np.array([1, 2]))
    array([1, 2])
    """
    return pcast(x, axis_name, to="varying")
