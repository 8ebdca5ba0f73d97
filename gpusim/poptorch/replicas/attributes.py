"""What modules hold beside parameters and buffers: a trace leaves nothing of its own there, and a
forward pass changes none of these tensors in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy

from ..poptorch_core import createPoptorchError
from .state import State

__all__ = ["Attributes", "attributes_kept"]

HELD = ("_parameters", "_buffers")  # which `State` looks after


class Attributes:
    """What the modules of a model hold, as it is now.

    Attributes:
        containers: dictionaries, lists and sets, the modules' own among them, and copies of them.
        tensors: those that are neither parameters nor buffers, by name, and their versions.
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        self._seen = {id(x) for x in (*state.parameters.values(), *state.buffers.values())}
        for name, module in model.named_modules():
            for kind in HELD:
                self._keep(vars(module)[kind])
            self._keep(vars(module))
            for key, value in vars(module).items():
                if key not in HELD:
                    self._look(f"{name}.{key}" if name else key, value)

    def _look(self, name: str, value: Any) -> None:
        if not isinstance(value, (Tensor, tuple, *CONTAINERS)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_inference() and not _is_fake(value):
                self.tensors[name] = value, value._version
            return
        self._keep(value)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            self._look(f"{name}[{key!r}]", part)

    def _keep(self, container: Any) -> None:
        if isinstance(container, CONTAINERS):
            kind = dict if isinstance(container, dict) else list
            self.containers.append((container, kind(container)))

    def changed(self) -> list[str]:
        """The names of the tensors that have changed in place since."""
        return [name for name, (x, version) in self.tensors.items() if x._version != version]

    def check(self) -> None:
        """Raise if a tensor has changed in place since.

        Raises:
            Error: naming it.
        """
        for name in self.changed():
            raise createPoptorchError(
                f"Tensor '{name}' was changed in place within the model's forward method, but it "
                "is neither a parameter nor a buffer: it would be the same for all replicas, and "
                "a constant of the compiled model. To change it, register it as a buffer"
            )


@contextmanager
def attributes_kept(model: nn.Module, state: State) -> Iterator[Attributes]:
    """A block after which modules hold no tensors without values, but what they had before
    instead, and tensors the values that they had."""
    attributes = Attributes(model, state)
    values = {name: x.detach().clone() for name, (x, _) in attributes.tensors.items()}
    try:
        yield attributes
    finally:
        for name in attributes.changed():
            attributes.tensors[name][0].detach().copy_(values[name])
        for container, before in attributes.containers:
            _restore(container, before)


CONTAINERS = (dict, list, set, deque)


def _restore(container: Any, before: Any) -> None:
    """Take out what has no values, for what was there before."""
    if isinstance(container, dict):
        for key, value in [*container.items()]:
            if not (key in before and before[key] is value) and _holds_fakes(value, set()):
                if key in before:
                    container[key] = before[key]
                else:
                    del container[key]
    elif any(_holds_fakes(value, set()) for value in container):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)


def _holds_fakes(value: Any, seen: set[int]) -> bool:
    if isinstance(value, (tuple, *CONTAINERS)):
        if id(value) in seen:
            return False
        seen.add(id(value))
        parts = value.values() if isinstance(value, dict) else value
        return any(_holds_fakes(part, seen) for part in parts)
    return _is_fake(value)


def _is_fake(value: Any) -> bool:
    """Whether it is a tensor without values, or of a transform, which has none afterwards."""
    if not isinstance(value, Tensor):
        return isinstance(value, Proxy)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
    return wrapped or isinstance(value, FakeTensor)
