"""Types for PopXL's annotations, and annotations that mean more than a type."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Union

import numpy as np

if TYPE_CHECKING:
    from .tensor import Tensor

__all__ = ["HostScalarTensor", "HostTensor", "NewAliasAnnotation", "ScalarType", "TensorLike"]

T = TypeVar("T")

ScalarType: TypeAlias = bool | int | float
HostTensor: TypeAlias = Any  # an array, a torch tensor, or nested lists of numbers
host_tensor_types = (np.ndarray, Iterable)  # for isinstance; torch's tensors are iterable
HostScalarTensor: TypeAlias = Any  # one of those, or a number
TensorLike: TypeAlias = "Tensor | HostScalarTensor"


class _Alias:
    """An annotation that stands for a type and means something more."""

    def __init__(self, name: str, tp: Any) -> None:
        self.__name__ = name
        self.tp = tp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__} should only be used as an annotation. Try using the associated type "
            f"alias instead: {self.tp}"
        )

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 no class, so it has no | of its own

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"popxl.{self.__name__}"


def NewAliasAnnotation(name: str, tp: T) -> Any:
    """An annotation for the type `tp` that differs from it; calling it is an error."""
    return _Alias(name, tp)


def is_numbers(value: Any) -> bool:
    """Whether constants and variables can be made of a value."""
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return True
    if type(value).__module__.partition(".")[0] in ("torch", "cupy"):
        return True
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))
