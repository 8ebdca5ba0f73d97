"""The operators of folds: each writes `left op right` into `out` (which may be `left`).
Operands are blocks of the computing type; no operator fuses a product with a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Operator = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], None]

OPS = ("sum", "prod", "max", "min", "logical_and", "logical_or")
ARITHMETIC_OPS = ("sum", "prod")
LOGICAL_OPS = ("logical_and", "logical_or")


def _add(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    np.add(left, right, out=out)


def _multiply(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    np.multiply(left, right, out=out)


def _multiply_complex(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    """Real and imaginary parts lie along the last axis. NumPy's own product may fuse."""
    a, b = left[..., 0], left[..., 1]
    c, d = right[..., 0], right[..., 1]
    real = a * c
    real -= b * d
    imaginary = a * d
    imaginary += b * c
    out[..., 0] = real
    out[..., 1] = imaginary


def _both_zero(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_] | None:
    """A mask of the elements where both are zero, or None; NumPy leaves their sign open."""
    zeros: NDArray[np.bool_] = left == 0
    if not zeros.any():
        return None
    zeros &= right == 0
    return zeros


def _maximum(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    zeros = _both_zero(left, right)
    if zeros is None:
        np.maximum(left, right, out=out)
        return
    signed = left[zeros] + right[zeros]  # -0 only if both are
    np.maximum(left, right, out=out)
    out[zeros] = signed


def _minimum(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    zeros = _both_zero(left, right)
    if zeros is None:
        np.minimum(left, right, out=out)
        return
    signed = -(-left[zeros] - right[zeros])  # +0 only if both are
    np.minimum(left, right, out=out)
    out[zeros] = signed


def _plain(ufunc: np.ufunc) -> Operator:
    def apply(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
        ufunc(left, right, out=out)

    return apply


_OPERATORS: dict[tuple[str, str], Operator] = {
    ("sum", "int"): _add,
    ("sum", "float"): _add,
    ("sum", "complex"): _add,
    ("prod", "int"): _multiply,
    ("prod", "float"): _multiply,
    ("prod", "complex"): _multiply_complex,
    ("max", "float"): _maximum,
    ("min", "float"): _minimum,
    ("max", "int"): _plain(np.maximum),
    ("min", "int"): _plain(np.minimum),
    ("max", "bool"): _plain(np.logical_or),
    ("min", "bool"): _plain(np.logical_and),
}
_LOGICAL: dict[str, Operator] = {
    "logical_and": _plain(np.logical_and),
    "logical_or": _plain(np.logical_or),
}
_RUNNING: dict[Operator, np.ufunc] = {_add: np.add, _multiply: np.multiply}


def check_op(op: str) -> str:
    """Return `op`; ValueError if it is unknown."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: expected one of {', '.join(map(repr, OPS))}")
    return op


def operator_for(op: str, kind: str) -> Operator:
    """The operator for `op` on inputs of `kind`; ValueError or TypeError if there is none."""
    check_op(op)
    operator = _LOGICAL.get(op) or _OPERATORS.get((op, kind))
    if operator is None:
        hint = "; convert to an integer dtype first" if kind == "bool" else ""
        raise TypeError(f"op={op!r} is not defined for {kind} values{hint}")
    return operator


def running(operator: Operator) -> np.ufunc | None:
    """The ufunc whose `accumulate` repeats `operator` in sequence, if there is one."""
    return _RUNNING.get(operator)
