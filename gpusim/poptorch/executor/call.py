"""One call of a compiled model: its device iterations, and in training an update after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpusim.poptorch.executor.arguments import Arguments, for_device
from gpusim.poptorch.executor.context import on_ipu
from gpusim.poptorch.executor.counters import Counters
from gpusim.poptorch.executor.executable import Executable
from gpusim.poptorch.executor.gradients import seed_of
from gpusim.poptorch.executor.micro_batches import MicroBatches
from gpusim.poptorch.executor.outputs import Collector, check_period
from gpusim.poptorch.executor.profile import Profile, Span
from gpusim.poptorch.executor.training import Training
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas import Step, flatten, flatten_like
from gpusim.poptorch.replicas.results import INVALID
from gpusim.torch.private import FakeTensor

__all__ = ["Result", "run"]

KEPT = (
    "The model returned a tensor that it kept when it was compiled, which has no values; outputs "
    "have to be made of the inputs each time"
)


@dataclass
class Result:
    """The result of a call.

    - `outputs`: as forward returned them, of the micro-batches that the options ask for;
      `tensors`: those in them.
    - `changed`: the inputs that were changed in place, and their new values, whole.
    - `anchors`: kept tensors by their short names; `counters`: when things happened.
    """

    outputs: Any
    tensors: list[Tensor]
    changed: list[tuple[Tensor, Tensor]]
    anchors: dict[str, Tensor]
    counters: Counters


def run(
    executable: Executable, given: Arguments, training: Training | None, profile: Profile
) -> Result:
    """Run a call, with its events in the profile.

    **Raises**:

    - poptorch.Error: if the arguments differ from the compiled ones.
    - poptorch.Error: for infinities and NaNs, if the options forbid them.
    """
    tensors = executable.arguments.check(given)
    with executable.instances.together(), executable.weights.model_kept(), on_ipu():
        return ModelCall(executable, tensors, training, profile).run()


class ModelCall:
    """A call in progress."""

    def __init__(
        self,
        executable: Executable,
        tensors: list[Tensor],
        training: Training | None,
        profile: Profile,
    ) -> None:
        self._of, self._training, self._profile = executable, training, profile
        made = executable.synthetic
        self._host = tensors
        self._device = executable.weights.device
        with profile.span("upload inputs", "upload", tensors=len(self._host)):
            self._batches = MicroBatches(executable.layout, self._on_device(made))
        self._counters = Counters(executable.layout.replicas, enabled=not made)
        self._outputs: Collector | None = None
        self._count = 0  # of tensors that forward returns
        self._first: Any = None  # step's outputs, as all others' are ordered
        self._rebuild: Any = None
        check_period(*executable.outputs, executable.layout)
        self._anchors = executable.anchors.collectors()

    def _on_device(self, made: bool) -> list[Tensor]:
        tensors = [for_device(tensor) for tensor in self._host]
        if made:
            seed = self._of.progress.seed
            tensors = [synthetic(x, seed_of(seed, place)) for place, x in enumerate(tensors)]
        return tensors if self._device is None else [x.to(self._device) for x in tensors]

    @torch.no_grad()
    def run(self) -> Result:
        """Run all iterations."""
        layout, training = self._of.layout, self._training
        for iteration in range(layout.iterations):
            accumulator = None if training is None else training.accumulator()
            for accumulation in range(layout.accumulations):
                step = self._micro_batch(iteration, accumulation)
                if accumulator is not None:
                    with self._timed("accumulation", update=self._of.progress.updates):
                        accumulator.add(step.gradients)
            if training is not None and accumulator is not None:
                training.update(accumulator, self._timed)
                anchors = self._of.anchors
                if anchors.of_update:
                    tensors = training.tensors(anchors.of_update)
                    anchors.add(self._anchors, iteration, layout.accumulations - 1, tensors)
        host = self._host[0].device if self._host else torch.device("cpu")
        assert self._outputs is not None  # there is at least one step
        with self._profile.span("download outputs", "download", tensors=self._count):
            results = [value.to(host) for value in self._outputs.results()]
            return Result(
                self._rebuild(iter(results)),
                results,
                [(self._host[place], x) for place, x in self._batches.changed().items()],
                {name: one.results()[0].to(host) for name, one in self._anchors.items()},
                self._counters,
            )

    def _micro_batch(self, iteration: int, accumulation: int) -> Step:
        of, progress = self._of, self._of.progress
        self._counters.note("input", len(self._host))
        inputs = self._batches.step(iteration, accumulation)
        self._counters.note("input_complete", len(self._host))
        number = progress.micro_batches
        at = {"iteration": iteration, "accumulation": accumulation, "number": number}
        with self._timed("micro-batch", **at, execution=of.program.execution):
            step = of.program.run(
                of.weights.stacked_parameters(),
                of.weights.stacked_buffers(),
                inputs,
                counter=number,
                seed=progress.seed,
                loss_scale=1.0 if self._training is None else self._training.loss_scale,
            )
        progress.micro_batches += 1
        of.weights.set_buffers({name: step.buffers[name] for name in of.program.changed_buffers})
        for place, value in step.changed_inputs.items():
            self._batches.write(place, iteration, accumulation, value)
        of.anchors.add(self._anchors, iteration, accumulation, step.anchors)
        self._collect(iteration, accumulation, step)
        if self._of.checked:
            check_finite(step)
        return step

    def _collect(self, iteration: int, accumulation: int, step: Step) -> None:
        if self._outputs is None:
            tensors, self._rebuild = flatten(step.outputs)
            self._first = step.outputs
        else:
            tensors = flatten_like(self._first, step.outputs)
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                raise createPoptorchError(KEPT)
        if self._outputs is None:
            self._outputs = Collector(*self._of.outputs, self._of.layout)
            self._count = len(tensors)
        returned = len(tensors) if self._outputs.transfers(iteration, accumulation) else 0
        self._counters.note("output", returned)
        self._outputs.add(iteration, accumulation, tensors)
        self._counters.note("output_complete", returned)

    def _timed(self, name: str, **args: Any) -> Span:
        """A block of the device's work."""
        return Span(self._profile, name, "device", args, self._device, self._counters)


def synthetic(tensor: Tensor, seed: int) -> Tensor:
    """A tensor of the same shape and dtype, made on the device to time a model alone.

    It is normally distributed, or zeros if it holds no floats.

    >>> synthetic(torch.tensor([3, 4]), 0)
    tensor([0, 0])
    """
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor)
    drawn = np.random.Generator(np.random.Philox(seed)).standard_normal(tensor.numel(), np.float32)
    return torch.from_numpy(drawn).reshape(tensor.shape).to(tensor.dtype).to(tensor.device)


def check_finite(step: Step) -> None:
    """Raise poptorch.Error if a step has made infinities or NaNs, or has compared NaNs."""
    made = {f"output {place}": x for place, x in enumerate(flatten(step.outputs)[0])}
    made |= {f"the gradient of {name}": x for name, x in step.gradients.items()}
    invalid = [
        f"{what} has infinities or NaNs"
        for what, x in made.items()
        if x.is_floating_point() and not bool(torch.isfinite(x).all())
    ]
    invalid += [
        f"{name.removeprefix(INVALID)} compares NaNs"
        for name, x in step.anchors.items()
        if name.startswith(INVALID) and bool(x.any())
    ]
    if invalid:
        raise createPoptorchError(
            f"floating-point exception: {invalid[0]} "
            "(Options.Precision.enableFloatingPointExceptions)"
        )
