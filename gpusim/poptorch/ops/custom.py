"""custom_op: operations of the user's own.

In PopTorch they are in libraries of PopART. Here they are functions of torch, registered by the
same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..poptorch_core import createPoptorchError
from .operation import kind

__all__ = ["custom_op", "register_custom_op"]

Function = TypeVar("Function", bound=Callable[..., Any])

_registered: dict[tuple[str, str, int], Callable[..., Any]] = {}


def register_custom_op(name: str, domain: str, version: int) -> Callable[[Function], Function]:
    """A decorator: register a function for `custom_op`, by name, domain and version.

    The function takes the inputs by position and the attributes by name, and returns a tensor, or
    a list or tuple of them. Its gradients are those of the functions of torch that it calls. With
    the `apply` of a torch.autograd.Function it has others, and the model runs in threads. A
    function that was registered before is replaced.

    >>> import torch
    >>> @register_custom_op("LeakyRelu", "com.acme", 1)
    ... def leaky_relu(x, alpha):
    ...     return torch.where(x < 0, alpha * x, x)
    >>> x = torch.tensor([-1.0, 1.0])
    >>> custom_op([x], "LeakyRelu", "com.acme", 1, [x], {"alpha": 0.5})
    [tensor([-0.5000,  1.0000])]
    """

    def register(function: Function) -> Function:
        _registered[name, domain, version] = function
        return function

    return register


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[Tensor],
    attributes: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """Call a registered operation.

    **Arguments**

    - `inputs`: the tensors.
    - `name`, `domain`, `domain_version`: those of `register_custom_op`.
    - `example_outputs`: tensors with the shapes and dtypes of its results.
    - `attributes`: its other arguments, by name: floats, integers, strings, and lists or tuples of
      one of these types.

    **Returns**

    A list of the results.

    **Raises**

    - ValueError for attributes of other types, and for strings that are not ASCII.
    - poptorch.Error for an operation that is not registered, and for results that differ from the
      examples in shape or dtype.


    >>> import torch
    >>> custom_op([torch.ones(1)], "Sinkhorn", "com.acme", 1, [torch.ones(1)])
    Traceback (most recent call last):
    ...
    gpusim.poptorch.poptorch_core.Error: 'poptorch_py_error': Custom op 'Sinkhorn' of domain \
'com.acme', version 1, is not registered...
    """
    for attribute, value in (attributes or {}).items():
        _check_attribute(attribute, value)
    function = _registered.get((name, domain, domain_version))
    if function is None:
        raise createPoptorchError(
            f"Custom op '{name}' of domain '{domain}', version {domain_version}, is not registered:"
            " @gpusim.poptorch.register_custom_op(name, domain, version) makes one of a function. "
            f"There are {sorted(_registered)}"
        )
    results = function(*inputs, **(attributes or {}))
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    expected = list(example_outputs)
    if [_like(x) for x in found] != [_like(x) for x in expected]:
        raise createPoptorchError(
            f"Custom op '{name}' returned {[_like(x) for x in found]}, but its example_outputs are "
            f"{[_like(x) for x in expected]}"
        )
    return found


def _check_attribute(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise ValueError("All attribute keys must be strings.")
    if not isinstance(value, (float, int, str, list, tuple)):
        raise ValueError(
            "Attribute values must be floats, ints, strings or a list/tuple of float, ints of "
            "strings."
        )
    values = value if isinstance(value, (list, tuple)) else [value]
    if any(not isinstance(element, type(values[0])) for element in values):
        raise ValueError("The types in a list/tuple attribute must all be the same.")
    for text in (name, *values):
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters.")


def _like(x: Any) -> Any:
    return kind(x) if isinstance(x, Tensor) else type(x)
