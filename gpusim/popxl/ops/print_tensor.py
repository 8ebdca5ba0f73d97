"""`print_tensor`: shows a tensor whenever the program comes by."""

from __future__ import annotations

from typing import Literal

from .._ops import printing
from .._ops.definition import add_op
from ..tensor import Tensor

__all__ = ["print_tensor"]

FloatFormat = Literal["auto", "fixed", "scientific", "none"]


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
    """Prints a tensor to standard error, once for each replica; the result is the same tensor.

    **Arguments**

    - `title`: what is printed before it, by default "print_" and its name; before its gradient,
      "_gradient" is added.
    - `print_self`, `print_gradient`: whether the tensor and its gradient are printed.
    - `summarise_threshold`: from how many elements on only `edge_items` of each end are shown.
    - `max_line_width`, `digits`: the length of lines, and decimals of numbers.
    - `float_format`: "fixed", "scientific", or what fits the numbers.
    - `separator`, `open_bracket`, `close_bracket`: one character each.

    ValueError for brackets or a separator of another length, or another format.

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
    if float_format not in printing.FLOAT_FORMATS:
        raise ValueError(
            f"float_format={float_format!r}: expected one of {', '.join(printing.FLOAT_FORMATS)}"
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
    return add_op(printing.PRINT_TENSOR, [t], attributes)[0]
