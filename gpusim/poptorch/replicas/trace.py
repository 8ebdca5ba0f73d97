"""A model's forward pass, run once for one replica and written down as a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ...torch import trace_axes
from ...torch.operators import Level
from ..axis import AXIS
from .attributes import Attributes, attributes_kept
from .decompositions import Untraceable, check_traced, table
from .draws import Draws
from .passes import add_taps, batch_mutated, running_statistics
from .results import Summary
from .state import State, parameter_changed
from .structures import Rebuild, flatten_outputs
from .watch import Watch, named_modules_entered

__all__ = ["Trace", "fake_like", "plain_kernels", "trace"]


@dataclass(frozen=True)
class Trace:
    """A traced forward pass.

    Attributes:
        graph: takes the parameters, the buffers, the inputs and a stream, and returns a list: the
            loss (in training), the outputs, the buffers after, the inputs after, the anchors.
        state: the model's parameters and buffers.
        inputs: those that it was traced with.
        training: whether there is a loss.
        outputs: how many there are.
        rebuild: what makes of them what the model returned.
        anchors: the names of the tensors that were asked for.
        taps: what is like the graph's further arguments, zeros that are added to the tensors whose
            gradients are wanted.
        summary: what else is to be known.
    """

    graph: GraphModule
    state: State
    inputs: list[Tensor]
    training: bool
    outputs: int
    rebuild: Rebuild
    anchors: tuple[str, ...]
    taps: list[Tensor]
    summary: Summary


def trace(
    model: nn.Module,
    call: Callable[[list[Tensor]], Any],
    state: State,
    inputs: list[Tensor],
    *,
    training: bool,
    total: int,
    wanted: frozenset[str],
) -> Trace:
    """Trace the model's forward pass.

    Args:
        model: the model, whose parameters and buffers are `state`.
        call: runs its forward pass on inputs.
        inputs: of one replica; their values are not looked at.
        training: whether a loss is looked for.
        total: the number of replicas on all instances.
        wanted: the names of tensors to return.

    Raises:
        Untraceable: where a graph would be another program.
        Error: where there is no loss, or more than one; for parameters, buffers and inputs
            reassigned, other tensors of the model changed, and outputs of unknown types.
    """
    with attributes_kept(model, state) as attributes:
        run = Run(call, state, attributes, training, wanted)
        given = [*state.parameters.values(), *state.buffers.values(), *inputs]
        graph = _traced(run, model, given, total)
    parameters, buffers = [*state.parameters], [*state.buffers]
    before, after = len(parameters), len(parameters) + len(buffers)
    *places, stream = (node for node in graph.graph.nodes if node.op == "placeholder")
    by_operators = running_statistics(graph.graph)
    changed = [on or place in by_operators for on, place in zip(run.changed, places, strict=True)]
    for name, is_changed in zip(parameters, changed, strict=False):
        if is_changed:
            raise parameter_changed(name)
    buffers_changed = [place for place, on in zip(places, changed, strict=True) if on]
    taps = add_taps(graph.graph, len(run.watch.differentiated), stream)
    batch_mutated(graph.graph, [*buffers_changed, *places[after:], stream], stream)
    graph.recompile()
    return Trace(
        graph=graph,
        state=state,
        inputs=inputs,
        training=training,
        outputs=run.outputs,
        rebuild=run.rebuild,
        anchors=tuple(run.watch.anchored),
        taps=taps,
        summary=Summary(
            trained=tuple(n for n, on in zip(parameters, run.trained, strict=True) if on),
            changed_buffers=tuple(
                n for n, on in zip(buffers, changed[before:after], strict=True) if on
            ),
            changed_inputs=tuple(n for n in range(len(inputs)) if changed[after + n]),
            names=tuple(run.watch.names),
            losses=tuple(mark.name for mark in run.watch.losses.marks),
            differentiated=tuple(run.watch.differentiated),
        ),
    )


class Run:
    """The forward pass as make_fx runs it, and what it shows.

    Attributes:
        watch: the losses and the names.
        changed: which of its arguments changed in place.
        trained: which of the parameters the loss's gradient reaches.
        outputs, rebuild: how many there are, and what makes of them what the model returned.
    """

    watch: Watch
    changed: list[bool]
    trained: list[bool]
    outputs: int
    rebuild: Rebuild

    def __init__(
        self,
        call: Callable[[list[Tensor]], Any],
        state: State,
        attributes: Attributes,
        training: bool,
        wanted: frozenset[str],
    ) -> None:
        self._call = call
        self._state = state
        self._attributes = attributes
        self._training = training
        self._wanted = wanted

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        """The parameters, the buffers, the inputs and a stream in; a list as of `Trace` out."""
        state = self._state
        *tensors, stream = leaves
        parameters = tensors[: len(state.parameters)]
        named = len(state.parameters) + len(state.buffers)
        given = dict(zip([*state.parameters, *state.buffers], tensors[:named], strict=True))
        versions = [x._version for x in tensors]
        self.watch = Watch(Draws(stream), state.instead(given), self._wanted)
        self.watch.inputs = inputs = tensors[named:]
        memory = state.memory(given, inputs)
        with state.kept():
            with self.watch.watching():
                result = self._call([*inputs])
            state.check(given)
        memory.check()
        self._attributes.check()
        self.changed = [x._version > v for x, v in zip(tensors, versions, strict=True)]
        results, self.rebuild = flatten_outputs(result)
        for check in self.watch.at_end:
            check(results)
        outputs = [self.watch.own(x) for x in results]
        self.outputs = len(outputs)
        loss = [self.watch.losses.final()] if self._training else []
        self.trained = _reached(loss, parameters)
        _refuse_functions(loss)
        anchored = [*self.watch.anchored.values(), *self.watch.differentiated.values()]
        return [*loss, *outputs, *tensors[len(parameters) :], *anchored]


def _traced(run: Run, model: nn.Module, given: list[Tensor], total: int) -> GraphModule:
    device = next((x.device for x in given), None)
    stream = torch.empty(3, dtype=torch.int64, device=device)
    with ExitStack() as entered:
        entered.enter_context(trace_axes({AXIS: total}))
        entered.enter_context(named_modules_entered(model))
        entered.enter_context(plain_kernels())
        entered.enter_context(torch.enable_grad())
        graph: GraphModule = make_fx(
            run.forward,
            decomposition_table=table(lambda: run.watch.draws),
            tracing_mode="fake",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
        )(*fake_like([*given, stream]))
    for node in graph.graph.nodes:
        check_traced(node)
    return graph


def fake_like(tensors: Sequence[Tensor], shapes: Sequence[Any] | None = None) -> list[Tensor]:
    """Tensors without values, all of one mode: of the same shapes, unless others are given, dtypes
    and devices, and leaves that require grad if these do."""
    chosen = [x.shape for x in tensors] if shapes is None else shapes
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [
            torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
            for x, shape in zip(tensors, chosen, strict=True)
        ]


FAKES = logging.getLogger("torch._subclasses.fake_tensor")


def _nothing(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def plain_kernels() -> Iterator[None]:
    """A block in which torch uses no fused kernels that know no batches and no gradients, and says
    nothing of what it has no batched kernel for, or cannot trace: there are other ways."""
    set_warning: Any = vars(torch._C._functorch)["_set_vmap_fallback_warning_enabled"]
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    set_warning(False)
    FAKES.addFilter(_nothing)
    try:
        yield
    finally:
        FAKES.removeFilter(_nothing)
        set_warning(True)
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)


def _reached(losses: list[Tensor], parameters: list[Tensor]) -> list[bool]:
    """Which parameters the loss's gradient reaches."""
    leaves = {id(x) for x in losses}
    leaves |= {id(node.variable) for node in _backward(losses) if hasattr(node, "variable")}
    return [x.requires_grad and id(x) in leaves for x in parameters]


def _refuse_functions(losses: list[Tensor]) -> None:
    """Raise for torch.autograd.Functions, of which a graph would lose the backward pass.

    Raises:
        Untraceable: naming it.
    """
    for node in _backward(losses):
        kind = type(node)
        if not issubclass(kind, torch.autograd.function.BackwardCFunction):
            continue
        of_operator = kind.__name__.startswith("GeneratedBackwardFor")  # torch.library's
        if not of_operator and kind is not Level._backward_cls:
            raise Untraceable(f"{kind.__name__} is of a torch.autograd.Function")


def _backward(results: list[Tensor]) -> Iterator[Any]:
    """The nodes of the backward pass, each once."""
    seen: set[Any] = set()
    pending: list[Any] = [x.grad_fn for x in results]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
