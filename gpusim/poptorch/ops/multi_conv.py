"""Convolutions that PopTorch makes one operation of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..enums import MultiConvPlanType
from ..poptorch_core import compiler_error
from ..replicas.forward import model_context

__all__ = ["MultiConv"]

CONVOLUTIONS = frozenset(
    {
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(functional.conv1d, functional.conv2d, functional.conv3d),
    }
)
NESTED = "Nested poptorch.MultiConv is not supported."
EMPTY = "Unexpected end_multi_conv, is the IR malformed?"
PARTIALS = "Invalid partials types. Expecting torch.float or torch.half"
DITHERING = "value must be bool or list of bools"


class Counting(TorchFunctionMode):
    """How many convolutions there are inside.

    Attributes:
        found: how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.found += func in CONVOLUTIONS
        return func(*args, **(kwargs or {}))


class MultiConv:
    """A context manager, in which a model's convolutions are one operation.

    Results do not depend on it, nor on what its methods say; they return it, and take one value for
    all convolutions or a list or tuple with one for each. In a model there has to be a convolution
    inside, and no other MultiConv; poptorch.Error otherwise. Outside of models nothing is checked.

    >>> import torch
    >>> with MultiConv().availableMemoryProportions(0.3).cycleBackOff(0.1):
    ...     y = torch.nn.functional.conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 2))
    >>> y
    tensor([[[2., 2., 2.]]])
    """

    def __init__(self) -> None:
        self._per_conv: dict[str, Sequence[Any]] = {}
        self._plan_type: MultiConvPlanType | None = None
        self._per_conv_reserved_tiles: int | None = None
        self._cycle_back_off: float | None = None

    def availableMemoryProportions(self, value: float | Sequence[float] | None) -> Self:
        """How much memory each may take; AssertionError for what are no floats."""
        if value is not None:
            values = _several(value)
            assert values and all(isinstance(each, float) for each in values), (
                "Invalid available memory proportion!"
            )
            self._per_conv["availableMemoryProportions"] = values
        else:
            self._per_conv.pop("availableMemoryProportions", None)
        return self

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> Self:
        """In what they add up: torch.float or torch.half, else a ValueError."""
        values = _several(value)
        if any(each not in (torch.float32, torch.float16) for each in values):
            raise ValueError(PARTIALS)
        self._per_conv["partialsTypes"] = values
        return self

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> Self:
        """Whether they begin on different tiles; ValueError for what are no bools."""
        if value is not None:
            values = _several(value)
            if any(not isinstance(each, bool) for each in values):
                raise ValueError(DITHERING)
            self._per_conv["enableConvDithering"] = values
        else:
            self._per_conv.pop("enableConvDithering", None)
        return self

    def planType(self, value: MultiConvPlanType | None) -> Self:
        """Whether they run at once; AssertionError for what is no MultiConvPlanType."""
        assert value is None or isinstance(value, MultiConvPlanType), "Invalid plan type!"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> Self:
        """How many tiles each has; AssertionError for what is no integer."""
        assert isinstance(value, int), f"perConvReservedTiles({value!r}) is no integer"
        self._per_conv_reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> Self:
        """By how much they may take longer; AssertionError for what is no float."""
        assert isinstance(value, float), f"cycleBackOff({value!r}) is no float"
        self._cycle_back_off = value
        return self

    def __enter__(self) -> None:
        if model_context() is None:
            return
        if _counting() is not None:
            raise compiler_error(NESTED)
        Counting().__enter__()

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        counting = _counting()
        if counting is None:
            return
        counting.__exit__(kind, value, traceback)
        if kind is None:
            self._check(counting.found)

    def _check(self, convolutions: int) -> None:
        if not convolutions:
            raise compiler_error(EMPTY)
        for name, values in self._per_conv.items():
            if len(values) not in (1, convolutions):
                raise compiler_error(
                    f"poptorch.MultiConv().{name} has {len(values)} values for {convolutions} "
                    "convolutions"
                )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _counting() -> Counting | None:
    """What counts the convolutions of the block that this is in, if it is in one."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in modes if isinstance(mode, Counting)), None)
