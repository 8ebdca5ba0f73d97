"""Dropout on ranks that share one model: from which random bits, and on which parts.

Ranks that exchange activations inside of modules' calls hold parts of one model. A tensor that all
of them have is to be dropped out alike, and the parts of one tensor differently.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..accelerator.devices import current_mode
from ..accelerator.marks import gpu_of
from ..private import is_dtensor, tensor_inside
from .digests import address, digest, is_constant, local_part, tensors_of
from .here import replace
from .random_bits import analyse

if TYPE_CHECKING:
    from .reading import Operation
    from .watch import Call, Watch

__all__ = ["Draws", "analyse", "install"]

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
FUNCTIONS, METHODS = ("rand", "rand_like", "bernoulli"), ("bernoulli", "bernoulli_", "uniform_")
APPLYING = ("mul", "mul_", "div", "div_", "where", "masked_fill", "masked_fill_")
PATIENCE = 12
"""How many operators may lie between the drawing of random numbers and their application."""
MOST_OF_SITE, MOST = 32, 2048
"""How many draws are noted, of one line and in all."""


class Draws:
    """A rank's draws. Owner: the rank's thread."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.is_drawing = False
        self._counts: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._weights: dict[str, str] = {}
        self._weighed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The tensors that the module is given, and what is known of them once something is drawn.
        self._given: list[weakref.ref[Tensor]] = []
        self._inputs: str | None = None
        self._part: list[Any] | None = None
        # Of the collectives inside of modules: the sizes of the last results, and the operations.
        self._sizes: dict[str, list[int]] = {}
        self._links: dict[str, list[str]] = {}

    def enter(self, module: nn.Module, args: Any, named: Any) -> None:
        """A module is called from outside of all modules."""
        if self.watch.in_backward:
            return
        self._module = weakref.ref(module)
        self._given = [weakref.ref(each) for each in tensors_of([*args, *named.values()])]
        self._part = self._inputs = None
        self._sizes.clear()

    def see_link(self, call: Call) -> None:
        """A collective over activations has been posted."""
        label, given = call.group._key.label, call.given
        operations = self._links.setdefault(label, [])
        if call.operation not in operations:
            operations.append(call.operation)
        self._sizes[label] = [each.numel() for each in (*given.written, *given.only_read)]

    def draw(self, tensor: Any, real: Callable[[], Any], in_place: bool) -> Any:
        """Call a function that draws for the elements of a tensor, and note it."""
        if not isinstance(tensor, Tensor) or is_dtensor(tensor):
            return real()  # a DTensor's draws are DTensor's own
        # A result that is yet to come can be read when the function has waited for it.
        comes = local_part(tensor) is None
        if comes and tensor_inside(tensor) is None:
            return real()
        note = self.begin()
        if note is None:
            return real()
        if not comes or in_place:
            self.end(note, tensor)
        self.is_drawing = True
        try:
            result = real()
        finally:
            self.is_drawing = False
        if comes and not in_place:
            self.end(note, tensor)
        self.note_state(note, tensor)
        return result

    def begin(self) -> dict[str, Any] | None:
        """A note of a draw; None for no more of them."""
        if self.is_drawing or self.watch.in_backward or len(self._rows) >= MOST:
            return None
        site = self.watch.site()
        count = self._counts.get(site, 0)
        if count >= MOST_OF_SITE:
            return None
        self._counts[site] = count + 1
        with self.watch.busy(), torch.no_grad():
            self._weigh()
            return {
                "site": site,
                "number": count,
                "state": "",
                "inputs": self._digest_inputs() if self.watch.depth else "",
                "sizes": {label: list(sizes) for label, sizes in self._sizes.items()},
                "part": self._part_of_whole(),
            }

    def end(self, note: dict[str, Any], tensor: Tensor) -> None:
        """Add to a note what is dropped out."""
        own = tensor_inside(tensor) if local_part(tensor) is None else tensor
        if own is not None:
            with self.watch.busy(), torch.no_grad():
                note.update(shape=list(own.shape), bits=digest(own), constant=is_constant(own))
            self._rows.append(note)

    def note_state(self, note: dict[str, Any], tensor: Tensor) -> None:
        """Add to a note the state of the generator, after the draw: it was as equal before."""
        with self.watch.busy():
            mode, gpu = current_mode(), gpu_of(tensor)
            if mode is not None and gpu is not None:
                state = mode.generators[gpu].get_state()
            elif mode is None and tensor.is_cuda:
                state = torch.cuda.get_rng_state(tensor.device)
            else:
                state = torch.get_rng_state()
            note["state"] = f"{zlib.crc32(state.numpy().tobytes()):08x}"

    def _weigh(self) -> None:
        """Take digests of the weights of the module that is called, once."""
        module = None if self._module is None else self._module()
        if module is None or module in self._weighed:
            return
        self._weighed.add(module)
        for name, each in (*module.named_parameters(), *module.named_buffers()):
            if len(self._weights) < 1024 and not is_constant(each):
                self._weights.setdefault(name, digest(each))

    def _digest_inputs(self) -> str:
        if self._inputs is None:
            given = [each() for each in self._given]
            self._inputs = " ".join("" if each is None else digest(each) for each in given)
        return self._inputs

    def _part_of_whole(self) -> list[Any] | None:
        """Of which tensor the module's input is a part along a dimension that is not the first."""
        tensor = self._given[0]() if self._given else None
        if tensor is None or local_part(tensor) is not tensor or tensor.dim() < 2:
            return None
        sizes, strides = tensor.shape, tensor.stride()
        gaps = [strides[at] > sizes[at + 1] * strides[at + 1] for at in range(tensor.dim() - 1)]
        if not any(gaps):
            return None
        if self._part is None:
            storage = tensor.untyped_storage()
            count = storage.nbytes() // tensor.element_size()
            whole = tensor.detach().as_strided((count,), (1,), 0)
            self._part = [digest(whole), tensor.storage_offset()]
        return self._part

    def finish(self) -> None:
        if self._rows and self._links:
            head = {"links": self._links, "weights": self._weights}
            self.watch.log.rows["draws"] = [head, *self._rows]


def _dropout(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    p = args[1] if len(args) > 1 else named.get("p", 0.5)
    training = args[2] if len(args) > 2 else named.get("training", named.get("train", True))
    in_place = args[3] if len(args) > 3 else named.get("inplace", False)
    if not (training and 0 < p < 1):
        return real(*args, **named)
    given = args[0] if args else named.get("input")
    return watch.draws.draw(given, lambda: real(*args, **named), bool(in_place))


def _attention(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    p = args[4] if len(args) > 4 else named.get("dropout_p", 0.0)
    if not 0 < p < 1:
        return real(*args, **named)
    given = args[0] if args else named.get("query")
    return watch.draws.draw(given, lambda: real(*args, **named), False)


def _mask(watch: Watch, real: Any, /, *args: Any, **named: Any) -> Any:
    """A function that makes random numbers, from which a program makes a mask of its own."""
    own = watch.draws
    if not watch.depth or own.is_drawing or named.get("generator") is not None:
        return real(*args, **named)
    result = real(*args, **named)
    if isinstance(result, Tensor) and local_part(result) is result:
        note = own.begin()
        if note is not None:
            own.note_state(note, result)
            watch.reading.add(Mask(own, note, result))
    return result


class Mask:
    """Hears of operators until one applies random numbers to a tensor: that is dropped out."""

    def __init__(self, draws: Draws, note: dict[str, Any], numbers: Tensor) -> None:
        self.draws, self.note = draws, note
        self.masks = [numbers]  # kept, so that no other tensor takes their memory
        self.left = PATIENCE

    def _is_mask(self, tensor: Tensor) -> bool:
        where = address(tensor)
        return any(where == address(each) for each in self.masks)

    def on_operation(self, operation: Operation) -> None:
        self.left -= 1
        masks = [each for each in operation.read if self._is_mask(each)]
        others = [
            each
            for each in operation.read
            if each.numel() > 1 and each.is_floating_point() and not self._is_mask(each)
        ]
        if masks and others and operation.name.removeprefix("aten::") in APPLYING:
            self.draws.end(self.note, max(others, key=Tensor.numel))
            self.left = 0
        if self.left <= 0:
            self.draws.watch.reading.remove(self)

    def on_communication(self, name: str, tensors: Sequence[Tensor]) -> None: ...

    def on_result(self, operation: Operation) -> None:
        if any(map(self._is_mask, operation.read)):
            self.masks += operation.made


def install(stack: ExitStack) -> None:
    """Watch the functions that drop out, and those that masks are made by."""
    for name in DROPOUTS:
        replace(stack, functional, name, _dropout)
    for name in ("dropout", "alpha_dropout", "feature_alpha_dropout"):
        replace(stack, torch, name, _dropout)
    replace(stack, functional, "scaled_dot_product_attention", _attention)
    for owner, names in ((torch, FUNCTIONS), (Tensor, METHODS)):
        for name in names:
            replace(stack, owner, name, _mask)
