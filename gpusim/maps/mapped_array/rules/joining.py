"""Batched rules of functions that join arrays, cut them, and put elements in or out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from ....libraries import constant_like, on_device, to_library_of
from ...axis_environment import Axes
from ..align import common_axes, lead, lead_full, shift_axis, visible_ndim, visible_shape
from ..array import Array, unpack, wrap
from ..dispatch import NoRule, Rule, rule
from .arguments import merge_visible, plain, unpack_array


def _together(arrays: Any) -> tuple[list[Any], list[Array], Axes]:
    """The arrays as a list, and their stacked data over the axes of them all."""
    parts = _in_one_memory(arrays)
    axes = common_axes(parts)
    return parts, [lead_full(part, axes) for part in parts], axes


def _in_one_memory(arrays: Any) -> list[Any]:
    """The arrays as a list; numbers and lists of them are where the arrays are."""
    parts = list(arrays)
    gpu = next(filter(on_device, (unpack(part)[0] for part in parts)), None)
    if gpu is None:
        return parts
    numbers = (list, tuple, int, float, complex)
    return [
        to_library_of(gpu, p) if isinstance(p, numbers) else constant_like(gpu, p) for p in parts
    ]


@rule(np.concatenate)
def concatenate(arrays: Any, /, axis: Any = 0, out: Any = None, **options: Any) -> Any:
    parts, data, axes = _together(arrays)
    if axis is None:
        return wrap(
            np.concatenate([merge_visible(part, axes) for part in data], len(axes), **options), axes
        )
    if len({visible_ndim(part) for part in parts}) != 1 or visible_ndim(parts[0]) == 0:
        raise NoRule  # NumPy's own error, from the per-replica fallback
    place = shift_axis(axis, visible_ndim(parts[0]), len(axes))
    others = {part.shape[:place] + part.shape[place + 1 :] for part in data}
    if len(others) != 1:
        raise NoRule
    return wrap(np.concatenate(data, place, **options), axes)


@rule(np.stack)
def stack(arrays: Any, axis: int = 0, out: Any = None, **options: Any) -> Any:
    parts, data, axes = _together(arrays)
    if len({visible_shape(part) for part in parts}) != 1:
        raise NoRule
    place = shift_axis(axis, visible_ndim(parts[0]) + 1, len(axes))
    return wrap(np.stack(data, place, **options), axes)


def _columns(value: Any) -> Any:
    return np.transpose(np.atleast_2d(value)) if visible_ndim(value) < 2 else value


def _beside(parts: Sequence[Any]) -> int:
    return 0 if visible_ndim(parts[0]) == 1 else 1


def joined(raised: Callable[[Any], Any], axis: Callable[[Sequence[Any]], int]) -> Rule:
    """The rule of a function that concatenates arrays after giving each the dimensions it needs."""

    def batched(tup: Any, **options: Any) -> Any:
        parts = [raised(part) for part in _in_one_memory(tup)]
        return concatenate(parts, axis(parts), **options)

    return batched


rule(np.vstack)(joined(np.atleast_2d, lambda parts: 0))
rule(np.hstack)(joined(np.atleast_1d, _beside))
rule(np.dstack)(joined(np.atleast_3d, lambda parts: 2))
rule(np.column_stack)(joined(_columns, lambda parts: 1))


@rule(np.append)
def append(arr: Any, values: Any, axis: Any = None) -> Any:
    arr, values = _in_one_memory([arr, values])
    if axis is None:
        arr, values, axis = np.ravel(arr), np.ravel(values), 0
    return concatenate([arr, values], axis)


def _depth(arrays: Any) -> int:
    """How deep np.block's lists nest; they must nest alike."""
    if not isinstance(arrays, list):
        return 0
    depths = {_depth(part) for part in arrays}
    if len(depths) != 1:
        raise NoRule
    return 1 + depths.pop()


def _leaves(arrays: Any) -> list[Any]:
    return (
        [leaf for part in arrays for leaf in _leaves(part)]
        if isinstance(arrays, list)
        else [arrays]
    )


@rule(np.block)
def block(arrays: Any) -> Any:
    leaves, depth = _leaves(arrays), _depth(arrays)
    if any(isinstance(leaf, tuple) for leaf in leaves):
        raise NoRule
    ndim = max(depth, *map(visible_ndim, leaves))

    def assemble(node: Any, level: int) -> Any:
        if level == depth:
            return np.reshape(node, (1,) * (ndim - visible_ndim(node)) + visible_shape(node))
        return concatenate([assemble(part, level + 1) for part in node], level - depth)

    return assemble(arrays, 0)


def cut(function: Callable[..., Any], axis: Callable[[int], int], needs: int = 0) -> Rule:
    """The rule of a function that cuts an array into a list; `axis` by default comes from its
    ndim."""

    def batched(ary: Any, indices_or_sections: Any, *given: Any, **named: Any) -> Any:
        data, axes = unpack_array(ary)
        ndim = visible_ndim(ary)
        if ndim < max(needs, 1):
            raise NoRule
        place = shift_axis(
            plain(next(iter([*given, *named.values()]), axis(ndim))), ndim, len(axes)
        )
        return [wrap(part, axes) for part in function(data, plain(indices_or_sections), place)]

    return batched


rule(np.split)(cut(np.split, lambda ndim: 0))
rule(np.array_split)(cut(np.array_split, lambda ndim: 0))
rule(np.hsplit)(cut(np.split, lambda ndim: min(ndim - 1, 1)))
rule(np.vsplit)(cut(np.split, lambda ndim: 0, needs=2))
rule(np.dsplit)(cut(np.split, lambda ndim: 2, needs=3))


def unstack(x: Any, /, *, axis: int = 0) -> Any:
    data, axes = unpack_array(x)
    if visible_ndim(x) == 0:
        raise NoRule
    moved = np.moveaxis(data, shift_axis(axis, visible_ndim(x), len(axes)), 0)
    parts = moved if moved.ndim > len(axes) + 1 else moved.copy()  # scalars share no memory
    return tuple(wrap(part, axes) for part in parts)


if hasattr(np, "unstack"):  # NumPy 2.1
    rule(np.unstack)(unstack)


@rule(np.insert)
def insert(arr: Any, obj: Any, values: Any, axis: Any = None) -> Any:
    """np.insert lines values up with the first axes, so here the mapped ones go last meanwhile."""
    axes = common_axes([arr, values])
    data, mapped = lead_full(arr, axes), len(axes)
    if axis is None:
        data, axis = merge_visible(data, axes), 0
    ndim = data.ndim - mapped
    if ndim == 0 or visible_ndim(values) > ndim:
        raise NoRule
    place = normalize_axis_index(axis, ndim)
    front, back = range(mapped), range(-mapped, 0)
    added = lead(values, axes, ndim)
    result = np.insert(
        np.moveaxis(data, front, back), plain(obj), np.moveaxis(added, front, back), place
    )
    return wrap(np.ascontiguousarray(np.moveaxis(result, back, front)), axes)
