"""Batched rules of products and sums of products: dot, inner, tensordot, einsum, cov and others.

np.dot and np.matmul call different routines of BLAS, which depend on the operands. The rules serve
operands for which the bits are the same, and leave others (scalars, sums over several labels) to
the per-replica fallback. np.convolve and np.correlate always take it: NumPy sums their short and
long rows in different orders.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ....libraries import empty_like, on_device
from ...axis_environment import Axes
from ..align import common_axes, lead, lead_full, sizes, visible_ndim, visible_shape
from ..array import Array, MappedArray, unpack, wrap
from ..dispatch import NoRule, rule
from .arguments import arrange, merge_visible, plain
from .ufuncs import matmul

BLAS = frozenset("fdFD")
"""Type characters of the dtypes that NumPy multiplies by BLAS."""


def operand(value: Any) -> Any:
    """`value` as an array."""
    known = isinstance(value, MappedArray) or on_device(value)
    return value if known else np.asanyarray(value)


def raveled(value: Any) -> MappedArray:
    """The elements that one replica sees, in C order, on one axis: a view where it can be one."""
    data, axes = unpack(operand(value))
    return wrap(merge_visible(data, axes), axes)


def complex_reversed(value: Any) -> bool:
    """Whether `value` is complex and runs backwards: NumPy's loops for one vector and for several
    then round differently."""
    data, axes = unpack(value)
    return (
        not on_device(data)
        and data.dtype.kind == "c"
        and any(stride < 0 for stride in data.strides[len(axes) :])
    )


def same_dtype(*values: Any) -> list[MappedArray]:
    """The arrays, as MappedArrays, converted to their common dtype.

    A converted one has the layout that converting one replica's part would give it.
    """
    arrays = [operand(value) for value in values]
    dtype = arrays[0].dtype
    if any(array.dtype != dtype for array in arrays):
        dtype = np.result_type(*(array.dtype for array in arrays))
    if dtype.kind not in "biufc":
        raise NoRule
    return [
        wrap(*unpack(array)) if array.dtype == dtype else _packed(array, dtype) for array in arrays
    ]


def _packed(array: Any, dtype: np.dtype[Any]) -> MappedArray:
    """A copy in `dtype`; one replica's part has the layout that a copy of it alone would have."""
    data, axes = unpack(array)
    visible = range(len(axes), data.ndim)
    order = [*range(len(axes)), *sorted(visible, key=lambda axis: -abs(data.strides[axis]))]
    moved = data.transpose(order).astype(dtype, order="C")
    return wrap(moved.transpose(sorted(range(data.ndim), key=order.__getitem__)), axes)


def _kind(shape: tuple[int, ...]) -> str:
    """The kind of operand that np.dot sees in an array of one or two axes."""
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    if rows > 1:
        return "column" if columns == 1 else "matrix"
    return "scalar" if columns == 1 else "row"


def _as_dot_reads(value: MappedArray) -> MappedArray:
    """`value`, copied in C order where np.dot would copy one replica's part before multiplying."""
    data, axes = unpack(value)
    if data.flags.c_contiguous:
        return value
    part = data[(0,) * len(axes)]
    good = all(
        stride % part.itemsize == 0 and (stride > 0 or (stride == 0 and n <= 1))
        for stride, n in zip(part.strides, part.shape, strict=True)
    )
    if good and _kind(part.shape) == "matrix":
        good = part.flags.c_contiguous or part.flags.f_contiguous
    return value if good else wrap(data.copy(), axes)


@rule(np.dot)
def dot(a: Any, b: Any) -> Any:
    left, right = same_dtype(a, b)
    ndims = left.ndim, right.ndim
    if 0 in ndims or left.shape[-1] != right.shape[-2 if ndims[1] > 1 else 0]:
        raise NoRule
    if max(ndims) > 2:
        return _dot_of_rows(left, right)
    length = left.shape[-1]
    if left.dtype.char in BLAS and length and not on_device(unpack(left)[0]):
        kinds = _kind(left.shape), _kind(right.shape)
        if "scalar" in kinds or (kinds == ("column", "row") and left.dtype.kind == "c"):
            raise NoRule
        left, right = _as_dot_reads(left), _as_dot_reads(right)
    return matmul(left, right)


def _dot_of_rows(left: MappedArray, right: MappedArray) -> Any:
    """np.dot of arrays with more than two axes: a product of two vectors for each element."""
    if left.dtype.kind not in "biuf":
        raise NoRule  # np.vecdot takes the conjugate of complex numbers
    axes = common_axes((left, right))
    rows = lead(left, axes)[(..., *(None,) * (right.ndim - 1), slice(None))]
    columns = lead(right, axes)
    if right.ndim > 1:
        columns = np.moveaxis(columns, -2, -1)
    columns = columns[(*(slice(None),) * len(axes), *(None,) * (left.ndim - 1), ...)]
    return wrap(_vecdot(rows, columns), axes)


def _vecdot(left: Array, right: Array) -> Array:
    """np.vecdot, which CuPy lacks."""
    if not on_device(left):
        return np.vecdot(left, right)
    left = np.conjugate(left) if left.dtype.kind == "c" else left
    return np.matmul(left[..., None, :], right[..., :, None])[..., 0, 0]


def inner_products(left: Any, right: Any) -> Any:
    """np.vecdot of arrays that may be mapped."""
    values = operand(left), operand(right)
    axes = common_axes(values)
    ndim = max(visible_ndim(value) for value in values)
    return wrap(_vecdot(*(lead(value, axes, ndim) for value in values)), axes)


@rule(np.inner)
def inner(a: Any, b: Any) -> Any:
    left, right = operand(a), operand(b)
    return dot(left, _swapped(right) if visible_ndim(right) > 1 else right)


def _swapped(value: Any) -> MappedArray:
    data, axes = unpack(value)
    return wrap(np.swapaxes(data, -1, -2), axes)


@rule(np.vdot)
def vdot(a: Any, b: Any, /) -> Any:
    left, right = (raveled(value) for value in same_dtype(a, b))
    if left.size != right.size or complex_reversed(left) or complex_reversed(right):
        raise NoRule
    axes = common_axes((left, right))
    return wrap(_vecdot(lead(left, axes), lead(right, axes)), axes)


@rule(np.outer)
def outer(a: Any, b: Any) -> Any:
    vectors = raveled(a), raveled(b)
    axes = common_axes(vectors)
    left, right = (lead(vector, axes) for vector in vectors)
    return wrap(np.multiply(left[..., :, None], right[..., None, :]), axes)


@rule(np.kron)
def kron(a: Any, b: Any) -> Any:
    values = operand(a), operand(b)
    axes = common_axes(values)
    ndim = max(visible_ndim(value) for value in values)
    left, right = (lead(value, axes, ndim) for value in values)
    mapped = len(axes)
    shape = [m * n for m, n in zip(left.shape[mapped:], right.shape[mapped:], strict=True)]
    spread: list[Any] = [slice(None)] * mapped
    product = np.multiply(
        left[(*spread, *(slice(None), None) * ndim)], right[(*spread, *(None, slice(None)) * ndim)]
    )
    return wrap(product.reshape((*product.shape[:mapped], *shape)), axes)


@rule(np.cross)
def cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Any:
    if axis is not None:
        axisa = axisb = axisc = axis
    vectors = []
    for value, place in ((operand(a), axisa), (operand(b), axisb)):
        shape = visible_shape(value)
        if not (-len(shape) <= place < len(shape)) or shape[place] != 3:
            raise NoRule
        data, own = unpack(value)
        vectors.append(wrap(np.moveaxis(data, place % len(shape) + len(own), -1), own))
    axes = common_axes(vectors)
    ndim = max(vector.ndim for vector in vectors)
    if not -ndim <= axisc < ndim:
        raise NoRule
    left, right = (lead(vector, axes, ndim) for vector in vectors)
    return wrap(np.moveaxis(np.cross(left, right), -1, axisc % ndim + len(axes)), axes)


@rule(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    left, right = operand(a), operand(b)
    first, second = _summed_axes(axes, visible_ndim(left), visible_ndim(right))
    shapes = visible_shape(left), visible_shape(right)
    if [shapes[0][axis] for axis in first] != [shapes[1][axis] for axis in second]:
        raise NoRule
    kept = [axis for axis in range(len(shapes[0])) if axis not in first]
    other = [axis for axis in range(len(shapes[1])) if axis not in second]
    product = dot(_as_matrix(left, kept, first), _as_matrix(right, second, other))
    data, over = unpack(product)
    shape = [shapes[0][axis] for axis in kept] + [shapes[1][axis] for axis in other]
    return wrap(data.reshape((*sizes(over), *shape)), over)


def _summed_axes(axes: Any, ndim_a: int, ndim_b: int) -> tuple[list[int], list[int]]:
    """The axes of both operands that np.tensordot sums over, counted from the first."""
    axes = plain(axes)
    try:
        first, second = axes
    except TypeError:
        first, second = range(-axes, 0), range(axes)
    first, second = ([int(axis) for axis in np.atleast_1d(group)] for group in (first, second))
    good = all(-ndim_a <= axis < ndim_a for axis in first) and all(
        -ndim_b <= axis < ndim_b for axis in second
    )
    if not good or len(first) != len(second):
        raise NoRule
    return [axis % ndim_a for axis in first], [axis % ndim_b for axis in second]


def _as_matrix(value: Any, rows: list[int], columns: list[int]) -> MappedArray:
    """The axes `rows` merged into one, and `columns` into another."""
    data, axes = unpack(value)
    mapped = len(axes)
    moved = data.transpose((*range(mapped), *(axis + mapped for axis in (*rows, *columns))))
    shape = moved.shape[mapped:]
    lengths = [
        int(np.prod(group, dtype=np.int64)) for group in (shape[: len(rows)], shape[len(rows) :])
    ]
    return wrap(moved.reshape((*sizes(axes), *lengths)), axes)


LONGEST_SUM = 8192
"""The buffer of NumPy's iterator, in elements: einsum adds up longer rows in pieces, and cuts them
differently for one replica and for several."""


@rule(np.einsum)
def einsum(subscripts: Any, *operands: Any, optimize: Any = False, **options: Any) -> Any:
    if not isinstance(subscripts, str) or optimize is not False or options:
        raise NoRule
    values = [operand(value) for value in operands]
    stacks = [unpack(value) for value in values]
    axes = common_axes(values)
    shapes = tuple(tuple(data.shape[len(own) :]) for data, own in stacks)
    mapped = tuple(tuple(map(axes.index, own)) for _, own in stacks)
    terms, summed = _terms(subscripts, shapes, mapped, len(axes))
    gpu = any(on_device(data) for data, _ in stacks)
    dtypes = {data.dtype for data, _ in stacks}
    if summed and not gpu and not _adds_alike(summed, dtypes):
        raise NoRule
    if summed and len(dtypes) > 1:
        stacks = [unpack(value) for value in same_dtype(*values)]
    arrays = [arrange(data, len(own), 2) for data, own in stacks]
    try:
        return wrap(np.einsum(terms, *arrays), axes)
    except ValueError:
        raise NoRule from None


@lru_cache(maxsize=1024)
def _terms(
    subscripts: str,
    shapes: tuple[tuple[int, ...], ...],
    mapped: tuple[tuple[int, ...], ...],
    count: int,
) -> tuple[str, tuple[int, ...]]:
    """The subscripts for operands that are mapped over some of `count` axes, and the lengths of the
    labels that are summed."""
    inputs, output = _explicit(subscripts, [len(shape) for shape in shapes])
    unused = [letter for letter in string.ascii_letters if letter not in subscripts]
    if len(unused) < count:
        raise NoRule
    stacked = ["".join(unused[axis] for axis in own) for own in mapped]
    terms = ",".join(lead + term for lead, term in zip(stacked, inputs, strict=True))
    return f"{terms}->{''.join(unused[:count])}{output}", _summed(inputs, output, shapes)


def _explicit(subscripts: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """The terms of np.einsum's subscripts, and the output, which NumPy may leave out."""
    text = subscripts.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    named = [term.replace("...", "", 1) for term in inputs]
    hidden = [ndim - len(letters) for ndim, letters in zip(ndims, named, strict=False)]
    if len(inputs) != len(ndims) or min(hidden) < 0:
        raise NoRule
    if any(rest and "..." not in term for rest, term in zip(hidden, inputs, strict=True)):
        raise NoRule
    every = "".join(named)
    if not arrow:
        output = "..." * ("..." in left)
        output += "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    letters = every + output.replace("...", "", 1)
    if ("..." in left) != ("..." in output) or not (letters + "a").isalpha():
        raise NoRule
    return inputs, output


def _summed(inputs: list[str], output: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The lengths, greater than 1, of the labels that einsum sums over."""
    lengths: dict[str, int] = {}
    for term, shape in zip(inputs, shapes, strict=True):
        before, _, after = term.partition("...")
        for letter, length in zip(before, shape, strict=False):
            lengths[letter] = max(length, lengths.get(letter, 0))
        for letter, length in zip(after[::-1], shape[::-1], strict=False):
            lengths[letter] = max(length, lengths.get(letter, 0))
    return tuple(n for letter, n in lengths.items() if letter not in output and n > 1)


def _adds_alike(summed: tuple[int, ...], dtypes: set[Any]) -> bool:
    """Whether einsum adds up stacked operands in the order in which it adds up one replica's.

    Sums over one label are the innermost loop in both cases. For several labels NumPy chooses the
    order of the loops by the number of all axes; only sums that are exact in any order are served.
    """
    if all(dtype.kind in "biu" for dtype in dtypes):
        return True
    return len(summed) == 1 and summed[0] <= LONGEST_SUM


@rule(np.cov)
def cov(
    m: Any,
    y: Any = None,
    rowvar: Any = True,
    bias: Any = False,
    ddof: Any = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> Any:
    if fweights is not None or aweights is not None:
        raise NoRule
    rows, axes = _observations([m] if y is None else [m, y], plain(rowvar), dtype)
    count = rows.shape[-1] - ((0 if plain(bias) else 1) if ddof is None else int(plain(ddof)))
    if count <= 0 or rows.shape[-2] == 0:
        raise NoRule
    rows = rows - np.mean(rows, axis=-1)[..., None]
    product = unpack(dot(wrap(rows, axes), wrap(np.swapaxes(rows, -1, -2).conj(), axes)))[0]
    product = product * np.true_divide(1, count)
    return wrap(product[..., 0, 0] if product.shape[-1] == 1 else product, axes)


def _observations(values: list[Any], rowvar: Any, dtype: Any) -> tuple[Array, Axes]:
    """A copy of the data of np.cov, one row a variable, in the layout of np.cov's own copy."""
    arrays = [operand(value) for value in values]
    kept = np.dtype(dtype or np.result_type(*(array.dtype for array in arrays), np.float64))
    axes = common_axes(arrays)
    if kept.char not in BLAS or any(visible_ndim(array) not in (1, 2) for array in arrays):
        raise NoRule
    parts = []
    for array in arrays:
        data = unpack(_packed(array, kept))[0]
        if visible_ndim(array) == 1:
            data = data[..., None, :]
        elif not rowvar:
            data = np.swapaxes(data, -1, -2)
        parts.append(wrap(data, unpack(array)[1]))
    if len(parts) == 1:
        return unpack(parts[0])[0], axes
    if not rowvar or any(part.shape[-1] != parts[0].shape[-1] for part in parts):
        raise NoRule
    return np.concatenate([lead_full(part, axes) for part in parts], axis=-2), axes


@rule(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: Any = True, *, dtype: Any = None) -> Any:
    product, axes = unpack(cov(x, y, rowvar, dtype=dtype))
    if product.ndim == len(axes):
        return wrap(product / product, axes)
    deviation = np.sqrt(np.diagonal(product, axis1=-2, axis2=-1).real)
    product = product / deviation[..., :, None] / deviation[..., None, :]
    if product.dtype.kind != "c":
        return wrap(np.clip(product, -1, 1), axes)
    product.real = np.clip(product.real, -1, 1)
    product.imag = np.clip(product.imag, -1, 1)
    return wrap(product, axes)


@rule(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    coefficients = operand(p)
    if isinstance(x, np.poly1d) or visible_ndim(coefficients) == 0:
        raise NoRule
    points = x if isinstance(x, MappedArray) else wrap(operand(x), ())
    data, axes = unpack(points)
    result = wrap(np.zeros_like(data), axes)
    for coefficient in coefficients:
        result = result * points + coefficient
    return result


@rule(np.vander)
def vander(x: Any, N: Any = None, increasing: bool = False) -> Any:
    data, axes = unpack(x)
    if visible_ndim(x) != 1:
        raise NoRule
    count = data.shape[-1] if N is None else plain(N)
    powers = empty_like(data, (*data.shape, count), np.promote_types(data.dtype, int))
    powers[..., :1] = 1
    powers[..., 1:] = data[..., None]
    if on_device(data):
        powers[..., 1:] = np.cumprod(powers[..., 1:], axis=-1)
    else:
        np.multiply.accumulate(powers[..., 1:], axis=-1, out=powers[..., 1:])
    return wrap(powers if plain(increasing) else powers[..., ::-1], axes)
