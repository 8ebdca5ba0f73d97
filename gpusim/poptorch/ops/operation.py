"""The parts that PopTorch's operations share: one function in a graph, and the dtypes of IPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ...torch.private import tree_leaves

__all__ = ["kind", "operation"]

P = ParamSpec("P")
R = TypeVar("R")


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: torch function modes see the function as one call, and not the calls inside.

    >>> import torch
    >>> from torch.overrides import TorchFunctionMode
    >>> @operation
    ... def double_twice(x):
    ...     return 2 * (2 * x)
    >>> class Listing(TorchFunctionMode):
    ...     def __torch_function__(self, function, types, args=(), kwargs=None):
    ...         print(function.__name__)
    ...         return function(*args, **(kwargs or {}))
    >>> x = torch.tensor(3)
    >>> with Listing():
    ...     result = double_twice(x)
    double_twice
    """

    @wraps(function)
    def seen(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if has_torch_function(tensors):
            found: Any = handle_torch_function(seen, tensors, *args, **kwargs)
            result: R = found
            return result
        return function(*args, **kwargs)

    return seen


OF_IPU = {torch.int64: torch.int32, torch.float64: torch.float32}
"""The dtypes of IPUs for dtypes that they do not have."""


def kind(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype of a tensor on an IPU, and its shape.

    >>> kind(torch.tensor([1, 2]))
    (torch.int32, (2,))
    """
    return OF_IPU.get(x.dtype, x.dtype), tuple(x.shape)
