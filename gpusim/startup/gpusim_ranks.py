"""The functions of torch.distributed by which a process joins simulated ranks, or leaves them.

Importing torch is followed by `hook`, which puts wrappers around `init_process_group` and
`destroy_process_group`. A process that calls neither is as it would be.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing.process
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

__all__ = ["VARIABLE", "hook", "install"]

VARIABLE = "GPUSIM_HUB"
"""The environment variable that says where the hub listens, its token, and how to simulate."""

BOUND = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
"""The modules that `import torch` binds the functions in."""

WRAPPED = ("init_process_group", "destroy_process_group")


def settings() -> dict[str, Any] | None:
    """The variable's value, if the hub's command runs in the environment of this interpreter."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    found: dict[str, Any] = json.loads(value)
    return found if found["interpreter"] == [sys.prefix, *sys.version_info[:2]] else None


def install(stack: ExitStack | None = None) -> None:
    """Have torch hooked, now or when it is imported, until the stack ends if there is one."""
    if settings() is None:
        return
    if "torch" in sys.modules:
        hook(sys.modules["torch"], stack)
    else:
        sys.meta_path.insert(0, Finder(stack))


class Finder:
    """Finds torch as others do, and hooks it after it has been imported."""

    def __init__(self, stack: ExitStack | None) -> None:
        self.searching, self.stack = False, stack

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.searching = False
        loader: Any = None if spec is None else spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                hook(module, self.stack)

        loader.exec_module = exec_module
        return spec


def hook(torch: Any, stack: ExitStack | None = None, plays: bool = True) -> None:
    """Wrap torch's functions, and have the CPU play GPUs, until the stack ends if there is one."""
    about = settings()
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if about is None or c10d is None or not hasattr(c10d, "init_process_group"):
        return
    if about["devices"] and plays:
        client().play_devices(about["devices"], stack)
    for name in WRAPPED:
        genuine = getattr(c10d, name)
        wrapper = _wrapper(name, genuine)
        for module in [sys.modules[each] for each in BOUND if each in sys.modules]:
            if getattr(module, name, None) is genuine:
                _replace(stack, module, name, wrapper)
    spawning = sys.modules["torch.multiprocessing.spawn"]
    for owner in (multiprocessing.process.BaseProcess, spawning.ProcessContext):
        _replace(stack, owner, "join", _joining(owner.join))


def _replace(stack: ExitStack | None, owner: Any, name: str, new: Any) -> None:
    if stack is not None:
        stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def _joining(genuine: Callable[..., Any]) -> Callable[..., Any]:
    """A `join` that tells the hub that the process waits, and for whom: it starts none meanwhile.

    A thread beside it might start one.
    """

    @functools.wraps(genuine)
    def join(self: Any, timeout: float | None = None, *args: Any, **named: Any) -> Any:
        about = settings() if timeout is None and threading.active_count() == 1 else None
        if about is None:
            return genuine(self, timeout, *args, **named)
        pids = self.pids() if hasattr(self, "pids") else [self.pid]
        with socket.socket(socket.AF_UNIX) as end:
            with suppress(OSError, TypeError):  # a process that has not begun: an error of join's
                end.connect(f"\0{about['name']}")
                hello = {"token": about["token"], "joins": pids}
                end.sendall(json.dumps(hello).encode() + b"\n")
            return genuine(self, timeout, *args, **named)

    return join


def _wrapper(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(genuine)
    def function(*args: Any, **named: Any) -> Any:
        if settings() is None:  # the program has removed it
            return genuine(*args, **named)
        return getattr(client(), name)(genuine, *args, **named)

    setattr(function, "gpusim_genuine", genuine)  # noqa: B010  # mypy knows no such attribute
    return function


def client() -> Any:
    """The module that does it; it may be on the path of the command alone."""
    about = settings()
    assert about is not None
    try:
        return importlib.import_module(about["client"])
    except ModuleNotFoundError as error:
        if error.name != about["client"].partition(".")[0]:
            raise
    sys.path.append(about["path"])
    return importlib.import_module(about["client"])
