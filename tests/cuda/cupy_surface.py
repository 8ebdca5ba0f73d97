"""CuPy's part of NumPy's functions, and their keywords: the table beside this file.
`python -m tests.cuda.cupy_surface` prints it, where CuPy is installed (a GPU is not needed)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TABLE = Path(__file__).parent / "cupy_surface.txt"
MODULES = ("", "linalg", "fft")
UNKNOWN = "..."  # of builtin functions, which do not say what they take
MARKS = {
    inspect.Parameter.POSITIONAL_ONLY: "/",
    inspect.Parameter.KEYWORD_ONLY: "*",
    inspect.Parameter.VAR_POSITIONAL: "*args",
    inspect.Parameter.VAR_KEYWORD: "**kwargs",
}


def functions(module: Any) -> Iterator[tuple[str, str]]:
    """NumPy's functions and ufuncs that `module`, which is cupy, has too: name and parameters."""
    for inner in MODULES:
        ours, theirs = (getattr(m, inner) if inner else m for m in (np, module))
        for name in dir(ours):
            function = getattr(ours, name)
            if name.startswith("_") or not callable(function) or isinstance(function, type):
                continue
            if hasattr(theirs, name):
                full = f"{inner}.{name}" if inner else name
                yield full, _parameters(getattr(theirs, name))


def _parameters(function: Any) -> str:
    if type(function).__name__ == "ufunc":
        return "ufunc"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return UNKNOWN
    words = []
    for parameter in parameters:
        mark = MARKS.get(parameter.kind, "")
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            words.append(mark)
        else:
            optional = "" if parameter.default is parameter.empty else "?"
            words.append(f"{mark}{parameter.name}{optional}")
    return " ".join(words)


@cache
def surface() -> dict[str, str]:
    """The table's content."""
    lines = TABLE.read_text().splitlines()
    return dict(line.split(": ") for line in lines if not line.startswith("#"))


@cache
def signature(name: str) -> inspect.Signature | None:
    """The arguments of a function of CuPy; None if they are not known."""
    words = surface()[name]
    if words in (UNKNOWN, "ufunc"):
        return None
    parameters = []
    for word in words.split():
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for known, mark in MARKS.items():
            if word == mark or (word.startswith(mark) and not mark.startswith("**")):
                kind = known
        bare = word.lstrip("/*").rstrip("?")
        default = None if word.endswith("?") else inspect.Parameter.empty
        if word in ("*args", "**kwargs"):
            kind = kind.VAR_POSITIONAL if word == "*args" else kind.VAR_KEYWORD
        elif word.startswith("*"):
            kind = kind.KEYWORD_ONLY
        parameters.append(inspect.Parameter(bare, kind, default=default))
    return inspect.Signature(parameters)


def text(module: Any) -> str:
    """The table, for the CuPy that is given."""
    lines = [f"# Of NumPy {np.__version__}'s functions those that CuPy {module.__version__} has;"]
    lines += ["# ? marks what need not be given, / and * what goes by position or by name alone."]
    lines += [f"{name}: {parameters}" for name, parameters in functions(module)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import cupy

    print(text(cupy), end="")
