"""Replicas one at a time: each in a thread, up to its next collective.

For models that cannot be traced, because they decide on values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import torch as gt
from ...reduction import State as Calls
from ...reduction import current, entered
from ...torch.private import TorchDispatchMode
from ..axis import AXIS
from .attributes import Attributes, preserve_attributes
from .draws import Draws, seed_torch
from .forward import ForwardMode, track_modules
from .random_operators import TABLE, is_random
from .results import GRADIENT, MicroBatch, Step, Summary
from .state import ModelState, parameter_changed
from .structures import flatten, flatten_like, flatten_outputs

__all__ = ["Threads"]


@dataclass
class Replica:
    """The results of the forward and the backward pass of one replica.

    **Attributes**:

    - `outputs`: what the model returned, detached.
    - `gradients`: of the parameters that require them; None if the loss does not reach it.
    - `buffers`, `inputs`: their values afterwards.
    - `changed`: which of parameters, buffers and inputs changed in place.
    - `anchors`: the anchored tensors, and gradients of computed tensors.
    - `loss`: the loss that was differentiated.
    - `mode`: the mode in which forward ran.
    """

    outputs: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    changed: list[bool]
    anchors: dict[str, Tensor]
    loss: Tensor | None
    mode: ForwardMode


class DrawingMode(TorchDispatchMode):
    """Lets random operators draw from the stream of a replica."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = TABLE.get(func)
        if rule is not None:
            return rule(self._draws, *args, **(kwargs or {}))
        if is_random(func):
            with seed_torch(self._draws):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Threads:
    """A model that runs once for each replica.

    One replica runs at a time, so the model's Python need not be thread-safe. Each has its own
    parameters, buffers and random numbers.
    """

    name = "threads"

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[list[Tensor]], Any],
        state: ModelState,
        *,
        training: bool,
        wanted: frozenset[str],
    ) -> None:
        self._model = model
        self._call = call
        self._state = state
        self._training = training
        self._wanted = wanted
        self.summary = Summary()

    def inspect(self, inputs: Sequence[Tensor], stream: Tensor) -> None:
        """Run once with the model's own parameters, to make the summary."""
        count = len(stream)
        preserved = preserve_attributes(self._model, self._state)
        with preserved, entered(Calls(current().reduction)):  # calls of its own, not counted
            batch = MicroBatch(
                {name: _expanded(x, count) for name, x in self._state.parameters.items()},
                {name: _expanded(x, count) for name, x in self._state.buffers.items()},
                [_expanded(x, count) for x in inputs],
                stream,
                torch.ones(()),
            )
            replicas = self._run_all(batch)
        first = replicas[0]
        names = [*self._state.buffers]
        before = len(self._state.parameters)
        changed = [any(each) for each in zip(*(one.changed for one in replicas), strict=True)]
        buffers = changed[before : before + len(names)]
        self.summary = Summary(
            trained=tuple(
                name
                for name in first.gradients
                if any(one.gradients[name] is not None for one in replicas)
            ),
            changed_buffers=tuple(
                name
                for name, on in zip(names, buffers, strict=True)
                if on
                or any(not _same(one.buffers[name], self._state.buffers[name]) for one in replicas)
            ),
            changed_inputs=tuple(
                place for place, on in enumerate(changed[before + len(names) :]) if on
            ),
            names=tuple(first.mode.names),
            losses=tuple(mark.name for mark in first.mode.losses.marks),
            differentiated=tuple(first.mode.differentiated),
        )

    def run(self, batch: MicroBatch) -> Step:
        """Run one micro-batch."""
        replicas = self._run_all(batch)
        first, summary = replicas[0], self.summary
        outputs = _stacked(
            "outputs", [flatten_like(first.outputs, one.outputs) for one in replicas]
        )
        gradients = {
            name: torch.stack(
                [_or_zeros(one.gradients[name], batch.parameters[name][0]) for one in replicas]
            )
            for name in summary.trained
        }
        changed = _stacked("inputs", [one.inputs for one in replicas])
        by_name = [[one.anchors[n] for n in first.anchors if n in one.anchors] for one in replicas]
        anchors = _stacked("anchors", by_name)
        losses = [one.loss for one in replicas if one.loss is not None]
        return Step(
            outputs=flatten(first.outputs)[1](iter(outputs)),
            gradients=gradients,
            buffers={
                name: torch.stack([one.buffers[name] for one in replicas])
                for name in self._state.buffers
            },
            changed_inputs={place: changed[place] for place in summary.changed_inputs},
            anchors=dict(zip(first.anchors, anchors, strict=True)),
            loss=torch.stack(losses) if losses else None,
        )

    def _run_all(self, batch: MicroBatch) -> list[Replica]:
        count = len(batch.stream)
        found: list[Any] = [None] * count
        attributes = Attributes(self._model, self._state)

        def replica(index: Tensor) -> tuple[()]:
            i = int(index)
            found[i] = self._run_one(
                i,
                {name: self._leaf(name, x[i]) for name, x in batch.parameters.items()},
                {name: x[i].detach().clone() for name, x in batch.buffers.items()},
                [x[i].detach().clone() for x in batch.inputs],
                Draws(batch.stream[i]),
                batch.scale,
            )
            return ()

        with self._state.per_thread(), track_modules(self._model), torch.enable_grad():
            gt.pmap(replica, AXIS, schedule="one")(torch.arange(count))
        attributes.check()
        return found

    def _leaf(self, name: str, x: Tensor) -> Tensor:
        own = x.clone() if x.is_inference() else x.detach()
        return own.requires_grad_(self._state.parameters[name].requires_grad)

    def _run_one(
        self,
        index: int,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: list[Tensor],
        draws: Draws,
        scale: Tensor,
    ) -> Replica:
        state = {**parameters, **buffers}
        leaves = [*state.values(), *inputs]
        versions = [x._version for x in leaves]
        memory = self._state.memory(state, inputs)
        mode = ForwardMode(draws, self._state.substitutes(state), self._wanted, index)
        mode.inputs = inputs
        for parameter in parameters.values():
            parameter._is_param = True  # isinstance(x, torch.nn.Parameter) looks at it
        with DrawingMode(draws), self._state.in_thread(state):
            with mode.active():
                result = self._call([*inputs])
            self._state.check(state)
            memory.check()
            outputs, rebuild = flatten_outputs(result)
            mode.check(outputs)
            loss = mode.losses.final() if self._training else None
            draws.end()
            gradients = _gradients(loss, parameters, scale, retain=bool(mode.differentiated))
            inner = _gradients(loss, mode.differentiated, scale)
        changed = [x._version > version for x, version in zip(leaves, versions, strict=True)]
        for name, is_changed in zip(parameters, changed, strict=False):
            if is_changed:
                raise parameter_changed(name)
        anchors = {name: x.detach() for name, x in mode.anchored.items()}
        anchors |= {
            GRADIENT + name: _or_zeros(gradient, mode.differentiated[name])
            for name, gradient in inner.items()
        }
        return Replica(
            outputs=rebuild(mode.substitute(x).detach() for x in outputs),
            gradients=gradients,
            buffers=buffers,
            inputs=inputs,
            changed=changed,
            anchors=anchors,
            loss=None if loss is None else loss.detach(),
            mode=mode,
        )


def _gradients(
    loss: Tensor | None, tensors: dict[str, Tensor], scale: Tensor, *, retain: bool = False
) -> dict[str, Tensor | None]:
    """The gradients of tensors that require one; None if the loss does not reach the tensor."""
    wanted = {name: x for name, x in tensors.items() if x.requires_grad and loss is not None}
    if loss is None or not wanted or not loss.requires_grad:
        return dict.fromkeys(wanted)
    start = scale.to(loss).expand(loss.shape)
    leaves = [*wanted.values()]
    found = torch.autograd.grad(loss, leaves, start, retain_graph=retain, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _expanded(x: Tensor, count: int) -> Tensor:
    """A copy, the same for `count` replicas."""
    return x.detach().clone().expand(count, *x.shape)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _stacked(what: str, replicas: list[list[Tensor]]) -> list[Tensor]:
    """Stack the tensors of all replicas.

    **Raises**:

    - ValueError: if a replica's shapes or dtypes differ; it names the replica.
    """
    kinds = [[(x.dtype, tuple(x.shape)) for x in tensors] for tensors in replicas]
    for index, own in enumerate(kinds):
        if own != kinds[0]:
            raise ValueError(
                f"the replicas' {what} have different dtypes or shapes: replica 0 has {kinds[0]}, "
                f"replica {index} has {own}"
            )
    return [torch.stack(column) for column in zip(*replicas, strict=True)]
