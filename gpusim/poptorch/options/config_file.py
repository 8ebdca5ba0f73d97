"""Options from a file of calls, which is parsed and never executed: `value` says what may occur."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.locations import TensorLocationSettings
from gpusim.poptorch.options.popart import _PopartOptions
from gpusim.poptorch.options.reachable import POPTORCH, method_of

__all__ = ["ConfigFileError", "load"]

PREFIX = "options."
DTYPES = frozenset("float float16 float32 float64 bfloat16 half int int8 int16 int32 int64".split())
PLAIN: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (bool, dict, float, frozenset, int, list, set, str, tuple)
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
# no power and no repetition, by which a short line could take all time or memory
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class ConfigFileError(Exception):
    """A line of an options file that is no Python, or that does what a file may not do."""


class Refused(Exception):
    """Python, but not for an options file."""


def load(options: Any, filepath: str | os.PathLike[str]) -> None:
    """Set what the file says."""
    path = Path(filepath)
    lines = [
        (number, PREFIX + line.strip())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    parsed = [(number, line, parse(line, number, path.name)) for number, line in lines]
    for number, line, statements in parsed:
        for statement in statements:
            try:
                perform(statement, options)
            except (Refused, RecursionError) as error:
                raise failed(error, number, path.name, line) from None
            except Exception as error:
                error.add_note(f"at line {number} of {path.name}: {line}")
                raise


def parse(line: str, number: int, filename: str) -> list[ast.stmt]:
    try:
        return ast.parse(line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise failed(error, number, filename, line) from None


def failed(error: Exception, number: int, filename: str, line: str) -> ConfigFileError:
    """The error as PopTorch words it."""
    reason = error.args[0] if error.args else "too deeply nested"
    kind = type(error).__name__
    return ConfigFileError(f"{kind} at line {number} of {filename}: {reason}\n> {line}")


def perform(statement: ast.stmt, options: Any) -> None:
    """A call, or `option = value`."""
    match statement:
        case ast.Expr(value=ast.Call() as call):
            reached(call, options)
        case ast.Assign(targets=[ast.Attribute(value=owner, attr=name)], value=given):
            target = reached(owner, options)
            method_of(target, name, options)  # must be there, and be allowed
            target.set(**{name: value(given, options)})
        case _:
            raise Refused(f"a call of a method is expected, got {ast.unparse(statement)}")


def value(node: ast.expr, options: Any) -> Any:
    """What an expression is worth as an argument: literals, containers, arithmetic, and results.

    Not the options, their groups and methods: options that hold themselves have no end.
    """
    found = reached(node, options)
    if not isinstance(found, TensorLocationSettings) and (
        callable(found) or isinstance(found, OptionsDict | _PopartOptions)
    ):
        raise Refused(f"{ast.unparse(node)} is no value")
    return found


def reached(node: ast.expr, options: Any) -> Any:
    """What an expression is worth where something of it follows."""
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id="options"):
            return options
        case ast.Attribute(value=owner, attr=name):
            return attribute(owner, name, options)
        case ast.Call(func=function, args=arguments, keywords=named):
            return called(function, arguments, named, options)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](number(operand, options))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in ARITHMETIC:
            return ARITHMETIC[type(sign)](number(left, options), number(right, options))
    return container(node, options)


def container(node: ast.expr, options: Any) -> Any:
    match node:
        case ast.List(elts=elements):
            return [value(element, options) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(value(element, options) for element in elements)
        case ast.Set(elts=elements):
            return {value(element, options) for element in elements}
        case ast.Dict(keys=keys, values=values):
            named = [key for key in keys if key is not None]
            if len(named) == len(values):
                pairs = zip(named, values, strict=True)
                return {value(key, options): value(item, options) for key, item in pairs}
    raise Refused(f"{ast.unparse(node)} is not for an options file")


def number(node: ast.expr, options: Any) -> Any:
    found = value(node, options)
    if not isinstance(found, int | float):
        raise Refused(f"a number is expected, got {ast.unparse(node)}")
    return found


def attribute(owner: ast.expr, name: str, options: Any) -> Any:
    """`poptorch.Name`, `poptorch.enums.Name`, `torch.half` and so on, or a method of what
    `method_of` lets files reach."""
    match owner:
        case ast.Name(id="torch"):
            return torch_dtype(name)
        case (
            ast.Name(id="poptorch")
            | ast.Attribute(value=ast.Name(id="poptorch"), attr="enums" | "options")
        ):
            if name not in POPTORCH:
                raise Refused(f"poptorch.{name} is not for an options file")
            return POPTORCH[name]
    return method_of(reached(owner, options), name, options)


def torch_dtype(name: str) -> Any:
    """One of PyTorch's dtypes, and nothing else of it."""
    if name not in DTYPES:
        raise Refused(f"torch.{name} is not for an options file")
    try:
        import torch
    except ImportError:
        raise ImportError(f"torch.{name} needs PyTorch: pip install 'gpusim[torch]'") from None
    return getattr(torch, name)


def called(
    function: ast.expr, arguments: list[ast.expr], named: list[ast.keyword], options: Any
) -> Any:
    if isinstance(function, ast.Name) and function.id in PLAIN:
        call = PLAIN[function.id]
    else:
        call = reached(function, options)
    if not callable(call):
        raise Refused(f"{ast.unparse(function)} cannot be called")
    given = [value(argument, options) for argument in arguments]
    keywords = {keyword.arg: value(keyword.value, options) for keyword in named if keyword.arg}
    if len(keywords) < len(named):
        raise Refused("** is not for an options file")
    return call(*given, **keywords)
