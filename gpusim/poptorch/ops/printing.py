"""ipu_print_tensor: each replica prints a tensor, and its gradient in the backward pass."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...torch.graph_operators import graph_operator
from ...torch.stacked import batched
from ..poptorch_core import createPoptorchError
from ..replicas.forward import model_context
from .host import replica_index
from .operation import operation

__all__ = ["TextSettings", "ipu_print_tensor", "text"]


@operation
def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Return the tensor, and print it to sys.stderr on each replica whenever it is computed.

    The output is the title, ": " and the elements. Replicas print in order. Use the result: in
    lockstep nothing is printed if nothing depends on it.

    **Arguments**

    - `tensor`: of any shape and dtype.
    - `title`: printed before the elements.
    - `print_gradient`: whether the backward pass prints the gradient, with "_gradient" after the
      title.
    - `summarise_threshold`: with more elements than this, only `edge_items` at either end of each
      dimension are printed. 0 prints all.
    - `max_line_width`: longer rows are broken after a separator. 0 breaks none.
    - `digits`: the number of digits, before and after the point. All numbers have the width of the
      widest one. 0 prints each number in full.
    - `float_format`: "fixed", "scientific", "auto" (fixed if that shows all numbers), or "none":
      each number by itself.
    - `separator`, `open_bracket`, `close_bracket`: between and around the elements.

    **Raises**: poptorch.Error if it is not a tensor; ValueError for another format or negative
    numbers.

    >>> import torch
    >>> from contextlib import redirect_stderr
    >>> import sys
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> with redirect_stderr(sys.stdout):
    ...     y = ipu_print_tensor(x, "x") ** 2
    ...     y.sum().backward()
    x: (1.000, 2.000)
    x_gradient: (2.000, 4.000)
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            f"ipu print tensor must take a torch.tensor argument. {type(tensor)} is not supported."
        )
    if float_format not in FLOAT_FORMATS:
        raise ValueError(
            f"ipu_print_tensor: float_format must be one of {', '.join(FLOAT_FORMATS)}, got "
            f"{float_format!r}"
        )
    for name, value in (
        ("summarise_threshold", summarise_threshold),
        ("edge_items", edge_items),
        ("max_line_width", max_line_width),
        ("digits", digits),
    ):
        if value < 0:
            raise ValueError(f"ipu_print_tensor: {name} must not be negative, got {value}")
    settings = TextSettings(
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )
    how = json.dumps([title, bool(print_gradient), asdict(settings)])
    found: Tensor = _print_tensor(tensor, replica_index(), how)
    return found


class Printed(torch.autograd.Function):
    """The derivative and the batching rule of the operator below."""

    @staticmethod
    def forward(x: Tensor, place: Tensor, how: str) -> Any:
        return _printed(x, place, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, place, ctx.how = inputs
        ctx.save_for_backward(place)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        title, print_gradient, settings = json.loads(ctx.how)
        if not print_gradient:
            return cotangent, None, None
        how = json.dumps([f"{title}_gradient" if title else "gradient", False, settings])
        return _print_tensor(cotangent, *ctx.saved_tensors, how), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, place: Tensor, how: str) -> Any:
        operands = zip((x, place), in_dims[:2], strict=True)
        whole = [batched(operand, dim, info.batch_size) for operand, dim in operands]
        return Printed.apply(*whole, how), 0


@torch.library.custom_op(
    "gpusim::printed", mutates_args=(), schema="(Tensor x, Tensor place, str how) -> Tensor"
)
def _printed(x: Tensor, place: Tensor, how: str) -> Tensor:
    """A copy; `place` has the dimensions by which the replicas' tensors are stacked."""
    now = model_context()
    if now is None or not now.compiling:
        title, _, settings = json.loads(how)
        own_values = x.flatten(0, place.dim() - 1) if place.dim() else [x]
        for index, own in zip(place.flatten().tolist(), own_values, strict=True):
            if index >= 0:
                written = text(own, TextSettings(**settings))
                print(f"{title}: {written}" if title else written, file=sys.stderr)
    return x.clone()


@_printed.register_fake
def _fake(x: Tensor, place: Tensor, how: str) -> Tensor:
    return x.clone()


_printed.register_autograd(Printed.backward, setup_context=Printed.setup_context)
_printed.register_vmap(Printed.vmap)
_print_tensor = graph_operator(
    "print_tensor(Tensor x, Tensor place, str how) -> Tensor", _printed, transformed=Printed.apply
)


# ---------------------------------------------------------------- tensors as text

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


@dataclass(frozen=True)
class TextSettings:
    """The format of a tensor.

    **Attributes**:

    - `summarise_threshold`: with more elements than this, only those at the edges; 0: all.
    - `edge_items`: the number of elements at an edge.
    - `max_line_width`: longer lines are split; 0: none.
    - `digits`: of each number, before and after the point; 0: each number in full.
    - `float_format`: one of FLOAT_FORMATS.
    - `separator`, `open_bracket`, `close_bracket`: between and around elements.
    """

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 80
    digits: int = 4
    float_format: str = "auto"
    separator: str = ", "
    open_bracket: str = "("
    close_bracket: str = ")"


def text(tensor: Tensor, settings: TextSettings) -> str:
    """A tensor as text, in Poplar's layout: each row is on a line, one space further in.

    >>> import torch
    >>> print(text(torch.tensor([[1.0, -2.5], [10.0, 0.25]]), TextSettings()))
    (
     ( 1.00, -2.50)
     (10.00,  0.25)
    )
    >>> text(torch.tensor([1e-9, 1.0]), TextSettings(digits=3))
    '(1.00e-09, 1.00e+00)'
    """
    values = tensor.detach().cpu()
    array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    summarised = 0 < settings.summarise_threshold < array.size
    edge = settings.edge_items if summarised else max(array.shape, default=0)
    return "\n".join(_lines(array, _formatter(array, settings), edge, settings, 0))


Number = Callable[[Any], str]


def _lines(
    array: np.ndarray[Any, Any], write: Number, edge: int, settings: TextSettings, depth: int
) -> list[str]:
    """The lines of a part of a tensor that lies in `depth` pairs of brackets.

    `edge` elements are written at either end of each dimension.
    """
    indent, opening, closing = " " * depth, settings.open_bracket, settings.close_bracket
    if array.ndim == 0:
        return [indent + write(array[()])]
    cut = len(array) > 2 * edge
    parts = [*array[:edge], *array[len(array) - edge :]] if cut else [*array]
    if array.ndim == 1:
        words = [write(value) for value in parts]
        words[edge:edge] = ["..."] * cut
        return _row(words, indent, settings)
    rows = [_lines(part, write, edge, settings, depth + 1) for part in parts]
    rows[edge:edge] = [[f"{indent} ..."]] * cut
    return [indent + opening, *(line for row in rows for line in row), indent + closing]


def _row(words: list[str], indent: str, settings: TextSettings) -> list[str]:
    """The lines of a row, broken after separators. Later lines are three spaces in for a matrix."""
    width, separator = settings.max_line_width or sys.maxsize, settings.separator
    ends = [*([separator] * (len(words) - 1)), settings.close_bracket]
    start = indent + settings.open_bracket
    lines, following = [start], f"{indent or ' '}  "
    for word, end in zip(words, ends if words else [], strict=True):
        if len(lines[-1] + (word + end).rstrip()) > width and lines[-1] not in (start, following):
            lines.append(following)
        lines[-1] += word + end
    if not words:
        lines[-1] += settings.close_bracket
    return lines


def _formatter(array: np.ndarray[Any, Any], settings: TextSettings) -> Number:
    """A function that formats a number, with the same width for all elements of the tensor."""
    if array.dtype.kind == "c":
        return str
    write = _floats(array, settings) if array.dtype.kind == "f" else _integer
    if settings.digits == 0 or (array.dtype.kind == "f" and settings.float_format == "none"):
        return write
    width = max((len(write(value)) for value in array.flat), default=0)
    return lambda value: write(value).rjust(width)


def _integer(value: Any) -> str:
    return str(int(value))


def _floats(array: np.ndarray[Any, Any], settings: TextSettings) -> Number:
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
