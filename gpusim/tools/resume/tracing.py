"""The tracer of a rank: writes the whole state at each step, and ends a run at its checkpoint.

The program is not changed, and no collective is called: a rank writes the parts that it holds.
Owner of all fields: the rank's main thread. Hooks only read.

A step begins with the first forward pass, with gradients, that follows a step of an optimizer. The
state is written there; the options of parameter groups and the schedulers are written as the
optimizer steps, as programs may set a learning rate in between.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from gpusim.tools.equal.names import Names, submodules
from gpusim.tools.equal.patches import trials_are_paused
from gpusim.tools.equal.shards import Shards
from gpusim.tools.equal.traces import TraceWriter
from gpusim.tools.equal.tracing import EnoughStepsError, array_of, local_of
from gpusim.torch.private import DisableTorchFunctionSubclass, in_backward

from .files import Checkpoints, saved_steps
from .samples import Samples
from .settings import Settings
from .sites import site
from .states import groups_of, random_state, scaler_state, scheduler_state

__all__ = ["StateTracer", "traced"]

KINDS = ("weight", "buffer", "optimizer state")


@contextmanager
def traced(settings: Settings, rank: int, ranks: int) -> Iterator[StateTracer]:
    """A block in which this process's state is traced, as that of a rank."""
    tracer = StateTracer(settings, rank, ranks)
    with ExitStack() as stack:
        tracer.install(stack)
        try:
            yield tracer
            tracer.finish(True)
        except EnoughStepsError:
            tracer.finish(False)
        except SystemExit as ended:
            tracer.finish(not ended.code)
            raise
        finally:
            tracer.finish(False)


class StateTracer:
    """The notes of a rank."""

    paused = False
    """In a pass that is made for the shapes of what a pipeline's stages exchange."""

    def __init__(self, settings: Settings, rank: int, ranks: int) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.writer = TraceWriter(self.folder, rank, ranks, settings.limit // ranks)
        self.names = Names()
        self.shards = Shards(self.names)
        self.samples = Samples(random_state)
        self.files = Checkpoints(self.folder, settings.checkpoint, rank, self.completed)
        self.order = 0
        self.step = 0
        #: Whether an optimizer has stepped since the last forward pass began.
        self.stepped = False
        self.any_step = False
        self.depth = 0
        self.finished = False
        #: Modules, optimizers, schedulers and scalers in the order in which they were made.
        self.modules: list[weakref.ref[nn.Module]] = []
        self.optimizers: list[weakref.ref[Any]] = []
        self.schedulers: list[weakref.ref[Any]] = []
        self.scalers: list[weakref.ref[Any]] = []
        #: Of each step, what is no tensor.
        self.random: list[dict[str, str]] = []
        self.scaled: list[list[dict[str, Any]]] = []
        self.groups: list[list[Any]] = []
        self.scheduled: list[list[Any]] = []
        self.data: list[list[Any]] = []
        self.elements: list[list[str]] = []
        self.draws: set[str] = set()
        #: Where each kind of state was put in last.
        self.sites: dict[str, str] = {}
        self._before: dict[str, str] = {}

    def completed(self) -> int:
        """The steps that are done."""
        return self.step + self.stepped

    @property
    def _is_under_way(self) -> bool:
        """Whether a forward pass has begun the step. DCP makes steps without one, at a load."""
        return len(self.random) > self.step

    # ------------------------------------------------------------ hooks

    def install(self, stack: ExitStack) -> None:
        """Put the hooks in, until the stack ends."""
        stack.callback(setattr, nn.Module, "__call__", nn.Module.__call__)
        setattr(nn.Module, "__call__", self._calling(nn.Module.__call__))  # noqa: B010  # mypy: a method
        for hook in (
            torch_module.register_module_module_registration_hook(self.names.note_child),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step),
            torch_optimizer.register_optimizer_step_post_hook(self._after_step),
        ):
            stack.callback(hook.remove)
        for kind, method, known in (
            (nn.Module, "__init__", self.modules),
            (nn.Module, "__setstate__", self.modules),
            (torch_optimizer.Optimizer, "__init__", self.optimizers),
            (lr_scheduler.LRScheduler, "__init__", self.schedulers),
            (lr_scheduler.ReduceLROnPlateau, "__init__", self.schedulers),
            (torch.amp.GradScaler, "__init__", self.scalers),
        ):
            self._register(stack, kind, method, known)
        for kind, label in (
            (nn.Module, "weights"),
            (torch_optimizer.Optimizer, "optimizer"),
            (lr_scheduler.LRScheduler, "scheduler"),
            (lr_scheduler.ReduceLROnPlateau, "scheduler"),
            (torch.amp.GradScaler, "scaler"),
        ):
            self._note_site(stack, kind, "load_state_dict", label)
        self._note_site(stack, torch, "set_rng_state", "random")
        self._note_site(stack, torch.random, "set_rng_state", "random")
        self._note_sites_of_dcp(stack)
        self.files.install(stack)
        self.samples.install(stack)
        atexit.register(self.finish)
        stack.callback(atexit.unregister, self.finish)

    def _note_sites_of_dcp(self, stack: ExitStack) -> None:
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint import state_dict, state_dict_loader

        for owner in (checkpoint, state_dict_loader):
            self._note_site(stack, owner, "load", "dcp")
        self._note_site(stack, state_dict, "set_model_state_dict", "weights")
        self._note_site(stack, state_dict, "set_optimizer_state_dict", "optimizer")
        self._note_site(stack, state_dict, "set_state_dict", "optimizer")

    def _register(self, stack: ExitStack, kind: Any, method: str, known: list[Any]) -> None:
        real = getattr(kind, method)

        @functools.wraps(real)
        def make(made: Any, *args: Any, **named: Any) -> Any:
            if all(each() is not made for each in known[-1:]):
                known.append(weakref.ref(made))
            return real(made, *args, **named)

        stack.callback(setattr, kind, method, real)
        setattr(kind, method, make)

    def _note_site(self, stack: ExitStack, owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name, None)
        if real is None:
            return

        @functools.wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            self.sites[label] = site()
            return real(*args, **named)

        stack.callback(setattr, owner, name, real)
        setattr(owner, name, call)

    def _calling(self, real: Any) -> Any:
        @functools.wraps(real)
        def __call__(module: nn.Module, *args: Any, **named: Any) -> Any:
            if self.depth or self.finished or torch.compiler.is_compiling():
                return real(module, *args, **named)
            trials_are_paused(self)  # type: ignore[arg-type]  # it pauses, and does no more
            if (
                not self.paused
                and module.training
                and torch.is_grad_enabled()
                and not in_backward()
                and next(module.parameters(), None) is not None
            ):
                self._begin_forward(module, (args, named))
            self.depth += 1
            try:
                return real(module, *args, **named)
            finally:
                self.depth -= 1

        return __call__

    def _begin_forward(self, module: nn.Module, given: Any) -> None:
        if self.stepped:
            self.stepped = False
            self.step += 1
        self.names.of(module, None)
        if len(self.random) == self.step:
            self.random.append(random_state())
            self.scaled.append([scaler_state(each) for each in _alive(self.scalers)])
            self.write_state()
            if self.settings.steps and self.step >= self.settings.steps:
                raise EnoughStepsError(0)
            self.data.append([])
            self.elements.append([])
        iterator, taken, elements = self.samples.taken(given)
        self.elements[-1].append(elements)
        if iterator < 0 or [iterator, taken] not in self.data[-1]:
            self.data[-1].append([iterator, taken])
        self._before = random_state()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.stepped or self.finished or not self._is_under_way:
            return
        if self.settings.stops and any(
            self.settings.stop_after <= step <= self.step for step in saved_steps(self.folder)
        ):
            raise EnoughStepsError(0)
        if len(self.groups) <= self.step:
            self.names.refresh()
            self.groups.append(
                [
                    [groups_of(each), self._names_of(each)]
                    for each in _alive(self.optimizers)
                    if any(group["params"] for group in each.param_groups)
                ]
            )
            self.scheduled.append(
                [[type(each).__name__, scheduler_state(each)] for each in _alive(self.schedulers)]
            )

    def _names_of(self, optimizer: Any) -> list[list[str]]:
        return [
            [
                f"{piece.tag}/{piece.name}"
                for each in group["params"]
                for piece in self.shards.of(each)
            ]
            for group in optimizer.param_groups
        ]

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_under_way:
            return
        after = random_state()
        if self._before:
            self.draws |= {name for name in after if after[name] != self._before[name]}
        self._before = after
        self.stepped = self.any_step = True

    # ------------------------------------------------------------ writing

    def write_state(self) -> None:
        """Write weights, buffers and states of optimizers as they are now."""
        self._take_others()
        self.names.refresh()
        self.counts: Counter[tuple[str, ...]] = Counter()
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for tag, name, parameter in self.names.weights():
                for piece in self.shards.of_parameter(tag, name, parameter):
                    value = piece.cut(parameter)
                    self.write("weight", piece.tag or tag, piece.name, "", value, piece.slice)
            for tag, root in self.names.roots.items():
                for owner, module in submodules(root):
                    for part, buffer in module._buffers.items():
                        if buffer is not None:
                            name = f"{owner}.{part}" if owner else part
                            self.write("buffer", tag, name, "", buffer)
            for optimizer in _alive(self.optimizers):
                self._write_optimizer(optimizer)

    def _take_others(self) -> None:
        """Know the outermost modules that were never called too, such as averages of weights."""
        alive = [
            each for each in _alive(self.modules) if getattr(each, "_parameters", None) is not None
        ]
        inner = {id(child) for each in alive for child in each._modules.values()}
        for each in alive:
            if id(each) not in inner and next(each.parameters(), None) is not None:
                self.names.of(each, None)

    def _write_optimizer(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not hasattr(state, "items"):
                    continue
                for leaf, value in state.items():
                    if isinstance(value, bool | int | float):
                        value = torch.tensor(float(value), dtype=torch.float64)
                    if isinstance(value, Tensor):
                        self._write_leaf(parameter, str(leaf), value)

    def _write_leaf(self, parameter: Tensor, leaf: str, value: Tensor) -> None:
        for piece in self.shards.of(parameter):
            kind, tag, name = "optimizer state", piece.tag, piece.name
            if value.shape == parameter.shape and value.dim():
                self.write(kind, tag, name, leaf, piece.cut(value), piece.slice)
            else:
                self.write(kind, tag, name, leaf, value)

    def write(
        self,
        kind: str,
        tag: str,
        name: str,
        leaf: str,
        tensor: Tensor,
        slice: tuple[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Write one tensor of this rank."""
        local, claim = local_of(tensor)
        if local is None:
            return
        key = kind, tag, name, leaf, str(slice)
        count = self.counts[key]
        self.counts[key] += 1
        self.order += 1
        about: dict[str, Any] = {"kind": kind, "root": tag, "name": name, "leaf": leaf}
        about |= {"step": self.step, "count": count, "order": self.order}
        if claim is not None:
            about["claim"] = claim
        if slice is not None:
            about["slice"] = slice
        array = array_of(local)
        self.writer.write(array if array.dtype != np.bool_ else array.astype(np.uint8), **about)

    def finish(self, well: bool = False) -> None:
        """Write what the end alone knows."""
        if self.finished:
            return
        self.finished = True
        if well and self.stepped:
            self.step += 1
            self.stepped = False
            self.write_state()
        elif self.stepped:
            self.step += 1
        self.writer.end(
            well=well,
            steps=self.step,
            trained=self.any_step,
            random=self.random,
            scaled=self.scaled,
            groups=self.groups,
            scheduled=self.scheduled,
            data=self.data,
            elements=self.elements,
            ended=self.samples.ended,
            draws=sorted(self.draws),
            data_draws=sorted(self.samples.draws),
            saved=self.files.saved,
            loaded=self.files.loaded,
            contents=self.files.contents,
            sites=self.sites,
        )


def _alive(known: list[weakref.ref[Any]]) -> list[Any]:
    return [each for reference in known if (each := reference()) is not None]
