"""The inputs of a call site: the caller's tensor for each input of the called graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .context import get_current_graph
from .exceptions import shape_exception
from .graph import Graph
from .tensor import Tensor, constant
from .typing_ import is_numbers

__all__ = ["site_inputs"]


def site_inputs(
    graph: Graph,
    inputs: Iterable[Any],
    inputs_dict: Mapping[Tensor, Any] | None,
    check_inputs: bool = True,
    role: str = "called",
) -> tuple[list[Tensor], list[Tensor]]:
    """The caller's tensors, and the inputs of `graph` that they are for, in the graph's order.

    Positional ones are for the first inputs; `inputs_dict` names its inputs. Numbers become
    constants. `role` names the graph in messages.

    **Raises**

    - ValueError: if there are too many inputs, an input is given twice or is not one of the graph;
      if a tensor is not in the current graph; or if inputs are missing and `check_inputs` is true.
    - popart_exception, which is a ValueError too: if a tensor has another shape or dtype.
    - TypeError: for values that are neither tensors nor numbers.
    """
    positional = flatten_lists(inputs)
    if len(positional) > len(graph.inputs):
        raise ValueError(
            f"Too many inputs have been provided to the {role} graph. The number of "
            f"positional inputs exceeds the number of inputs of the graph. {len(positional)} > "
            f"{len(graph.inputs)}. For graph: {graph}"
        )
    arguments: dict[str, Tensor] = {}
    for place, (tensor, value) in enumerate(zip(graph.inputs, positional, strict=False)):
        what = f'Input at position "{place}"'
        arguments[tensor._id] = argument = parent_tensor(role, tensor, value, what)
        if argument not in get_current_graph():
            raise ValueError(
                f'Parent input tensor "{value}" is not in parent graph "{get_current_graph()}".'
            )
    for tensor, value in (inputs_dict or {}).items():
        if not isinstance(tensor, Tensor) or not any(tensor is i for i in graph._inputs):
            raise ValueError(
                f'The graph input tensor "{tensor}" is not in the {role} graph ({graph}).'
            )
        if tensor._id in arguments:
            raise ValueError(
                f"Graph input tensor is specified twice for the {role} graph, in "
                f"`inputs_dict` and positionally in `inputs`: {tensor}"
            )
        arguments[tensor._id] = argument = parent_tensor(role, tensor, value, f'Input "{tensor}"')
        if argument not in get_current_graph():
            raise ValueError(
                f'The parent input tensor "{value}" is not in the parent graph '
                f"({get_current_graph()})."
            )
    missing = [tensor.name for tensor in graph.inputs if tensor._id not in arguments]
    if missing and check_inputs:
        raise ValueError(
            f"Not enough inputs have been provided to the {role} graph ({graph}): {missing} are "
            "missing"
        )
    called = [tensor for tensor in graph.inputs if tensor._id in arguments]
    return [arguments[tensor._id] for tensor in called], called


def flatten_lists(inputs: Iterable[Any]) -> list[Any]:
    """The inputs, with lists of tensors flattened; a list of numbers is one input."""
    flat: list[Any] = []
    for value in inputs:
        listed = isinstance(value, Iterable) and not isinstance(value, Tensor)
        if listed and not hasattr(value, "shape"):
            entries = list(value)
            if not entries or any(isinstance(entry, Tensor) for entry in entries):
                flat += entries
                continue
            value = entries
        flat.append(value)
    return flat


def parent_tensor(role: str, tensor: Tensor, value: Any, what: str) -> Tensor:
    """A tensor of the current graph for an input of a called one."""
    if not isinstance(value, Tensor):
        fault = (
            f"{what} could not be coerced into a tensor for the {role} graph: Type "
            f"{type(value)}. Value: {value}"
        )
        if not is_numbers(value):
            raise TypeError(fault)
        try:
            value = constant(value, tensor.dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(fault) from error
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise shape_exception(
            f"{what} of the {role} graph must have shape {tensor.shape} and dtype "
            f"{tensor.dtype}, as {tensor} has, got {value}"
        )
    return value
