"""The watch of the calling thread, for what the check puts in the place of torch's functions."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.jit
from torch.compiler import is_dynamo_compiling

from ....platforms import after_fork
from ..accelerator.devices import WRAPPED
from ..own.threads import own_rank
from ..private_checks import is_transforming

if TYPE_CHECKING:
    from .watch import Watch

__all__ = ["install", "replace", "watch_of_thread"]


def watch_of_thread() -> Watch | None:
    """The watch of the rank whose own thread this is, unless the check's own code runs."""
    rank = own_rank()
    watch: Watch | None = None if rank is None else rank.watch
    return None if watch is None or watch.is_busy else watch


def replace(
    stack: ExitStack, owner: Any, name: str, serve: Callable[..., Any], static: bool = False
) -> None:
    """Let `serve(watch, real, *args, **named)` serve a function in the threads of watched ranks.

    Its own parameters are positional only: all names are the function's. A call that passes fewer
    arguments by position than `serve` has goes to the function.

    The function is the process's: other threads get the real one. It is put back when the stack
    ends.
    """
    real = getattr(owner, name)
    kinds = [each.kind for each in inspect.signature(serve).parameters.values()]
    needed = kinds.count(inspect.Parameter.POSITIONAL_ONLY) - 2
    assert needed >= 0, f"{serve}: expected watch and real as positional only"

    @functools.wraps(real)
    def function(*args: Any, **named: Any) -> Any:
        if is_dynamo_compiling():  # a constant there
            return real(*args, **named)
        watch = watch_of_thread()
        if watch is None or len(args) < needed or is_transforming():
            return real(*args, **named)
        return serve(watch, real, *args, **named)

    own = vars(owner).get(name, ABSENT)
    new: Any = staticmethod(function) if static else function

    def put_back() -> None:
        if own is ABSENT:  # of a base class
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    def put_in() -> None:
        setattr(owner, name, new)

    WRAPPED[function] = real
    _replaced.append((put_back, put_in))
    stack.callback(WRAPPED.pop, function)
    stack.callback(_replaced.remove, (put_back, put_in))
    stack.callback(put_back)
    put_in()


ABSENT = object()

_replaced: list[tuple[Callable[[], None], Callable[[], None]]] = []
"""How each function is put back, and put in again. Owner: the session, in its lock."""


def install(stack: ExitStack) -> None:
    """Let torch.jit.script compile torch's own functions, which it finds by their names."""
    real = torch.jit.script

    @functools.wraps(real)
    def script(*args: Any, **named: Any) -> Any:
        with _compiling:
            if not _replaced or _is_back[0]:
                return real(*args, **named)
            _is_back[0] = True
            for put_back, _ in reversed(_replaced):
                put_back()
            try:
                return real(*args, **named)
            finally:
                _is_back[0] = False
                for _, put_in in _replaced:
                    put_in()

    stack.callback(setattr, torch.jit, "script", real)
    setattr(torch.jit, "script", script)  # noqa: B010  # mypy refuses to assign a function


_is_back = [False]
"""Whether the functions are put back. Owner: the rank that compiles, in `_compiling`."""

_compiling = threading.RLock()
"""Held while a rank compiles: ranks that run freely share the functions."""


def _compile_anew() -> None:
    global _compiling  # another thread of the parent may have been compiling
    _compiling = threading.RLock()
    if _is_back[0]:
        _is_back[0] = False
        for _, put_in in _replaced:
            put_in()


after_fork(_compile_anew)
