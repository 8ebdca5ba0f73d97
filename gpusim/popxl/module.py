"""Module: a graph's function as a class, whose object can store tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tensor import Tensor

__all__ = ["Module"]


class Module:
    """A class whose method `build` is a function for `Ir.create_graph`.

    Inputs that `build` makes by `popxl.graph_input` can be stored as attributes, and used at calls.

    >>> import gpusim.popxl as popxl
    >>> class Twice(popxl.Module):
    ...     def build(self, x: popxl.Tensor) -> popxl.Tensor:
    ...         self.offset = popxl.graph_input(x.shape, x.dtype, "offset")
    ...         return x + x + self.offset
    >>> ir, twice = popxl.Ir(), Twice()
    >>> graph = ir.create_graph(twice, popxl.TensorSpec((2,), popxl.float32))
    >>> [tensor.name for tensor in graph.inputs], graph.inputs[1] == twice.offset
    (['x', 'offset'], True)
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | Iterable[Tensor] | None:
        return self.build(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> Tensor | Iterable[Tensor] | None:
        """Add the graph's ops. Subclasses override it."""
        raise NotImplementedError("Your popxl.Module must override `build` method")
