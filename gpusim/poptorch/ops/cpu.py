"""CPU: a Python function inside a model, called on the host for each replica."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...torch.private import DisableTorchFunction, disable_modes
from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import model_context
from .host import HOST, HostFunction, Like, on_host, replica_index
from .operation import operation

__all__ = ["CPU"]

OVERLAP = "Trying to enter CPU from another CPU op! CPU ops must not overlap."


class CpuCall(NamedTuple):
    """A call in a graph.

    **Attributes**:

    - `cpu`: the operation.
    - `outputs`: the shapes and dtypes of its results.
    - `single`: whether it returns a tensor instead of a list.
    """

    cpu: weakref.ref[CPU]
    outputs: list[Like]
    single: bool


CALLS: dict[int, CpuCall] = {}
"""Calls by number. Graphs contain the numbers."""

_numbers = itertools.count()
_made_in_forward: list[CPU] = []
_inside: ContextVar[bool] = ContextVar("gpusim inside a CPU operation", default=False)


class CPU:
    """A function that a model calls on the CPU when it runs.

    In models it is for inference only. The compilation calls it once with zeros, for the shapes and
    dtypes of its results. A run calls it for each replica and micro-batch, in order. It gets
    tensors on the CPU, and may use NumPy, files and the network. Its weights are the host's.

    **Arguments**

    - `layer_to_call`: takes tensors and returns a tensor, or a list or tuple of them. A module's
      parameters require no gradients afterwards, as in PopTorch.
    - `ID`: a name, for error messages.

    **Raises**: poptorch.Error for a call in a training model or from within another CPU operation,
    for arguments that are not tensors, and for results whose shapes or dtypes differ from those for
    zeros.

    >>> import torch
    >>> class Sorted(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.sorted = CPU(lambda x: torch.tensor(sorted(x.tolist())), "sorted")
    ...
    ...     def forward(self, x):
    ...         return 10 * self.sorted(x)
    >>> Sorted()(torch.tensor([3.0, 1.0]))
    tensor([10., 30.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)
        self._ID = ID
        self._calls: dict[tuple[Like, ...], int] = {}
        self.in_shapes: list[torch.Size] | None = None
        self.out_shapes: list[torch.Size] | None = None
        self.inputs: list[Tensor] | None = None
        self.outputs: list[Tensor] | None = None
        if model_context() is not None:
            _made_in_forward.append(self)  # a reference: the graph calls it after forward

    def __getstate__(self) -> dict[str, Any]:
        """The state without the numbers of calls: other graphs call a copy."""
        return vars(self) | {"_calls": {}}

    def execute(self) -> None:
        """Call the function with `inputs`, and write what it returns to `outputs`."""
        assert self.inputs is not None and self.outputs is not None
        results = self._results(self.inputs)[0]
        found, expected = map(_kinds, (results, self.outputs))
        if found != expected:
            raise createPoptorchError(
                f"CPU op '{self._ID}' returned {found}, and for zeros {expected}"
            )
        for whole, result in zip(self.outputs, results, strict=True):
            whole.copy_(result)

    def registerPersistentData(self) -> None:
        """Set `inputs` and `outputs` to zeros, in the shapes of the last call."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes or ()]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes or ()]

    def __call__(self, *input: Tensor, **kwargs: Any) -> Any:
        if kwargs:
            raise createPoptorchError(
                f"CPU op '{self._ID}' takes tensors by place, and no {', '.join(kwargs)} by name"
            )
        now = model_context()
        if now is None:
            if _inside.get():
                raise compiler_error(OVERLAP)
            return self._layer_to_call(*input)
        if now.training:
            raise createPoptorchError(
                f"CPU ops are only supported in inference graphs, and '{self._ID}' is in a "
                "training model"
            )
        for tensor in input:
            if not isinstance(tensor, Tensor):
                raise createPoptorchError(
                    f"CPU op '{self._ID}' must take torch.tensor arguments. {type(tensor)} is not "
                    "supported."
                )
        number = self._number([Like(tuple(x.shape), x.dtype) for x in input])
        found = cpu_op(list(input), number)
        self.in_shapes = [x.shape for x in input]
        self.out_shapes = [x.shape for x in found]
        return found[0] if CALLS[number].single else found

    def _number(self, likes: Sequence[Like]) -> int:
        """The number of the call with operands of these shapes and dtypes."""
        key = tuple(likes)
        if key not in self._calls:
            with DisableTorchFunction(), disable_modes():
                zeros = [torch.zeros(like.shape, dtype=like.dtype) for like in likes]
                results, single = self._results(zeros)
            self._calls[key] = number = next(_numbers)
            outputs = [Like(tuple(x.shape), x.dtype) for x in results]
            CALLS[number] = CpuCall(weakref.ref(self), outputs, single)
            weakref.finalize(self, CALLS.pop, number, None)
        return self._calls[key]

    def _results(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """The function's results as a list, and whether it has returned a single tensor.

        It runs in an empty context, outside of all models.
        """
        results = Context().run(self._run, inputs)
        single = not isinstance(results, (list, tuple))
        found = [results] if single else list(results)
        for result in found:
            if not isinstance(result, Tensor):
                raise createPoptorchError(
                    f"CPU op '{self._ID}' must return tensors, got {type(result)}"
                )
        return found, single

    def _run(self, inputs: Sequence[Tensor]) -> Any:
        _inside.set(True)
        return self._layer_to_call(*inputs)


@operation
def cpu_op(inputs: list[Tensor], number: int) -> list[Tensor]:
    return on_host("cpu", [*inputs, replica_index()], number=number)


def _likes(operands: Sequence[Like], arguments: dict[str, Any]) -> list[Like]:
    return CALLS[arguments["number"]].outputs


def _compute(operands: list[Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    call = CALLS[arguments["number"]]
    outputs = [torch.zeros(like.shape, dtype=like.dtype) for like in call.outputs]
    *inputs, where = operands
    cpu = call.cpu()
    if int(where) >= 0 and cpu is not None:
        cpu.inputs, cpu.outputs = inputs, outputs
        cpu.execute()
    return outputs


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(x.dtype, tuple(x.shape)) for x in tensors]


HOST["cpu"] = HostFunction(_likes, _compute)
