"""PoplarExecutor: a model that runs on simulated IPUs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpusim.poptorch._logging import logger
from gpusim.poptorch.blocks import module_repr
from gpusim.poptorch.enums import ConnectionType, OutputMode
from gpusim.poptorch.executor.arguments import Arguments, Binder
from gpusim.poptorch.executor.call import run
from gpusim.poptorch.executor.context import living
from gpusim.poptorch.executor.counters import Counters, Latency
from gpusim.poptorch.executor.devices import Ipus, ipus_per_replica
from gpusim.poptorch.executor.executable import Executable
from gpusim.poptorch.executor.grouping import Grouping, OnGrouping, assign, groupings_of
from gpusim.poptorch.executor.hooks import call_hooks, postcompile, precompile
from gpusim.poptorch.executor.logs import log_options, log_to_file
from gpusim.poptorch.executor.micro_batches import MicroBatchLayout
from gpusim.poptorch.executor.profile import Profile
from gpusim.poptorch.executor.saving import Exported, Invalid, Saved, read, write
from gpusim.poptorch.executor.training import Training
from gpusim.poptorch.executor.weights import HostWeights, described
from gpusim.poptorch.executor.wrapping import (
    fetch,
    groupable,
    is_wrapped,
    not_groupable,
    original_class,
    plain,
    unwrap,
    wrap,
)
from gpusim.poptorch.optim import Optimizer
from gpusim.poptorch.optim.updater import Updater, updater_for
from gpusim.poptorch.options import Options
from gpusim.poptorch.options.progress import ProgressBar
from gpusim.poptorch.options.strategies import PipelinedExecution, ShardedExecution
from gpusim.poptorch.poptorch_core import _validateOptions, createPoptorchError
from gpusim.poptorch.profiling import Channel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PoplarExecutor"]

NOT_COMPILED = "Model has not been compiled or has been destroyed."
NO_COMPILATION = "Please compile the model before obtaining compilation time."
NO_PROGRESS_BAR = "Please set showCompilationProgressBar option to obtain compilation time."
ACCUMULATED = (
    "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default "
    "value (1) when running a poptorch.inferenceModel()."
)
ITERATE = (
    " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run "
    "for pipelined execution instead."
)
NO_BACKWARD = (
    "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
    "trainingModel, the backwards pass is performed automatically when invoking the model. If "
    "you're using an inferenceModel, you should use a trainingModel instead."
)
NO_GROUPING = (
    "replicaGrouping has to be called after the model was passed to poptorch.trainingModel or "
    "poptorch.inferenceModel, and before it is compiled: call destroy() first."
)
EXPANDED = (
    "An input of shape %s was changed in place by the model, and is left as it was for the caller: "
    "it is an expanded tensor, some of whose elements are one number in memory."
)
CYCLES = "instrumentWithHardwareCycleCounter"  # PopART's name for logCycleCount
PHASES = 4  # of compilation, as the progress bar counts them


class PoplarExecutor:
    """A model on simulated IPUs; `trainingModel` and `inferenceModel` make it.

    Calling it runs the model. Other attributes are looked up on the model.

    **Arguments**

    - `model`: a shallow copy of the user's, which is traced; `user_model`: the user's.
    - `options`: frozen here; the executor keeps a clone.
    - `training`: whether it trains; `optimizer`: only for training.

    **Attributes**

    - `per_replica_params`: the groupings of parameters by name, which `replicaGrouping` writes and
      compiling reads: (CommGroupType, number of replicas of a group, VariableRetrievalMode).
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options | None,
        training: bool,
        poptorch_version: str,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: nn.Module | None = None,
    ) -> None:
        self._options = own_options(options, training)
        self._user_model = user_model if user_model is not None else model
        self._model, self._training, self._version = model, training, poptorch_version
        self._bind = Binder(model)
        self._seed = seed_from(self._options)
        #: By parameter: (CommGroupType, number of replicas of a group, VariableRetrievalMode).
        self.per_replica_params: dict[str, Any] = {}
        self._executable: Executable | None = None
        self._ipus: Ipus | None = None
        self._updates: Training | None = None
        self._updater: Updater | None = None
        self._optimizer: Any = None
        self._host = HostWeights(weakref.ref(self))
        self._beyond_host: dict[str, Tensor] = {}  # of a file, until weights are copied
        self._first_call = False  # is to come, and copies the weights
        self._detached = False  # its state is on the host
        self._counters = Counters()
        self._anchored: dict[str, Tensor] = {}
        self._compilation_time: timedelta | None = None
        log_to_file(self, self._options)
        self._profiling = Channel(f"poptorch.{'training' if training else 'inference'}Model")
        self._profile = Profile(self._options, training)
        assert training or optimizer is None, "Optimizer should be None for inference"
        if not training and int(self._options.Training.gradient_accumulation) != 1:
            strategy = self._options._execution_strategy
            pipelined = isinstance(strategy, PipelinedExecution)
            sharded = isinstance(strategy, ShardedExecution)
            raise createPoptorchError(ACCUMULATED + ITERATE * (pipelined and not sharded))
        if training:
            self.setOptimizer(optimizer or torch.optim.SGD(self._user_model.parameters(), lr=0.01))
            self._wrap()
        self._options._freeze()  # only now: an optimizer may have chosen how means are taken
        if options is not None:
            options._freeze()  # nothing can fail any more
        living.add(self)

    # ---------------------------------------------------------------- the model

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        self._let_group()
        return self._user_model

    @property
    def options(self) -> Options:
        """The options that it was made with, frozen."""
        return self._options

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(attribute)  # a copy that is being made
        found = getattr(self._user_model, attribute)
        if isinstance(found, (nn.Parameter, nn.Module)):
            self._let_group()
        return found

    def __repr__(self) -> str:
        return module_repr(self._user_model)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Any:
        """The model's `load_state_dict`, and a copy to the device if it is attached.

        Returns, raises: as the model's.
        """
        found = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            logger.debug("load_state_dict: implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
        return found

    def _let_group(self) -> None:
        """From here on `replicaGrouping` of the model's parameters is this executor's."""
        groupable(self._user_model, self._grouping_callback())

    def _groupings(self) -> dict[str, Grouping]:
        return groupings_of(self.per_replica_params, self._user_model)

    def _grouping_callback(self) -> OnGrouping:
        """A callback that notes groupings, without keeping the executor alive."""
        parent = weakref.ref(self)

        def on_grouping(parameter: Any, grouping: Grouping) -> None:
            executor = parent()
            if executor is None or executor.isCompiled():
                raise createPoptorchError(NO_GROUPING)
            assign(executor.per_replica_params, executor._user_model, parameter, grouping)

        return on_grouping

    def _wrap(self) -> None:
        parent = weakref.ref(self)  # the model keeps the weights alive, and not the devices

        def destroy(model: nn.Module) -> None:
            executor = parent()
            if executor is not None:
                executor.destroy()
            else:
                unwrap(model)

        wrap(self._user_model, self._host.fetch, destroy, self._grouping_callback())

    # ---------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and compile it at the first call.

        Takes the model's arguments, with all micro-batches along dimension 0 of each tensor, and
        returns the results of forward, for the micro-batches that the output mode selects. Inputs
        that forward changes in place are changed.

        **Raises**:

        - AssertionError: for an offline device, for arguments that forward does not take, and for
          batches that do not divide into micro-batches.
        - poptorch.Error: for arguments that differ from those of the compiled model.
        """
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use "
            "model.compile(inputs) instead of model(inputs)"
        )
        given = self._bind(args, kwargs)
        if self._executable is None:
            self._compile(given)
            self._first_call = False  # the weights are those that were just copied
        if not self.isAttachedToDevice():
            self.attachToDevice()
        elif self._first_call or (not self._training and self._is_behind()):
            self._upload()
        assert self._executable is not None
        with self._profiling.tracepoint("modelExecution"):
            result = run(self._executable, given, self._updates, self._profile)
        self._profile.flush()
        if self._training:
            self._host.outdated = True
        self._counters, self._anchored = result.counters, result.anchors
        if self._options._Popart.options.get(CYCLES):
            logger.debug("Total number of IPU cycles: %d", self._counters.cycles())
        for tensor, value in result.changed:
            put_back(value, tensor)
        for tensor in result.tensors:
            tensor.backward = no_backward  # type: ignore[method-assign]  # it may not be called
        return result.outputs

    # ---------------------------------------------------------------- compiling

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments like these, without running it.

        A warning is logged if it has been compiled. Raises what calling it raises.
        """
        given = self._bind(args, kwargs)
        if self._executable is not None:
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(given)

    def _compile(self, given: Arguments, progress: list[int] | None = None) -> None:
        begin = datetime.now()
        bar = ProgressBar() if self._options._show_compilation_progress_bar else None
        call_hooks(precompile)
        try:
            with self._profiling.tracepoint("modelCompilation"):
                self._build(given, bar or no_progress)
        finally:
            if bar is not None:
                bar.abandon()  # unless it is full
            call_hooks(postcompile)
            self._profile.flush()
        self._compilation_time = datetime.now() - begin
        if progress is not None:
            self.rng_state = progress

    @torch.inference_mode(False)  # what is made here outlives the caller's
    def _build(self, given: Arguments, done: Callable[[int, int], None]) -> None:
        done(0, PHASES)
        values = self._options.toDict()
        log_options(values)
        _validateOptions(values)
        logger.debug("Setting random seed to: %d", self._seed)
        if self._training and not is_wrapped(self._user_model):
            self._wrap()  # it was destroyed before
        with self._profiling.tracepoint("modelTracing"), plain(self._model):
            executable = Executable(
                self._model,
                given,
                self._options,
                training=self._training,
                seed=self._seed,
                groupings=self._groupings(),
            )
        done(1, PHASES)
        each = ipus_per_replica(self._options, executable.plan.highest_ipu)
        ipus = Ipus(self._options, each)
        if ipus.model and self._options._Popart.options.get(CYCLES):
            raise createPoptorchError(
                "Cycle count logging is only supported on actual IPU hardware."
            )
        executable.plan.check_depth()
        self._check_updatable(executable)
        done(2, PHASES)
        updates = self._updates_of(executable) if self._training else None
        executable.anchors.find(updates.names if updates else ())
        done(3, PHASES)
        ipus.acquire()
        logger.debug("Finished Poplar compilation.")
        self._executable, self._ipus, self._updates = executable, ipus, updates
        self._first_call, self._detached = True, False
        self._host.weights, self._host.profile = executable.weights, self._profile
        self._profile.compiled(executable.instances.replicas, each)
        self._profile.add("upload weights", "upload", *executable.uploaded)
        done(PHASES, PHASES)

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._executable is not None

    def compilationTime(self) -> timedelta:
        """The time that compiling took.

        poptorch.Error if the model is not compiled, and without `showCompilationProgressBar`.
        """
        if not self._options._show_compilation_progress_bar:
            raise createPoptorchError(NO_PROGRESS_BAR)
        if self._executable is None or self._compilation_time is None:
            raise createPoptorchError(NO_COMPILATION)
        return self._compilation_time

    def _compiled(self) -> Executable:
        if self._executable is None:
            raise createPoptorchError(NOT_COMPILED)
        return self._executable

    def destroy(self) -> None:
        """Release the device and the compiled model, and copy the weights to the host.

        A training model, its parameters and buffers get their classes back. The next call compiles
        the model again.
        """
        if self._executable is not None:
            self.copyWeightsToHostIfNeeded()
            self._forget_updater()
            self._release()
            self._executable = self._ipus = self._updates = None
            self._counters = Counters()
        if self._training and is_wrapped(self._user_model):
            unwrap(self._user_model)
        else:
            not_groupable(self._user_model)

    def _release(self) -> None:
        if self._ipus is not None:
            self._ipus.detach()

    # ---------------------------------------------------------------- weights

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy trained weights to the model if it lacks them, and return whether it did."""
        return self._host.fetch()

    def copyWeightsToHost(self) -> None:
        """Copy the device's weights into the model's parameters and buffers.

        poptorch.Error if the model is not compiled.
        """
        self._compiled()
        with self._profiling.tracepoint("copyWeightsToHost"):
            self._host.copy()

    def copyWeightsToDevice(self) -> None:
        """Copy the model's parameters and buffers to the device, whatever was trained there.

        poptorch.Error if the model is not compiled.
        """
        executable = self._compiled()
        self._host.outdated = False
        self._beyond_host, self._first_call = {}, False
        with self._profiling.tracepoint("copyWeightsToDevice"):
            logger.info("Writing weights from host to IPU memory.")
            with self._profile.span("upload weights", "upload"):
                executable.weights.upload()

    def _is_behind(self) -> bool:
        """Whether the model has weights that were trained elsewhere since the last upload.

        A training model around these weights copies them to the host first.
        """
        weights = self._compiled().weights
        fetch(weights.tensors)
        return weights.is_behind()

    def _upload(self) -> None:
        """Copy the weights as a part of another call, with the full precision that a file has."""
        of_file = self._beyond_host
        logger.debug("Implicit copyWeightsToDevice()")
        self.copyWeightsToDevice()
        self._compiled().weights.take(of_file)

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers that `Options.updatableNamedBuffers` names to the device.

        poptorch.Error if the model is not compiled, and if no buffer is named.
        """
        executable = self._compiled()
        names = self._check_updatable(executable)
        if not names:
            raise createPoptorchError(
                "No named buffers marked as updatable via updatableNamedBuffers option"
            )
        logger.info("Writing named buffers from host to IPU memory.")
        with self._profile.span("upload buffers", "upload", buffers=len(names)):
            executable.weights.upload_buffers(names)

    def _check_updatable(self, executable: Executable) -> list[str]:
        """The names that `Options.updatableNamedBuffers` says; poptorch.Error for unknown ones."""
        if not self._options.exists("updatable_named_buffers"):
            return []
        names: list[str] = self._options.updatable_named_buffers
        for name in names:
            if name not in executable.weights.buffers:
                raise createPoptorchError(f"Invalid updatable buffer {name}")
        return names

    # ---------------------------------------------------------------- the optimizer

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with another optimizer, or with other values of this one's attributes.

        AssertionError and ValueError as `poptorch.optim` says: for optimizers that are not
        supported, and for changes that a compiled model cannot make.
        """
        with self._profiling.tracepoint("setOptimizer"):
            if self._updater is None:
                self._updater = self._new_updater(optimizer)
            else:
                self._updater.set_optimizer(optimizer)
        self._optimizer = optimizer

    def _new_updater(self, optimizer: torch.optim.Optimizer) -> Updater:
        named = dict(self._user_model.named_parameters())
        return updater_for(optimizer, self._options, named, seed=self._seed)

    def _updates_of(self, executable: Executable) -> Training:
        """Updates from the optimizer's state, if it was trained with, or loaded, before."""
        if self._updater is None:
            self._updater = self._new_updater(self._optimizer)
        if isinstance(self._optimizer, Optimizer) and self._optimizer.has_state():
            self._optimizer.ipu_state_is_dirty = True
        return Training(executable, self._updater)

    def _forget_updater(self) -> None:
        """Disconnect the optimizer, which keeps its state and may be used for another model."""
        if self._updater is not None:
            self._updater.disconnect()
        self._updater = None

    def _read_optimizer(self) -> None:
        """Copy the optimizer's state to the host."""
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.state_dict()

    # ---------------------------------------------------------------- files

    def save(
        self,
        filename: str | os.PathLike[str],
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write the compiled model to a file, atomically.

        **Arguments**

        - `filename`: a file or a folder, which gets the file `model.poptorch`.
        - `export_model`: whether to write the model, its options, weights and optimizer too, for
          `load`. All but tensors is pickled.
        - `save_rng_state`: whether to write `rng_state` too.

        poptorch.Error if the model is not compiled, and for arguments of types other than Python's
        and PyTorch's without `export_model`; AssertionError where a folder would have to be and
        something else is; OSError; what pickling raises.
        """
        with self._profiling.tracepoint("saveExecutableToFile"):
            write(filename, self._saved(export_model, save_rng_state))

    def _saved(self, export_model: bool, save_rng_state: bool) -> Saved:
        executable = self._compiled()
        saved = Saved(
            version=self._version,
            training=self._training,
            arguments=executable.arguments,
            layout=executable.layout.described(),
            weights=described(self._model, self._groupings()),
            groupings=self._groupings(),
        )
        on_device = self._options.connection_type != ConnectionType.Never
        if export_model:
            exported = Exported(self._user_model, self._options.clone(), self._optimizer)
            saved.exported = exported
            if on_device:
                self._read_for(exported)
        if save_rng_state and on_device:
            saved.rng_state = self.rng_state
        return saved

    def _read_for(self, exported: Exported) -> None:
        """Copy what the device has to the model, the optimizer, and where these lack it."""
        self.copyWeightsToHostIfNeeded()
        self._read_optimizer()
        if self._training:
            exported.device = self._compiled().weights.beyond_host()
        if self._updater is not None and not isinstance(self._optimizer, Optimizer):
            exported.state = self._updater.state_dict()["ipu_state"]

    def compileAndExport(
        self,
        filename: str | os.PathLike[str],
        *args: Any,
        export_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """`compile(*args, **kwargs)`, then `save(filename, export_model)`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Compile the model for what a file says that it was compiled for.

        Nothing in the file is unpickled: of one with a model, weights and optimizer are not read.
        If the model is compiled already it is destroyed first.

        poptorch.Error for a file that is damaged, of another version, or none of PopTorch's, and
        for one of another model: with other weights, micro-batches, or of the other kind.
        """
        try:
            saved = read(filename, self._version, model=False)
            if saved.arguments is None:
                raise Invalid("its arguments are of types that only poptorch.load reads")
            layout, weights = (
                MicroBatchLayout.of(self._options),
                described(self._model, saved.groupings),
            )
            differing = saved.differs(self._training, layout.described(), weights)
            if differing is not None:
                raise Invalid(differing)
        except Invalid as error:
            raise createPoptorchError(f"Invalid file {filename}: {error}") from None
        if self._executable is not None:
            self.destroy()
        self._restore(saved)

    def _restore(self, saved: Saved) -> None:
        """Compile, and go on where the file was saved."""
        assert saved.arguments is not None
        self.per_replica_params |= saved.groupings
        if saved.rng_state is not None:
            self._seed = saved.rng_state[0]
            self._forget_updater()  # its random numbers are of another seed
        with self._profiling.tracepoint("loadExecutable"):
            self._compile(saved.arguments.example(), saved.rng_state)
        if saved.exported is None:
            return
        if self._updater is not None and saved.exported.state is not None:
            self._updater.load_state_dict({"ipu_state": saved.exported.state})
        self._compiled().weights.take(saved.exported.device)
        self._beyond_host = saved.exported.device  # the model's weights are copied once more

    @property
    def rng_state(self) -> list[int]:
        """Seed, micro-batches and updates so far: random numbers go on from there if it is set.

        poptorch.Error if the model is not compiled.
        """
        progress = self._compiled().progress
        log_reading()
        return progress.state

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        progress = self._compiled().progress
        progress.state = state
        logger.debug("Setting random seed to: %d", progress.seed)
        logger.debug("Setting RNG state")

    # ---------------------------------------------------------------- tensors of the graph

    def getTensorNames(self) -> list[str]:
        """The names of the graph's tensors, for `Options.anchorTensor`.

        AssertionError if the model is not compiled.
        """
        assert self._executable is not None, "Model must be compiled before calling getTensorNames"
        program = self._executable.program
        of_update = self._updates.names if self._updates else ()
        return [*program.names, *program.buffers, *of_update]

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """A tensor that the last call kept. AssertionError for an unknown name."""
        assert short_name in self._anchored, f"No tensor with name {short_name} found."
        return self._anchored[short_name]

    # ---------------------------------------------------------------- the schedule

    def schedulePlot(
        self, path: str | os.PathLike[str] | None = None, *, backward: float = 2.0
    ) -> Figure:
        """Plot the schedule of each IPU of a replica. PopTorch lacks this method.

        It shows the time from one update to the next, or a call for inference, and the share of it
        in which the IPUs wait.

        **Arguments**

        - `path`: a file to write it to as well, .svg, .png or .pdf.
        - `backward`: how long a stage's backward pass takes, its forward pass being 1.

        **Returns**

        A figure of matplotlib, which notebooks show.

        poptorch.Error if the model is not compiled; ValueError for other files, for a `backward`
        that is not positive, and for too many micro-batches to be seen; ModuleNotFoundError, with
        the command that installs it, without matplotlib.
        """
        name = original_class(self._user_model).__name__
        return self._compiled().plan.plot(path, name, backward)

    # ---------------------------------------------------------------- times

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When the last call's tensors went to and came from the device, in seconds.

        The keys are "input", "input_complete", "output" and "output_complete"; the values have a
        list for each tensor, with a time for each micro-batch (for outputs, for each that was
        returned). Measured; only differences mean something.
        """
        return self._counters.as_dict()

    def getHostIpuLatency(self) -> Latency:
        """Seconds from the first input's request to the last one's arrival: least, most, mean."""
        return self._counters.host_to_device()

    def getComputeLatency(self) -> Latency:
        """Seconds from the last input's arrival to the last output: least, most, mean."""
        return self._counters.compute()

    def getIpuHostLatency(self) -> Latency:
        """Seconds from the first output to the last one's arrival: least, most, mean."""
        return self._counters.device_to_host()

    def getLatency(self) -> Latency:
        """Seconds from the first input's request to the last output's arrival."""
        return self._counters.round_trip()

    def cycleCount(self) -> int:
        """An estimate of the cycles of the last call.

        It is the measured time of the device's work times the clock of a Mk2 IPU, 1.33 GHz: the
        cycles of an IPU that takes as long as this machine does for all replicas.

        poptorch.Error unless `Options.logCycleCount(True)` was set, and before the first call.
        """
        if not self._options._Popart.options.get(CYCLES):
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to "
                "enable."
            )
        if self._executable is None or not self._counters.device_seconds:
            raise createPoptorchError(
                "Please run the model at least once before obtaining cycle count."
            )
        return self._counters.cycles()

    # ---------------------------------------------------------------- the device

    def isAttachedToDevice(self) -> bool:
        """Whether the model is compiled, and its device this executor's."""
        return self._ipus is not None and self._ipus.attached

    def attachToDevice(self) -> None:
        """Attach to the device, and copy the model's weights to it.

        After `detachFromDevice` it copies the optimizer's state too.

        poptorch.Error if the model is not compiled, if it is attached, and if the device is in use;
        AssertionError for an offline device.
        """
        self._compiled()
        assert self._ipus is not None
        assert self._options.connection_type != ConnectionType.Never, (
            "Trying to attach to an offline device (ConnectionType.Never)"
        )
        if self._ipus.attached:
            raise createPoptorchError("Device is already attached")
        self._ipus.attach()
        if self._detached:
            self._detached = False
            self.rng_state = self._compiled().progress.state
            if self._updater is not None:
                self._updater.restore()
        self._upload()

    def detachFromDevice(self) -> None:
        """Copy the weights and the optimizer's state to the host, and release the device.

        poptorch.Error if the model is not compiled, or not attached.
        """
        self._compiled()
        if self._ipus is None or not self._ipus.attached:
            raise createPoptorchError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        self._read_optimizer()
        log_reading()
        self._detached = True
        self._ipus.detach()


def own_options(options: Options | None, training: bool) -> Options:
    """A clone of the user's options with an output mode; ValueError for impossible groups."""
    if options is None:
        options = Options()
    elif not isinstance(options, Options):
        raise createPoptorchError(
            f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)"
        )
    options._check_input_groups()
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if training else OutputMode.All)
    return own


def seed_from(options: Options) -> int:
    """The options' seed, or PyTorch's."""
    given = options.random_seed if options.exists("random_seed") else torch.initial_seed()
    return int(given) % 2**64


def log_reading() -> None:
    """Log that random numbers' state comes to the host: only the log shows a difference."""
    logger.debug("Reading random seed")
    logger.debug("Reading RNG state")


def put_back(value: Tensor, given: Tensor) -> None:
    """Copy a value that forward changed to the caller's tensor, unless that one is expanded."""
    steps = zip(given.stride(), given.shape, strict=True)
    if any(not stride and size > 1 for stride, size in steps):
        logger.warning(EXPANDED, list(given.shape))
    else:
        given.data.copy_(value)


def no_backward(*args: Any, **kwargs: Any) -> None:
    raise createPoptorchError(NO_BACKWARD)


def no_progress(progress: int, total: int) -> None:
    """Ignore the progress of a compilation."""
