"""The error for converting an array that may differ between replicas, with its cure.

NumPy converts a MappedArray wherever no protocol reaches it: in np.array([x, y]), in table[i] of a
plain table, in np.full(n, x). The line of the user's code that asks for the conversion says which
cure is the right one.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import math
import sys
import sysconfig
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

import numpy as np

FOLDERS = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""Folders of installed packages, whose frames are not the user's."""

CHOSEN = "choose with np.where instead of branching on it"
INDEXED = "index a plain array by gpusim.at(array)[index].get()"
STACKED = "join MappedArrays by np.stack([a, b])"
STORED = (
    "store it in an array made like it (np.zeros(3, like=x)), or use "
    "array = gpusim.at(array)[index].set(x)"
)
CREATED = "{name}(..., like=x) with a MappedArray x makes a MappedArray"
CONVERTED = "x.astype({name}) converts the values of all replicas"
COUNTED = "use one length for all replicas, and np.where for what is beyond a replica's own"
ITERATED = "iterate over x, or over x.flat"
GIVEN = (
    "give {name} one MappedArray instead of a list (np.stack) or a plain array "
    "(np.asarray(array, like=x))"
)
CALLED = "call it once per replica by gpusim.per_replica({name})(...)"

CURES: dict[Any, str] = {
    **dict.fromkeys((np.array, np.asarray, np.asanyarray), f"{STACKED}; {CREATED}"),
    **dict.fromkeys((np.ascontiguousarray, np.full), CREATED),
    **dict.fromkeys((np.r_, np.c_), "join MappedArrays by np.concatenate or np.column_stack"),
    **dict.fromkeys((np.nditer, np.ndenumerate, np.ndindex), ITERATED),
    **dict.fromkeys((range, np.arange, np.zeros, np.ones, np.empty), COUNTED),
    **dict.fromkeys((int, float, complex), CONVERTED),
    **dict.fromkeys((max, min), "use np.maximum and np.minimum, or np.max and np.min"),
    sorted: "use np.sort",
    np.fromiter: STACKED,
    np.take: INDEXED,
    np.vectorize: f"{CALLED}, or write the function with np.where and call it on the array",
}
"""Cures by the function that the user's line calls or indexes."""

WRITERS = frozenset({"__setitem__", "fill", "put", "itemset"})
"""Methods that write into an array."""

LONGEST_NAME = 40
"""Characters of an expression that messages repeat."""


def conversion_error(conversion: str, array: str, names: str) -> Exception:
    """The TypeError for a conversion, with the cure for the line that asked for it.

    A ValueError inside np.nditer, which replaces TypeErrors by another one.
    """
    function, cure = _function_and_cure(conversion)
    kind = ValueError if function is np.nditer else TypeError
    other = "" if CHOSEN in cure else f". Elsewhere {CHOSEN}"
    return kind(
        f"{conversion} needs one value, but this array ({array}) is mapped over {names} and may "
        f"differ between replicas: {cure}{other}, or run the function under gpusim.pmap, where "
        "every replica has plain arrays"
    )


def _function_and_cure(conversion: str) -> tuple[Any, str]:
    """The function that the user's line calls, None if it is unknown, and the cure."""
    if conversion.startswith((".item", ".to")):
        return None, "x itself has the values of all replicas"
    frame: FrameType | None = sys._getframe(1)
    entered = ""  # what the user called in a library: "softmax", "np.vectorize"
    while frame is not None and _is_installed(frame):
        if not _module(frame).startswith("gpusim."):
            entered = frame.f_code.co_qualname.split(".")[0]
            entered = f"np.{entered}" if _module(frame).startswith("numpy") else entered
        frame = frame.f_back
    if frame is None or _module(frame).startswith("gpusim."):  # the library's function is the map's
        return None, _cure(conversion, entered, None, entered, False)
    node = _expression(frame)
    stores = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("STORE_")
    stores |= isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WRITERS
    if isinstance(node, ast.Call):
        name, function = ast.unparse(node.func), _value(node.func, frame)
    elif isinstance(node, ast.Subscript) and not stores:
        name, function = ast.unparse(node.value), _value(node.value, frame)
        if not any(function is known for known in (np.r_, np.c_)):
            return None, INDEXED
    else:
        name, function = entered, None
    return function, _cure(conversion, name, function, entered, stores)


def _cure(conversion: str, name: str, function: Any, entered: str, stores: bool) -> str:
    name = name if len(name) <= LONGEST_NAME else ""
    if entered == "np.vectorize":
        name = "np.vectorize(f)" if name in ("", entered) else name
        return CURES[np.vectorize].format(name=name)
    known = next((cure for key, cure in CURES.items() if key is function), None)
    if known is not None:
        return known.format(name=name)
    if conversion == "bool()":
        return CHOSEN
    if stores:
        return STORED
    if isinstance(function, type) and issubclass(function, np.generic):
        return CONVERTED.format(name=name)
    own = getattr(function, "__name__", "")
    if getattr(function, "__module__", None) == math.__name__ and hasattr(np, own):
        return f"use np.{own}"
    if name and getattr(function, "__module__", name).startswith(("numpy", "np.")):
        return f"{GIVEN}, or {CALLED}".format(name=name)
    if name:
        return CALLED.format(name=name)
    return f"{CHOSEN}, {INDEXED}, {STACKED}"


def _is_installed(frame: FrameType) -> bool:
    """Whether the frame is of the rules or of an installed package."""
    module = _module(frame)
    if module.startswith("gpusim."):
        return module.startswith("gpusim.maps.mapped_array")
    return module.startswith(("numpy", "scipy")) or frame.f_code.co_filename.startswith(FOLDERS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _expression(frame: FrameType) -> ast.expr | None:
    """The expression that the frame evaluates, if its source is at hand."""
    code = frame.f_code
    place = next(islice(code.co_positions(), frame.f_lasti // 2, None))
    first, last, start, end = place
    if first is None or last is None:
        return None
    lines = [
        linecache.getline(code.co_filename, number, frame.f_globals).encode()
        for number in range(first, last + 1)
    ]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _value(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name, or of an attribute of a module; None for other expressions."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, None)
    return None
