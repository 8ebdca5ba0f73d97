"""PopART's graphs and ops, as PopXL programs see them: `ir.op.AddOp` is the class of Add ops."""

from __future__ import annotations

from gpusim.popxl._op import Op
from gpusim.popxl._options import SessionOptions
from gpusim.popxl.graph import Graph
from gpusim.popxl.ir import Ir
from gpusim.popxl.tensor import Tensor

from . import op

__all__ = ["Graph", "Ir", "Op", "SessionOptions", "Tensor", "op"]
