"""Block, BeginBlock and BlockFunction: which block the operations of a model belong to.

They act while a model is compiled, and nowhere else: results do not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn

from ..poptorch_core import createPoptorchError
from .placement import current_recorder

__all__ = ["BeginBlock", "Block", "BlockFunction", "LegacyBeginBlockFn", "removeBlocks"]

P = ParamSpec("P")
R = TypeVar("R")


class Block(nn.Module):
    """A block of a model: what is computed inside `with` belongs to it.

    As an operation belongs to the block that was entered last, none belongs to a block after the
    end of one: whoever uses Block has to have all operations in blocks. One Block can be entered
    often, and kept as an attribute of a model, whose state_dict it does not change.

    **Arguments**

    - `user_id`: the block's name in the execution strategy; blocks with the same name are one. None
      for the next of "0", "1", ...; a number is as its digits.
    - `ipu_id`: the IPU of the replica, from 0, unless the strategy names another one.

    When the model is compiled: AssertionError for ids of other kinds, and for a block that the
    strategy does not know or for which nobody names an IPU; poptorch.Error for operations outside
    of blocks, and as the strategies say.

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
        """Number the blocks without a name from "0" again; for the beginning of forward."""
        recorder = current_recorder()
        if recorder is not None:
            recorder.reset_auto_id()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that goes on until another one begins."""
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
    """Begins a block before a module runs. As part of the module it is pickled and copied."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, *_: object) -> None:
        begin(self, self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(nn.Module):
    """A function that is the beginning of a block: what `BeginBlock` makes of one.

    Arguments as for `BeginBlock`. Calling it calls the function, with the same arguments.
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
    """Have a block begin with a module of a model, in place.

    The module, its submodules and whatever runs after it belong to the block, until another one
    begins; what runs before the first one is on IPU 0. Parameters, state_dict and class of the
    module stay as they are, and copies and pickles of it have the block, too.

    **Arguments**

    - `layer_to_call`: a module; or a function, which is not changed: a module that calls it is
      returned.
    - `user_id`, `ipu_id`: as for `Block`.

    **Returns**

    The module that was given.

    poptorch.Error for what is neither, and for a module with which a block begins already.

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
    """A decorator: the function runs inside of a `Block` with these ids.

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
    """Undo `BeginBlock` of a module and all its submodules. AssertionError for what is no module.

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
