"""PopART's graphs and ops, as PopXL programs see them: `ir.op.AddOp` is the class of Add ops.

`gpusim.popxl._popart` gives PopXL's own graphs, tensors and ops PopART's methods.
"""

from __future__ import annotations

from gpusim.popxl._op import Op
from gpusim.popxl._options import SessionOptions
from gpusim.popxl._popart import (
    BwdGraphInfo,
    ExecutionContext,
    ExpectedConnectionType,
    GraphId,
    TensorType,
    TopoCons,
)
from gpusim.popxl._popart import PbConnection as ExpectedConnection
from gpusim.popxl.graph import Graph
from gpusim.popxl.ir import Ir
from gpusim.popxl.tensor import Tensor

from . import op, patterns, view

__all__ = [
    "BwdGraphInfo",
    "ExecutionContext",
    "ExpectedConnection",
    "ExpectedConnectionType",
    "Graph",
    "GraphId",
    "Ir",
    "Op",
    "SessionOptions",
    "Tensor",
    "TensorType",
    "TopoCons",
    "op",
    "patterns",
    "view",
]
