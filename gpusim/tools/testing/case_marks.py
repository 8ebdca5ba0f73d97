"""The mark of a unittest.TestCase, and a class for each rank: for all kinds of such classes."""

from __future__ import annotations

import dataclasses
import sys
import unittest
from typing import Any

from gpusim.tools.testing.copies import deep_copy, holds_data
from gpusim.tools.testing.mark import RanksMark

__all__ = ["MARK", "TORCH", "CaseMark", "class_of_rank", "exit_as_skip"]

MARK = "_gpusim_ranks"
"""The attribute of a class, or of a method, that holds its CaseMark."""

TORCH = "torch.testing._internal.common_distributed"
"""The module of PyTorch's own classes."""


@dataclasses.dataclass(frozen=True)
class CaseMark:
    """The arguments of `ranks`: those of the mark, and the number of ranks, which may be None."""

    count: Any
    mark: RanksMark

    def counts_of(self, case: Any) -> tuple[int, ...]:
        """The numbers of ranks that a test of this class runs on.

        **Raises**: ValueError if the class does not say, or says another one.
        """
        name = type(case).__name__
        declared = getattr(case, "world_size", None)
        if self.count is None:
            if type(declared) is not int or declared < 1:
                found = "" if declared is None else f", which is {declared!r:.40}"
                raise ValueError(
                    f"ranks(): expected the number of ranks, or {name}.world_size{found}"
                )
            return (declared,)
        if declared is not None and self.mark.counts != (declared,) and not from_torch(case):
            raise ValueError(
                f"ranks({self.count!r}): {name}.world_size is {declared!r:.40}; give one of them"
            )
        return self.mark.counts


def from_torch(case: Any) -> bool:
    """Whether `world_size` is the default of PyTorch's own classes, which the decorator changes."""
    for base in type(case).__mro__:
        if "world_size" in vars(base):
            return base.__module__.startswith("torch.testing._internal")
    return False


def class_of_rank(cls: type, **attributes: Any) -> type:
    """A subclass for one rank, as a process has its own class: with copies of the class's data.

    **Raises**: TypeError if a tensor or module of the class has no copy.
    """
    memo: dict[int, Any] = {}
    own: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            if name.startswith("__") or callable(value) or not holds_data(value):
                continue
            own[name], why = deep_copy(value, memo)
            if why:
                raise TypeError(f"{cls.__name__}.{name} has no copy for each rank: {why}")
    return type(cls)(cls.__name__, (cls,), own | attributes)


def exit_as_skip(error: BaseException) -> BaseException:
    """A SystemExit with a code of PyTorch's `TEST_SKIPS` as a SkipTest; else the error itself."""
    common = sys.modules.get(TORCH)
    if isinstance(error, SystemExit) and common is not None:
        for skip in common.TEST_SKIPS.values():
            if skip.exit_code == error.code:
                return unittest.SkipTest(skip.message)
    return error
