"""The tracer of a rank: hooks of torch's by which every tensor with a name is written down.

The program is not changed. Owner of all fields: the rank's main thread, in which forward and
backward run on the CPU. Hooks only read: they return None, and keep no tensor of the program's.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from gpusim.torch.private import DisableTorchFunctionSubclass, in_backward

from .calls import Calls
from .data import Loaders
from .names import Names, is_wrapper
from .patches import patched, trials_are_paused
from .settings import Settings
from .shards import Shards
from .traces import TraceWriter, blocks, coarse

__all__ = ["KINDS", "Tracer", "current", "traced"]

KINDS = (
    "input",
    "output",
    "gradient",
    "weight",
    "local gradient",
    "weight gradient",
    "optimizer state",
    "loss",
    "norm",
    "logged",
    "watched",
)
"""The kinds of tensors: an input of an outermost module; an output of a module, and its gradient;
a parameter, the gradient that a backward pass adds to it, and the one that is reduced; a state of
an optimizer; a tensor on which backward is called; a norm of gradients that are clipped; the result
of a reduction that is no part of a graph; one that the program names by `gpusim.equal.watch`."""

CLIPPED = "weight gradient, clipped"
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class EnoughStepsError(SystemExit):
    """The program ends: all steps that are compared are done."""


_current: Tracer | None = None


def current() -> Tracer | None:
    """The tracer of this rank, if it is traced."""
    return _current


@contextmanager
def traced(settings: Settings, rank: int, ranks: int) -> Iterator[Tracer]:
    """A block in which this process's tensors are traced, as those of a rank."""
    global _current
    tracer = Tracer(settings, rank, ranks)
    with ExitStack() as stack:
        tracer.install(stack)
        _current = tracer
        stack.callback(_forget)
        try:
            yield tracer
        except EnoughStepsError:
            pass
        finally:
            tracer.finish()


def _forget() -> None:
    global _current
    _current = None


class Tracer:
    """The notes of a rank."""

    def __init__(self, settings: Settings, rank: int, ranks: int) -> None:
        self.settings = settings
        folder = Path(settings.folder)
        self.writer = TraceWriter(folder, rank, ranks, settings.limit // ranks)
        self.names = Names()
        self.calls = Calls(lambda: self.order, self.on_logged)
        self.loaders = Loaders(settings.batches)
        self.shards = Shards(self.names)
        self.order = 0
        self.step = 0
        #: Whether an optimizer has stepped since the last forward pass began.
        self.stepped = False
        self.any_step = False
        self.stack: list[nn.Module] = []
        #: Of a rank that made no step, by which it sees that its weights are other ones.
        self.weight_sum = 0.0
        self.counts: Counter[tuple[Any, ...]] = Counter()
        #: When a parameter's gradient was last added to, and the sum of what was added.
        self.added: dict[tuple[str, str], tuple[int, Tensor]] = {}
        #: When backward added to a parameter's gradient for the last time.
        self.orders: dict[tuple[str, str], int] = {}
        self.hooked: set[int] = set()
        #: Parameters whose weights of this step are written.
        self.weighed: set[tuple[str, str]] = set()
        #: In a pass that is made for the shapes of what a pipeline's stages exchange.
        self.paused = False
        self.clipped = False
        self.narrow: dict[str, str] = {}
        self.notes: dict[str, int] = {}
        self.finished = False
        self.given = _weights_of(settings.weights)

    # ------------------------------------------------------------ hooks

    def install(self, stack: ExitStack) -> None:
        """Put the hooks in, until the stack ends."""
        # A hook of torch's for all modules would come before a module's own hooks, which DTensor's
        # plans and FSDP2 have: what the outer module gets is what the call returns.
        stack.callback(setattr, nn.Module, "__call__", nn.Module.__call__)
        call = self._calling(nn.Module.__call__)
        setattr(nn.Module, "__call__", call)  # noqa: B010  # mypy refuses to assign a method
        hooks = [
            torch_module.register_module_module_registration_hook(self.names.note_child),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step),
            torch_optimizer.register_optimizer_step_post_hook(self._after_step),
        ]
        for hook in hooks:
            stack.callback(hook.remove)
        self.calls.install(stack)
        self.loaders.install(stack)
        stack.enter_context(patched(self))
        atexit.register(self.finish)
        stack.callback(atexit.unregister, self.finish)

    def _calling(self, real: Any) -> Any:
        @functools.wraps(real)
        def __call__(module: nn.Module, *args: Any, **named: Any) -> Any:
            if not self.stack:
                trials_are_paused(self)
            if torch.compiler.is_compiling() or self.finished or self.paused:
                return real(module, *args, **named)
            if not self.stack and not in_backward():
                self._begin_forward(module, (args, named) if named else args)
            self.stack.append(module)
            try:
                output = real(module, *args, **named)
            finally:
                outer = self.stack[0]
                self.stack.pop()
            self._after_forward(module, outer, output)
            return noisy(output) if self.settings.noise and not module._modules else output

        return __call__

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        tag, name = self.names.of(module, None) or ("", "")
        self._see_others_step()
        if torch.is_grad_enabled() and self.stepped:
            self.stepped = False
            self.step += 1
            self.counts.clear()
            self.weighed.clear()
        self.names.refresh()
        if self.given:
            self._write_given()
        if not self.any_step:
            self.weight_sum = self._sum_of_weights()
        self.write_weights()
        if self.settings.steps and self.step >= self.settings.steps:
            raise EnoughStepsError(0)
        self._hook_parameters()
        for leaf, tensor in leaves(args):
            if tensor.dim():  # a number, as of tokens, may be the rank's or all ranks'
                self.write("input", tag, name, leaf, tensor)

    def _after_forward(self, module: nn.Module, outer: nn.Module, output: Any) -> None:
        if is_wrapper(module) or in_backward():
            return
        own = self.names.of(module, outer)
        if own is None:
            return
        tag, name = own
        for leaf, tensor in leaves(output):
            if not torch.is_floating_point(tensor):
                continue
            count = self.write("output", tag, name, leaf, tensor)
            if tensor.requires_grad and torch.is_grad_enabled() and not tensor.is_leaf:
                self._hook(tensor, tag, name, leaf, count)

    def _hook(self, tensor: Tensor, tag: str, name: str, leaf: str, count: int) -> None:
        step = self.step

        def write(gradient: Tensor) -> None:
            if gradient is not None and self.step == step:
                self.write("gradient", tag, name, leaf, gradient, count=count)

        tensor.register_hook(write)

    def _hook_parameters(self) -> None:
        for owner, name, parameter in self.names.weights():
            if parameter.requires_grad and id(parameter) not in self.hooked:
                self.hooked.add(id(parameter))
                parameter.register_hook(self._adder(owner, name))

    def _adder(self, tag: str, name: str) -> Any:
        def add(gradient: Tensor) -> None:
            if self.paused:
                return
            self.order += 1
            with torch.no_grad():
                before = self.added.get((tag, name))
                gradient = gradient.detach()
                total = gradient.clone() if before is None else before[1] + gradient
            self.added[tag, name] = self.order, total

        return add

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        """Write the gradients: now, or after the closure has made them, in the step."""
        given = list(args)
        closure = kwargs.get("closure") or next((each for each in given[1:2] if each), None)
        if not callable(closure):
            self._write_reduced(optimizer)
            return None

        def closing() -> Any:
            result = closure()
            self._write_reduced(optimizer)
            return result

        if kwargs.get("closure"):
            return args, {**kwargs, "closure": closing}
        given[1] = closing
        return tuple(given), kwargs

    def _write_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        self.names.refresh()
        self.write_gradients(
            [each for group in optimizer.param_groups for each in group["params"]],
            CLIPPED if self.clipped else "weight gradient",
        )

    def _see_others_step(self) -> None:
        """Notice that another rank, which has the optimizer, has sent the weights."""
        if not self.any_step and self.added and self.weight_sum != self._sum_of_weights():
            self.stepped = True
            self.write_gradients([], "weight gradient")

    def _sum_of_weights(self) -> float:
        with torch.no_grad():
            locals_ = (local_of(each)[0] for _, _, each in self.names.weights())
            return sum(float(each.double().sum()) for each in locals_ if each is not None)

    def write_gradients(self, given: Sequence[Tensor], kind: str) -> None:
        """Write what backward has added to parameters, and the gradients as they are now."""
        for (tag, name), (order, total) in list(self.added.items()):
            self.write("local gradient", tag, name, "", total, order=order, count=0)
        self.orders |= {key: order for key, (order, _) in self.added.items()}
        self.added.clear()
        for parameter in given:
            gradient = parameter.grad
            if gradient is None:
                continue
            for piece in self.shards.of(parameter):
                self.write(
                    kind,
                    piece.tag,
                    piece.name,
                    "",
                    piece.cut(gradient),
                    added=self.orders.get((piece.tag, piece.name), 0),
                    slice=piece.slice,
                )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.names.refresh()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not isinstance(state, Mapping):
                    continue
                for leaf, value in state.items():
                    if not isinstance(value, Tensor) or value.dim() == 0:
                        continue
                    for piece in self.shards.of(parameter):
                        if value.shape == parameter.shape:
                            cut = piece.cut(value)
                            self.write(
                                "optimizer state",
                                piece.tag,
                                piece.name,
                                str(leaf),
                                cut,
                                slice=piece.slice,
                            )
        self.stepped = self.any_step = True
        self.clipped = False

    # ------------------------------------------------------------ what patches say

    def on_loss(self, loss: Tensor) -> None:
        """Backward is called on a tensor of one element."""
        if loss.numel() == 1:
            self.write("loss", "", "loss", "", loss)

    def on_clip(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are about to be clipped."""
        self.names.refresh()
        self.write_gradients(parameters, "weight gradient")
        self.clipped = True

    def on_norm(self, norm: Any) -> None:
        """A norm of gradients is known. All ranks call this: a DTensor's parts are joined."""
        full = getattr(norm, "full_tensor", None)
        norm = full() if full is not None else norm
        self.write("norm", "", "clip norm", "", norm)

    def on_logged(self, name: str, tensor: Tensor) -> None:
        """A reduction outside of a graph has a result."""
        if torch.is_floating_point(tensor) and tensor.numel() <= 4 and not self.stack:
            if not in_backward():
                self.write("logged", "", name, "", tensor)

    def on_bits(self, tensor: Tensor, digest: str) -> None:
        """Random bits are drawn for a tensor."""
        module = self.stack[-1] if self.stack else None
        own = None if module is None else self.names.of(module, self.stack[0])
        tag, name = own or ("", "")
        again = in_backward()
        leaf = "again" if again else ""
        self.write("bits", tag, name, leaf, tensor, bits=digest)

    def watch(self, name: str, tensor: Tensor) -> None:
        """The program names a tensor."""
        count = self.write("watched", "", name, "", tensor)
        if tensor.requires_grad and torch.is_grad_enabled() and not tensor.is_leaf:
            self._hook(tensor, "", name, "", count)

    def note(self, text: str) -> None:
        """Count something that is said in the report."""
        self.notes[text] = self.notes.get(text, 0) + 1

    # ------------------------------------------------------------ writing

    def write_weights(self) -> None:
        """Write the parameters, unless they are written in this step."""
        for tag, name, parameter in self.names.weights():
            if (tag, name) in self.weighed or not torch.is_floating_point(parameter):
                continue
            self.weighed.add((tag, name))
            for piece in self.shards.of_parameter(tag, name, parameter):
                value = piece.cut(parameter)
                self.write("weight", piece.tag, piece.name, "", value, slice=piece.slice)

    def _write_given(self) -> None:
        with torch.no_grad():
            for owner, name, parameter in self.names.weights():
                value = self.given.pop(f"{owner}/{name}", None)
                if value is not None and tuple(value.shape) == tuple(parameter.shape):
                    parameter.copy_(torch.from_numpy(value))

    def write(
        self,
        kind: str,
        tag: str,
        name: str,
        leaf: str,
        tensor: Any,
        *,
        count: int | None = None,
        order: int | None = None,
        added: int = 0,
        slice: tuple[int, tuple[int, ...]] | None = None,
        bits: str = "",
    ) -> int:
        """Write a tensor; how often it was written before in this step."""
        self.order += 1
        evaluated = not torch.is_grad_enabled() and kind in ("input", "output")
        key = (kind, tag, name, leaf, evaluated, slice and slice[0])
        if count is None:
            count = self.counts[key]
            self.counts[key] += 1
        with torch.no_grad(), DisableTorchFunctionSubclass():
            local, claim = local_of(tensor)
            if local is None:
                return count
            if local.dtype in NARROW:
                self.narrow.setdefault(str(local.dtype).removeprefix("torch."), f"{kind} {name}")
            array = array_of(local)
            pool: tuple[int, ...] = ()
            if array.size > self.settings.large and slice is None and array.dtype.kind == "f":
                pool = blocks(array.shape)
                array = coarse(array.astype(np.float64, copy=False), pool)
        about: dict[str, Any] = {"kind": kind, "root": tag, "name": name, "leaf": leaf}
        about |= {"step": self.step, "count": count, "order": order or self.order}
        if claim is not None:
            about["claim"] = claim
        if slice is not None:
            about["slice"] = slice
        if pool:
            about["pool"] = pool
        if added:
            about["added"] = added
        if bits:
            about["bits"] = bits
        if evaluated:
            about["evaluated"] = True
        self.writer.write(array, **about)
        return count

    def finish(self) -> None:
        """Write what the end alone knows."""
        if self.finished:
            return
        self.finished = True
        self._see_others_step()
        if self.stepped:
            self.step += 1
            self.weighed.clear()
            self.names.refresh()
            self.write_weights()
        self.writer.end(
            steps=self.step,
            trained=self.any_step,
            modules=self.names.about,
            aliases=self.names.aliases(),
            calls=self.calls.calls,
            groups=self.calls.known_groups(),
            messages=self.calls.messages,
            narrow=self.narrow,
            notes=self.notes,
            batches=self.loaders.read,
            lengths=self.loaders.lengths,
            weights={
                f"{tag}/{name}": list(parameter.shape)
                for tag, name, parameter in self.names.weights()
            },
        )


def noisy(value: Any) -> Any:
    """A tensor, or tensors in a tuple or list, with each element changed by up to one rounding."""
    if isinstance(value, Tensor):
        if not torch.is_floating_point(value) or not value.numel():
            return value
        if hasattr(value, "placements"):  # a DTensor, whose parts are to be as they were
            return value * (1 + torch.finfo(value.dtype).eps)
        with torch.no_grad():
            # Of a generator of its own: the program's random numbers stay what they are.
            draw = torch.Generator().manual_seed(value.numel())
            noise = torch.rand(value.shape, generator=draw, dtype=torch.float64) * 2 - 1
            factor = (1 + noise * torch.finfo(value.dtype).eps).to(value.dtype)
        return value * factor
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(noisy(each) for each in value)
    return value


def _weights_of(path: str) -> dict[str, Any]:
    if not path:
        return {}
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value, which may be nested in sequences, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for n, each in enumerate(value):
            yield from leaves(each, f"{name}.{n}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from leaves(getattr(value, one.name, None), f"{name}.{one.name}")


def local_of(tensor: Any) -> tuple[Tensor | None, Any]:
    """The rank's own part of a tensor, and what a DTensor claims; None for one without elements."""
    tensor = tensor.detach()
    claim = None
    placements = getattr(tensor, "placements", None)
    if placements is not None and hasattr(tensor, "device_mesh"):
        with suppress(ValueError, RuntimeError):  # the mesh's groups are gone: the program ends
            mesh = tensor.device_mesh.mesh.tolist()
            claim = [_placement(each) for each in placements], mesh, list(tensor.shape)
        tensor = tensor.to_local()
    wait = getattr(tensor, "wait", None)
    if wait is not None and type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = wait()
    if tensor.is_meta or tensor.layout is not torch.strided:
        return None, None
    return tensor, claim


def _placement(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        return "P"
    dim = getattr(placement, "dim", None)
    factor = getattr(placement, "split_factor", None)
    return f"S{dim}" if factor is None else f"S{dim}/{factor}"


def array_of(tensor: Tensor) -> np.ndarray:
    """The elements, in a dtype that NumPy has."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.is_floating_point and tensor.dtype not in (torch.float64, torch.float32):
        tensor = tensor.to(torch.float32) if tensor.element_size() < 4 else tensor.double()
    if tensor.dtype is torch.bool:
        tensor = tensor.to(torch.uint8)
    found: np.ndarray = tensor.resolve_neg().cpu().contiguous().numpy()
    return found
