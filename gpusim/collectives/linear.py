"""Linear collectives: functions that carry their transpose as an attribute."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class LinearCollective(Generic[P, T]):
    """A collective that is linear in its values, called as the function that it wraps.

    ``transpose`` is its adjoint map on cotangents: for all x and y, the inner products (summed over
    replicas) <f(x), y> and <x, f.transpose(y)> are equal. It takes the cotangent of the result
    in the place of x, and otherwise the same arguments. A result that is stored once counts as
    R equal values, and so does a cotangent that is broadcast along the replicas.

    >>> import numpy as np
    >>> from gpusim.collectives import all_gather
    >>> all_gather(np.array([5, 6, 7])).value
    array([5, 6, 7])
    >>> cotangent = np.array([[1, 2, 3], [10, 20, 30], [100, 200, 300]])  # of each replica's result
    >>> all_gather.transpose(cotangent).value
    array([111, 222, 333])
    """

    transpose: Callable[..., Any]

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<linear collective {self._function.__qualname__}>"


def linear(function: Callable[P, T]) -> LinearCollective[P, T]:
    """Make a function a linear collective; its ``transpose`` is to be set beside it."""
    return LinearCollective(function)
