"""What the body of a loop or a branch does to tensors: those that it makes are its own, and those
from outside are to stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..poptorch_core import compiler_error

__all__ = ["Inside"]

CHANGED = (
    "poptorch.cond: a body has changed a tensor from outside in place, through a view of it or as "
    "out=. What it changes is a copy: return the new value instead"
)


class Inside(TorchFunctionMode):
    """What a body does: which tensors it makes, and which from outside it takes.

    Those from outside that it changes in place are copied first if `copying`.
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
        """Whether a tensor was made inside."""
        return id(x) in self._made

    def checked(self, results: list[Tensor]) -> list[Tensor]:
        """The results, copies for those that were copied.

        Raises:
            Error: if a tensor from outside has changed.
        """
        for x, version in self._outside.values():
            if _version(x) != version:
                raise compiler_error(CHANGED)
        return [self._copied(x) for x in results]


def _changes_first(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch changes its first operand, by its name or as it is told."""
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
    with torch._C.DisableTorchFunction():
        return -1 if x.is_inference() else x._version
