"""Writes into MappedArrays on a GPU are those of NumPy; arguments are protected without a flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import lax
from tests.gpu.cupy_arrays import cupy


def program(v: Any) -> Any:
    """Change arrays by each kind of write; return them all."""
    acc = np.zeros_like(v)
    row = acc[0]
    acc += v  # which varies: the memory of both follows
    row *= 2
    out = np.zeros(3, like=v)
    out[1] = v[0, 1]
    w = v.copy()
    for part in w:
        part *= 2
    w[w > 3] = 0
    picked = w[lax.axis_index("i")]
    picked += 100
    np.add.at(out, [0, 0], v[0, 0])
    out.sort()
    total = lax.psum(v, "i")
    total /= 2
    zero = np.zeros((), like=v)
    same = zero
    zero += v.sum()
    np.add(w, 1, out=w)
    np.copyto(acc[1], w[0])
    w[[0, 1], [1, 0]] = 7
    np.sum(w, 0, out=acc[0])
    w.T[0] = w[1]
    w **= 2
    half = w.astype(np.float16)
    half -= np.float32(0.1) * half
    np.clip(w, 0, 50, out=w)
    np.fill_diagonal(w, 1)
    np.multiply(w, w, out=w, where=w > 2)
    w.flat[1:3] = 5
    acc[:, 1:] += acc[:, :-1]
    return acc, out, w, picked, total, same, half, v


def test_writes_are_numpys() -> None:
    x = np.arange(8.0).reshape(2, 2, 2)
    on_gpu = cupy.asarray(x)
    expected = gpusim.vmap(program, axis_name="i")(x)
    for right, found in zip(expected, gpusim.vmap(program, axis_name="i")(on_gpu), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(cupy.asnumpy(found), right)
        assert found.data.ptr != on_gpu.data.ptr
    np.testing.assert_array_equal(cupy.asnumpy(on_gpu), x)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.__iadd__(1),
        lambda v: v[0].__setitem__(0, 1),
        lambda v: v.T.sort(),
        lambda v: np.copyto(v, 1),
        lambda v: np.broadcast_to(v.copy(), (2, 2, 2)).__iadd__(1),
    ],
)
def test_arguments_are_read_only(change: Callable[[Any], Any]) -> None:
    x = cupy.asarray(np.arange(8.0).reshape(2, 2, 2))
    with pytest.raises(ValueError, match="read-only"):
        gpusim.vmap(change)(x)
    x += 1  # the caller's again
    assert float(x[0, 0, 0]) == 1
