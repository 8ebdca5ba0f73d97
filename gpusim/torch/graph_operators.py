"""Operators that a graph carries as one, however they are made: torch.func's levels and autograd
see what is below them only where they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["graph_operator"]

_library = torch.library.Library("gpusim", "FRAGMENT")


def graph_operator(
    schema: str, run: Callable[..., Any], transformed: Callable[..., Any] | None = None
) -> Any:
    """The operator gpusim::name of this schema.

    **Arguments**:

    - `schema`: as "name(Tensor x) -> Tensor".
    - `run`: its implementation.
    - `transformed`: its implementation where torch.func transforms it, if that differs: an
      operator of torch.library is differentiated there by an autograd.Function only.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> from gpusim.torch.graph_operators import graph_operator
    >>> twice = graph_operator("twice(Tensor x) -> Tensor", lambda x: x + x)
    >>> graph = make_fx(lambda x: twice(x) * 2, pre_dispatch=True)(torch.ones(2))
    >>> [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    ['gpusim.twice.default', 'aten.mul.Tensor']
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    # Where no transform of torch.func is active, and before the first one that is:
    _library.impl(name, run, "CompositeImplicitAutograd")
    _library.impl(name, transformed or run, "FuncTorchDynamicLayerFrontMode")
    return getattr(torch.ops.gpusim, name).default
