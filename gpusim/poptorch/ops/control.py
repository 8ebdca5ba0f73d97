"""Loops and branches that run on the device: for_loop and cond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch.axes import is_traced
from ..axis import AXIS
from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import forward_mode, model_context
from .inside import Inside
from .kinds import kind
from .place import only_where

__all__ = ["cond", "for_loop"]

Body = Callable[..., Any]

NO_LIST = (
    "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object is not list)"
)
NO_TENSOR = (
    "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object contained "
    "in list at index %d is not torch.tensor)"
)
NO_LISTS = (
    "poptorch.cond expects then_inps and else_inps tensors to be a list of tensors. (Object is not "
    "list)"
)
TRAINED = "poptorch.{}() is only supported in inference."
NO_SHAPE = (
    "`else` branch output has an empty shape, so adding a reshape op to the `then` branch to "
    "achieve shapes identity is not possible!"
)


def for_loop(count: int, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    """What `count` calls of a function make of tensors, each of what the one before has returned.

    In a model it is for inference only. Its graph has the operations of all calls, one after the
    other.

    **Arguments**

    - `count`: how often the body is called, 0 or more.
    - `body`: takes and returns as many tensors, of the same shapes and dtypes. They are passed by
      value: what it does to them in place is not done to those outside.
    - `inputs`: a list of the first ones; ValueError for anything else.

    poptorch.Error in a training model, and for a body that returns others than it takes.

    **Returns**

    A list of the last ones.

    >>> import torch
    >>> for_loop(10, lambda x: 2 * x, [torch.ones(2)])
    [tensor([1024., 1024.])]
    """
    if not isinstance(inputs, list):
        raise ValueError(NO_LIST)
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise ValueError(NO_TENSOR % number)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"poptorch.for_loop: count must be an integer from 0, got {count!r}")
    _refuse_training("for_loop")
    carried = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        with Inside() as inside:
            results = _as_list(body(*carried))
        _check_carried(carried, results)
        carried = [
            (after if after is before or inside.has_made(after) else after.clone()).to(before.dtype)
            for before, after in zip(carried, results, strict=True)
        ]
    return carried


def cond(
    condition: Tensor,
    then_body: Body,
    then_inps: list[Tensor],
    else_body: Body,
    else_inps: list[Tensor],
) -> list[Tensor]:
    """What one of two functions returns, as a tensor says.

    In a model it is for inference only. Replicas in lockstep run both functions, and each takes the
    results of its own; prints and CPU operations are those of its own alone.

    **Arguments**

    - `condition`: a boolean tensor of one element.
    - `then_body`, `else_body`: take the tensors of `then_inps` and `else_inps`, and return as many
      tensors, of the same dtypes and shapes. (Where the shapes differ, the first ones' results are
      reshaped.) They may use tensors from outside, and have copies of all: what they do in place
      is not done to those outside.
    - `then_inps`, `else_inps`: lists, or ValueError.

    poptorch.Error in a training model, and for results that do not fit.

    **Returns**

    A list of what was returned.

    >>> import torch
    >>> x = torch.tensor([2.0])
    >>> cond(x.sum() > 0, lambda x: x.sqrt(), [x], lambda: -x, [])
    [tensor([1.4142])]
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError(NO_LISTS)
    now = forward_mode()
    if now is None:
        return _as_list(then_body(*then_inps) if condition else else_body(*else_inps))
    _refuse_training("cond")
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        given = tuple(condition.shape) if isinstance(condition, Tensor) else repr(condition)
        raise createPoptorchError(
            f"poptorch.cond: condition must be a tensor of one element, got {given}"
        )
    number = now.draws.next_number()
    is_true = condition.reshape(()).bool()

    def branch(which: bool) -> list[Tensor]:
        body, inputs = (then_body, then_inps) if which else (else_body, else_inps)
        counts = is_true if which else ~is_true
        with (
            now.draws.separate(number, int(which)),
            only_where(counts),
            Inside(copying=True) as inside,
        ):
            results = _as_list(body(*(tensor.clone() for tensor in inputs)))
        return [x if inside.has_made(x) else x.clone() for x in inside.checked(results)]

    if not is_traced(AXIS):
        return branch(bool(is_true))
    return _selected(is_true, branch(True), branch(False))


def _refuse_training(name: str) -> None:
    now = model_context()
    if now is not None and now.training:
        raise compiler_error(TRAINED.format(name))


def _as_list(results: Any) -> list[Tensor]:
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    for result in found:
        if not isinstance(result, Tensor):
            raise createPoptorchError(
                f"The body of a loop or branch must return tensors, got {type(result)}"
            )
    return found


def _check_carried(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    if len(before) != len(after):
        raise createPoptorchError(
            f"poptorch.for_loop: body takes {len(before)} tensors and returns {len(after)}"
        )
    for number, (x, y) in enumerate(zip(before, after, strict=True)):
        if kind(x) != kind(y):
            raise createPoptorchError(
                f"poptorch.for_loop: body takes {x.dtype} of shape {tuple(x.shape)} as tensor "
                f"{number}, and returns {y.dtype} of shape {tuple(y.shape)}"
            )


def _selected(is_true: Tensor, then: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    if len(then) != len(other):
        raise createPoptorchError(
            f"poptorch.cond: then_body returns {len(then)} tensors and else_body {len(other)}"
        )
    return [_either(is_true, *each) for each in zip(then, other, strict=True)]


def _either(is_true: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if kind(x)[0] != kind(y)[0] or (x.shape != y.shape and x.numel() != y.numel()):
        raise createPoptorchError(
            f"poptorch.cond: then_body returns {x.dtype} of shape {tuple(x.shape)} where else_body "
            f"returns {y.dtype} of shape {tuple(y.shape)}"
        )
    if x.shape != y.shape and not y.dim():
        raise compiler_error(NO_SHAPE)
    return torch.where(is_true, x.reshape(y.shape).to(y.dtype), y)
