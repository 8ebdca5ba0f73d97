"""What is seen of a forward pass while it runs: its losses, and the names of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..blocks.placement import Recorder, recording
from ..losses import LossFinder
from .device import ABOUT_IPU, on_this_device
from .draws import SEEDS, Draws, seeds
from .phase import phase
from .results import GRADIENT
from .unsupported import refuse_unsupported

__all__ = ["Watch", "named_modules_entered", "watch"]

WANT_INT64: dict[Callable[..., Any], int] = {
    getattr(module, name): place
    for place, module, names in (
        (0, functional, "one_hot"),
        (1, functional, "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss"),
        (2, functional, "linear_cross_entropy"),
        (1, torch, "take take_along_dim"),
        (1, Tensor, "take take_along_dim"),
        (2, torch, "gather scatter scatter_add scatter_reduce index_fill index_copy"),
        (2, Tensor, "gather scatter scatter_add scatter_reduce index_fill index_copy"),
        (2, Tensor, "scatter_ scatter_add_ scatter_reduce_ index_fill_ index_copy_"),
    )
    for name in names.split()
    if hasattr(module, name)
}
"""Which operand PyTorch wants in int64, which an IPU has not: PopTorch takes int32."""


DATA = vars(torch._C.TensorBase)["data"].__get__
"""x.data; x.detach() is the same, but that changes in place can be seen."""


class Watch(TorchFunctionMode):
    """What the functions of torch do inside it.

    Attributes:
        draws: what its random operators draw from.
        losses: the losses.
        blocks: where the model's operations belong, if it is being compiled.
        names: of all tensors computed, in order.
        anchored: copies of those that are wanted, by name.
        differentiated: those whose gradients are wanted; what follows is computed from these.
        inputs: those of the model, and `uses`: by their ids, how many functions have taken them.
        at_end: what is to be called with the model's outputs.
    """

    def __init__(
        self, draws: Draws, instead: Mapping[int, Tensor], wanted: frozenset[str] = frozenset()
    ) -> None:
        """`instead` are the replica's own tensors by the ids of the model's, for which they stand
        wherever the model keeps these."""
        super().__init__()
        self.draws = draws
        self.losses = LossFinder()
        self.blocks: Recorder | None = None
        self.names: dict[str, None] = {}
        self.anchored: dict[str, Tensor] = {}
        self.differentiated: dict[str, Tensor] = {}
        self._instead = instead
        self._wanted = wanted
        self.inputs: list[Tensor] = []
        self.uses: Counter[int] = Counter()
        self.at_end: list[Callable[[list[Tensor]], None]] = []
        now = phase()
        self._of_ipu = now is not None and now.options is not None
        self._stack: list[str] = []
        self._scopes: list[str] = []
        self._counts: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block that is watched."""
        token = _watch.set(self)
        try:
            with self.losses.looking(), recording() as self.blocks, self:
                yield
        finally:
            _watch.reset(token)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SEEDS:
            return seeds(self.draws, *args, **kwargs)
        if func == DATA:
            func = Tensor.detach
        func = ABOUT_IPU.get(func, func)
        if self._of_ipu:
            refuse_unsupported(func, args, kwargs)
        args, kwargs = on_this_device(func, args, kwargs, self.draws.stream.device)
        operands = _tensors((args, kwargs))
        if any(id(x) in self._instead for x in operands):
            args, kwargs = tree_map_only(Tensor, self.own, (args, kwargs))
            operands = _tensors((args, kwargs))
        if func in WANT_INT64:
            place = WANT_INT64[func]
            args = (*args[:place], *map(_wide, args[place : place + 1]), *args[place + 1 :])
            named = {name: _wide(kwargs[name]) for name in ("target", "index") if name in kwargs}
            kwargs = kwargs | named
        result = func(*args, **kwargs)
        results = _tensors(result)
        changed = operands[:1] if func is Tensor.__setitem__ else []
        self.losses.saw(func, operands, changed or results)
        if self.blocks is not None and (changed or results):
            self.blocks.saw(func, operands, changed or results)
        if not results:
            return result
        self.uses.update(map(id, operands))
        instead = self.name(getattr(func, "__name__", str(func)).strip("_"), results)
        if not instead:
            return result
        return tree_map_only(Tensor, lambda x: instead.get(id(x), x), result)

    def own(self, x: Tensor) -> Tensor:
        """What stands for a tensor of the model."""
        return self._instead.get(id(x), x)

    def name(self, operator: str, results: list[Tensor]) -> dict[int, Tensor]:
        """Name the results of an operator: "encoder.linear1/linear:0".

        Returns:
            By their ids, what stands for those whose gradients are wanted.
        """
        instead: dict[int, Tensor] = {}
        base = "/".join(filter(None, [*self._stack[-1:], operator]))
        again = self._counts[base] = self._counts.get(base, -1) + 1
        for place, tensor in enumerate(results):
            name = f"{base}{f'/{again}' if again else ''}:{place}"
            self.names[name] = None
            if self.blocks is not None:
                self.blocks.named(name, tensor)
            if name in self._wanted:
                self.anchored[name] = tensor.clone()
            if GRADIENT + name in self._wanted and tensor.is_floating_point():
                own = self.differentiated[name] = instead[id(tensor)] = tensor.clone()
                self.losses.saw(torch.clone, [tensor], [own])
        return instead

    def enter(self, module: str) -> None:
        """A module of that name begins."""
        self._stack.append("/".join(filter(None, [*self._scopes[-1:], module])))

    def enter_scope(self, name: str) -> None:
        """What follows has this before its names, after those of where it is."""
        self._stack.append("/".join(filter(None, [*self._stack[-1:], name])))
        self._scopes.append(self._stack[-1])

    def leave_scope(self) -> None:
        """It ends."""
        self._scopes.pop()
        self.leave()

    def leave(self) -> None:
        """It ends."""
        self._stack.pop()


def _wide(x: Any) -> Any:
    return x.long() if isinstance(x, Tensor) and x.dtype == torch.int32 else x


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


_watch: ContextVar[Watch | None] = ContextVar("gpusim watch", default=None)


def watch() -> Watch | None:
    """What watches the forward pass that runs here."""
    return _watch.get()


@contextmanager
def named_modules_entered(model: nn.Module) -> Iterator[None]:
    """A block in which running watches know which module of the model runs."""

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            watch = _watch.get()
            if watch is not None:
                watch.enter(name)

        return hook

    def leave(*_: Any) -> None:
        watch = _watch.get()
        if watch is not None:
            watch.leave()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(enter(name), prepend=True)
            after = module.register_forward_hook(leave, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield
