"""Replicas one at a time: each in a thread of its own, up to its next collective. For models whose
Python has to run for every replica, as it decides on values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ... import torch as gt
from ...reduction import State as Calls
from ...reduction import current, entered
from ..axis import AXIS
from .attributes import Attributes, attributes_kept
from .draws import Draws, seeded_by
from .random_operators import TABLE, is_random
from .results import GRADIENT, Step, Summary
from .state import State, parameter_changed
from .structures import Rebuild, flatten_outputs
from .watch import Watch, named_modules_entered

__all__ = ["Threads"]


@dataclass
class Replica:
    """What the forward and the backward pass of one replica gave.

    Attributes:
        outputs, rebuild: the tensors, and what makes of them what the model returned.
        gradients: of the parameters that require them; None of those that the loss does not reach.
        buffers, inputs: afterwards.
        changed: which of parameters, buffers and inputs changed in place.
        anchors: the tensors that were asked for, and gradients of what was computed.
        loss: the one that was differentiated.
        watch: what else was seen.
    """

    outputs: list[Tensor]
    rebuild: Rebuild
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    changed: list[bool]
    anchors: dict[str, Tensor]
    loss: Tensor | None
    watch: Watch


class Drawing(TorchDispatchMode):
    """A replica's own random numbers, whatever operator draws them."""

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
            with seeded_by(self._draws):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Threads:
    """A model that runs for each replica by itself.

    One runs at a time, up to its next collective, so that the model's Python need not be safe in
    threads; each has its own parameters, buffers and random numbers.
    """

    execution = "threads"

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[list[Tensor]], Any],
        state: State,
        *,
        training: bool,
        wanted: frozenset[str],
    ) -> None:
        self._model = model
        self._call = call
        self._state = state
        self._training = training
        self._wanted = wanted
        self.summary = Summary((), (), (), (), ())

    def look(self, inputs: Sequence[Tensor], stream: Tensor) -> None:
        """Run once, with the model's own parameters, for what is to be known of it."""
        count = len(stream)
        kept = attributes_kept(self._model, self._state)
        with kept, entered(Calls(current().reduction)):  # a look is none of the context's calls
            replicas = self._all(
                {name: _spread(x, count) for name, x in self._state.parameters.items()},
                {name: _spread(x, count) for name, x in self._state.buffers.items()},
                [_spread(x, count) for x in inputs],
                stream,
                torch.ones(()),
            )
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
            names=tuple(first.watch.names),
            losses=tuple(mark.name for mark in first.watch.losses.marks),
            differentiated=tuple(first.watch.differentiated),
        )

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        stream: Tensor,
        scale: Tensor,
    ) -> Step:
        """Run one micro-batch, as `Engine`."""
        replicas = self._all(parameters, buffers, inputs, stream, scale)
        first, summary = replicas[0], self.summary
        outputs = _stacked("outputs", [one.outputs for one in replicas])
        gradients = {
            name: torch.stack(
                [_or_zeros(one.gradients[name], parameters[name][0]) for one in replicas]
            )
            for name in summary.trained
        }
        changed = _stacked("inputs", [one.inputs for one in replicas])
        anchors = _stacked("anchors", [[*one.anchors.values()] for one in replicas])
        losses = [one.loss for one in replicas if one.loss is not None]
        return Step(
            outputs=first.rebuild(iter(outputs)),
            gradients=gradients,
            buffers={
                name: torch.stack([one.buffers[name] for one in replicas])
                for name in self._state.buffers
            },
            changed_inputs={place: changed[place] for place in summary.changed_inputs},
            anchors=dict(zip(first.anchors, anchors, strict=True)),
            loss=torch.stack(losses) if losses else None,
        )

    def _all(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        stream: Tensor,
        scale: Tensor,
    ) -> list[Replica]:
        found: list[Any] = [None] * len(stream)
        attributes = Attributes(self._model, self._state)

        def replica(number: Tensor) -> tuple[()]:
            place = int(number)
            found[place] = self._one(
                {name: self._leaf(name, x[place]) for name, x in parameters.items()},
                {name: x[place].detach().clone() for name, x in buffers.items()},
                [x[place].detach().clone() for x in inputs],
                Draws(stream[place]),
                scale,
            )
            return ()

        with self._state.apart(), named_modules_entered(self._model), torch.enable_grad():
            gt.pmap(replica, AXIS, schedule="one")(torch.arange(len(stream)))
        attributes.check()
        return found

    def _leaf(self, name: str, x: Tensor) -> Tensor:
        own = x.clone() if x.is_inference() else x.detach()
        return own.requires_grad_(self._state.parameters[name].requires_grad)

    def _one(
        self,
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: list[Tensor],
        draws: Draws,
        scale: Tensor,
    ) -> Replica:
        given = {**parameters, **buffers}
        leaves = [*given.values(), *inputs]
        versions = [x._version for x in leaves]
        memory = self._state.memory(given, inputs)
        watch = Watch(draws, self._state.instead(given), self._wanted)
        watch.inputs = inputs
        for parameter in parameters.values():
            parameter._is_param = True  # isinstance(x, torch.nn.Parameter) looks at it
        with Drawing(draws), self._state.seeing(given):
            with watch.watching():
                result = self._call([*inputs])
            self._state.check(given)
            memory.check()
            outputs, rebuild = flatten_outputs(result)
            for check in watch.at_end:
                check(outputs)
            loss = watch.losses.final() if self._training else None
            draws.end()
            gradients = _gradients(loss, parameters, scale, keep=bool(watch.differentiated))
            inner = _gradients(loss, watch.differentiated, scale)
        changed = [x._version > version for x, version in zip(leaves, versions, strict=True)]
        for name, is_changed in zip(parameters, changed, strict=False):
            if is_changed:
                raise parameter_changed(name)
        anchors = {name: x.detach() for name, x in watch.anchored.items()}
        anchors |= {
            GRADIENT + name: _or_zeros(gradient, watch.differentiated[name])
            for name, gradient in inner.items()
        }
        return Replica(
            outputs=[watch.own(x).detach() for x in outputs],
            rebuild=rebuild,
            gradients=gradients,
            buffers=buffers,
            inputs=inputs,
            changed=changed,
            anchors=anchors,
            loss=None if loss is None else loss.detach(),
            watch=watch,
        )


def _gradients(
    loss: Tensor | None, tensors: dict[str, Tensor], scale: Tensor, *, keep: bool = False
) -> dict[str, Tensor | None]:
    """Of each that requires one, in training; None of those that the loss does not reach."""
    wanted = {name: x for name, x in tensors.items() if x.requires_grad and loss is not None}
    if loss is None or not wanted or not loss.requires_grad:
        return dict.fromkeys(wanted)
    start = scale.to(loss).expand(loss.shape)
    leaves = [*wanted.values()]
    found = torch.autograd.grad(loss, leaves, start, retain_graph=keep, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _spread(x: Tensor, count: int) -> Tensor:
    """A copy, the same for so many replicas."""
    return x.detach().clone().expand(count, *x.shape)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _stacked(what: str, replicas: list[list[Tensor]]) -> list[Tensor]:
    """The tensors of all replicas, which are to have the same shapes and dtypes.

    Raises:
        ValueError: naming the first replica whose differ.
    """
    kinds = [[(x.dtype, tuple(x.shape)) for x in tensors] for tensors in replicas]
    for index, own in enumerate(kinds):
        if own != kinds[0]:
            raise ValueError(
                f"the replicas' {what} have different dtypes or shapes: replica 0 has {kinds[0]}, "
                f"replica {index} has {own}"
            )
    return [torch.stack(column) for column in zip(*replicas, strict=True)]
