"""How names of torch are replaced where they are, and where modules have imported them before."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from ..private import replace

__all__ = ["Rewrite", "install_names", "rewriting"]

#: Of a rank's GPUs and the argument that a program gave: the argument that torch gets.
Rewrite = Callable[[Any, Any], Any]

_LIBRARIES = {*sys.stdlib_module_names, "gpusim", "numpy", "scipy", "sympy"} - {"__main__"}


def install_names(stack: ExitStack, replacements: Mapping[int, tuple[Any, Any]]) -> None:
    """Replace objects until the stack ends.

    **Arguments**: `replacements`, by the ids of objects of torch: the object, and what replaces it.
    """
    for module in _modules():
        for name, value in list(vars(module).items()):
            new = replacements.get(id(value))
            if new is not None:
                replace(stack, module, name, new[1])


def _modules() -> Iterator[Any]:
    """torch's modules that offer the names, and all that are neither torch's nor Python's."""
    yield torch
    for name, module in list(sys.modules.items()):
        first = name.partition(".")[0]
        if first == "torch":
            if name.startswith(("torch.cuda", "torch.accelerator")):
                yield module
        elif first not in _LIBRARIES and isinstance(module, ModuleType):
            yield module


def rewriting(
    function: Any,
    signature: inspect.Signature,
    rewritten: Mapping[str, Rewrite],
    current: Callable[[], Any],
) -> Callable[..., Any]:
    """A function that gets other values of these arguments from a rank.

    **Arguments**:

    - `function`, which may have been replaced, and the `signature` of torch's own.
    - `rewritten`: how, by the names of arguments.
    - `current` gives the calling rank's GPUs, and None outside of ranks.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = current()
        if mode is None:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        for name, rewrite in rewritten.items():
            bound.arguments[name] = rewrite(mode, bound.arguments.get(name))
        return function(*bound.args, **bound.kwargs)

    return call
