"""Functions of torch that PopTorch does not have, or not with all arguments: models for IPUs get
the errors that they got there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..poptorch_core import compiler_error

__all__ = ["refuse_unsupported"]

Given = dict[str, Any]
Rule = Callable[[Given], str | None]


def refuse_unsupported(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a call of a function of torch that a compiler for IPUs refuses.

    Raises:
        Error: with PopTorch's message.

    Example:
        >>> x = torch.zeros(3, 2)
        >>> refuse_unsupported(torch.linalg.matrix_norm, (x,), {})
        >>> refuse_unsupported(torch.linalg.matrix_norm, (x, "nuc"), {})
        Traceback (most recent call last):
        ...
        gpusim.poptorch.poptorch_core.Error: 'poptorch_cpp_error': Matrix nuclear norm is not \
supported.
    """
    if function not in RULES:
        return
    names, rule = RULES[function]
    given = dict(zip(names or _names(function), args, strict=False)) | kwargs
    message = rule(given)
    if message is not None:
        raise compiler_error(message)


@cache
def _names(function: Any) -> tuple[str, ...]:
    """Of the arguments of a function that is written in Python."""
    return tuple(inspect.signature(function).parameters)


def _where(name: str, refused: Callable[[Any], bool], message: str) -> Rule:
    """Refuses values of one argument."""
    return lambda given: message if refused(given.get(name)) else None


def _any_of(*rules: Rule) -> Rule:
    def rule(given: Given) -> str | None:
        found = (each(given) for each in rules)
        return next((message for message in found if message is not None), None)

    return rule


def _is_given(value: Any) -> bool:
    return value is not None


def _weighted(operator: str) -> Rule:
    message = f'Parameter "weight" is unsupported for aten::{operator}'
    return _where("weight", _is_given, message)


def _recurrent(messages: dict[str, str]) -> Rule:
    refused: dict[str, Callable[[Any], bool]] = {
        "has_biases": lambda has: not has,
        "num_layers": lambda layers: layers != 1,
        "dropout": bool,
        "bidirectional": bool,
    }
    rule = _any_of(*(_where(name, refused[name], text) for name, text in messages.items()))
    # Packed sequences come with other arguments in these places.
    return lambda given: rule(given) if type(given["num_layers"]) is int else None


NUCLEAR = "Matrix nuclear norm is not supported."


def _matrix_norm(given: Given) -> str | None:
    order, dim, x = given.get("ord"), given.get("dim"), given["A"]
    of_matrix = len(dim) == 2 if isinstance(dim, (tuple, list)) else dim is None and x.dim() == 2
    if order == "nuc":
        return NUCLEAR
    return "Matrix 2-norm is not supported." if of_matrix and order in (2, -2) else None


def _norm(given: Given) -> str | None:
    return NUCLEAR if given.get("p") == "nuc" else None  # p=2 is a norm of vectors here


def _steps(given: Given) -> str | None:
    index = given["index"] if isinstance(given["index"], tuple) else (given["index"],)
    if any(isinstance(each, slice) and each.step not in (None, 1) for each in index):
        return "In-place modification of slices with step size other than 1 is not supported."
    return None


def _upsampled(given: Given) -> str | None:
    if given.get("align_corners"):
        return "Only support align_corners=False."
    if given.get("mode") in ("linear", "bicubic", "trilinear"):
        return f"Unsupported upsample mode {given['mode']}: currently only 'nearest' is supported"
    return None


def _embedding(operator: str) -> Rule:
    message = f"Unsupported aten::{operator} operation"
    return _any_of(_where("scale_grad_by_freq", bool, message), _where("sparse", bool, message))


RECURRENT = (
    *("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional"),
    "batch_first",
)

GRU = {
    "num_layers": "Only GRU with 1 layer supported",
    "dropout": "GRU only supports dropout = 0.0",
    "bidirectional": "bidirectional GRU not supported",
}
LSTM = {
    "has_biases": "LSTM without biases not supported",
    "num_layers": "Only LSTM with 1 layer supported",
    "dropout": "LSTM only supports dropout = 0.0",
    "bidirectional": "bidirectional LSTM not supported",
}
RNN = {
    "has_biases": "RNN without biases is not supported",
    "num_layers": "Only RNN with 1 layer is supported",
    "dropout": "RNN only supports dropout = 0.0",
    "bidirectional": "Bidirectional RNN is not supported",
}

RULES: dict[Any, tuple[tuple[str, ...], Rule]] = {
    functional.cross_entropy: ((), _weighted("cross_entropy_loss")),
    functional.nll_loss: ((), _weighted("nll_loss_nd")),
    functional.ctc_loss: (
        (),
        _where(
            "reduction",
            lambda how: how == "none",
            'CTCLoss with reduction="none" is currently not supported',
        ),
    ),
    functional.embedding: ((), _embedding("embedding")),
    functional.embedding_bag: (
        (),
        _any_of(
            _embedding("embedding_bag"),
            _where(
                "padding_idx",
                _is_given,
                "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported.",
            ),
        ),
    ),
    functional.interpolate: ((), _upsampled),
    functional.one_hot: (
        ("tensor", "num_classes"),
        _where(
            "num_classes",
            lambda classes: classes in (None, -1),
            "OneHot num classes must be specified and must be constant.",
        ),
    ),
    torch.gru: (RECURRENT, _recurrent(GRU)),
    torch.lstm: (RECURRENT, _recurrent(LSTM)),
    torch.rnn_tanh: (RECURRENT, _recurrent(RNN)),
    torch.rnn_relu: (RECURRENT, _recurrent(RNN)),
    torch.linalg.norm: (("A", "ord", "dim"), _matrix_norm),
    torch.linalg.matrix_norm: (("A", "ord", "dim"), _matrix_norm),
    torch.norm: ((), _norm),
    Tensor.norm: (("input", "p", "dim"), _norm),
    Tensor.__setitem__: (("self", "index", "value"), _steps),
}
"""The names of a function's arguments, unless Python knows them, and what is refused of them."""
