"""The part of torch's private interface that gpusim uses: all of it, and nothing of it elsewhere.

A torch that lacks one of these names fails here, on import, and `tests/torch/test_private.py` shows
what each has to do. The operations on lists of tensors, `torch._foreach_...`, are private by their
names only: PyTorch documents them, and its optimizers consist of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._decomp import decomposition_table as decomposed
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack as outside_transform
from torch._ops import OpOverload, _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data._utils import fetch

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FETCHERS",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TENSOR_ATTRIBUTES",
    "TorchDispatchMode",
    "VmapTransform",
    "backward_class",
    "below_batching",
    "decomposed",
    "disable_modes",
    "dispatch_flags_kept",
    "function_modes",
    "in_backward",
    "innermost_vmap",
    "is_plain",
    "is_transformed",
    "operators_are_seen",
    "outside_transform",
    "plain_kernels",
    "schema_of",
    "seed_of_tests",
    "storage_key",
    "tree_leaves",
    "tree_map_only",
    "untransformed",
    "vmap_flat",
]

#: The attributes that all tensors have, as descriptors.
TENSOR_ATTRIBUTES: Mapping[str, Any] = vars(torch._C.TensorBase)

#: The classes whose `fetch` reads what a DataLoader's next batch consists of.
FETCHERS = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)

_functorch: Any = torch._C._functorch
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
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


class VmapTransform(NamedTuple):
    """A torch.vmap that runs: its level among the transforms, and its size."""

    level: int
    size: int

    def unwrap(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """The tensor below, and its batch dimension; None if it has none."""
        below: tuple[Tensor, int | None] = _functorch._unwrap_batched(tensor, self.level)
        return below

    def wrap(self, tensor: Tensor) -> Tensor:
        """The tensor inside this vmap that has dimension 0 of `tensor` as batch dimension."""
        inside: Tensor = _functorch._add_batch_dim(tensor, 0, self.level)
        return inside


def vmap_flat(
    function: Callable[..., Iterable[Tensor]],
    dims: Sequence[int | None],
    size: int,
    randomness: str,
    arguments: Sequence[Any],
) -> list[Tensor]:
    """torch.func.vmap of a function whose results are tensors; their batch dimension is 0.

    torch.func.vmap flattens and checks arguments that are flat and checked, and looks for an
    exporter at each of them: that takes several times as long.
    """
    if operators_are_seen() or torch.compiler.is_compiling():  # these record torch's function
        return [*torch.func.vmap(function, tuple(dims), 0, randomness)(*arguments)]
    level = _functorch._vmap_increment_nesting(size, randomness)
    try:
        inside = [
            x if dim is None else _functorch._add_batch_dim(x, dim, level)
            for x, dim in zip(arguments, dims, strict=True)
        ]
        return [_functorch._remove_batch_dim(x, level, size, 0) for x in function(*inside)]
    finally:
        _functorch._vmap_decrement_nesting()


def below_batching() -> AbstractContextManager[Any]:
    """A block of a batching rule, which calls operators of the transform below the vmap."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_BATCHED)
    return guard


def innermost_vmap() -> VmapTransform | None:
    """The innermost of torch's function transforms, if it is a vmap."""
    inner = _functorch.peek_interpreter_stack()
    if inner is None or inner.key() != _functorch.TransformType.Vmap:
        return None
    vmap = _functorch.CVmapInterpreterPtr(inner)
    return VmapTransform(vmap.level(), vmap.batchSize())


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether operations on the tensors only compute: no transform, tracer or autograd is told."""
    if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    recorded = torch.is_grad_enabled()
    for x in tensors:
        if type(x) not in (Tensor, Parameter) or (recorded and x.requires_grad):
            return False
    return True


def operators_are_seen() -> bool:
    """Whether a mode sees the operators that this thread calls: that of a tracer, for example."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
    )


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


def in_backward() -> bool:
    """Whether this thread runs a backward pass, in which checkpoints compute modules again."""
    return bool(torch._C._current_graph_task_id() != -1)


def seed_of_tests() -> None:
    """Seed the generators of Python, NumPy and torch as PyTorch seeds them before its own tests."""
    from torch.testing._internal import common_utils  # takes long to import

    common_utils.set_rng_seed()
