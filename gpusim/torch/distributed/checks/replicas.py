"""A rank's notes of its replica of a model: parameters and gradients at each optimizer step.

`drift` compares the notes of all ranks.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..private import is_dtensor
from ..private_checks import unreduced_parameters
from .described import called_by_dtensor, ddp_groups, names_of, replicas_of, settings_of
from .digests import address, digest, glance, is_constant, local_part, tensors_of
from .drift import analyse
from .here import watch_of_thread
from .training import install

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["Replicas", "analyse", "follow_steps", "install"]

DETAILED, SPARSE, MOST = 256, 16, 512
"""All of the first steps are noted, then one of so many, and no more than so many in all."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather")
WHOLE = ("all_reduce", "broadcast")
"""Calls after which all ranks of the group have the same tensor."""


class Seen(NamedTuple):
    """The last call that had a tensor's storage: what it was, after how many backward passes and
    steps."""

    operation: str
    site: str
    labels: tuple[str, ...]
    backwards: int
    steps: int
    written: bool


def follow_steps(stack: ExitStack) -> None:
    """Note the steps of optimizers, until the stack ends, in the threads of watched ranks.

    By hooks in the tables of the calling thread: those of a rank in its turn, else the process's.
    """
    stack.callback(register_optimizer_step_pre_hook(_begin_step).remove)
    stack.callback(register_optimizer_step_post_hook(_end_step).remove)


def _begin_step(optimizer: Any, args: Any, named: Any) -> None:
    watch = None if torch.compiler.is_dynamo_compiling() else watch_of_thread()
    if watch is not None:
        watch.replicas.begin_step(optimizer, args, named)


def _end_step(optimizer: Any, args: Any, named: Any) -> None:
    watch = None if torch.compiler.is_dynamo_compiling() else watch_of_thread()
    if watch is not None:
        watch.replicas.end_step(optimizer)


class Steps:
    """Notes on an optimizer with one list of parameters."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters = [weakref.ref(each) for each in parameters]
        self.ids = [id(each) for each in parameters]
        self.count = 0
        self.row: dict[str, Any] | None = None
        # "averaged" and "given": after how many steps a call last wrote, or read, one of them.
        self.about: dict[str, Any] = {"kind": type(optimizer).__name__, "steps": []}
        self.about.update(averaged=0, given=0)
        self.settings: list[Any] = []
        self.addresses = [address(each) for each in parameters]


class Replicas:
    """A rank's notes. Owner: the rank's thread."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.backwards = 0
        self.steps = 0
        # The rank's modules, that program's calls begin with, and the DDP modules among them.
        self.modules: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._ddp: list[weakref.ref[nn.Module]] = []
        self._inputs = "0"
        # By the addresses of storages. `_seen` is of the last steps, `_spread` of all before the
        # first one.
        self._seen: dict[int, Seen] = {}
        self._spread: dict[int, str] = {}
        self._flats: list[tuple[int, int]] = []
        self._torch_reduced = -1
        self._optimizers: dict[int, Steps] = {}
        self._all: list[Steps] = []
        self._stack: list[int] = []
        self._tied: dict[str, int] = {}
        self._head: dict[str, Any] = {"links": [], "peers": [], "losses": [], "samplers": []}

    # What the program does

    def enter(self, module: nn.Module, args: Any, named: Any) -> None:
        """A module is called from outside of all modules."""
        if self.watch.in_backward:  # of a checkpoint, which calls it again
            return
        if module not in self._known:
            self._known.add(module)
            self.modules.append(weakref.ref(module))
        if not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return
        with self.watch.busy():
            found = [digest(each) for each in tensors_of([*args, *named.values()])]
        if found:
            self._inputs = f"{zlib.crc32(' '.join([self._inputs, *found]).encode()):08x}"

    def add_ddp(self, module: nn.Module) -> None:
        """DDP has been made."""
        self._ddp.append(weakref.ref(module))

    def add_sampler(self, replicas: int) -> None:
        """A DistributedSampler for so many ranks is iterated over."""
        self._add("samplers", replicas)

    def is_linked(self, label: str) -> bool:
        """Whether ranks of the group exchange activations."""
        return label in self._head["links"]

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of the modules that the program calls."""
        for reference in self.modules:
            module = reference()
            if module is not None:
                yield from module.parameters()

    def begin_backward(self, roots: Iterable[Tensor]) -> None:
        """A backward pass begins."""
        self.backwards += 1
        for root in roots:
            seen = self._seen.get(address(root))
            if seen is not None and seen.written and seen.operation == "all_reduce":
                self._add("losses", seen.labels[-1])

    def see_call(self, call: Call) -> None:
        """A call has been posted."""
        given, key = call.given, call.group._key
        if len(key.ranks) < 2:
            return
        if call.operation in ("send", "recv"):
            if given.peer is not None and 0 <= given.peer < len(key.ranks):
                self._add("peers", key.ranks[given.peer])
            return
        if call.inside == "forward" or (call.inside == "torch" and called_by_dtensor()):
            self._add("links", key.label)
            self.watch.draws.see_link(call)
            return
        if not given.written and not given.only_read:
            return
        if call.inside == "torch" and self.watch.in_backward:
            self._torch_reduced = self.backwards
        if call.inside != "torch":
            self._tied.setdefault(key.label, self.steps)
        written = set(map(id, given.written))
        for tensor in (*given.written, *given.only_read):
            where, is_written = address(tensor), id(tensor) in written
            if not where:
                continue
            before = self._seen.get(where)
            labels: tuple[str, ...] = (key.label,)
            if before is not None and before.backwards == self.backwards:
                labels = (*before.labels, key.label)
            now = self.backwards, self.steps
            self._seen[where] = Seen(call.operation, call.site, labels, *now, is_written)
            if not self.steps and is_written and call.operation in ("broadcast", "all_reduce"):
                self._spread[where] = key.label
            if call.operation in REDUCING and not self.watch.in_backward:
                self._flats.append((self.backwards, tensor.numel()))

    def _add(self, name: str, value: Any) -> None:
        if value not in self._head[name]:
            self._head[name].append(value)

    # An optimizer's step

    def begin_step(self, optimizer: Any, args: Any, named: Any) -> None:
        """An optimizer's step begins; `args` begin with the optimizer."""
        key = id(optimizer)
        if key in self._stack:  # of a step that has raised an error
            del self._stack[self._stack.index(key) :]
        self._stack.append(key)
        if len(self._stack) == 1:
            closure = named.get("closure") or (len(args) > 1 and args[1])
            site = self.watch.site()
            with self.watch.busy(), torch.no_grad():
                self._begin(optimizer, site, bool(closure))

    def end_step(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""
        key = id(optimizer)
        if key not in self._stack:
            return
        del self._stack[self._stack.index(key) :]
        steps = self._optimizers.get(key)
        if self._stack or steps is None:
            return
        with self.watch.busy(), torch.no_grad():
            self._end(steps)

    def _begin(self, optimizer: Any, site: str, closure: bool) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if not parameters or any(local_part(each) is None for each in parameters):
            return  # of fake tensors, and of others without memory
        key = id(optimizer)
        steps = self._optimizers.get(key)
        if (
            steps is None
            or steps.optimizer() is not optimizer
            or steps.ids != [id(each) for each in parameters]
        ):
            steps = self._optimizers[key] = Steps(optimizer, parameters)
            self._all.append(steps)
            self._describe(steps, parameters)
        self._find_unreduced(optimizer, site, parameters)
        self._note_calls_on(steps)
        if steps.count < DETAILED or steps.count % SPARSE == 0:
            rows = steps.about["steps"]
            if len(rows) < MOST:
                steps.row = {"k": steps.count, "site": site, "inputs": self._inputs}
                steps.row["before"] = [digest(each) for each in parameters]
                if not closure:
                    self._note_gradients(steps.row, parameters)
                settings = [settings_of(group) for group in optimizer.param_groups]
                if settings != steps.settings:
                    steps.settings = steps.row["settings"] = settings

    def _end(self, steps: Steps) -> None:
        steps.count += 1
        self.steps += 1
        row, steps.row = steps.row, None
        if row is not None:
            parameters = [each() for each in steps.parameters]
            if "grads" not in row:
                self._note_gradients(row, parameters)
            row["after"] = ["" if each is None else digest(each) for each in parameters]
            row["at"] = self.steps
            steps.about["steps"].append(row)
        if len(self._seen) > 4096:
            self._seen.clear()
        del self._flats[:-64]

    def _describe(self, steps: Steps, parameters: Sequence[Tensor]) -> None:
        """The values that ranks have to have alike."""
        modules = [each() for each in (*self._ddp, *self.modules)]
        names = names_of([each for each in modules if each is not None])
        groups = ddp_groups([each() for each in self._ddp])
        about = steps.about
        about["names"] = [names.get(id(each)) for each in parameters]
        about["shapes"] = [list(each.shape) for each in parameters]
        about["constant"] = [is_constant(each) for each in parameters]
        about["samples"] = [glance(each)[1] for each in parameters]
        about["ddp"] = [groups.get(id(each)) for each in parameters]
        about["dtensor"] = [replicas_of(each) for each in parameters]
        about["spread"] = sorted(
            {self._spread.get(address(each), "") for each in parameters} - {""}
        )

    def _note_calls_on(self, steps: Steps) -> None:
        """Note calls of the program on the parameters themselves, as those of local SGD."""
        for each in steps.addresses:
            seen = self._seen.get(each)
            if seen is not None and seen.steps:
                name = "averaged" if seen.written else "given"
                steps.about[name] = max(steps.about[name], seen.steps)

    def _note_gradients(self, row: dict[str, Any], parameters: Sequence[Tensor | None]) -> None:
        """Digests of gradients, and which a collective has contained since the backward pass."""
        gradients = [None if each is None else each.grad for each in parameters]
        looks = [("", []) if each is None else glance(each) for each in gradients]
        row["grads"] = [digested for digested, _ in looks]
        row["samples"] = [pair for _, pair in looks]
        row["sent"], row["late"], row["labels"], row["touched"] = [], {}, {}, []
        ends, total = {0: 0}, 0
        for place, each in enumerate(gradients):
            if each is None:
                continue
            total += each.numel()
            ends[total] = place + 1
            seen = self._seen.get(address(each))
            if seen is not None and seen.backwards == self.backwards:
                row["sent"].append(place)
                if seen.operation in WHOLE:
                    row["labels"][str(place)] = sorted(set(seen.labels))
            elif seen is not None:
                row["late"][str(place)] = f"{seen.operation} at {seen.site}"
        for backwards, numel in self._flats:
            if backwards == self.backwards:
                for end, place in ends.items():
                    if end + numel in ends:
                        row["touched"] += range(place, ends[end + numel])
        row["by_torch"] = self._torch_reduced == self.backwards

    def _find_unreduced(self, optimizer: Any, site: str, parameters: Sequence[Tensor]) -> None:
        """FSDP2's gradients that wait for a reduction while the optimizer steps."""
        if not any(map(is_dtensor, parameters)):
            return
        own = set(map(id, parameters))
        for reference in self.modules:
            module = reference()
            if module is None:
                continue
            waiting = [name for name, each in unreduced_parameters(module) if id(each) in own]
            if waiting:
                self.watch.find(
                    "gradient-not-reduced",
                    site,
                    f"the optimizer steps while the gradient of parameter {waiting[0]!r} waits to "
                    "be reduced over FSDP2's ranks: set_requires_gradient_sync(False) was on in "
                    "the last backward pass",
                    f"{type(optimizer).__name__}.step()",
                )
                return

    def finish(self) -> None:
        if not self._all:
            return
        self._head["tied"] = [label for label, at in self._tied.items() if at < self.steps]
        rows: list[Any] = [self._head]
        for steps in self._all:
            self._note_calls_on(steps)
            parameters = [each() for each in steps.parameters]
            if all(each is not None for each in parameters):
                steps.about["end"] = [digest(each) for each in parameters if each is not None]
            rows.append(steps.about)
        self.watch.log.rows["replicas"] = rows
