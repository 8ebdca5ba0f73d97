"""A compiled model: one micro-batch of all replicas that are here, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplicaError
from ...maps.frames import outermost_share
from .._logging import logger
from ..poptorch_core import Error, createPoptorchError
from .blame import raised_by_the_model
from .cache import Cache
from .draws import streams
from .lockstep import Lockstep
from .phase import Phase, entered
from .results import GRADIENT, Engine, Step
from .state import State
from .structures import flatten
from .threads import Threads
from .trace import trace

__all__ = ["Program", "compile_model"]


class Program:
    """A model that was compiled for a number of replicas.

    Attributes:
        parameters, buffers: their names.
        trained: the parameters that have gradients: those that the loss depends on.
        changed_buffers, changed_inputs: the names of buffers and the numbers of inputs that forward
            changes in place.
        names: of all tensors that can be anchored.
        losses: the functions that computed losses.
        execution: "lockstep" or "threads".
    """

    def __init__(
        self, engine: Engine, state: State, replicas: range, wanted: Sequence[str], phase: Phase
    ) -> None:
        self._engine = engine
        self._phase = phase
        self._replicas = replicas
        self.parameters = tuple(state.parameters)
        self.buffers = tuple(state.buffers)
        self.execution = engine.execution
        summary = engine.summary
        self.trained = summary.trained
        self.changed_buffers = summary.changed_buffers
        self.changed_inputs = summary.changed_inputs
        self.losses = summary.losses
        differentiated = summary.differentiated if summary.trained else ()
        gradients = tuple(GRADIENT + name for name in (*self.trained, *differentiated))
        self.names = (*self.parameters, *summary.names, *gradients)
        self._anchors = {name: self._known(name) for name in wanted}

    def _known(self, name: str) -> str:
        """The tensor's own name; PopTorch has "model." before those of the user's model."""
        for own in (name, name.replace("model.", "", 1)):
            if own in self.names:
                return own
        raise createPoptorchError(
            f"Anchored tensor '{name}' is none of the model's: {', '.join(self.names)}"
        )

    @torch.inference_mode(False)
    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        *,
        counter: int,
        seed: int,
        loss_scale: float | Mapping[str, float] = 1.0,
    ) -> Step:
        """Run one micro-batch.

        Args:
            parameters, buffers: values by name, each [replicas, ...]. Those that are the same on
                all replicas had better be expanded tensors, of stride 0.
            inputs: the tensors of the arguments, in the order of `flatten`, each [replicas, ...].
            counter: the number of the micro-batch, 0 to 2**44 - 1: with the seed and the replica's
                number in the whole program it says what random numbers there are.
            seed: 0 to 2**64 - 1.
            loss_scale: what the loss is multiplied by before it is differentiated; by parameter, if
                it is not the same for all.

        Returns:
            Tensors of their own: none shares memory with what was given, but for the buffers that
            do not change.
        """
        given = {name: parameters[name] for name in self.parameters}
        kept = {name: buffers[name] for name in self.buffers}
        device = next((x.device for x in (*given.values(), *kept.values(), *inputs)), None)
        stream = streams(seed, counter, self._replicas, device)

        def step(scale: float) -> Step:
            value = torch.tensor(float(scale), device=device)
            with entered(self._phase):
                return self._engine.run(given, kept, inputs, stream, value)

        if isinstance(loss_scale, Mapping):
            found = self._scaled_apart(step, loss_scale)
        else:
            found = step(loss_scale)
        unchanged = {name: x for name, x in kept.items() if name not in self.changed_buffers}
        return replace(
            found,
            buffers=found.buffers | unchanged,
            anchors={name: self._anchor(own, given, found) for name, own in self._anchors.items()},
        )

    def _scaled_apart(self, step: Callable[[float], Step], scales: Mapping[str, float]) -> Step:
        """The same micro-batch once for each scale; random numbers are the same each time."""
        steps = {scale: step(scale) for scale in sorted({scales[name] for name in self.trained})}
        first = next(iter(steps.values())) if steps else step(1.0)
        gradients = {name: steps[scales[name]].gradients[name] for name in self.trained}
        return replace(first, gradients=gradients)

    def _anchor(self, name: str, parameters: Mapping[str, Tensor], step: Step) -> Tensor:
        if name in parameters:
            return parameters[name].clone()
        of = name.removeprefix(GRADIENT)
        return step.gradients[of].clone() if of in step.gradients else step.anchors[name]


@torch.inference_mode(False)
def compile_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool,
    replicas: int,
    replica_offset: int = 0,
    options: Any = None,
    execution: str | None = None,
) -> Program:
    """Compile a model for a number of replicas.

    Its forward pass runs once, on tensors without values, and is traced; where that cannot be, as
    it decides on values or calls what is no torch function, it will run for each replica and
    micro-batch in a thread, which is logged.

    Args:
        model: the model.
        args, kwargs: of one micro-batch of one replica, as forward takes them.
        training: whether a loss is looked for, and differentiated.
        replicas: how many there are here; inside `with world` those of this instance.
        replica_offset: the number of the first of them in the whole program.
        options: PopTorch's options, for the tensors that they anchor.
        execution: "lockstep" or "threads" where it is to be that and no other.

    Raises:
        Error: where there is no loss or more than one, for parameters and buffers that forward
            reassigns, and for anchored tensors that there are not; and whatever forward raises.
        AssertionError: for a cache folder that cannot be written.
    """
    cache = Cache.from_options(options)
    state = State(model)
    inputs, rebuild = flatten((tuple(args), dict(kwargs or {})))

    def call(leaves: list[Tensor]) -> Any:
        own_args, own_kwargs = rebuild(iter(leaves))
        return model(*own_args, **own_kwargs)

    device = next((x.device for x in (*model.parameters(), *model.buffers(), *inputs)), None)
    anchored = {} if options is None else options.anchored_tensors
    wanted = [anchor[0] for anchor in anchored.values()]
    chosen = frozenset(wanted) | {name.replace("model.", "", 1) for name in wanted}
    numbers = range(replica_offset, replica_offset + replicas)

    def in_lockstep() -> Engine:
        share = outermost_share("compile_model", replicas)
        total = replicas if share is None else sum(share.counts)
        traced = trace(model, call, state, inputs, training=training, total=total, wanted=chosen)
        return Lockstep(traced, replicas, cache)

    def in_threads() -> Engine:
        engine = Threads(model, call, state, training=training, wanted=chosen)
        try:
            engine.look(inputs, streams(0, 0, numbers, device))
        except ReplicaError as error:
            raise error.__cause__ or error from None
        return engine

    engines = {"lockstep": in_lockstep, "threads": in_threads}
    compiling = Phase(training=training, compiling=True, options=options)
    running = replace(compiling, compiling=False)
    with entered(compiling):
        if execution is not None:
            return Program(engines[execution](), state, numbers, wanted, running)
        try:
            engine = in_lockstep()
        except Error:
            raise
        except Exception as reason:
            if raised_by_the_model(reason):
                raise
            logger.info("The model cannot be traced (%s): its replicas run in threads", reason)
            engine = in_threads()
        return Program(engine, state, numbers, wanted, running)
