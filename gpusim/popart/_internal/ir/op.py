"""A class for every type of op: `AddOp`, `MatMulOp`, and any other name that ends in Op.

>>> from gpusim.popart._internal import ir
>>> ir.op.MatMulOp is ir.op.MatMulOp, issubclass(ir.op.MatMulOp, ir.Op)
(True, True)
"""

from __future__ import annotations

import sys
from typing import Any

from gpusim.popxl._op import op_class

#: Classes whose name in PopART differs from the type of their ops.
_RENAMED = {
    "BatchNormOp": "BatchNormalization",
    "GroupNormOp": "GroupNormalization",
    "NegateOp": "Neg",
    "OnehotOp": "OneHot",
    "IsInf": "IsInf",
    "IsNaN": "IsNaN",
    "SubtractOp": "Sub",
    "TiedGatherOp": "PopartTiedGather",
}


#: Parts of PopART's module whose classes are in this one.
_PARTS = ("collectives", "dynamic", "exchange")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return sys.modules[__name__]
    if name in _RENAMED:
        return op_class(_RENAMED[name])
    if not name.endswith("Op") or name.startswith("_") or name == "Op":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return op_class(name.removesuffix("Op"))
