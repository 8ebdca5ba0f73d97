"""A forward pass while it runs: the model's context, and a mode that sees torch's functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...torch.private import TENSOR_ATTRIBUTES, tree_leaves, tree_map_only
from ..blocks.placement import Recorder, recording
from ..losses import LossFinder
from .draws import SEEDS, Draws, seeds
from .ipu_torch import (
    OVERRIDES,
    call,
    is_ipu,
    on_this_device,
    refuse_unsupported,
    strided_group_norm,
    with_int64_indices,
)
from .reads import watch
from .results import CHECKED, GRADIENT, INVALID

__all__ = [
    "MODEL_CONTEXT",
    "ForwardMode",
    "ModelContext",
    "forward_mode",
    "in_context",
    "model_context",
    "track_modules",
]


@dataclass(frozen=True)
class ModelContext:
    """The use of the model whose code runs. Operations of PopTorch depend on it.

    **Attributes**:

    - `training`: whether it is trained.
    - `compiling`: whether it is compiled: its code may run, but only for the shapes.
    - `options`: PopTorch's options, or None.
    - `replicas`: the numbers, in the whole program, of the replicas here.
    """

    training: bool
    compiling: bool
    options: Any
    replicas: Sequence[int] = (0,)


MODEL_CONTEXT: ContextVar[ModelContext | None] = ContextVar("gpusim model context", default=None)


def model_context() -> ModelContext | None:
    """The context of the model that runs; None outside of models that replicas run.

    >>> model_context() is None
    True
    """
    return MODEL_CONTEXT.get()


@contextmanager
def in_context(context: ModelContext) -> Iterator[None]:
    """Set the context inside the block."""
    token = MODEL_CONTEXT.set(context)
    try:
        yield
    finally:
        MODEL_CONTEXT.reset(token)


STRIDED = "groupNormStridedChannelGrouping"
"""PopART's option."""

ON_HOST = "gpusim_is_on_host"
"""The attribute of tensors that a forward pass makes without the model's inputs or state."""

ORDERED = {
    *("gt", "ge", "lt", "le", "gt_", "ge_", "lt_", "le_", "__gt__", "__ge__", "__lt__", "__le__"),
    *("greater", "greater_equal", "less", "less_equal"),
}
"""The names of comparisons that are invalid operations if an operand is a NaN."""

DATA = TENSOR_ATTRIBUTES["data"].__get__
"""x.data. x.detach() has the same value and memory, and in-place changes of it can be seen."""


class ForwardMode(TorchFunctionMode):
    """Sees each call of a function of torch: finds losses, names tensors, seeds random operators.

    **Attributes**:

    - `draws`: the random numbers of the replica.
    - `losses`: the losses.
    - `blocks`: the record of the model's blocks while it is compiled, else None.
    - `names`: the names of all tensors computed, in order.
    - `anchored`: copies of the anchored tensors, by name.
    - `differentiated`: the tensors whose gradients are anchored, by name. What follows is computed
      from these.
    - `inputs`: the model's inputs.
    - `uses`: how many functions have taken a tensor, by its id.
    - `checks`: functions to be called with the model's outputs.
    - `option_checks`: functions to be called after these.
    """

    def __init__(
        self,
        draws: Draws,
        substitutes: Mapping[int, Tensor],
        wanted: frozenset[str] = frozenset(),
        replica: int | None = None,
    ) -> None:
        """`substitutes` are the replica's tensors by the ids of the model's, which they replace
        wherever the model uses these. `wanted` are the names of anchored tensors. `replica` is the
        place of the replica among those here, None where the pass stands for all of them."""
        super().__init__()
        self.draws = draws
        self.losses = LossFinder(self.substitute)
        self.blocks: Recorder | None = None
        self.names: dict[str, None] = {}
        self.anchored: dict[str, Tensor] = {}
        self.differentiated: dict[str, Tensor] = {}
        self._substitutes = substitutes
        self._wanted = wanted
        self.inputs: list[Tensor] = []
        self.uses: Counter[int] = Counter()
        self.checks: list[Callable[[list[Tensor]], None]] = []
        self.option_checks: list[Callable[[], None]] = []
        context = model_context()
        options: Any = None if context is None else context.options
        self._has_options = options is not None
        popart = {} if options is None else options._Popart.options
        self._checked = bool(popart.get(CHECKED, False))
        self._strided = bool(popart.get(STRIDED, False))
        numbers = (0,) if context is None else context.replicas
        self._watch = watch(numbers if replica is None else [numbers[replica]])
        self._stack: list[str] = []
        self._scopes: list[str] = []
        self._counts: dict[str, int] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the forward pass inside the block."""
        token = _mode.set(self)
        if self._watch is not None:
            self._watch.begin(self._substitutes, self.inputs)
        try:
            with self.losses.active(), recording() as self.blocks, self:
                yield
        finally:
            _mode.reset(token)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SEEDS:
            return seeds(self.draws, *args, **kwargs)
        if func == DATA:
            func = Tensor.detach
        func = OVERRIDES.get(func, func)
        on_host = self._has_options and runs_on_host(args, kwargs)
        if self._has_options and not on_host:
            refuse_unsupported(func, args, kwargs)
        if self._strided and func is functional.group_norm:
            func = strided_group_norm
        args, kwargs = on_this_device(func, args, kwargs, self.draws.stream.device)
        operands = _tensors((args, kwargs))
        if any(id(x) in self._substitutes for x in operands):
            args, kwargs = tree_map_only(Tensor, self.substitute, (args, kwargs))
            operands = _tensors((args, kwargs))
        args, kwargs = with_int64_indices(func, args, kwargs)
        if self._checked and getattr(func, "__name__", "") in ORDERED:
            name = f"{INVALID}comparison {len(self.anchored)}"
            self.anchored[name] = torch.stack([x.isnan().any() for x in operands]).any()
        if self._watch is not None:
            self._watch.before(func, args, kwargs)
        result = call(func, args, kwargs)
        results = _tensors(result)
        outcome = operands[:1] if func is Tensor.__setitem__ else results
        mark(outcome, on_host)
        if self._watch is not None:
            self._watch.after(operands, outcome)
        self.losses.record(func, operands, outcome)
        if self.blocks is not None and outcome:
            self.blocks.record(func, operands, outcome)
        if not results:
            return result
        self.uses.update(map(id, operands))
        copies = self.name_results(getattr(func, "__name__", str(func)).strip("_"), results)
        if copies:
            result = tree_map_only(Tensor, lambda x: copies.get(id(x), x), result)
            mark(_tensors(result), on_host)
            if self._watch is not None:
                self._watch.after(operands, _tensors(result))
        return result

    def check(self, outputs: list[Tensor]) -> None:
        """Call the checks of a model that has returned the outputs."""
        for check in self.checks:
            check(outputs)
        for check_option in self.option_checks:
            check_option()

    def substitute(self, x: Tensor) -> Tensor:
        """The replica's tensor for one of the model, or `x` itself."""
        return self._substitutes.get(id(x), x)

    def name_results(self, operator: str, results: list[Tensor]) -> dict[int, Tensor]:
        """Name the results of an operator: "encoder.linear1/linear:0".

        **Returns**: Copies of the results whose gradients are anchored, by the ids of the results.
        """
        copies: dict[int, Tensor] = {}
        base = "/".join(filter(None, [*self._stack[-1:], operator]))
        repeat = self._counts[base] = self._counts.get(base, -1) + 1
        for number, tensor in enumerate(results):
            name = f"{base}{f'/{repeat}' if repeat else ''}:{number}"
            self.names[name] = None
            if self.blocks is not None:
                self.blocks.name_result(name, tensor)
            if name in self._wanted:
                self.anchored[name] = tensor.clone()
            if GRADIENT + name in self._wanted and tensor.is_floating_point():
                copy = self.differentiated[name] = copies[id(tensor)] = tensor.clone()
                self.losses.record(torch.clone, [tensor], [copy])
        return copies

    def enter(self, module: str) -> None:
        """Begin a module of that name."""
        self._stack.append("/".join(filter(None, [*self._scopes[-1:], module])))

    def leave(self) -> None:
        """End the module or scope that was entered last."""
        self._stack.pop()

    def enter_scope(self, name: str) -> None:
        """Begin a scope: names inside begin with its own, after those of the scopes around it."""
        self._stack.append("/".join(filter(None, [*self._stack[-1:], name])))
        self._scopes.append(self._stack[-1])

    def leave_scope(self) -> None:
        """End the scope that was entered last."""
        self._scopes.pop()
        self.leave()


def runs_on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function makes a tensor on the host, or takes only those that are made there.

    The compiler does not see it: what is refused on an IPU is allowed.
    """
    if is_ipu(kwargs.get("device")) or any(is_ipu(each) for each in args):
        return False
    return all(getattr(each, ON_HOST, False) for each in _tensors((args, kwargs)))


def mark(tensors: list[Tensor], on_host: bool) -> None:
    """Note of tensors whether they are on the host. Those of the model's are never marked."""
    for each in tensors:
        if on_host or getattr(each, ON_HOST, False):
            setattr(each, ON_HOST, on_host)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


_mode: ContextVar[ForwardMode | None] = ContextVar("gpusim forward mode", default=None)


def forward_mode() -> ForwardMode | None:
    """The mode of the forward pass that runs here."""
    return _mode.get()


@contextmanager
def track_modules(model: nn.Module) -> Iterator[None]:
    """Tell forward modes, inside the block, which module of the model runs."""

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mode = _mode.get()
            if mode is not None:
                mode.enter(name)

        return hook

    def leave(*_: Any) -> None:
        mode = _mode.get()
        if mode is not None:
            mode.leave()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(enter(name), prepend=True)
            after = module.register_forward_hook(leave, always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield
