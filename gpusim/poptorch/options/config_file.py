"""Options from files of calls and from JSON. Neither is executed: both only set options."""

from __future__ import annotations

import ast
import enum
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpusim.optional import load
from gpusim.poptorch import enums
from gpusim.poptorch.options import strategies
from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.locations import TensorLocationSettings
from gpusim.poptorch.options.popart import _PopartOptions

__all__ = ["ConfigFileError", "load_file", "load_json"]

LARGEST = 1 << 20
"""Characters of a file: parsed lines take some hundred times their memory."""

#: The names that may follow `poptorch.`: values and classes of values, nothing that acts.
POPTORCH: dict[str, Any] = {
    **{name: getattr(enums, name) for name in enums.__all__},
    "TensorLocationSettings": TensorLocationSettings,
    "Stage": strategies.Stage,
    "Phase": strategies.Phase,
    "PipelinedExecution": strategies.PipelinedExecution,
    "ShardedExecution": strategies.ShardedExecution,
    "ParallelPhasedExecution": strategies.ParallelPhasedExecution,
    "SerialPhasedExecution": strategies.SerialPhasedExecution,
}
OWNERS = (
    OptionsDict,
    _PopartOptions,
    strategies.Stage,
    strategies.Phase,
    strategies._IExecutionStrategy,
    enum.Enum,
)
READS_MORE = ("loadFromFile", "from_json")  # a file that reads itself would never end

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
    """A line of an options file that is not Python, or does more than a file may do."""


class Refused(Exception):
    """Python that an options file may not contain."""


def method_of(owner: Any, name: str, options: Any) -> Any:
    """An attribute by its name. AttributeError for one that files and variables may not reach."""
    popart = name == "_Popart" and owner is options
    if isinstance(owner, enum.EnumMeta):
        reachable = name in owner.__members__
    else:
        reachable = isinstance(owner, OWNERS) and name not in READS_MORE
    if not popart and (name.startswith("_") or not reachable):
        raise AttributeError(f"Invalid attribute {name}.")
    return getattr(owner, name)


# ---------------------------------------------------------------- JSON


def load_json(options: Any, text: str) -> None:
    """Call the methods that a JSON object names: `{"Training.gradientAccumulation": 4}`."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object of options, got {text[:80]!r}")
    for name, value in found.items():
        target = options
        *groups, method = name.split(".")
        for group in groups:
            target = method_of(target, group, options)
        arguments = value if isinstance(value, list) else [value]
        call = method_of(target, method, options)
        if not callable(call):
            raise AttributeError(f"{name!r} is not a method of the options")
        call(*map(converted, arguments))


def converted(value: Any) -> Any:
    """Replace names of enumerations' members by the members, also in lists and dictionaries.

    >>> converted(["ConnectionType.OnDemand", "a.b"])
    [<ConnectionType.OnDemand: 1>, 'a.b']
    """
    if isinstance(value, list):
        return [converted(element) for element in value]
    if isinstance(value, dict):
        return {key: converted(element) for key, element in value.items()}
    if isinstance(value, str):
        name, dot, member = value.removeprefix("poptorch.").partition(".")
        kind = getattr(enums, name, None) if dot and name in enums.__all__ else None
        if isinstance(kind, enum.EnumMeta):
            if member not in kind.__members__:
                raise ValueError(f"{value!r}: expected one of {', '.join(kind.__members__)}")
            return kind[member]
    return value


# ---------------------------------------------------------------- files of calls


def load_file(options: Any, filepath: str | os.PathLike[str]) -> None:
    """Perform the calls in a file, all of whose lines are parsed first."""
    path = Path(filepath)
    with path.open(encoding="utf-8") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ConfigFileError(
            f"{path.name}: expected lines that call methods of options, of at most "
            f"{LARGEST:,} characters together; the file is larger"
        )
    lines = [
        (number, PREFIX + line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
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
                error.add_note(f"at line {number} of {path.name}: {line:.1000}")
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
    return ConfigFileError(
        f"{kind} at line {number} of {filename}: {reason!s:.1000}\n> {line:.1000}"
    )


def perform(statement: ast.stmt, options: Any) -> None:
    """Perform a call, or `option = value`."""
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
    """The value of an argument: a literal, a container, arithmetic, or the result of a call.

    Options, their groups and methods are refused: options could contain themselves.
    """
    found = reached(node, options)
    if not isinstance(found, TensorLocationSettings) and (
        callable(found) or isinstance(found, OptionsDict | _PopartOptions)
    ):
        raise Refused(f"{ast.unparse(node)} is not a value")
    return found


def reached(node: ast.expr, options: Any) -> Any:
    """The value of an expression, which may be an owner of attributes."""
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
    """The value of `poptorch.Name`, `poptorch.enums.Name`, `torch.half` or a method's name."""
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
    return getattr(load(f"torch.{name} needs", "torch"), name)


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
