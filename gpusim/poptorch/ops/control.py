"""Loops and branches that run on the device: for_loop and cond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...torch.axes import is_traced
from ...torch.private import DisableTorchFunction, tree_leaves, tree_map_only
from ..axis import AXIS
from ..poptorch_core import compiler_error, createPoptorchError
from ..replicas.forward import forward_mode, model_context
from .host import only_where
from .operation import kind

__all__ = ["cond", "for_loop"]

Body = Callable[..., Any]

NO_LIST = (
    "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object is not list)"
)
NO_TENSOR = (
    "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object contained "
    "in list at index %d is not torch.tensor)"
)
NO_LISTS = (
    "poptorch.cond expects then_inps and else_inps tensors to be a list of tensors. (Object is not "
    "list)"
)
TRAINED = "poptorch.{}() is only supported in inference."
NO_SHAPE = (
    "`else` branch output has an empty shape, so adding a reshape op to the `then` branch to "
    "achieve shapes identity is not possible!"
)


CHANGED = (
    "poptorch.cond: a body has changed a tensor from outside in place, through a view of it or as "
    "out=. What it changes is a copy: return the new value instead"
)


def for_loop(count: int, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    """Call a function `count` times, each time on the results of the call before.

    In models it is for inference only. The graph has the operations of all calls.

    **Arguments**

    - `count`: the number of calls, 0 or more.
    - `body`: takes and returns the same number of tensors, of the same shapes and dtypes. They are
      copies: changes in place do not change tensors outside.
    - `inputs`: a list of tensors for the first call.

    **Returns**

    A list of the results of the last call.

    **Raises**: ValueError if `inputs` is not a list of tensors; poptorch.Error in a training model,
    and if the body returns other tensors than it takes.

    >>> import torch
    >>> for_loop(10, lambda x: 2 * x, [torch.ones(2)])
    [tensor([1024., 1024.])]
    """
    if not isinstance(inputs, list):
        raise ValueError(NO_LIST)
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise ValueError(NO_TENSOR % number)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"poptorch.for_loop: count must be an integer from 0, got {count!r}")
    _refuse_training("for_loop")
    carried = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        with BodyMode() as mode:
            results = _as_list(body(*carried))
        _check_carried(carried, results)
        carried = [
            (after if after is before or mode.has_made(after) else after.clone()).to(before.dtype)
            for before, after in zip(carried, results, strict=True)
        ]
    return carried


def cond(
    condition: Tensor,
    then_body: Body,
    then_inps: list[Tensor],
    else_body: Body,
    else_inps: list[Tensor],
) -> list[Tensor]:
    """Call one of two functions, selected by a tensor.

    In models it is for inference only. Replicas in lockstep run both functions, and each takes the
    results of one. It prints and calls CPU operations of that one only.

    **Arguments**

    - `condition`: a boolean tensor of one element.
    - `then_body`, `else_body`: take the tensors of `then_inps` and `else_inps`. Both return the
      same number of tensors, of the same dtypes and shapes; if shapes differ, the results of
      `then_body` are reshaped. They may use tensors from outside. All are copies: changes in place
      do not change tensors outside.
    - `then_inps`, `else_inps`: lists of tensors.

    **Returns**

    A list of the results.

    **Raises**: ValueError if the inputs are not lists; poptorch.Error in a training model, and for
    results that do not match.


    >>> import torch
    >>> x = torch.tensor([2.0])
    >>> cond(x.sum() > 0, lambda x: x.sqrt(), [x], lambda: -x, [])
    [tensor([1.4142])]
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError(NO_LISTS)
    now = forward_mode()
    if now is None:
        return _as_list(then_body(*then_inps) if condition else else_body(*else_inps))
    _refuse_training("cond")
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        found = tuple(condition.shape) if isinstance(condition, Tensor) else repr(condition)
        raise createPoptorchError(
            f"poptorch.cond: condition must be a tensor of one element, got {found}"
        )
    number = now.draws.next_number()
    is_true = condition.reshape(()).bool()

    def branch(which: bool) -> list[Tensor]:
        body, inputs = (then_body, then_inps) if which else (else_body, else_inps)
        counts = is_true if which else ~is_true
        with (
            now.draws.separate(number, int(which)),
            only_where(counts),
            BodyMode(copying=True) as mode,
        ):
            results = _as_list(body(*(tensor.clone() for tensor in inputs)))
        return [x if mode.has_made(x) else x.clone() for x in mode.checked(results)]

    if not is_traced(AXIS):
        return branch(bool(is_true))
    return _selected(is_true, branch(True), branch(False))


def _refuse_training(name: str) -> None:
    now = model_context()
    if now is not None and now.training:
        raise compiler_error(TRAINED.format(name))


def _as_list(results: Any) -> list[Tensor]:
    found = list(results) if isinstance(results, (list, tuple)) else [results]
    for result in found:
        if not isinstance(result, Tensor):
            raise createPoptorchError(
                f"The body of a loop or branch must return tensors, got {type(result)}"
            )
    return found


def _check_carried(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    if len(before) != len(after):
        raise createPoptorchError(
            f"poptorch.for_loop: body takes {len(before)} tensors and returns {len(after)}"
        )
    for number, (x, y) in enumerate(zip(before, after, strict=True)):
        if kind(x) != kind(y):
            raise createPoptorchError(
                f"poptorch.for_loop: body takes {x.dtype} of shape {tuple(x.shape)} as tensor "
                f"{number}, and returns {y.dtype} of shape {tuple(y.shape)}"
            )


def _selected(is_true: Tensor, then: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    if len(then) != len(other):
        raise createPoptorchError(
            f"poptorch.cond: then_body returns {len(then)} tensors and else_body {len(other)}"
        )
    return [_either(is_true, *each) for each in zip(then, other, strict=True)]


def _either(is_true: Tensor, x: Tensor, y: Tensor) -> Tensor:
    if kind(x)[0] != kind(y)[0] or (x.shape != y.shape and x.numel() != y.numel()):
        raise createPoptorchError(
            f"poptorch.cond: then_body returns {x.dtype} of shape {tuple(x.shape)} where else_body "
            f"returns {y.dtype} of shape {tuple(y.shape)}"
        )
    if x.shape != y.shape and not y.dim():
        raise compiler_error(NO_SHAPE)
    return torch.where(is_true, x.reshape(y.shape).to(y.dtype), y)


# ---------------------------------------------------------------- bodies


class BodyMode(TorchFunctionMode):
    """Runs the body of a loop or branch: records which tensors it makes and which it takes.

    If `copying`, tensors from outside are copied before they are changed in place.
    """

    def __init__(self, *, copying: bool = False) -> None:
        super().__init__()
        self._copying = copying
        self._made: dict[int, Tensor] = {}
        self._outside: dict[int, tuple[Tensor, int]] = {}
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._copying:
            args, kwargs = self._with_copies(func, args, kwargs)
        result = func(*args, **kwargs)
        outside = {id(x) for x in tree_leaves((args, kwargs))} - self._made.keys()
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in outside:
                self._made[id(x)] = x
        return result

    def _with_copies(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._made:
                self._outside.setdefault(id(x), (x, _version(x)))
        first = id(args[0]) if args and _changes_first(func, kwargs) else 0
        if first in self._outside and first not in self._copies:
            self._copies[first] = args[0].clone()
        if not self._copies:
            return args, kwargs
        found: tuple[Any, Any] = tree_map_only(Tensor, self._copied, (args, kwargs))
        self._made.update({id(x): x for x in self._copies.values()})
        return found

    def _copied(self, x: Tensor) -> Tensor:
        return self._copies.get(id(x), x)

    def has_made(self, x: Tensor) -> bool:
        """Whether the body has made a tensor."""
        return id(x) in self._made

    def checked(self, results: list[Tensor]) -> list[Tensor]:
        """The results, with copies in place of tensors that were copied.

        **Raises**:

        - Error: if a tensor from outside has changed.
        """
        for x, version in self._outside.values():
            if _version(x) != version:
                raise compiler_error(CHANGED)
        return [self._copied(x) for x in results]


def _changes_first(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function of torch changes its first operand."""
    name = getattr(func, "__name__", "")
    if kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name in IN_PLACE
    return name.endswith("_") and not name.startswith("_")


IN_PLACE = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


def _version(x: Tensor) -> int:
    with DisableTorchFunction():
        return -1 if x.is_inference() else x._version
