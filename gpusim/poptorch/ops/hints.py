"""Operations that tell PopTorch's compiler how to compute: names, memory, convolutions, products.

Results do not depend on them; their arguments are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..enums import MatMulSerializationMode, MultiConvPlanType
from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import forward_mode, model_context
from .operation import operation

__all__ = [
    "MultiConv",
    "NameScope",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
]


@operation
def nop(tensor: Tensor) -> Tensor:
    """The tensor itself, by an operation that is never taken out of the graph.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error for what is none.

    >>> import torch
    >>> nop(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            f"nop must take a torch.tensor argument. {type(tensor)} is not supported."
        )
    return tensor.clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """The tensors themselves, marked to be kept for the backward pass and not computed again.

    Everything is kept here, so nothing changes.

    **Arguments**

    - `tensors`: one or more, or one list or tuple of them; ValueError for anything else.

    **Returns**

    A tensor for a tensor, a tuple for several, a list for a list.

    >>> import torch
    >>> recomputationCheckpoint(torch.ones(2))
    tensor([1., 1.])
    >>> recomputationCheckpoint(torch.ones(1), torch.zeros(1))
    (tensor([1.]), tensor([0.]))
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        return type(tensors[0])(_checkpoint(tensor) for tensor in tensors[0])
    found = tuple(_checkpoint(tensor) for tensor in tensors)
    return found[0] if len(found) == 1 else found


def _checkpoint(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError("All inputs must be tensors")
    return recomputation_checkpoint(tensor)


@operation
def recomputation_checkpoint(tensor: Tensor) -> Tensor:
    return tensor.clone()


@operation
def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """The tensor itself: how much memory the operation that made it may take has no effect here.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error for what is none.
    - `available_memory_proportion`: from 0 to 1, else a ValueError.

    >>> import torch
    >>> set_available_memory(torch.eye(2) @ torch.ones(2), 0.2)
    tensor([1., 1.])
    """
    if not isinstance(tensor, Tensor):
        raise createPoptorchError(
            "You may only set available memory for torch.tensor values. "
            f"{type(tensor)} is not supported."
        )
    if not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            "set_available_memory: available_memory_proportion must be from 0 to 1, got "
            f"{available_memory_proportion}"
        )
    return tensor.clone()


class NameScope:
    """A context manager: names of tensors that are computed inside begin with its own.

    **Arguments**

    - `name`: a string; AssertionError for anything else.

    The names are those of `executor.getTensorNames()`, "encoder/mul:0" for example. Outside of a
    model it does nothing.

    >>> import torch
    >>> with NameScope("encoder"):
    ...     y = torch.ones(1) * 2
    >>> y
    tensor([2.])
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), "Parameter to NameScope must be a string"
        self.name = name

    def __enter__(self) -> None:
        now = forward_mode()
        if now is not None:
            now.enter_scope(self.name)

    def __exit__(self, *_: Any) -> None:
        now = forward_mode()
        if now is not None:
            now.leave_scope()


@operation
def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """The product of two matrices. It is one product here, with the rounding of torch.matmul.

    **Arguments**

    - `lhs`, `rhs`: (m, n) and (n, p), or batches of them.
    - `mode`: what would be split: m (InputChannels), n (ReducingDim), p (OutputChannels), or
      nothing (Disabled).
    - `factor`: into how many parts, which must divide that dimension; 0 is one part. poptorch.Error
      for others.
    - `keep_precision`: in which dtype partial products would be added. There are none.

    AssertionError for a mode, factor or keep_precision of another type.

    >>> import torch
    >>> lhs, rhs = torch.ones(2, 4), torch.arange(8.0).reshape(4, 2)
    >>> serializedMatMul(lhs, rhs, MatMulSerializationMode.ReducingDim, factor=2)
    tensor([[12., 16.],
            [12., 16.]])
    """
    assert isinstance(keep_precision, bool), f"keep_precision={keep_precision!r} is no bool"
    assert isinstance(factor, int), f"factor={factor!r} is no integer"
    assert isinstance(mode, MatMulSerializationMode), f"mode={mode!r} is no MatMulSerializationMode"
    if mode is not MatMulSerializationMode.Disabled:
        _check_factor(lhs, rhs, mode, factor)
    return torch.matmul(lhs, rhs)


def _check_factor(lhs: Tensor, rhs: Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise createPoptorchError(
            f"serializedMatMul needs matrices, got shapes {tuple(lhs.shape)} and {tuple(rhs.shape)}"
        )
    split = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }[mode]
    if factor < 0 or (factor and split % factor):
        raise createPoptorchError(
            f"serializedMatMul: factor must divide the {split} of the dimension that {mode} splits,"
            f" got {factor}"
        )


# ---------------------------------------------------------------- convolutions

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
