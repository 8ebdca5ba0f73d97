"""The op that shows a tensor's values: to standard error, once for each replica.
What it makes is its input, and its gradient is the output's, which it can show as well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ...libraries import to_host
from ..tensor import TensorSpec
from .definition import Definition, GradientSite, add_op
from .stacked import Array

Attributes = Mapping[str, Any]
Specs = list[TensorSpec]

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


def _spec(inputs: Specs, attributes: Attributes) -> Specs:
    return [TensorSpec(inputs[0].shape, inputs[0].dtype, inputs[0].meta_shape)]


def text_of(value: np.ndarray[Any, Any], attributes: Attributes) -> str:
    """An array as text.

    >>> attributes = dict.fromkeys(("threshold", "width", "digits"), 8) | {
    ...     "edge_items": 1, "float_format": "auto", "separator": ",", "open_bracket": "(",
    ...     "close_bracket": ")"}
    >>> text_of(np.arange(3), attributes)
    '(0,1,2)'
    """
    digits = attributes["digits"]
    formats = {
        "fixed": lambda x: f"{x:.{digits}f}",
        "scientific": lambda x: f"{x:.{digits}e}",
    }
    chosen = formats.get(attributes["float_format"])
    text = np.array2string(
        value.astype(np.float32) if value.dtype.kind == "V" else value,
        max_line_width=attributes["width"],
        precision=digits,
        separator=attributes["separator"],
        threshold=attributes["threshold"],
        edgeitems=attributes["edge_items"],
        formatter=None if chosen is None else {"float_kind": chosen},
    )
    brackets = str.maketrans("[]", attributes["open_bracket"] + attributes["close_bracket"])
    return text.translate(brackets)


def _print(xp: ModuleType, inputs: list[Array], attributes: Attributes) -> list[Array]:
    (t,) = inputs
    if attributes["print_self"]:
        for value in to_host(t):
            print(f"{attributes['title']}: {text_of(value, attributes)}", file=sys.stderr)
    return [t]


def _build_gradient(site: GradientSite) -> list[Any]:
    shown = site.attributes["print_gradient"]
    title = f"{site.attributes['title']}_gradient"
    attributes = {**site.attributes, "print_self": shown, "title": title}
    return [add_op(PRINT_TENSOR, [site.gradient(0)], attributes)[0]]


PRINT_TENSOR = Definition(
    "PrintTensor", infer=_spec, run=_print, gradient=_build_gradient, effect=True, names=("t",)
)
