"""A model's parameters and buffers, and other tensors put in their places for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..poptorch_core import Error, createPoptorchError

__all__ = ["State", "parameter_changed"]


def parameter_changed(name: str) -> Error:
    """The error for a parameter that forward changes in place, not yet raised."""
    return createPoptorchError(
        f"Parameter '{name}' was changed in place within the model's forward method. Only "
        "optimizers change parameters; make it a buffer"
    )


def reassigned(what: str) -> Error:
    """The error for what forward puts another tensor in the place of, not yet raised."""
    return createPoptorchError(
        f"{what} was reassigned within the model's forward method. This is not supported; change "
        "it in place instead, with copy_() for example"
    )


class Held(dict[str, Any]):
    """A module's parameters or buffers, of which each replica's thread sees its own."""

    def __getitem__(self, key: str) -> Any:
        own = _own.get()
        shown = super().__getitem__(key)
        return shown if own is None else own.get((id(self), key), shown)

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


_own: ContextVar[dict[tuple[int, str], Any] | None] = ContextVar("gpusim held", default=None)
"""What the replica whose thread this is sees, by the dictionary and the key."""


class Place(NamedTuple):
    """Where a model holds a parameter or a buffer.

    Attributes:
        module: the module that holds it.
        kind: which of the module's dictionaries it is in: "_parameters" or "_buffers".
        key: its key there.
        name: its name in the whole model.
    """

    module: nn.Module
    kind: str
    key: str
    name: str


class State:
    """A model's parameters and buffers, and where it holds them.

    Attributes:
        parameters, buffers: those of named_parameters() and named_buffers(). What a model holds in
            several places is there once, by its first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, Tensor] = dict(model.named_buffers())
        names = {id(value): name for name, value in (self.parameters | self.buffers).items()}
        self._places = [
            Place(module, kind, key, names[id(value)])
            for module in model.modules()
            for kind in ("_parameters", "_buffers")
            for key, value in vars(module)[kind].items()
            if value is not None
        ]

    def instead(self, tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Which tensor stands for which of the model's own, by the id of that."""
        held = {**self.parameters, **self.buffers}
        return {id(own): tensors[name] for name, own in held.items()}

    def put(self, tensors: Mapping[str, Any]) -> None:
        """Put these in the places of the parameters and buffers."""
        for place in self._places:
            vars(place.module)[place.kind][place.key] = tensors[place.name]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which the model holds its own again."""
        try:
            yield
        finally:
            self.put({**self.parameters, **self.buffers})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if the model holds others than its own, or than these that stand for them.

        Raises:
            Error: naming the parameter or buffer that was reassigned.
        """
        own: dict[str, Any] = {**self.parameters, **self.buffers}
        for place in self._places:
            held = vars(place.module)[place.kind].get(place.key)
            if held is not own[place.name] and held is not tensors[place.name]:
                raise reassigned(self._titled(place.name))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block in which each replica's thread has its own, those of `seeing`."""
        before = [(m, k, vars(m)[k]) for m, k in {(p.module, p.kind): None for p in self._places}]
        for module, kind, held in before:
            vars(module)[kind] = Held(held)
        try:
            yield
        finally:
            for module, kind, held in before:
                vars(module)[kind] = held

    @contextmanager
    def seeing(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A block, in `apart`, in which this thread has these."""
        own: dict[tuple[int, str], Any] = {
            (id(vars(place.module)[place.kind]), place.key): tensors[place.name]
            for place in self._places
        }
        token = _own.set(own)
        try:
            yield
        finally:
            _own.reset(token)

    def memory(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Memory:
        """What memory these have, which stand for the model's own, and the model's inputs."""
        inside = {self._titled(name): x for name, x in tensors.items()}
        return Memory(inside, {f"Input {place}": x for place, x in enumerate(inputs)})

    def _titled(self, name: str) -> str:
        return f"{'Parameter' if name in self.parameters else 'Buffer'} '{name}'"


class Memory:
    """What memory tensors have, which x.data = y and x.set_(y) put other memory in the place of."""

    def __init__(self, held: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        self._tensors = {**held, **inputs}
        # The storages are held, or others had their addresses.
        self._storages = {name: x.untyped_storage() for name, x in self._tensors.items()}
        self._layouts = {name: (x.shape, x.stride()) for name, x in held.items()}

    def check(self) -> None:
        """Raise if one has other memory than before; all but inputs keep their shapes, too.

        Raises:
            Error: naming it.
        """
        for name, x in self._tensors.items():
            moved = x.untyped_storage()._cdata != self._storages[name]._cdata
            if moved or self._layouts.get(name, (x.shape, x.stride())) != (x.shape, x.stride()):
                raise reassigned(name)
