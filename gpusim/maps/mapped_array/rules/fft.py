"""Batched rules of numpy.fft: axes are counted in one replica's array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..align import visible_ndim
from ..array import unpack, wrap
from ..dispatch import NoRule, Rule, rule
from .arguments import plain


def _shifted(axis: Any, ndim: int, mapped: int) -> int:
    if not -ndim <= axis < ndim:
        raise NoRule
    return int(axis) % ndim + mapped


def along_an_axis(function: Callable[..., Any]) -> Rule:
    """The rule of a transform along one axis."""

    def batched(a: Any, n: Any = None, axis: Any = -1, norm: Any = None) -> Any:
        data, axes = unpack(a)
        place = _shifted(plain(axis), visible_ndim(a), len(axes))
        return wrap(function(data, plain(n), place, norm), axes)

    return batched


def along_axes(function: Callable[..., Any], default: tuple[int, ...] | None) -> Rule:
    """The rule of a transform along several axes, `default` if none are given: None is all axes."""

    def batched(a: Any, s: Any = None, axes: Any = default, norm: Any = None) -> Any:
        data, own = unpack(a)
        ndim, s, axes = visible_ndim(a), plain(s), plain(axes)
        if axes is None:
            axes = range(ndim) if s is None else range(-len(s), 0)
        places = tuple(_shifted(axis, ndim, len(own)) for axis in axes)
        if not places or (s is not None and None in s):
            raise NoRule
        return wrap(function(data, s, places, norm), own)

    return batched


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    rule(getattr(np.fft, _name))(along_an_axis(getattr(np.fft, _name)))
for _name in ("fft", "ifft", "rfft", "irfft"):
    rule(getattr(np.fft, _name + "2"))(along_axes(getattr(np.fft, _name + "2"), (-2, -1)))
    rule(getattr(np.fft, _name + "n"))(along_axes(getattr(np.fft, _name + "n"), None))


def shift(function: Callable[..., Any]) -> Rule:
    """The rule of fftshift and ifftshift."""

    def batched(x: Any, axes: Any = None) -> Any:
        data, own = unpack(x)
        ndim, axes = visible_ndim(x), plain(axes)
        if axes is None:
            axes = range(ndim)
        elif isinstance(axes, (int, np.integer)):
            axes = (axes,)
        return wrap(function(data, tuple(_shifted(axis, ndim, len(own)) for axis in axes)), own)

    return batched


for _function in (np.fft.fftshift, np.fft.ifftshift):
    rule(_function)(shift(_function))
