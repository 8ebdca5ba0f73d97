"""Operations that a model is seen to do as one, by the name that PopTorch has for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves

__all__ = ["operation"]

P = ParamSpec("P")
R = TypeVar("R")


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """The function as one of torch's own: what watches those sees it once, not what is inside.

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
