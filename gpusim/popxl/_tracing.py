"""create_graph: calls a function with graph inputs, and makes its results graph outputs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .graph import Graph
from .module import Module
from .tensor import Tensor, TensorByRef, TensorSpec, graph_input, graph_output

if TYPE_CHECKING:
    from .ir import Ir

__all__ = ["trace"]

_MIXED = (list, tuple, dict)


def trace(ir: Ir, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """The graph of a function called with these arguments."""
    function = function_of(fn)
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            "The arguments, `args` and `kwargs`, do not match the signature of the function `fn`."
        ) from error
    bound.apply_defaults()
    named = type(fn) if isinstance(fn, Module) else fn
    graph = ir.create_empty_graph(getattr(named, "__qualname__", type(fn).__qualname__))
    references = by_reference(function)
    with graph:
        for name, value in bound.arguments.items():
            bound.arguments[name] = as_inputs(name, value, name in references)
        for output in outputs_of(function(*bound.args, **bound.kwargs)):
            graph_output(output)
    return graph


def function_of(fn: Any) -> Callable[..., Any]:
    """The function to call, whose signature counts."""
    if isinstance(fn, Module):
        return fn.build
    if callable(fn) and not isinstance(fn, type):
        function: Callable[..., Any] = fn
        return function
    raise TypeError("Callable `fn` must be either a function or a class that extends popxl.Module")


def by_reference(function: Callable[..., Any]) -> frozenset[str]:
    """The parameters whose annotation contains TensorByRef."""
    annotations = dict(getattr(function, "__annotations__", {}))
    try:
        annotations |= typing.get_type_hints(function)
    except Exception:  # names that only a type checker knows: the texts are looked at instead
        pass
    return frozenset(name for name, hint in annotations.items() if speaks_of_reference(hint))


def speaks_of_reference(hint: Any) -> bool:
    """Whether an annotation, or a part of it, is TensorByRef.

    >>> speaks_of_reference(list[TensorByRef]), speaks_of_reference(Tensor)
    (True, False)
    """
    if hint is TensorByRef:
        return True
    if isinstance(hint, str):
        return TensorByRef.__name__ in hint
    return any(map(speaks_of_reference, typing.get_args(hint)))


def as_inputs(name: str, value: Any, by_ref: bool) -> Any:
    """The argument with inputs of the current graph instead of its tensors."""
    if isinstance(value, (Tensor, TensorSpec)):
        return as_input(name, value, by_ref)
    if not isinstance(value, _MIXED):
        return value
    entries = value if isinstance(value, dict) else dict(enumerate(value))
    tensors = [isinstance(entry, (Tensor, TensorSpec)) for entry in entries.values()]
    if not any(tensors):
        return value
    if not all(tensors):
        raise TypeError(
            f"A {type(value)} argument can't contain a mixture of Tensors and other types. "
            f"Arg name: {name}. Value: {value}"
        )
    inputs = {
        key: as_input(str(key) if isinstance(value, dict) else f"{name}_{key}", entry, by_ref)
        for key, entry in entries.items()
    }
    if isinstance(value, dict):
        return inputs
    return tuple(inputs.values()) if isinstance(value, tuple) else list(inputs.values())


def as_input(name: str, value: Tensor | TensorSpec, by_ref: bool) -> Tensor:
    spec = value.spec if isinstance(value, Tensor) else value
    return graph_input(spec.shape, spec.dtype, name, by_ref, spec.meta_shape)


def outputs_of(returned: Any) -> list[Tensor]:
    """The result of a function as a list of tensors."""
    if returned is None:
        return []
    if isinstance(returned, Tensor):
        return [returned]
    outputs = list(returned) if isinstance(returned, Iterable) else [returned]
    if not isinstance(returned, Iterable) or not all(isinstance(t, Tensor) for t in outputs):
        raise ValueError(
            "Output of subgraph must be None, a Tensor or an iterable of Tensors. Output type: "
            f"{type(returned)}. Value {returned}"
        )
    return outputs
