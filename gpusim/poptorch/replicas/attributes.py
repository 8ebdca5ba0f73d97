"""The attributes of modules beside parameters and buffers.

A trace leaves no tensor of its own there, and a forward pass changes none of them in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from ...torch.private import FakeTensor, is_transformed
from ..poptorch_core import createPoptorchError
from .state import ModelState

__all__ = ["Attributes", "preserve_attributes"]

STATE = ("_parameters", "_buffers")  # preserved by `ModelState`


class Attributes:
    """A record of the attributes of a model's modules.

    **Attributes**:

    - `containers`: dictionaries, lists and sets, the modules' own included, and copies of them.
    - `tensors`: those that are neither parameters nor buffers, by name, and their versions.
    """

    def __init__(self, model: nn.Module, state: ModelState) -> None:
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: dict[str, tuple[Tensor, int]] = {}
        self._seen = {id(x) for x in (*state.parameters.values(), *state.buffers.values())}
        for name, module in model.named_modules():
            for kind in STATE:
                self._copy(vars(module)[kind])
            self._copy(vars(module))
            for key, value in vars(module).items():
                if key not in STATE:
                    self._visit(f"{name}.{key}" if name else key, value)

    def _visit(self, name: str, value: Any) -> None:
        if not isinstance(value, (Tensor, tuple, *CONTAINERS)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_inference() and not _is_fake(value):
                self.tensors[name] = value, value._version
            return
        self._copy(value)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            self._visit(f"{name}[{key!r}]", part)

    def _copy(self, container: Any) -> None:
        if isinstance(container, CONTAINERS):
            kind = dict if isinstance(container, dict) else list
            self.containers.append((container, kind(container)))

    def changed(self) -> list[str]:
        """The names of the tensors that have changed in place."""
        return [name for name, (x, version) in self.tensors.items() if x._version != version]

    def check(self) -> None:
        """Raise if a tensor has changed in place.

        **Raises**:

        - Error: naming the tensor.
        """
        for name in self.changed():
            raise createPoptorchError(
                f"Tensor '{name}' was changed in place within the model's forward method, but it "
                "is neither a parameter nor a buffer: it would be the same for all replicas, and "
                "a constant of the compiled model. To change it, register it as a buffer"
            )


@contextmanager
def preserve_attributes(model: nn.Module, state: ModelState) -> Iterator[Attributes]:
    """Restore the modules' attributes after the block.

    Tensors without values are replaced by the attributes from before, and tensors get their old
    values back.
    """
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
    """Replace tensors without values by the elements from before."""
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
    """Whether a value is a tensor without values, or will be one when a transform ends."""

    if not isinstance(value, Tensor):
        return isinstance(value, Proxy)
    return is_transformed(value) or isinstance(value, FakeTensor)
