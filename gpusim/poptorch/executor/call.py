"""One call of a compiled model: its device iterations, and in training an update after each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpusim.poptorch.executor.arguments import Arguments, for_device
from gpusim.poptorch.executor.context import on_ipu
from gpusim.poptorch.executor.counters import Counters
from gpusim.poptorch.executor.executable import Executable
from gpusim.poptorch.executor.gradients import seed_of
from gpusim.poptorch.executor.micro_batches import MicroBatches
from gpusim.poptorch.executor.outputs import Collector, as_returned
from gpusim.poptorch.executor.profile import Profile
from gpusim.poptorch.executor.synthetic import synthetic
from gpusim.poptorch.executor.training import Training
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.poptorch.replicas import Step, flatten

__all__ = ["Result", "run"]

SYNTHETIC = "syntheticDataMode"  # PopART's names for what the options' methods set
CHECKED = "enableFloatingPointChecks"


@dataclass
class Result:
    """What a call gave.

    - `outputs`: as forward returned them, of the micro-batches that the options ask for.
    - `changed`: the inputs that were changed in place, by number, whole.
    - `anchors`: kept tensors by their short names; `counters`: when things happened.
    """

    outputs: Any
    changed: dict[int, Tensor]
    anchors: dict[str, Tensor]
    counters: Counters


def run(
    executable: Executable, given: Arguments, training: Training | None, profile: Profile
) -> Result:
    """Run a call, with its events in the profile.

    poptorch.Error for arguments that are not like the compiled ones; RuntimeError for infinities
    and NaNs where the options forbid them.
    """
    executable.arguments.check(given)
    with executable.instances.together(), executable.weights.model_kept(), on_ipu():
        return Call(executable, given, training, profile).run()


class Call:
    """A call in progress."""

    def __init__(
        self, executable: Executable, given: Arguments, training: Training | None, profile: Profile
    ) -> None:
        self._of, self._training, self._profile = executable, training, profile
        popart = executable.options._Popart.options
        made = bool(popart.get(SYNTHETIC, 0))
        self._checked = bool(popart.get(CHECKED, False))
        self._host = given.tensors
        with profile.span("upload inputs", "upload", tensors=len(self._host)):
            self._batches = MicroBatches(executable.layout, self._on_device(made))
        self._counters = Counters(executable.layout.replicas, enabled=not made)
        self._outputs: list[Collector] = []
        self._rebuild: Any = None
        self._anchors = executable.anchors.collectors()

    def _on_device(self, made: bool) -> list[Tensor]:
        device = self._of.weights.device
        tensors = [for_device(tensor) for tensor in self._host]
        if made:
            seed = self._of.progress.seed
            tensors = [synthetic(x, seed_of(seed, place)) for place, x in enumerate(tensors)]
        return [x if device is None else x.to(device) for x in tensors]

    @torch.no_grad()
    def run(self) -> Result:
        """All iterations."""
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
        host = self._host[0].device if self._host else torch.device("cpu")
        with self._profile.span("download outputs", "download", tensors=len(self._outputs)):
            return Result(
                self._rebuild(iter([one.result().to(host) for one in self._outputs])),
                self._batches.changed(),
                {name: one.result().to(host) for name, one in self._anchors.items()},
                self._counters,
            )

    def _micro_batch(self, iteration: int, accumulation: int) -> Step:
        of, progress = self._of, self._of.progress
        inputs = [self._input(place, iteration, accumulation) for place in range(len(self._host))]
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
        of.anchors.add(self._anchors, iteration, accumulation, step)
        self._collect(iteration, accumulation, step)
        if self._checked:
            check_finite(step)
        return step

    def _input(self, place: int, iteration: int, accumulation: int) -> Tensor:
        self._counters.note("input", place)
        value = self._batches.step(place, iteration, accumulation)
        self._counters.note("input_complete", place)
        return value

    def _collect(self, iteration: int, accumulation: int, step: Step) -> None:
        tensors, rebuild = flatten(step.outputs)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise createPoptorchError(
                "The model returned a tensor that it kept when it was compiled, which has no "
                "values; outputs have to be made of the inputs each time"
            )
        if self._rebuild is None:
            mode, period = self._of.options.output_mode, self._of.options.output_return_period
            self._outputs = [Collector(mode, period, self._of.layout) for _ in tensors]
            self._rebuild = rebuild
        for place, (collector, tensor) in enumerate(zip(self._outputs, tensors, strict=True)):
            returned = collector.transfers(iteration, accumulation)
            if returned:
                self._counters.note("output", place)
            collector.add(iteration, accumulation, as_returned(tensor))
            if returned:
                self._counters.note("output_complete", place)

    @contextmanager
    def _timed(self, name: str, **args: Any) -> Iterator[None]:
        """Work of the device."""
        device = self._of.weights.device
        begin = time.perf_counter()
        yield
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.perf_counter()
        self._counters.device_seconds += end - begin
        self._profile.add(name, "device", begin, end, **args)


def check_finite(step: Step) -> None:
    """RuntimeError if a step has made infinities or NaNs."""
    made = {f"output {place}": x for place, x in enumerate(flatten(step.outputs)[0])}
    made |= {f"the gradient of {name}": x for name, x in step.gradients.items()}
    for what, value in made.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise RuntimeError(
                f"floating-point exception: {what} has infinities or NaNs "
                "(Options.Precision.enableFloatingPointExceptions)"
            )
