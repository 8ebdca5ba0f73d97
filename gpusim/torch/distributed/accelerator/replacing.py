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

__all__ = ["Rewrite", "install_names", "restoring", "rewriting", "under_mode"]

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


def under_mode(engine: Any, current: Callable[[], Any]) -> Callable[..., Any]:
    """The beginning of a backward pass, in which hooks and checkpoints run a rank's code.

    **Arguments**: torch's function that begins it; `current` as above.
    """

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode = current()
        if mode is None:
            return engine(*args, **kwargs)
        return mode.run_backward(engine, *args, **kwargs)

    return run


def restoring(function: Any, number: str, current: Callable[[], Any]) -> Callable[..., Any]:
    """How torch.load puts a storage where it is to be.

    **Arguments**:

    - `function`: torch's own, of a storage and a location.
    - `number`: the attribute of a storage that says on which of a rank's GPUs it is.
    - `current`: as above.
    """

    @functools.wraps(function)
    def restore(storage: Any, location: Any) -> Any:
        mode = current()
        if mode is None or not mode.is_played(location):
            return function(storage, location)
        result = function(storage, str(mode.player))
        setattr(result, number, mode.index(location))
        return result

    return restore
