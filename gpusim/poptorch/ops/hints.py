"""Operations that tell PopTorch's compiler how to compute: names, memory, convolutions, products.

Results do not depend on them; their arguments are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...torch.private import function_modes
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
    """Return the tensor, by an operation that is never removed from the graph.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error if it is not a tensor.

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
    """Return the tensors, marked as stored for the backward pass and not to be recomputed.

    Nothing is recomputed here, so the mark has no effect.

    **Arguments**

    - `tensors`: one or more, or one list or tuple of them; ValueError for other values.

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
    """Return the tensor. The memory limit of the operation that made it has no effect here.

    **Arguments**

    - `tensor`: of any shape and dtype; poptorch.Error if it is not a tensor.
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
    """A context manager: a prefix for the names of tensors that are computed inside.

    **Arguments**

    - `name`: a string; AssertionError for other values.

    The names are those of `executor.getTensorNames()`, "encoder/mul:0" for example. Outside of
    models it has no effect.

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
    """Multiply two matrices. The product is not split here; its rounding is that of torch.matmul.

    **Arguments**

    - `lhs`, `rhs`: (m, n) and (n, p), or batches of them.
    - `mode`: the dimension to split: m (InputChannels), n (ReducingDim), p (OutputChannels), or
      none (Disabled).
    - `factor`: the number of parts, which must divide that dimension; 0 is one part.
    - `keep_precision`: the dtype in which partial products are added. It has no effect.

    **Raises**: poptorch.Error for a factor that does not divide the dimension; AssertionError for a
    mode, factor or keep_precision of another type.

    >>> import torch
    >>> lhs, rhs = torch.ones(2, 4), torch.arange(8.0).reshape(4, 2)
    >>> serializedMatMul(lhs, rhs, MatMulSerializationMode.ReducingDim, factor=2)
    tensor([[12., 16.],
            [12., 16.]])
    """
    assert isinstance(keep_precision, bool), (
        f"keep_precision must be a bool, got {keep_precision!r}"
    )
    assert isinstance(factor, int), f"factor must be an integer, got {factor!r}"
    assert isinstance(mode, MatMulSerializationMode), (
        f"mode must be a MatMulSerializationMode, got {mode!r}"
    )
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
    """Counts the convolutions inside.

    **Attributes**:

    - `found`: their number.
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
    """A context manager: the convolutions inside are one operation of the model.

    Results do not depend on it or its settings. Its methods take one value for all convolutions, or
    a list or tuple with one for each, and return the MultiConv. In models poptorch.Error is raised
    if there is no convolution inside, or another MultiConv. Outside of models nothing is checked.

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
        """The share of memory of each; AssertionError for values that are not floats."""
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
        """The dtype of partial sums: torch.float or torch.half, else a ValueError."""
        values = _several(value)
        if any(each not in (torch.float32, torch.float16) for each in values):
            raise ValueError(PARTIALS)
        self._per_conv["partialsTypes"] = values
        return self

    def enableConvDithering(self, value: bool | Sequence[bool] | None) -> Self:
        """Whether they begin on different tiles; ValueError for values that are not bools."""
        if value is not None:
            values = _several(value)
            if any(not isinstance(each, bool) for each in values):
                raise ValueError(DITHERING)
            self._per_conv["enableConvDithering"] = values
        else:
            self._per_conv.pop("enableConvDithering", None)
        return self

    def planType(self, value: MultiConvPlanType | None) -> Self:
        """Whether they run at once; AssertionError unless it is a MultiConvPlanType."""
        assert value is None or isinstance(value, MultiConvPlanType), "Invalid plan type!"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> Self:
        """The number of tiles of each; AssertionError unless it is an integer."""
        assert isinstance(value, int), f"perConvReservedTiles({value!r}) is not an integer"
        self._per_conv_reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> Self:
        """The slowdown that is allowed; AssertionError unless it is a float."""
        assert isinstance(value, float), f"cycleBackOff({value!r}) is not a float"
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
    """The counter of the MultiConv around this code, or None."""

    modes = function_modes()
    return next((mode for mode in modes if isinstance(mode, Counting)), None)
