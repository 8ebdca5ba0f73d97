"""Block, BeginBlock and BlockFunction: the blocks that a model's operations belong to.

They act only while a model is compiled. Results do not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from ..poptorch_core import createPoptorchError
from .placement import current_recorder

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "module_repr",
    "removeBlocks",
]

P = ParamSpec("P")
R = TypeVar("R")


class Block(nn.Module):
    """A block of a model: the operations inside `with` belong to it.

    After the end of a block no block is active, so a model that uses Block must have all its
    operations in blocks. A Block can be entered repeatedly, and be an attribute of a model, whose
    state_dict it does not change.

    **Arguments**

    - `user_id`: the block's name in the execution strategy; blocks with the same name are one. None
      stands for the next of "0", "1", ...; a number stands for its digits.
    - `ipu_id`: the IPU of the replica, from 0, unless the strategy names another one.

    **Raises**, when the model is compiled

    - AssertionError for ids of other types, for a block that the strategy does not know, and for a
      block without an IPU.
    - poptorch.Error for operations outside of blocks, and the errors of the strategies.

    >>> import torch
    >>> with Block("encoder", ipu_id=0):  # outside a compilation it does nothing
    ...     x = torch.zeros(2) + 1
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from "0" again. Call it at the beginning of forward."""
        recorder = current_recorder()
        if recorder is not None:
            recorder.reset_auto_id()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that ends when another one begins."""
        recorder = current_recorder()
        if recorder is not None:
            recorder.begin(user_id, ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *_: object) -> None:
        recorder = current_recorder()
        if recorder is not None:
            recorder.end()

    def extra_repr(self) -> str:
        return f"user_id={self._user_id!r}, ipu_id={self._ipu_id!r}"


class _BlockHook:
    """Begins a block before a module runs. It is pickled and copied with the module."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *_: object) -> None:
        begin(self, self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(nn.Module):
    """A function that begins a block, as `BeginBlock` returns it.

    Arguments are those of `BeginBlock`. Calling it calls the function with the same arguments.
    """

    def __init__(
        self,
        layer_to_call: Callable[..., Any],
        user_id: str | None = None,
        ipu_id: int | None = None,
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        begin(self, self._user_id, self._ipu_id)
        return self._layer_to_call(*input, **kwargs)

    def extra_repr(self) -> str:
        return f"user_id={self._user_id!r}, ipu_id={self._ipu_id!r}"


def begin(owner: object, user_id: str | None, ipu_id: int | None) -> None:
    """Begin a block; without a name, the owner keeps the first number that it gets."""
    recorder = current_recorder()
    if recorder is not None:
        named = recorder.auto_id_of(owner) if user_id is None else user_id
        recorder.begin(named, ipu_id)


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """Begin a block with a module of a model, in place.

    The module, its submodules and everything that runs after it belong to the block, until another
    one begins. Operations before the first block are on IPU 0. Parameters, state_dict and class of
    the module do not change. Copies and pickles of the module begin the block too.

    **Arguments**

    - `layer_to_call`: a module or a function. A function is not changed.
    - `user_id`, `ipu_id`: as for `Block`.

    **Returns**

    The module; for a function, a module that calls it.

    **Raises**: poptorch.Error for other values, and for a module that begins a block already.

    >>> import torch
    >>> BeginBlock(torch.nn.Linear(2, 3), "decoder", ipu_id=1)
    Linear(in_features=2, out_features=3, bias=True)
    """
    if not isinstance(layer_to_call, nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise createPoptorchError("module is not an instance of torch.nn.Module or function.")
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise createPoptorchError("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: run the function inside a `Block` with these ids.

    >>> @BlockFunction("decoder", ipu_id=1)
    ... def double(x):
    ...     return 2 * x
    >>> double(4)
    8
    """

    def decorator(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return wrapper

    return decorator


def removeBlocks(module: nn.Module) -> None:
    """Undo `BeginBlock` for a module and its submodules. AssertionError if it is not a module.

    >>> import torch
    >>> layer = BeginBlock(torch.nn.Linear(2, 3))
    >>> removeBlocks(layer)
    >>> _ = BeginBlock(layer)  # no error
    """
    assert isinstance(module, nn.Module), f"module: expected a torch.nn.Module, got {type(module)}"
    for each in module.modules():
        hooks = each._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _BlockHook)]:
            del hooks[key]


def module_repr(m: nn.Module) -> str:
    """`repr(m)`, with the arguments of `BeginBlock` before each module that begins a block.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    >>> _ = BeginBlock(model[1], "second", ipu_id=1)
    >>> print(module_repr(model))
    Sequential(
      (0): ReLU()
      (1): BeginBlock(user_id=second, ipu_id=1): Tanh()
    )
    """
    begins = "".join(
        f"{hook!r}: " for hook in m._forward_pre_hooks.values() if isinstance(hook, _BlockHook)
    )
    if not any(
        isinstance(hook, _BlockHook)
        for each in m.modules()
        if each is not m
        for hook in each._forward_pre_hooks.values()
    ):
        return begins + repr(m)  # containers shorten their lists of equal modules
    extra = m.extra_repr()
    lines = extra.split("\n") if extra else []
    for name, child in m._modules.items():
        shown = repr(child) if child is None else module_repr(child)
        lines.append(f"({name}): " + shown.replace("\n", "\n  "))
    inner = "".join(f"\n  {line}" for line in lines)
    return f"{begins}{m._get_name()}({inner}\n)"
