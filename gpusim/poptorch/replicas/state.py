"""A model's parameters and buffers, and tensors that replace them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...torch.private import storage_key
from ..poptorch_core import Error, createPoptorchError

__all__ = ["ModelState", "parameter_changed"]


def parameter_changed(name: str) -> Error:
    """The error for a parameter that forward changes in place."""
    return createPoptorchError(
        f"Parameter '{name}' was changed in place within the model's forward method. Only "
        "optimizers change parameters; make it a buffer"
    )


def reassigned(kind: str, name: str) -> Error:
    """The error for a tensor that forward replaces; `kind` is "Buffer" for example."""
    text = f"{kind} {name} is reassigned within the model when calling the forward method. This is "
    text += "not supported."
    if kind != "Input":
        text += f" Consider using self.{name}.copy_(src) to copy data from a source tensor, where "
        text += "src is the name of the source tensor."
    return createPoptorchError(text)


def removed(kind: str, name: str) -> Error:
    """The error for a tensor that forward deletes."""
    return createPoptorchError(
        f"{kind} {name} is removed from the model when calling the forward method."
    )


class ThreadLocalDict(dict[str, Any]):
    """A module's parameters or buffers; the thread of each replica sees its own values."""

    def __getitem__(self, key: str) -> Any:
        own = _own.get()
        shared = super().__getitem__(key)
        return shared if own is None else own.get((id(self), key), shared)

    def __setitem__(self, key: str, value: Any) -> None:
        own = _own.get()
        if own is None or (id(self), key) not in own:
            super().__setitem__(key, value)
        else:
            own[id(self), key] = value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


_own: ContextVar[dict[tuple[int, str], Any] | None] = ContextVar("gpusim own", default=None)
"""The values of this thread's replica, by the id of the dictionary and the key."""


class Location(NamedTuple):
    """Where a model holds a parameter or a buffer.

    **Attributes**:

    - `module`: the module that holds it.
    - `kind`: the module's dictionary: "_parameters" or "_buffers".
    - `key`: its key there.
    - `name`: its name in the whole model.
    """

    module: nn.Module
    kind: str
    key: str
    name: str


class ModelState:
    """A model's parameters and buffers, and where it holds them.

    **Attributes**:

    - `parameters`, `buffers`: those of named_parameters() and named_buffers(). A tensor that the
      model holds in several places appears once, by its first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        names = {id(value): name for name, value in (self.parameters | self.buffers).items()}
        self._locations = [
            Location(module, kind, key, names[id(value)])
            for module in model.modules()
            for kind in ("_parameters", "_buffers")
            for key, value in vars(module)[kind].items()
            if value is not None
        ]

    def substitutes(self, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """These tensors by the ids of the model's own."""
        held = {**self.parameters, **self.buffers}
        return {id(own): tensors[name] for name, own in held.items()}

    def assign(self, tensors: Mapping[str, Any]) -> None:
        """Let the model hold these as its parameters and buffers."""
        for location in self._locations:
            vars(location.module)[location.kind][location.key] = tensors[location.name]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Let the model hold its own tensors again after the block."""
        try:
            yield
        finally:
            self.assign({**self.parameters, **self.buffers})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if the model holds tensors that are neither its own nor these.

        **Raises**:

        - Error: naming the parameter or buffer that was reassigned or removed.
        """
        own: dict[str, Any] = {**self.parameters, **self.buffers}
        for location in self._locations:
            holder = vars(location.module)[location.kind]
            if location.key not in holder:
                raise removed(self._kind(location.name), location.name)
            held = holder[location.key]
            if held is not own[location.name] and held is not tensors[location.name]:
                raise reassigned(self._kind(location.name), location.name)

    @contextmanager
    def per_thread(self) -> Iterator[None]:
        """Allow `in_thread` inside the block."""
        holders = {(location.module, location.kind): None for location in self._locations}
        before = [(module, kind, vars(module)[kind]) for module, kind in holders]
        for module, kind, held in before:
            vars(module)[kind] = ThreadLocalDict(held)
        try:
            yield
        finally:
            for module, kind, held in before:
                vars(module)[kind] = held

    @contextmanager
    def in_thread(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model hold these in this thread, inside the block and one of `per_thread`."""
        own: dict[tuple[int, str], Any] = {
            (id(vars(location.module)[location.kind]), location.key): tensors[location.name]
            for location in self._locations
        }
        token = _own.set(own)
        try:
            yield
        finally:
            _own.reset(token)

    def memory(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Memory:
        """The memory of these substitutes and of the model's inputs."""
        inside = {(self._kind(name), name): x for name, x in tensors.items()}
        return Memory(inside, {("Input", str(place)): x for place, x in enumerate(inputs)})

    def _kind(self, name: str) -> str:
        return "Parameter" if name in self.parameters else "Buffer"


class Memory:
    """The memory of tensors. `x.data = y` and `x.set_(y)` give a tensor other memory."""

    def __init__(
        self, held: Mapping[tuple[str, str], Tensor], inputs: Mapping[tuple[str, str], Tensor]
    ) -> None:
        self._tensors = {**held, **inputs}
        # References keep the storages alive, so that no other one gets their addresses.
        self._storages = {name: x.untyped_storage() for name, x in self._tensors.items()}
        self._layouts = {name: (x.shape, x.stride()) for name, x in held.items()}

    def check(self) -> None:
        """Raise if a tensor has other memory than before; all but inputs must keep their shapes.

        **Raises**:

        - Error: naming the tensor.
        """

        for name, x in self._tensors.items():
            moved = storage_key(x.untyped_storage()) != storage_key(self._storages[name])
            if moved or self._layouts.get(name, (x.shape, x.stride())) != (x.shape, x.stride()):
                raise reassigned(*name)
