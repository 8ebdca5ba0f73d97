"""The arguments of a call: bound to forward's parameters, and compared with the compiled ones.

Tensors are inputs; all else is a constant of the compiled model and may not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from typing import Any

import torch

from gpusim.poptorch._logging import logger
from gpusim.poptorch.executor.custom_parsers import parsed
from gpusim.poptorch.poptorch_core import Error, createPoptorchError
from gpusim.poptorch.replicas.structures import StandIn, flatten, flatten_like, standing_in

__all__ = ["DEVICE_DTYPES", "Arguments", "Binder", "for_device"]

DICTS = (
    "Dicts as inputs only have partial support, they can be accessed using literal keys, but full "
    "Python functionality is not enabled. Consider changing dict inputs to tuple."
)
NOT_CONTIGUOUS = (
    "At least one input tensor is not contiguous: non-contiguous tensors will be converted."
)
REQUIRES_GRAD = (
    "Input tensor has requires_grad=True set. This tensor will be detached because backward pass "
    "via inputs is not supported."
)
MISMATCH = (
    "\nThis error occurred because the inputs passed at runtime don't match the inputs used to "
    "compile the model.\nTo recompile the model for the new inputs create a new inferenceModel / "
    "trainingModel wrapper or call destroy() on the current one and try again."
)
#: The dtypes that an IPU has, instead of those that it lacks.
DEVICE_DTYPES = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}


@dataclass(frozen=True)
class Arguments:
    """A call's arguments as forward gets them, with the names of the positional ones."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, those of positional arguments first."""
        return flatten((self.args, self.kwargs))[0]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> Arguments:
        """The same arguments with other tensors, or stand-ins where a parser makes other types."""
        args, kwargs = standing_in((self.args, self.kwargs), tensors)
        return Arguments(self.names, args, kwargs)

    def described(self) -> Arguments:
        """The same without the tensors' values, for `check`."""
        return self.with_tensors(torch.empty_like(one, device="meta") for one in self.tensors)

    def example(self) -> Arguments:
        """The same with zeros, to compile a model with that runs for its trace."""
        return self.with_tensors(torch.zeros_like(one, device="cpu") for one in self.tensors)

    def check(self, given: Arguments) -> list[torch.Tensor]:
        """The tensors of a call's arguments, in the order of these, the compiled ones.

        **Raises**:

        - poptorch.Error: if the arguments differ in more than the tensors' values, and the order of
          keys.
        """
        if len(given.args) != len(self.args):
            raise mismatch(
                f"Number of positional arguments mismatch: expected {len(self.args)} arguments "
                f"but got {len(given.args)}."
            )
        for name, compiled, value in zip(self.names, self.args, given.args, strict=True):
            compare(name, compiled, value)
        if self.kwargs or given.kwargs:
            compare("named arguments", self.kwargs, given.kwargs, "{key}")
        if not self._has_order:
            return given.tensors
        return flatten_like((self.args, self.kwargs), (given.args, given.kwargs))

    @cached_property
    def _has_order(self) -> bool:
        """Whether arguments like these can hold their tensors in another order."""
        direct = (*self.args, *self.kwargs.values())
        return len(self.kwargs) > 1 or not all(isinstance(x, torch.Tensor) for x in direct)


def mismatch(text: str) -> Error:
    return createPoptorchError(text + MISMATCH)


# ---------------------------------------------------------------- comparing


def compare(name: str, compiled: Any, given: Any, inner: str = "{name}[{key}]") -> None:
    """Raise poptorch.Error, which names the argument, if more than tensors' values differ."""
    if isinstance(compiled, torch.Tensor) and isinstance(given, torch.Tensor):
        compare_tensors(name, compiled, given)
        return
    kind: Any = compiled.kind if isinstance(compiled, StandIn) else type(compiled)
    if type(given) is not kind:
        raise mismatch(f"Type mismatch for {name}: expected {kind} but got {type(given)}.")
    if isinstance(compiled, StandIn) or parsed(compiled):
        compare_sequences(name, flatten(compiled)[0], flatten(given)[0])
    elif isinstance(compiled, (tuple, list)):
        compare_sequences(name, compiled, given)
    elif isinstance(compiled, Mapping):
        compare_keys(name, compiled.keys(), given.keys())
        for key in compiled:
            compare(inner.format(name=name, key=key), compiled[key], given[key])
    elif tensors := flatten(compiled)[0]:
        compare_sequences(name, tensors, in_order(name, compiled, given))
    elif not same(compiled, given):
        raise mismatch(f"Value mismatch for {name}: expected {compiled} but got {given}.")


def in_order(name: str, compiled: Any, given: Any) -> list[torch.Tensor]:
    """The tensors of a given structure in the compiled one's order."""
    try:
        return flatten_like(compiled, given)
    except ValueError as error:
        raise mismatch(f"Structure mismatch for {name}: {error}.") from None


def compare_tensors(name: str, compiled: torch.Tensor, given: torch.Tensor) -> None:
    if compiled.dtype != given.dtype:
        raise mismatch(
            f"Data type mismatch for {name}: expected {compiled.dtype} but got {given.dtype}."
        )
    if compiled.shape != given.shape:
        raise mismatch(
            f"Shape mismatch for {name}: expected {compiled.shape} but got {given.shape}."
        )


def compare_sequences(name: str, compiled: Sequence[Any], given: Sequence[Any]) -> None:
    if len(compiled) != len(given):
        raise mismatch(
            f"Length mismatch for {name}: expected {len(compiled)} elements but got {len(given)}."
        )
    for place, (expected, value) in enumerate(zip(compiled, given, strict=True)):
        compare(f"{name}[{place}]", expected, value)


def compare_keys(name: str, compiled: Iterable[Any], given: Iterable[Any]) -> None:
    expected, provided = set(compiled), set(given)
    differing = {
        "Unexpected arguments": provided - expected,
        "Missing arguments": expected - provided,
    }
    details = [
        f"{what}: {', '.join(sorted(map(str, keys)))}" for what, keys in differing.items() if keys
    ]
    if details:
        raise mismatch(f"Keys mismatch for {name}: {'. '.join(details)}.")


def same(compiled: Any, given: Any) -> bool:
    """Whether two constants are equal; arrays by all of their elements."""
    if compiled is given:
        return True
    equal = compiled == given
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


# ---------------------------------------------------------------- binding


class Binder:
    """Binds a call's arguments to the parameters of a model's forward, or of a function.

    **Raises**:

    - TypeError: if the model cannot be called.
    - AssertionError: by a call, for arguments that are too many, unknown or given twice.
    - poptorch.Error: by a call, for a missing argument.

    >>> bind = Binder(lambda x, scale=2.0, *rest: x)
    >>> bound = bind((torch.zeros(1),), {})
    >>> bound.names, bound.args
    (('x', 'scale'), (tensor([0.]), 2.0))
    """

    def __init__(self, model: torch.nn.Module | Callable[..., Any]) -> None:
        target = model.forward if isinstance(model, torch.nn.Module) else model
        if not callable(target):
            raise TypeError("Expected a torch.nn.Module or a callable")
        # names and kinds beside the parameters, whose properties take time in every call
        self._parameters = [(one.name, one.kind, one) for one in parameters_of(target)]
        self._names = [name for name, _, _ in self._parameters]
        kinds = {kind for _, kind, _ in self._parameters}
        self._variadic = bool(kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD})
        self._warned: set[str] = set()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        count = len(args) + len(kwargs)
        assert self._variadic or count <= len(self._names), (
            f"Too many arguments provided: expected {self._names} ({len(self._names)}) but got "
            f"{count}"
        )
        for name in kwargs:
            assert self._variadic or name in self._names, (
                f"{name} is not a valid parameter.Allowed values are {self._names}"
            )
        found = self._bound(args, kwargs)
        for value in (*found.args, *found.kwargs.values()):
            if isinstance(value, dict):
                self._warn_once(DICTS)
        for tensor in found.tensors:
            if not tensor.is_contiguous():
                self._warn_once(NOT_CONTIGUOUS)  # they are copied when they are cut
        return found

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        names: list[str] = []
        values: list[Any] = []
        named: dict[str, Any] = {}
        by_name = False  # what follows *args is given by name
        for place, (name, kind, parameter) in enumerate(self._parameters):
            if kind is Parameter.VAR_KEYWORD:
                before = self._names[:place]
                named |= {key: value for key, value in kwargs.items() if key not in before}
            elif kind is Parameter.VAR_POSITIONAL:
                rest = args[place:]
                names += [f"*{name}[{index}]" for index in range(len(rest))]
                values += rest
                args, by_name = args[:place], True
            elif place < len(args):
                assert name not in kwargs, f"Parameter {name} was passed more than once"
                names.append(name)
                values.append(args[place])
            elif by_name or kind is Parameter.KEYWORD_ONLY:
                named[name] = argument(parameter, kwargs)
            else:
                names.append(name)
                values.append(argument(parameter, kwargs))
        return Arguments(tuple(names), tuple(values), named)

    def _warn_once(self, warning: str) -> None:
        """Warn once for each model."""
        if warning not in self._warned:
            self._warned.add(warning)
            logger.warning(warning)


def argument(parameter: Parameter, kwargs: dict[str, Any]) -> Any:
    if parameter.name in kwargs:
        return kwargs[parameter.name]
    if parameter.default is Parameter.empty:
        raise createPoptorchError(f"Mandatory parameter {parameter.name} missing")
    return parameter.default


def parameters_of(target: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:  # torch functions without a signature take any arguments
        return [
            Parameter("args", Parameter.VAR_POSITIONAL),
            Parameter("kwargs", Parameter.VAR_KEYWORD),
        ]


# ---------------------------------------------------------------- on the way to the device


def for_device(tensor: torch.Tensor, warn: Callable[[str], None] | None = None) -> torch.Tensor:
    """A call's tensor as the device gets it: detached, and in a dtype that an IPU has.

    **Arguments**

    - `warn`: called with a description of each change.

    >>> for_device(torch.tensor([1, 2]), print)
    Input tensor of type torch.int64 coerced to torch.int32
    tensor([1, 2], dtype=torch.int32)
    """
    warn = warn or silent
    if tensor.requires_grad:
        warn(REQUIRES_GRAD)
        tensor = tensor.detach()
    wanted = DEVICE_DTYPES.get(tensor.dtype)
    if wanted is None:
        return tensor
    warn(f"Input tensor of type {tensor.dtype} coerced to {wanted}")
    return tensor.to(wanted)


def silent(text: str) -> None:
    """Ignore a warning."""
