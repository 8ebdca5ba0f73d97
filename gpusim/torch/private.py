"""What gpusim uses of torch's private interface: all of it, and nothing of it elsewhere.

A torch that lacks one of these names fails here, on import, and `tests/torch/test_private.py` shows
what each has to do. The operations on lists of tensors, `torch._foreach_...`, are private by their
names only: PyTorch documents them, and its optimizers consist of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TENSOR_ATTRIBUTES",
    "TorchDispatchMode",
    "backward_class",
    "disable_modes",
    "dispatch_flags_kept",
    "function_modes",
    "is_transformed",
    "plain_kernels",
    "schema_of",
    "storage_key",
    "tree_leaves",
    "tree_map_only",
    "untransformed",
]

#: The attributes that all tensors have, as descriptors.
TENSOR_ATTRIBUTES: Mapping[str, Any] = vars(torch._C.TensorBase)

_functorch: Any = torch._C._functorch
_set_onednn: Any = torch._C._set_mkldnn_enabled
_fakes = logging.getLogger(FakeTensorMode.__module__)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor stands for another in torch.vmap or in a derivative."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor below all of torch's function transforms."""
    while is_transformed(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that the storages of two tensors have in common if they are one, while it lives."""
    return int(storage._cdata)


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that a function puts into the graph of the backward pass."""
    kind: type = function._backward_cls
    return kind


def schema_of(operator: Any) -> Any:
    """The schema of an operator, or None for other functions."""
    return getattr(operator, "_schema", None)


@contextmanager
def dispatch_flags_kept() -> Iterator[None]:
    """Leave torch's flags of dispatch modes as they are before the block.

    The stack of modes belongs to a thread, but the flags that say whether there is any to the
    process. Threads that enter and leave modes in turns leave them set, and torch then takes all
    that follows, and what Dynamo compiles, to be in a mode.
    """
    flags: Any = vars(dispatch)
    names = [name for name in flags if name.startswith("_is_in_")]
    before = {name: flags[name] for name in names}
    try:
        yield
    finally:
        flags.update(before)
        on = before["_is_in_any_mode_without_ignore_compile_internals"]
        dispatch.set_is_in_mode_without_ignore_compile_internals(on)


def _nothing(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Avoid fused kernels without a batching rule or gradient inside the block.

    oneDNN's operators have neither, and nor has the fast path of attention. Messages of torch about
    functions that it cannot batch or trace are suppressed: there is a fallback for them.
    """
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _set_onednn(False)
    _functorch._set_vmap_fallback_warning_enabled(False)
    _fakes.addFilter(_nothing)
    try:
        yield
    finally:
        _fakes.removeFilter(_nothing)
        _functorch._set_vmap_fallback_warning_enabled(True)
        torch.backends.mha.set_fastpath_enabled(fast)
        _set_onednn(onednn)
