"""A compiled model: the forward and backward pass of a micro-batch, for all local replicas."""

from __future__ import annotations

import dis
import os
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gpusim

from ...errors import ReplicaError
from ...maps.axis_environment import outermost_sharding
from .._logging import logger
from ..poptorch_core import Error, createPoptorchError
from .cache import Cache
from .draws import streams
from .forward import MODEL_CONTEXT, ModelContext, in_context
from .lockstep import Lockstep
from .results import GRADIENT, INVALID, Execution, MicroBatch, Step, is_of_update
from .state import ModelState
from .structures import flatten
from .threads import Threads
from .trace import trace

__all__ = ["Program", "compile_model", "find_name", "is_user_error"]

LOSS = "loss"


class Program:
    """A model that was compiled for a number of replicas.

    **Attributes**:

    - `parameters`, `buffers`: their names.
    - `trained`: the parameters that have gradients: those that the loss depends on.
    - `changed_buffers`, `changed_inputs`: the names of buffers and the indices of inputs that
      forward changes in place.
    - `names`: of all tensors of a micro-batch that can be anchored.
    - `losses`: the functions that computed losses.
    - `execution`: "lockstep" or "threads".
    """

    def __init__(
        self,
        execution: Execution,
        state: ModelState,
        replicas: range,
        inputs: int,
        wanted: Sequence[str],
        context: ModelContext,
    ) -> None:
        self._execution = execution
        self._context = context
        self._replicas = np.asarray(replicas)
        self.parameters = tuple(state.parameters)
        self.buffers = tuple(state.buffers)
        self.execution = execution.name
        summary = execution.summary
        self.trained = summary.trained
        self.changed_buffers = summary.changed_buffers
        self.changed_inputs = summary.changed_inputs
        self.losses = summary.losses
        differentiated = summary.differentiated if summary.trained else ()
        gradients = tuple(GRADIENT + name for name in (*self.trained, *differentiated))
        self._inputs = {f"input/{place}" if place else "input": place for place in range(inputs)}
        loss = [LOSS] if context.training else []
        self.names = (*self.parameters, *self._inputs, *summary.names, *loss, *gradients)
        self._anchors = {name: find_name(name, self.names) for name in wanted}

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

        **Arguments**:

        - `parameters`, `buffers`: values by name, each [replicas, ...]. A value that is the same
          on all replicas is fastest as an expanded tensor, of stride 0.
        - `inputs`: the tensors of the arguments, in the order of `flatten`, each [replicas, ...].
        - `counter`: the number of the micro-batch, 0 to 2**44 - 1. With the seed and the number of
          the replica in the whole program it determines the random numbers.
        - `seed`: 0 to 2**64 - 1.
        - `loss_scale`: the factor of the loss in the backward pass, or such factors by parameter.

        **Returns**: New tensors: only buffers that do not change share memory with the arguments.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.run(
                    parameters, buffers, inputs, counter=counter, seed=seed, loss_scale=loss_scale
                )
        own = {name: parameters[name] for name in self.parameters}
        before = {name: buffers[name] for name in self.buffers}
        values = (*own.values(), *before.values(), *inputs)
        device = values[0].device if values else None
        stream = streams(seed, counter, self._replicas, device)

        def step(scale: float) -> Step:
            factor = torch.scalar_tensor(float(scale), device=device)
            batch = MicroBatch(own, before, inputs, stream, factor)
            token = MODEL_CONTEXT.set(self._context)
            try:
                return self._execution.run(batch)
            finally:
                MODEL_CONTEXT.reset(token)

        if isinstance(loss_scale, float) or not isinstance(loss_scale, Mapping):
            found = step(loss_scale)
        else:
            found = self._for_each_scale(step, loss_scale)
        for name, x in before.items():
            if name not in self.changed_buffers:
                found.buffers[name] = x
        anchors = {
            name: self._anchor(key, own, inputs, found) for name, key in self._anchors.items()
        }
        for name, x in found.anchors.items():
            if name.startswith(INVALID):
                anchors[name] = x
        found.anchors.clear()
        found.anchors.update(anchors)
        return found

    def _for_each_scale(self, step: Callable[[float], Step], scales: Mapping[str, float]) -> Step:
        """Run the same micro-batch for each scale, with the same random numbers."""
        steps = {scale: step(scale) for scale in sorted({scales[name] for name in self.trained})}
        first = next(iter(steps.values())) if steps else step(1.0)
        gradients = {name: steps[scales[name]].gradients[name] for name in self.trained}
        return replace(first, gradients=gradients)

    def _anchor(
        self,
        name: str,
        parameters: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        step: Step,
    ) -> Tensor:
        if name in parameters:
            return parameters[name].clone()
        if name in self._inputs:
            return inputs[self._inputs[name]].clone()
        if name == LOSS and step.loss is not None:
            return step.loss.clone()
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

    Its forward pass runs once, on tensors without values, and is traced. A model that cannot be
    traced, because it decides on values or calls functions that are not torch's, runs for each
    replica and micro-batch in a thread; the log says so.

    **Arguments**:

    - `model`: the model.
    - `args`, `kwargs`: of one micro-batch of one replica, as forward takes them.
    - `training`: whether to find a loss and differentiate it.
    - `replicas`: the number of local replicas; inside `with world` those of this instance.
    - `replica_offset`: the number of the first of them in the whole program.
    - `options`: PopTorch's options, for the tensors that they anchor.
    - `execution`: "lockstep" or "threads" to allow only that.

    **Raises**:

    - Error: for a model without a loss or with several, for parameters and buffers that forward
      reassigns, and for anchored tensors that do not exist; and whatever forward raises.
    - AssertionError: for a cache folder that cannot be written.
    """
    cache = Cache.from_options(options)
    state = ModelState(model)
    inputs, rebuild = flatten((tuple(args), dict(kwargs or {})))

    def call(leaves: list[Tensor]) -> Any:
        own_args, own_kwargs = rebuild(iter(leaves))
        return model(*own_args, **own_kwargs)

    device = next((x.device for x in (*model.parameters(), *model.buffers(), *inputs)), None)
    anchored = {} if options is None else options.anchored_tensors
    wanted = [anchor[0] for anchor in anchored.values() if not is_of_update(anchor[0])]
    chosen = frozenset(wanted) | {name.replace("model.", "", 1) for name in wanted}
    numbers = range(replica_offset, replica_offset + replicas)

    def in_lockstep() -> Execution:
        sharding = outermost_sharding("compile_model", replicas)
        total = replicas if sharding is None else sum(sharding.counts)
        traced = trace(model, call, state, inputs, training=training, total=total, wanted=chosen)
        return Lockstep(traced, replicas, cache)

    def in_threads() -> Execution:
        threads = Threads(model, call, state, training=training, wanted=chosen)
        try:
            threads.inspect(inputs, streams(0, 0, numbers, device))
        except ReplicaError as error:
            raise error.__cause__ or error from None
        return threads

    make = {"lockstep": in_lockstep, "threads": in_threads}
    compiling = ModelContext(training, compiling=True, options=options, replicas=numbers)
    running = replace(compiling, compiling=False)
    with in_context(compiling):
        if execution is not None:
            return Program(make[execution](), state, numbers, len(inputs), wanted, running)
        try:
            found = in_lockstep()
        except Error:
            raise
        except Exception as reason:
            if is_user_error(reason):
                raise
            logger.info("The model cannot be traced (%s): its replicas run in threads", reason)
            found = in_threads()
        return Program(found, state, numbers, len(inputs), wanted, running)


def find_name(anchored: str, names: Collection[str]) -> str:
    """The name of an anchored tensor; PopTorch's has the prefix "model.". Error if there is none.

    >>> find_name("Gradient___model.w", ["w", "Gradient___w"])
    'Gradient___w'
    """
    for own in (anchored, anchored.replace("model.", "", 1)):
        if own in names:
            return own
    raise createPoptorchError(
        f"Anchored tensor '{anchored}' is none of the model's: {', '.join(names)}"
    )


# ---------------------------------------------------------------- errors of the user's code

PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Files that are not the user's: Python's, installed packages', and gpusim's.
OTHERS = (
    *(f"{Path(path)}{os.sep}" for name in PATHS if (path := sysconfig.get_path(name))),
    f"{Path(gpusim.__file__).parent}{os.sep}",
    "<frozen",
)


def is_user_error(error: BaseException) -> bool:
    """Whether a `raise` or `assert` of the user's code has raised an error, and not the tracing.

    Functions written in C have no frames. Their errors about tensors without values come out of the
    user's code too, but not from a `raise` in it. An error with a cause or context is not counted.
    """
    trace = error.__traceback__
    if trace is None or error.__context__ is not None or error.__cause__ is not None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and not code.co_filename.startswith(OTHERS)
