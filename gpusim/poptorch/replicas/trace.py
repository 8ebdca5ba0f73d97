"""The trace of a model: its forward pass, run once for one replica and recorded as a graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ...torch import trace_axes
from ...torch.operators import VmapLevel
from ...torch.private import FakeTensorMode, backward_class, plain_kernels
from ..axis import AXIS
from .attributes import Attributes, preserve_attributes
from .decompositions import Untraceable, check_traced, table
from .draws import Draws
from .forward import ForwardMode, track_modules
from .passes import add_taps, batch_mutated, running_statistics
from .results import Summary
from .state import ModelState, parameter_changed
from .structures import Rebuild, flatten_outputs

__all__ = ["Trace", "collection_paused", "fake_like", "trace"]


@dataclass(frozen=True)
class Trace:
    """A traced forward pass.

    **Attributes**:

    - `graph`: takes the parameters, the buffers, the inputs, a stream and the taps. Returns a
      list: the loss (in training), the outputs, the buffers and the inputs afterwards, the
      anchors.
    - `state`: the model's parameters and buffers.
    - `inputs`: the inputs of the trace.
    - `training`: whether there is a loss.
    - `outputs`: the number of outputs.
    - `rebuild`: makes the structure that the model returned, around other outputs.
    - `anchors`: the names of the anchored tensors.
    - `taps`: tensors like the taps: zeros that are added to tensors whose gradients are anchored.
    - `summary`: the names, losses and changes in place.
    """

    graph: GraphModule
    state: ModelState
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
    state: ModelState,
    inputs: list[Tensor],
    *,
    training: bool,
    total: int,
    wanted: frozenset[str],
) -> Trace:
    """Trace the model's forward pass.

    **Arguments**:

    - `model`: the model, whose parameters and buffers are `state`.
    - `call`: runs its forward pass on inputs.
    - `inputs`: of one replica; their values are not used.
    - `training`: whether to find a loss.
    - `total`: the number of replicas on all instances.
    - `wanted`: the names of tensors to return.

    **Raises**:

    - Untraceable: if a graph cannot stand for the model.
    - Error: for a model without a loss or with several; for parameters, buffers and inputs that
      are reassigned, other tensors that are changed, and outputs of unknown types.
    """
    with preserve_attributes(model, state) as attributes:
        run = ForwardRun(call, state, attributes, training, wanted)
        leaves = [*state.parameters.values(), *state.buffers.values(), *inputs]
        graph = _traced(run, model, leaves, total)
        held = {*map(id, (*state.parameters.values(), *state.buffers.values()))}
        for node in graph.graph.nodes:
            check_traced(node, held)
    parameters, buffers = [*state.parameters], [*state.buffers]
    before, after = len(parameters), len(parameters) + len(buffers)
    *places, stream = (node for node in graph.graph.nodes if node.op == "placeholder")
    by_operators = running_statistics(graph.graph)
    changed = [on or place in by_operators for on, place in zip(run.changed, places, strict=True)]
    for name, is_changed in zip(parameters, changed, strict=False):
        if is_changed:
            raise parameter_changed(name)
    buffers_changed = [place for place, on in zip(places, changed, strict=True) if on]
    taps = add_taps(graph.graph, len(run.mode.differentiated), stream)
    batch_mutated(graph.graph, [*buffers_changed, *places[after:], stream], stream)
    graph.recompile()
    return Trace(
        graph=graph,
        state=state,
        inputs=inputs,
        training=training,
        outputs=run.outputs,
        rebuild=run.rebuild,
        anchors=tuple(run.mode.anchored),
        taps=taps,
        summary=Summary(
            trained=tuple(n for n, on in zip(parameters, run.trained, strict=True) if on),
            changed_buffers=tuple(
                n for n, on in zip(buffers, changed[before:after], strict=True) if on
            ),
            changed_inputs=tuple(n for n in range(len(inputs)) if changed[after + n]),
            names=tuple(run.mode.names),
            losses=tuple(mark.name for mark in run.mode.losses.marks),
            differentiated=tuple(run.mode.differentiated),
        ),
    )


class ForwardRun:
    """The forward pass as make_fx runs it, and its findings.

    **Attributes**:

    - `mode`: the losses and the names.
    - `changed`: which of its arguments changed in place.
    - `trained`: which of the parameters the loss's gradient reaches.
    - `outputs`, `rebuild`: the number of outputs, and the structure around them.
    """

    mode: ForwardMode
    changed: list[bool]
    trained: list[bool]
    outputs: int
    rebuild: Rebuild

    def __init__(
        self,
        call: Callable[[list[Tensor]], Any],
        state: ModelState,
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
        """Run on the parameters, the buffers, the inputs and a stream; returns as `Trace.graph`."""
        state = self._state
        *tensors, stream = leaves
        parameters = tensors[: len(state.parameters)]
        named = len(state.parameters) + len(state.buffers)
        own = dict(zip([*state.parameters, *state.buffers], tensors[:named], strict=True))
        versions = [x._version for x in tensors]
        self.mode = ForwardMode(Draws(stream), state.substitutes(own), self._wanted)
        self.mode.inputs = inputs = tensors[named:]
        memory = state.memory(own, inputs)
        with state.preserved():
            with self.mode.active():
                result = self._call([*inputs])
            state.check(own)
        memory.check()
        self._attributes.check()
        self.changed = [x._version > v for x, v in zip(tensors, versions, strict=True)]
        results, self.rebuild = flatten_outputs(result)
        self.mode.check(results)
        outputs = [self.mode.substitute(x) for x in results]
        self.outputs = len(outputs)
        loss = [self.mode.losses.final()] if self._training else []
        self.trained = _reached(loss, parameters)
        _refuse_functions(loss)
        anchored = [*self.mode.anchored.values(), *self.mode.differentiated.values()]
        return [*loss, *outputs, *tensors[len(parameters) :], *anchored]


def _traced(run: ForwardRun, model: nn.Module, leaves: list[Tensor], total: int) -> GraphModule:
    device = next((x.device for x in leaves), None)
    stream = torch.empty(3, dtype=torch.int64, device=device)
    with (
        trace_axes({AXIS: total}),
        track_modules(model),
        plain_kernels(),
        torch.enable_grad(),
        collection_paused(),
    ):
        graph: GraphModule = make_fx(
            run.forward,
            decomposition_table=table(lambda: run.mode.draws),
            tracing_mode="fake",
            pre_dispatch=True,
            _allow_non_fake_inputs=True,
        )(*fake_like([*leaves, stream]))
    return graph


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector: a trace would record what finalizers call, as part of the model.

    Generators are the usual ones. One that waits inside `torch.no_grad()` ends that when collected.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fake_like(tensors: Sequence[Tensor], shapes: Sequence[Any] | None = None) -> list[Tensor]:
    """Tensors without values, all of one fake mode.

    They have the dtypes and devices of `tensors`, the shapes too unless `shapes` are given, and
    require gradients if these do.
    """
    chosen = [x.shape for x in tensors] if shapes is None else shapes
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [
            torch.empty(shape, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)
            for x, shape in zip(tensors, chosen, strict=True)
        ]


def _reached(losses: list[Tensor], parameters: list[Tensor]) -> list[bool]:
    """Which parameters the loss's gradient reaches."""
    leaves = {id(x) for x in losses}
    leaves |= {id(node.variable) for node in _backward(losses) if hasattr(node, "variable")}
    return [x.requires_grad and id(x) in leaves for x in parameters]


def _refuse_functions(losses: list[Tensor]) -> None:
    """Raise Untraceable for a torch.autograd.Function: a graph would lose its backward pass."""
    for node in _backward(losses):
        kind = type(node)
        if not issubclass(kind, torch.autograd.function.BackwardCFunction):
            continue
        of_operator = kind.__name__.startswith("GeneratedBackwardFor")  # torch.library's
        if not of_operator and kind is not backward_class(VmapLevel):
            raise Untraceable(f"{kind.__name__} is of a torch.autograd.Function")


def _backward(results: list[Tensor]) -> Iterator[Any]:
    """The nodes of the backward pass, without repetitions."""

    seen: set[Any] = set()
    pending: list[Any] = [x.grad_fn for x in results]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
