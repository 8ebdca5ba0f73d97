"""Ops that return their input: copies, also on other IPUs and tiles, detached, printed tensors."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Literal

import numpy as np

from gpusim.libraries import to_host

from .._definition import (
    Arrays,
    Attributes,
    Definition,
    GradientSite,
    Specs,
    add_op,
    gradient_ops,
    no_gradient,
    same_spec,
)
from ..errors import UndefinedValue
from ..tensor import Tensor, TensorSpec

__all__ = ["identity", "detach", "detach_", "ipu_copy", "io_tile_copy", "print_tensor"]


def _pass(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    return [inputs[0]]


IDENTITY_GRAD = Definition("IdentityGrad", same_spec, _pass)
IDENTITY = Definition("Identity", same_spec, _pass, gradient_ops((IDENTITY_GRAD, "")))


def identity(t: Tensor, output_name: str | None = None) -> Tensor:
    """Copy `t`, and name the copy if `output_name` is given.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.identity(popxl.constant([1.0, 2.0]), "copied")
    Tensor[copied popxl.dtypes.float32 (2,)]
    """
    names = None if output_name is None else [output_name]
    return add_op(IDENTITY, [t], output_names=names)[0]


DETACH = Definition("Detach", same_spec, _pass, gradient=no_gradient)
DETACH_INPLACE = Definition("DetachInplace", same_spec, _pass, gradient=no_gradient, aliases={0: 0})


def detach(t: Tensor) -> Tensor:
    """Copy `t`. No gradient passes through the copy.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.detach(popxl.constant([1.0, 2.0]))
    Tensor[detach_out popxl.dtypes.float32 (2,)]
    """
    return add_op(DETACH, [t])[0]


def detach_(t: Tensor) -> Tensor:
    """A view of `t` through which no gradient passes.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.detach_(popxl.constant([1.0, 2.0]))
    Tensor[detachinplace_out popxl.dtypes.float32 (2,)]
    """
    return add_op(DETACH_INPLACE, [t])[0]


# Copies on other IPUs and tiles


def _ipu_copy_back(site: GradientSite) -> list[Any]:
    attributes = {
        "source": site.attributes["destination"],
        "destination": site.attributes["source"],
    }
    source = attributes["destination"]
    return [add_op(IPU_COPY, [site.gradient(0)], attributes, ipu=source)[0]]


IPU_COPY = Definition("IpuCopy", same_spec, _pass, gradient=_ipu_copy_back)


def ipu_copy(t: Tensor, destination: int, source: int | None = None) -> Tensor:
    """Copy `t` to the IPU `destination`.

    **Arguments**: `source`: the IPU of `t`, by default the IPU of the op that made it.

    **Raises**: ValueError: if the source is neither given nor known.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.ipu_copy(popxl.constant([1.0]), destination=1, source=0).ipu
    1
    """
    if source is None:
        try:
            source = t.ipu
        except UndefinedValue as error:
            raise ValueError(
                f'Could not infer the ipu for Tensor to be copied "{t}" . Please specify `source` '
                "when copying for this tensor."
            ) from error
    attributes = {"source": source, "destination": destination}
    return add_op(IPU_COPY, [t], attributes, ipu=destination)[0]


def _tile_copy_back(site: GradientSite) -> list[Any]:
    to = "io" if site.op.tile_set == "compute" else "compute"
    return [add_op(IO_TILE_COPY, [site.gradient(0)], tile_set=to)[0]]


IO_TILE_COPY = Definition("IoTileCopy", same_spec, _pass, gradient=_tile_copy_back)


def io_tile_copy(t: Tensor) -> Tensor:
    """Copy `t` to the other tile set: an IPU has compute tiles, and IO tiles for its transfers.

    If the tile set of `t` is not known, as for a constant, the context decides.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph, popxl.io_tiles():
    ...     popxl.ops.io_tile_copy(popxl.constant([1.0])).tile_set
    'io'
    """
    try:
        other = "io" if t.tile_set == "compute" else "compute"
    except UndefinedValue:
        other = None
    return add_op(IO_TILE_COPY, [t], tile_set=other)[0]


# Printing: to standard error, once for each replica; the gradient can be printed as well

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
FloatFormat = Literal["auto", "fixed", "scientific", "none"]


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
    formats = {"fixed": lambda x: f"{x:.{digits}f}", "scientific": lambda x: f"{x:.{digits}e}"}
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


def _print(xp: ModuleType, inputs: Arrays, attributes: Attributes) -> Arrays:
    (t,) = inputs
    if attributes["print_self"]:
        for value in to_host(t):
            print(f"{attributes['title']}: {text_of(value, attributes)}", file=sys.stderr)
    return [t]


def _build_gradient(site: GradientSite) -> list[Any]:
    print_self = site.attributes["print_gradient"]
    title = f"{site.attributes['title']}_gradient"
    attributes = {**site.attributes, "print_self": print_self, "title": title}
    return [add_op(PRINT_TENSOR, [site.gradient(0)], attributes)[0]]


PRINT_TENSOR = Definition("PrintTensor", _spec, _print, gradient=_build_gradient, effect=True)


def print_tensor(
    t: Tensor,
    title: str | None = None,
    print_self: bool = True,
    print_gradient: bool = False,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 75,
    digits: int = 8,
    float_format: FloatFormat = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> Tensor:
    """Print a tensor to standard error, once for each replica, and return it.

    **Arguments**

    - `title`: the text before the tensor, by default "print_" and its name. For its gradient
      "_gradient" is added.
    - `print_self`, `print_gradient`: whether to print the tensor and its gradient.
    - `summarise_threshold`: tensors of more elements are shown by `edge_items` of each end.
    - `max_line_width`, `digits`: the length of lines, and the decimals of numbers.
    - `float_format`: "fixed", "scientific", or by default the format that fits the numbers.
    - `separator`, `open_bracket`, `close_bracket`: one character each.

    **Raises**: ValueError: if brackets or separator have another length, or for another format.

    >>> import gpusim.popxl as popxl
    >>> with popxl.Ir().main_graph:
    ...     popxl.ops.print_tensor(popxl.constant([1.0, 2.0]), "numbers")
    Tensor[printtensor_out popxl.dtypes.float32 (2,)]
    """
    characters = {
        "separator": separator,
        "open_bracket": open_bracket,
        "close_bracket": close_bracket,
    }
    for name, char in characters.items():
        if len(char) != 1:
            raise ValueError(
                f"Parameter {name} must be 1 character exactly. Not length {len(char)} and value "
                f"{char}."
            )
    if float_format not in FLOAT_FORMATS:
        raise ValueError(
            f"float_format={float_format!r}: expected one of {', '.join(FLOAT_FORMATS)}"
        )
    attributes = {
        "title": f"print_{t.name}" if title is None else title,
        "print_self": bool(print_self),
        "print_gradient": bool(print_gradient),
        "threshold": summarise_threshold,
        "edge_items": edge_items,
        "width": max_line_width,
        "digits": digits,
        "float_format": float_format,
        **characters,
    }
    return add_op(PRINT_TENSOR, [t], attributes)[0]
