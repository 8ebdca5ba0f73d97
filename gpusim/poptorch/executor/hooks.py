"""Hooks that programs register, to run before and after models are compiled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

__all__ = ["call_hooks", "postcompile", "precompile", "registerPostCompileHook"]
__all__ += ["registerPreCompileHook"]

Hook = Callable[[], Any]
precompile: OrderedDict[int, Hook] = OrderedDict()
postcompile: OrderedDict[int, Hook] = OrderedDict()


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Call `hook()` before a model is compiled, until the handle's `remove`.

    **Raises**:

    - RuntimeError: if the hook cannot be called.

    >>> handle = registerPreCompileHook(lambda: print("compiling"))
    >>> handle.remove()
    """
    if not callable(hook):
        raise RuntimeError("Pre-compile hook must be callable")
    return registered(precompile, hook)


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Call `hook()` when a model has been compiled, or failed to, until the handle's `remove`.

    **Raises**:

    - RuntimeError: if the hook cannot be called.
    """
    if not callable(hook):
        raise RuntimeError("Post-compile hook must be callable")
    return registered(postcompile, hook)


def registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def call_hooks(hooks: OrderedDict[int, Hook]) -> None:
    """Call the hooks in the order of registration; a hook may remove itself."""
    for hook in list(hooks.values()):
        hook()
