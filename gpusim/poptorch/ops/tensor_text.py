"""Tensors as text, with the settings that ipu_print_tensor has."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["FLOAT_FORMATS", "Settings", "text"]

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


@dataclass(frozen=True)
class Settings:
    """How a tensor is written.

    Attributes:
        summarise_threshold: with more elements than this, only those at the edges; 0: always all.
        edge_items: how many are at an edge.
        max_line_width: longer lines are split; 0: none is.
        digits: of each number, before and after the point; 0: each number is as long as it is.
        float_format: one of FLOAT_FORMATS.
        separator, open_bracket, close_bracket: between and around elements.
    """

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"


def text(tensor: Tensor, settings: Settings) -> str:
    """The tensor, written.

    >>> import torch
    >>> print(text(torch.tensor([[1.0, -2.5], [10.0, 0.25]]), Settings()))
    (( 1.00, -2.50),
     (10.00,  0.25))
    >>> text(torch.tensor([1e-9, 1.0]), Settings(digits=3))
    '(1.00e-09, 1.00e+00)'
    """
    values = tensor.detach().cpu()
    array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    number = _formatter(array, settings)
    written: str = np.array2string(
        array,
        max_line_width=settings.max_line_width or sys.maxsize,
        threshold=settings.summarise_threshold or sys.maxsize,
        edgeitems=settings.edge_items,
        separator=settings.separator,
        formatter={"all": number},
    )
    brackets = {"[": settings.open_bracket, "]": settings.close_bracket}
    return "".join(brackets.get(character, character) for character in written)


Number = Callable[[Any], str]


def _formatter(array: np.ndarray[Any, Any], settings: Settings) -> Number:
    """What writes a number, in as many characters as all others of the tensor have."""
    if array.dtype.kind == "c":
        return str
    write = _floats(array, settings) if array.dtype.kind == "f" else _integer
    if settings.digits == 0 or (array.dtype.kind == "f" and settings.float_format == "none"):
        return write
    width = max((len(write(value)) for value in array.flat), default=0)
    return lambda value: write(value).rjust(width)


def _integer(value: Any) -> str:
    return str(int(value))


def _floats(array: np.ndarray[Any, Any], settings: Settings) -> Number:
    digits = settings.digits
    if digits == 0:
        return str
    if settings.float_format == "none":
        return lambda value: f"{value:.{digits}g}"

    def scientific(value: Any) -> str:
        return f"{value:.{digits - 1}e}"

    if settings.float_format == "scientific":
        return scientific
    magnitudes = np.abs(array[np.isfinite(array) & (array != 0)]).astype(np.float64)
    largest = float(magnitudes.max(initial=0.0))
    whole = max(math.floor(math.log10(largest)) + 1, 1) if largest else 1
    decimals = max(digits - whole, 0)
    visible = largest < 10.0**digits and float(magnitudes.min(initial=1.0)) >= 10.0**-decimals
    if settings.float_format == "auto" and not visible:
        return scientific
    return lambda value: f"{value:.{decimals}f}"
