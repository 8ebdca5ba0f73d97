"""Training changes the classes of a model and of its tensors: reading a tensor fetches its value.

Pickles, copies and state_dicts have the original classes, and `unwrap` restores them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from gpusim.poptorch.executor.grouping import Groupable, OnGrouping
from gpusim.poptorch.poptorch_core import createPoptorchError
from gpusim.torch.private import DisableTorchFunctionSubclass

__all__ = [
    "fetch",
    "groupable",
    "is_wrapped",
    "not_groupable",
    "original_class",
    "plain",
    "unwrap",
    "wrap",
]

ALREADY = (
    "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model "
    "to unwrap before wrapping again."
)
Fetch = Callable[[], bool]
Destroy = Callable[[nn.Module], None]


def wrap(model: nn.Module, fetch: Fetch, destroy: Destroy, on_grouping: OnGrouping) -> None:
    """Change the classes of a model, its parameters and its buffers, in place.

    **Arguments**

    - `fetch`: copies the weights to the host if they are out of date there, and returns whether it
      did. It is called before every access, and must do nothing while it runs.
    - `destroy`: called with the model by its new method `destroy`.
    - `on_grouping`: called by the parameters' new method `replicaGrouping`.

    RuntimeError for a wrapped model; poptorch.Error for a buffer of a subclass of Tensor.
    """
    if is_wrapped(model):
        raise RuntimeError(ALREADY)
    tensors = list(model.parameters()), list(model.buffers())
    for buffer in tensors[1]:
        if type(buffer) is not Tensor and not is_wrapped(buffer):
            raise createPoptorchError(
                f"All buffers must be an instance of torch.Tensor (Got {type(buffer)})"
            )
    made: dict[type, type] = {}
    for tensor in (*tensors[0], *tensors[1]):
        original = original_class(tensor)
        if original not in made:
            made[original] = tensor_class(original, fetch, on_grouping)
        tensor.__class__ = made[original]
    model.__class__ = model_class(type(model), fetch, destroy)


def unwrap(model: nn.Module) -> None:
    """Give a model and its tensors their classes back."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.__class__ = original_class(tensor)
    model.__class__ = original_class(model)


def groupable(model: nn.Module, on_grouping: OnGrouping) -> None:
    """Give a model's parameters the method `replicaGrouping`, which calls `on_grouping`."""
    made: dict[type, type] = {}
    for parameter in model.parameters():
        kind: Any = type(parameter)
        if issubclass(kind, Groupable):
            kind.poptorch_on_grouping = staticmethod(on_grouping)
            continue
        if kind not in made:
            members = {"poptorch_original": kind, "poptorch_on_grouping": staticmethod(on_grouping)}
            made[kind] = type(kind)("PoptorchParameter", (Groupable, kind), members)
        parameter.__class__ = made[kind]


def not_groupable(model: nn.Module) -> None:
    """Undo `groupable` for parameters that are not wrapped."""
    for parameter in model.parameters():
        if not is_wrapped(parameter):
            parameter.__class__ = original_class(parameter)


def is_wrapped(value: object) -> bool:
    """Whether `wrap` has changed the class of a model or tensor."""
    return issubclass(type(value), (WrappedModel, WrappedTensor))  # isinstance would fetch


def original_class(value: object) -> type:
    """The class that a model or tensor has outside of PopTorch."""
    kind = type(value)
    return getattr(kind, "poptorch_original", kind)


def fetch(tensors: Iterable[Tensor]) -> None:
    """Let the executors that train these tensors copy them to the host if they are newer there."""
    for kind in set(map(type, tensors)):
        if issubclass(kind, WrappedTensor):
            kind.poptorch_fetch()


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """A block in which the model's tensors are of their original classes.

    They are fetched before the block. The model may be a shallow copy of a wrapped one.
    """
    tensors = [*model.parameters(), *model.buffers()]
    classes = [type(tensor) for tensor in tensors]
    fetch(tensors)
    for tensor in tensors:
        tensor.__class__ = original_class(tensor)
    try:
        yield
    finally:
        for tensor, kind in zip(tensors, classes, strict=True):
            tensor.__class__ = kind


# ---------------------------------------------------------------- tensors


class WrappedTensor:
    """The behaviour of wrapped parameters and buffers: every access fetches the weights first."""

    poptorch_original: ClassVar[type]
    poptorch_fetch: ClassVar[Fetch]

    def __getattribute__(self, name: str) -> Any:
        type(self).poptorch_fetch()
        return object.__getattribute__(self, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch calls this before it looks at the values, in functions and methods of its own
        cls.poptorch_fetch()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memory: dict[int, Any]) -> Any:
        copied = original_tensor(self, self.data.clone())
        memory[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return original_tensor(self, self.data).__reduce_ex__(protocol)


def tensor_class(original: type, fetch: Fetch, on_grouping: OnGrouping) -> type:
    """A subclass of Parameter, which can be grouped, or of Tensor, that fetches."""
    made_by: Any = type(original)
    members = {"poptorch_original": original, "poptorch_fetch": staticmethod(fetch)}
    if not issubclass(original, nn.Parameter):
        return made_by("PoptorchBuffer", (WrappedTensor, original), members)
    members["poptorch_on_grouping"] = staticmethod(on_grouping)
    return made_by("PoptorchParameter", (WrappedTensor, Groupable, original), members)


def original_tensor(value: Any, data: Tensor) -> Any:
    """A parameter, or plain tensor, with this data."""
    original = original_class(value)
    if issubclass(original, nn.Parameter):
        return original(data, value.requires_grad)
    return data.requires_grad_(value.requires_grad)


# ---------------------------------------------------------------- models

FETCHING = ("_buffers", "_parameters", "forward")


class WrappedModel:
    """The methods that wrapped models have beside those of their own class."""

    poptorch_original: ClassVar[type]
    poptorch_fetch: ClassVar[Fetch]
    poptorch_destroy: ClassVar[Callable[[Any], None]]

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if they were trained since the last time; return whether they were."""
        return type(self).poptorch_fetch()

    def destroy(self) -> None:
        """Destroy the training model around this one."""
        type(self).poptorch_destroy(self)

    def __getattribute__(self, name: str) -> Any:
        if name in FETCHING:
            type(self).poptorch_fetch()
        return super().__getattribute__(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with parameters and buffers of their original classes."""
        found = super().state_dict(*args, **kwargs)  # type: ignore[misc]  # a mixin's
        made: dict[int, Any] = {}  # what the model holds twice, it holds twice here
        for key, value in found.items():
            if isinstance(value, WrappedTensor):
                if id(value) not in made:
                    made[id(value)] = original_tensor(value, value.data)
                found[key] = made[id(value)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.copyWeightsToHostIfNeeded()
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *rest = reduced
        original = type(self).poptorch_original
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants our class here
            make, args = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        else:
            args = tuple(original if part is type(self) else part for part in args)
        return make, args, *rest


def model_class(original: type, fetch: Fetch, destroy: Destroy) -> type:
    """A subclass of the model's class that fetches."""
    members = {
        "poptorch_original": original,
        "poptorch_fetch": staticmethod(fetch),
        "poptorch_destroy": staticmethod(destroy),
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(original)(f"Poptorch{original.__name__}", (WrappedModel, original), members)
