"""Values in the forms that collectives take, and results in one form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from gpusim.collectives import Result

Array = np.ndarray
EVEN = [None, [[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]], [[4, 1], [5, 0], [3, 2]]]
EVEN += [[[5, 3, 1, 0, 2, 4]], [[i] for i in range(6)], [[0, 1, 2, 3, 4, 5]]]

property_test = settings(max_examples=100, deadline=None)


# Ways to hand in the same values, and to read a result whatever its form


def rows_apart(x: Array) -> Array:
    """The same values with other strides."""
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]) if x.ndim > 1 else (2 * len(x),), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


FORMS: dict[str, Callable[[Array], Array | list[Array]]] = {
    "stacked": np.ascontiguousarray,
    "strided": rows_apart,
    "fortran": np.asfortranarray,
    "list": list,
    "strided list": lambda x: list(rows_apart(x)),
}


def every_replica(result: Result, size: int) -> Array:
    """The result as (R, ...)."""
    assert isinstance(result, Result)
    if result.mapped:
        assert len(result.value) == size
        return np.stack(result.value) if isinstance(result.value, list) else result.value
    return np.stack([result.value] * size)


@st.composite
def programs(draw: st.DrawFn, all_groups=EVEN, min_ndim: int = 0):
    """Six replicas' values (R, *batch, *s), how to hand them in, batch axes and groups."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    shape = draw(st.lists(st.integers(0, 4), min_size=min_ndim, max_size=3))
    dtype = draw(st.sampled_from([np.int64, np.float32, np.int8, np.complex64]))
    seed = draw(st.integers(0, 2**32))
    x = np.random.default_rng(seed).integers(-8, 8, (6, *batch, *shape)).astype(dtype)
    return x, draw(st.sampled_from(sorted(FORMS))), len(batch), draw(st.sampled_from(all_groups))
