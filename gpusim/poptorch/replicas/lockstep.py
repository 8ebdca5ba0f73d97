"""All replicas at once: one graph of the forward pass and the gradients, over stacked values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ... import torch as gt
from ...torch.private import plain_kernels, storage_key
from ..axis import AXIS
from .cache import Cache
from .passes import call_directly, simplify
from .results import GRADIENT, MicroBatch, Step
from .trace import Trace, collection_paused, fake_like

__all__ = ["Lockstep"]

Axes = tuple[int | None, ...]


class Lockstep:
    """A trace, run for a number of replicas.

    The graph has no vmap and no autograd: both were traced through. There is one graph for each
    set of parameters and buffers that differ between the replicas.
    """

    name = "lockstep"

    def __init__(self, trace: Trace, replicas: int, cache: Cache) -> None:
        self.summary = trace.summary
        self._trace = trace
        self._replicas = replicas
        self._cache = cache
        self._graphs: dict[Axes, GraphModule] = {}
        self._names = [*trace.state.parameters, *trace.state.buffers]
        self._trained = [self._names.index(name) for name in trace.summary.trained]
        self._tapped = trace.summary.differentiated if trace.training else ()
        changed = [self._names.index(name) for name in trace.summary.changed_buffers]
        self._changed = changed + [
            len(self._names) + place for place in trace.summary.changed_inputs
        ]
        alone = replicas == 1
        places = range(len(self._names))
        self._graph(tuple(0 if alone or place in changed else None for place in places))

    def run(self, batch: MicroBatch) -> Step:
        """Run one micro-batch."""
        state = [*batch.parameters.values(), *batch.buffers.values()]
        several = self._replicas > 1
        axes: list[int | None] = []
        operands = []
        for place, x in enumerate(state):
            # equal on all replicas, in memory once
            shared = several and x.stride(0) == 0 and place not in self._changed
            axes.append(None if shared else 0)
            operands.append(x[0] if shared else x)
        forward = self._graph(tuple(axes)).forward
        operands += [*batch.inputs, batch.stream, batch.scale]
        if torch.is_grad_enabled():
            with torch.no_grad():
                results = forward(*operands)
        else:
            results = forward(*operands)
        return self._step(iter(results), [*state, *batch.inputs])

    def _step(self, results: Iterator[Tensor], operands: list[Tensor]) -> Step:
        trace, summary = self._trace, self.summary
        gradients = dict(zip(summary.trained, results, strict=False))
        taps = {GRADIENT + name: next(results) for name in self._tapped}
        loss = next(results) if trace.training else None
        outputs = trace.rebuild(_fresh(results, trace.outputs, operands))
        buffers = dict(zip(trace.state.buffers, results, strict=False))
        inputs = list(islice(results, len(operands) - len(self._names)))
        return Step(
            outputs=outputs,
            gradients=gradients,
            buffers=buffers,
            changed_inputs={place: inputs[place] for place in summary.changed_inputs},
            anchors=dict(zip(trace.anchors, results, strict=True)) | taps,
            loss=loss,
        )

    def _graph(self, axes: Axes) -> GraphModule:
        graph = self._graphs.get(axes)
        if graph is None:
            graph = self._graphs[axes] = self._build(axes)
            call_directly(graph)
        return graph

    def _build(self, axes: Axes) -> GraphModule:
        trace, count = self._trace, self._replicas
        like = [*trace.state.parameters.values(), *trace.state.buffers.values(), *trace.inputs]
        in_dims = (*axes, *(0 for _ in trace.inputs), 0, None)
        device = next((x.device for x in like), None)
        like = [x.detach() for x in like]
        like += [torch.empty(3, dtype=torch.int64, device=device), torch.empty((), device=device)]
        shapes = [
            x.shape if axis is None else (count, *x.shape)
            for x, axis in zip(like, in_dims, strict=True)
        ]
        mapped = gt.vmap(self._replica, in_dims=in_dims, axis_name=AXIS)

        def build() -> GraphModule:
            with plain_kernels(), collection_paused():
                graph: GraphModule = make_fx(
                    lambda *leaves: mapped(*leaves),
                    tracing_mode="fake",
                    _allow_non_fake_inputs=True,
                )(*fake_like(like, shapes))
            simplify(graph.graph)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            return graph

        about = {
            "like": [
                [str(x.dtype), str(x.device), [*s]] for x, s in zip(like, shapes, strict=True)
            ],
            "axes": in_dims,
            "replicas": count,
            "training": trace.training,
            "trained": self._trained,
            "changed": self._changed,
            "taps": [[str(x.dtype), str(x.device), [*x.shape]] for x in trace.taps],
        }
        return self._cache.graph(trace.graph, about, build)

    def _replica(self, *leaves: Tensor) -> list[Tensor]:
        """The forward and backward pass of one replica: gradients, then the trace's results."""
        *values, scale = leaves
        taps = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in self._trace.taps]
        if not self._trace.training:
            return list(self._trace.graph(*self._copied(values), *taps))

        def forward(primals: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            own = self._copied(values)
            for place, tensor in zip(self._trained, primals, strict=False):
                own[place] = tensor
            results = list(self._trace.graph(*own, *primals[len(self._trained) :]))
            return results[0], [results[0].detach(), *results[1:]]

        primals = [*(values[place] for place in self._trained), *taps]
        found: Any = torch.func.vjp(forward, primals, has_aux=True)
        loss, pull, results = found
        (gradients,) = pull(scale.to(loss.dtype).expand(loss.shape))
        return [*gradients, *results]

    def _copied(self, values: list[Tensor]) -> list[Tensor]:
        """The values, with copies of those that change in place."""
        return [x.clone() if place in self._changed else x for place, x in enumerate(values)]


def _fresh(values: Iterator[Tensor], count: int, operands: list[Tensor]) -> Iterator[Tensor]:
    """The next `count` values, copied if they share memory with an operand."""
    taken = {storage_key(x.untyped_storage()) for x in operands}
    fresh = list(islice(values, count))
    for place, value in enumerate(fresh):
        if storage_key(value.untyped_storage()) in taken:
            fresh[place] = value.clone()
    return iter(fresh)
