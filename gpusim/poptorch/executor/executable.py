"""A compiled model, with its weights on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from gpusim.poptorch.blocks import PlacementPlan, compiling
from gpusim.poptorch.enums import OutputMode
from gpusim.poptorch.executor.arguments import Arguments, for_device
from gpusim.poptorch.executor.context import on_ipu
from gpusim.poptorch.executor.grouping import Grouping
from gpusim.poptorch.executor.instances import Instances
from gpusim.poptorch.executor.logs import Warnings
from gpusim.poptorch.executor.micro_batches import MicroBatchLayout
from gpusim.poptorch.executor.outputs import Anchors
from gpusim.poptorch.executor.weights import Weights
from gpusim.poptorch.options import Options
from gpusim.poptorch.replicas import Program, compile_model
from gpusim.poptorch.replicas.results import CHECKED

__all__ = ["EXECUTION", "Executable", "Progress"]

SYNTHETIC = "syntheticDataMode"  # PopART's name for what the options' methods set
#: The option of `options._Popart.set` that chooses "lockstep" or "threads" for one model.
EXECUTION = "gpusim.execution"


@dataclass
class Progress:
    """The position of a run; it depends on this, the weights and the optimizer's state alone.

    - `seed`: of all random numbers; `micro_batches`, `updates`: the numbers of those so far.
    """

    seed: int
    micro_batches: int = 0
    updates: int = 0

    @property
    def state(self) -> list[int]:
        """The list that `rng_state` returns."""
        return [self.seed, self.micro_batches, self.updates]

    @state.setter
    def state(self, state: list[int]) -> None:
        if len(state) != 3 or not all(isinstance(number, int) for number in state):
            raise ValueError(f"rng_state={state!r}: expected a list of three integers")
        self.seed, self.micro_batches, self.updates = state


class Executable:
    """A model compiled for its replicas.

    **Arguments**

    - `model`: its weights are copied to the device; `given`: arguments that it is compiled for.
    - `options`: all of them; `training`: whether to differentiate and update.
    - `seed`: of random numbers; `groupings`: of parameters.

    **Attributes**, of the options: `synthetic`: whether data is made on the device; `checked`:
    whether infinities and NaNs are errors; `outputs`: the outputs' mode and period.

    Raises what the checks of inputs, weights and groupings raise, and what tracing raises.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Arguments,
        options: Options,
        *,
        training: bool,
        seed: int,
        groupings: Mapping[str, Grouping],
    ) -> None:
        self.options, self.training = options, training
        # options are frozen, and read at every call
        popart = options._Popart.options
        self.synthetic, self.checked = bool(popart.get(SYNTHETIC)), bool(popart.get(CHECKED))
        self.outputs = OutputMode(options.output_mode), int(options.output_return_period)
        self.arguments = given.described()
        self.layout = MicroBatchLayout.of(options)
        self.instances = Instances(options)
        begin = time.perf_counter()
        self.weights = Weights(
            model,
            replicas=self.instances.total,
            first=self.instances.first,
            local=self.instances.local,
            groupings=groupings,
            shared_buffers=bool(options.broadcast_buffers),
        )
        #: When the weights were first copied to the device, on time.perf_counter's clock.
        self.uploaded = begin, time.perf_counter()
        self.progress = Progress(seed)
        self.program = self._traced(model, given)
        self.anchors = Anchors(options, self.layout)
        self.weights.check_buffers(self.program.changed_buffers)

    def _traced(self, model: nn.Module, given: Arguments) -> Program:
        warn = Warnings(self.options)
        first = given.with_tensors(
            self.layout.first(for_device(tensor, warn)) for tensor in given.tensors
        )
        blocks = compiling(self.options._execution_strategy)
        with self.instances.together(), self.weights.traced_form(), on_ipu(), blocks as record:
            program = compile_model(
                model,
                first.args,
                first.kwargs,
                training=self.training,
                replicas=self.instances.local,
                replica_offset=self.instances.first,
                options=self.options,
                execution=self.options._Popart.options.get(EXECUTION),
            )
        self.plan = PlacementPlan.of(record, self.options, self.training)
        return program
