"""Batched rules of numpy.linalg, whose functions take stacks of matrices.

np.linalg.lstsq, and multi_dot of more than three arrays, take the per-replica fallback.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ....libraries import on_device
from ...axis_environment import Axes
from ..align import common_axes, lead, shift_axes, sizes, visible_ndim, visible_shape
from ..array import MappedArray, unpack, wrap
from ..dispatch import NoRule, Rule, rule
from .arguments import arrange, merge_visible, name_arguments, plain
from .products import (
    complex_reversed,
    cross,
    inner_products,
    operand,
    outer,
    raveled,
    tensordot,
)


def _wrapped(result: Any, axes: Axes) -> Any:
    """An array, or each of a tuple of arrays, which may be a named one."""
    if isinstance(result, tuple):
        parts = [wrap(part, axes) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return wrap(result, axes)


def of_matrices(function: Callable[..., Any], *, least_ndim: int = 2) -> Rule:
    """The rule of a function of matrices, with options that are the same on all replicas."""

    def batched(a: Any, *args: Any, **kwargs: Any) -> Any:
        if visible_ndim(a) < least_ndim:
            raise NoRule
        data, axes = unpack(a)
        options = {key: plain(value) for key, value in kwargs.items()}
        return _wrapped(function(data, *(plain(value) for value in args), **options), axes)

    return batched


for _function in (
    *(np.linalg.inv, np.linalg.det, np.linalg.slogdet, np.linalg.cholesky),
    *(np.linalg.eig, np.linalg.eigvals, np.linalg.eigh, np.linalg.eigvalsh),
    *(np.linalg.svd, np.linalg.matrix_power),
):
    rule(_function)(of_matrices(_function))


@rule(np.linalg.svdvals)
def svdvals(x: Any, /) -> Any:
    if visible_ndim(x) < 2:
        raise NoRule
    data, axes = unpack(x)
    return wrap(np.linalg.svd(data, compute_uv=False), axes)


@rule(np.linalg.diagonal)
def diagonal(x: Any, /, *, offset: Any = 0) -> Any:
    if visible_ndim(x) < 2:
        raise NoRule
    data, axes = unpack(x)
    return wrap(np.diagonal(data, plain(offset), -2, -1), axes)


@rule(np.linalg.qr)
def qr(a: Any, mode: Any = "reduced") -> Any:
    if mode not in ("reduced", "complete", "r", "raw") or visible_ndim(a) < 2:
        raise NoRule
    data, axes = unpack(a)
    return _wrapped(np.linalg.qr(data, mode), axes)


@rule(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    matrix, right = operand(a), operand(b)
    axes = common_axes((matrix, right))
    ndims = visible_ndim(matrix), visible_ndim(right)
    if ndims[0] < 2 or ndims[1] < 1:
        raise NoRule
    if ndims[1] > 1:
        ndim = max(ndims)
        return wrap(_solved(lead(matrix, axes, ndim), lead(right, axes, ndim)), axes)
    if visible_shape(matrix)[-1] != visible_shape(right)[0]:
        raise NoRule
    column = lead(right, axes, ndims[0] - 1)[..., None]
    return wrap(_solved(lead(matrix, axes), column)[..., 0], axes)


def _solved(a: Any, b: Any) -> Any:
    """Solve a stack of equations, whose stacks are broadcast here: CuPy does not."""
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (np.broadcast_to(x, (*stack, *x.shape[-2:])) for x in (a, b))
    return np.linalg.solve(left, right)


def _tolerance(value: Any, axes: Axes, ndim: int) -> Any:
    """A tolerance for each matrix of a stack with `ndim` axes, or None or a number for all."""
    return lead(value, axes, ndim - 2) if isinstance(value, MappedArray) else value


def with_tolerance(function: Callable[..., Any], names: tuple[str, ...]) -> Rule:
    """The rule of pinv and matrix_rank, whose tolerances are arrays over the stack."""

    def batched(*args: Any, **kwargs: Any) -> Any:
        options = name_arguments(function, args, kwargs)
        matrix = operand(options.pop(next(iter(options))))
        given = [options[name] for name in names if name in options]
        axes, ndim = common_axes([matrix, *given]), visible_ndim(matrix)
        if ndim < 2 or any(value is not None and visible_ndim(value) > ndim - 2 for value in given):
            raise NoRule
        for name, value in options.items():
            options[name] = _tolerance(value, axes, ndim) if name in names else plain(value)
        return wrap(function(lead(matrix, axes), **options), axes)

    return batched


rule(np.linalg.pinv)(with_tolerance(np.linalg.pinv, ("rcond", "rtol")))
rule(np.linalg.matrix_rank)(with_tolerance(np.linalg.matrix_rank, ("tol", "rtol")))


@rule(np.linalg.cond)
def cond(x: Any, p: Any = None) -> Any:
    data, axes = unpack(x)
    if visible_ndim(x) < 2 or complex_reversed(x):
        raise NoRule
    return wrap(np.linalg.cond(arrange(data, len(axes), 2), plain(p)), axes)


@rule(np.linalg.multi_dot)
def multi_dot(arrays: Any) -> Any:
    values = [operand(array) for array in arrays]
    ndims = [visible_ndim(value) for value in values]
    outer_ndims = {ndims[0], ndims[-1]}
    if len(values) == 2 and outer_ndims <= {1, 2}:
        return np.dot(values[0], values[1])
    if len(values) != 3 or ndims[1] != 2 or not outer_ndims <= {1, 2}:
        raise NoRule
    first, second, third = values
    rows = 1 if ndims[0] == 1 else visible_shape(first)[0]
    columns = 1 if ndims[2] == 1 else visible_shape(third)[1]
    inner, last = visible_shape(second)
    if rows * last * (inner + columns) < inner * columns * (rows + last):
        return np.dot(np.dot(first, second), third)
    return np.dot(first, np.dot(second, third))


ROUNDED_ALIKE = frozenset({None, 0, 1, 2, np.inf, -np.inf})
"""Orders of vector norms without a power of the sum: NumPy rounds powers of scalars and of arrays
differently."""


@rule(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: Any = False) -> Any:
    ord, axis, keepdims = plain(ord), plain(axis), plain(keepdims)
    ndim = visible_ndim(x)
    data, axes = unpack(x)
    if data.dtype.kind not in "biufc" or complex_reversed(x):
        raise NoRule
    if axis is None and (
        ord is None or (ord in ("f", "fro") and ndim == 2) or (ord == 2 and ndim == 1)
    ):
        return _length(data, axes, ndim, keepdims)
    places = shift_axes(axis, ndim, len(axes))
    gpu = on_device(data)
    if len(places) == 1 and ord not in ROUNDED_ALIKE and ndim == 1 and not gpu:
        raise NoRule
    if len(places) not in (1, 2):
        raise NoRule
    kept = arrange(data, len(axes), len(places))
    return wrap(np.linalg.norm(kept, ord, places, bool(keepdims)), axes)


def _length(data: Any, axes: Axes, ndim: int, keepdims: Any) -> Any:
    """The 2-norm of all elements, by BLAS, in the order in which they lie in memory."""
    mapped = len(axes)
    if data.dtype.kind not in "fc":
        data = data.astype(float)
    if on_device(data):
        length = np.sqrt(np.sum(np.square(np.abs(merge_visible(data, axes))), axis=-1))
        return wrap(length.reshape((*sizes(axes), *(1,) * ndim)) if keepdims else length, axes)
    visible = range(mapped, data.ndim)
    if any(data.strides[axis] == 0 and data.shape[axis] > 1 for axis in visible):
        raise NoRule
    order = sorted(visible, key=lambda axis: -abs(data.strides[axis]))
    vector = merge_visible(data.transpose((*range(mapped), *order)), axes)
    if vector.strides[-1] != vector.itemsize and vector.shape[-1] > 1:
        vector = vector.copy()
    parts = [vector] if data.dtype.kind == "f" else [vector.real, vector.imag]
    squares = [np.vecdot(part, part) for part in parts]
    length = np.sqrt(squares[0] if len(squares) == 1 else squares[0] + squares[1])
    return wrap(length.reshape((*sizes(axes), *(1,) * ndim)) if keepdims else length, axes)


@rule(np.linalg.vector_norm)
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: Any = False, ord: Any = 2) -> Any:
    ord, axis = plain(ord), plain(axis)
    data, axes = unpack(x)
    ndim, mapped = visible_ndim(x), len(axes)
    group = shift_axes(axis, ndim, mapped)
    if data.dtype.kind not in "biufc" or complex_reversed(x):
        raise NoRule
    if ord not in ROUNDED_ALIKE and len(group) == ndim and not on_device(data):
        raise NoRule
    along = group[0] if isinstance(axis, int) else mapped
    if axis is None:
        kept = merge_visible(data, axes)
    elif isinstance(axis, int):
        kept = data
    else:
        rest = [place for place in range(mapped, data.ndim) if place not in group]
        length = int(np.prod([data.shape[place] for place in group], dtype=np.int64))
        moved = data.transpose((*range(mapped), *group, *rest))
        kept = moved.reshape((*data.shape[:mapped], length, *(data.shape[place] for place in rest)))
    result = np.linalg.norm(arrange(kept, mapped), ord, along)
    if plain(keepdims):
        shape = [1 if place in group else n for place, n in enumerate(data.shape)]
        result = result.reshape(shape)
    return wrap(result, axes)


@rule(np.linalg.matrix_norm)
def matrix_norm(x: Any, /, *, keepdims: Any = False, ord: Any = "fro") -> Any:
    if visible_ndim(x) < 2:
        raise NoRule
    return norm(x, ord, (-2, -1), keepdims)


@rule(np.linalg.trace)
def trace(x: Any, /, *, offset: Any = 0, dtype: Any = None) -> Any:
    if visible_ndim(x) < 2:
        raise NoRule
    data, axes = unpack(x)
    arrays = arrange(data, len(axes), 2)
    return wrap(np.trace(arrays, plain(offset), -2, -1, dtype), axes)


@rule(np.linalg.outer)
def outer_of_vectors(x1: Any, x2: Any, /) -> Any:
    if visible_ndim(x1) != 1 or visible_ndim(x2) != 1:
        raise NoRule
    return outer(x1, x2)


@rule(np.linalg.cross)
def cross_of_vectors(x1: Any, x2: Any, /, *, axis: Any = -1) -> Any:
    return cross(x1, x2, axis=operator.index(plain(axis)))


@rule(np.linalg.matmul)
def matmul(x1: Any, x2: Any, /) -> Any:
    return np.matmul(x1, x2)


@rule(np.linalg.tensordot)
def tensordot_of_arrays(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    return tensordot(x1, x2, axes)


@rule(np.linalg.matrix_transpose)
def matrix_transpose(x: Any, /) -> Any:
    if visible_ndim(x) < 2:
        raise NoRule
    data, axes = unpack(x)
    return wrap(np.swapaxes(data, -1, -2), axes)


@rule(np.linalg.vecdot)
def vecdot(x1: Any, x2: Any, /, *, axis: Any = -1) -> Any:
    return inner_products(*(_last(operand(value), plain(axis)) for value in (x1, x2)))


def _last(value: Any, axis: int) -> Any:
    """`value` with its visible `axis` moved to the end."""
    data, axes = unpack(value)
    place = normalize_axis_index(axis, visible_ndim(value)) + len(axes)
    return wrap(np.moveaxis(data, place, -1), axes)


@rule(np.linalg.tensorinv)
def tensorinv(a: Any, ind: Any = 2) -> Any:
    shape, ind = visible_shape(a), plain(ind)
    size = int(np.prod(shape[ind:], dtype=np.int64))
    if ind <= 0 or size == 0:
        raise NoRule
    data, axes = unpack(a)
    square = data.reshape((*sizes(axes), size, -1))
    return wrap(np.linalg.inv(square).reshape((*sizes(axes), *shape[ind:], *shape[:ind])), axes)


@rule(np.linalg.tensorsolve)
def tensorsolve(a: Any, b: Any, axes: Any = None) -> Any:
    left, right = operand(a), operand(b)
    ndim = visible_ndim(left)
    order = list(range(ndim))
    for axis in plain(axes) or ():
        order.remove(axis)
        order.insert(ndim, axis)
    data, own = unpack(left)
    mapped = len(own)
    moved = data.transpose((*range(mapped), *(axis + mapped for axis in order)))
    shape = moved.shape[mapped:][visible_ndim(right) - ndim :]
    size = int(np.prod(shape, dtype=np.int64))
    if int(np.prod(visible_shape(left), dtype=np.int64)) != size**2:
        raise NoRule
    square = wrap(moved.reshape((*sizes(own), size, size)), own)
    found, over = unpack(solve(square, raveled(right)))
    return wrap(found.reshape((*sizes(over), *shape)), over)
