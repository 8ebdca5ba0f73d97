"""Conversions between data types; those of 8-bit floats multiply by a power of two on the way.
To a floating-point type each is one rounding; too large for an 8-bit float is NaN, as on an IPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...libraries import to_host, to_library_of
from ...rounding import round_to
from .. import dtypes
from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]

FLOAT8 = (dtypes.float8_143, dtypes.float8_152)


def _spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, attributes["dtype"])]


def _cast(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    return [inputs[0].astype(attributes["dtype"].as_numpy(), copy=False)]


def _build_gradient(site: GradientSite) -> list[Any]:
    given = site.op.inputs[0].dtype
    if not given.is_floating_point:
        return [None]
    return [add_op(CAST_GRAD, [site.gradient(0)], {"dtype": given})[0]]


CAST_GRAD = Definition("CastGrad", infer=_spec, run=_cast)
CAST = Definition("Cast", infer=_spec, run=_cast, gradient=_build_gradient, names=("t",))


# 8-bit floats


def _scale_of(scales: Array, rank: int) -> np.ndarray[Any, Any]:
    """2 ** log2_scale of each replica, in a form that broadcasts to its tensor."""
    return np.ldexp(np.float64(1), to_host(scales)).reshape(-1, *(1,) * rank)


def _scaled_cast(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    t, scales = inputs
    scaled = to_host(t).astype(np.float64) * _scale_of(scales, t.ndim - 1)  # exact
    return [to_library_of(t, round_to(scaled, attributes["dtype"].as_numpy()))]


POW2SCALE_THEN_CAST = Definition(
    "Pow2ScaleThenCast", infer=_spec, run=_scaled_cast, names=("t", "log2_scale")
)
CAST_THEN_POW2SCALE = Definition(
    "CastThenPow2Scale", infer=_spec, run=_scaled_cast, names=("t", "log2_scale")
)
