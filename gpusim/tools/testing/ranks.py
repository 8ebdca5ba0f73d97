"""A test function of pytest on the ranks of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pytest

from gpusim.errors import GpusimError, ReplicaError
from gpusim.tools.testing.copies import deep_copy, holds_data
from gpusim.tools.testing.mark import RanksMark, count_of, has_own_rank, mark_of
from gpusim.tools.testing.outcomes import RankedTest, reduced
from gpusim.tools.testing.outputs import RankedOutputs

__all__ = ["call"]


def call(item: pytest.Function) -> None:
    """Run the test function on all ranks; or here, in a process that is one of them."""
    mark = mark_of(item)
    assert mark is not None
    if mark.processes:
        with reduced(mark.reduction):
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    elif mark.equals is not None:
        compare(MarkedTest(item, mark), mark.equals)
    else:
        MarkedTest(item, mark).execute()


def compare(test: MarkedTest, reference_ranks: int) -> None:
    """Run the test on the reference's ranks and on its own, as processes, and compare."""
    from gpusim.tools.equal.checking import check_functions

    def run(rank: int) -> None:
        test.begin()
        test.function(**{name: wide(each) for name, each in test.arguments_of(rank).items()})

    try:
        check_functions(
            run,
            run,
            test.count,
            (),
            reference_ranks=reference_ranks,
            steps=0,
            dtype="float64",
            reduction=test.mark.reduction,
            device=test.mark.device,
        )
    except ReplicaError as error:
        cause = error.__cause__
        if type(cause).__name__ in ("Skipped", "SkipTest"):  # its type is another process's
            pytest.skip(str(cause))
        raise
    except AssertionError as error:  # the verdict; the test's own come as ReplicaError
        pytest.fail(str(error), pytrace=False)


def wide(value: Any) -> Any:
    """A value whose tensors and modules are float64, as what the test itself makes."""
    import torch

    if isinstance(value, torch.nn.Module):
        return value.double()
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: wide(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(wide(each) for each in value)
    return value


class Captured(NamedTuple):
    """The pair that `capsys.readouterr` returns."""

    out: str
    err: str


class RankCapsys:
    """`capsys` in a rank: what the rank itself has written."""

    def __init__(self, outputs: RankedOutputs) -> None:
        self._outputs = outputs

    def readouterr(self) -> Captured:
        """The output of this rank since the last call."""
        kept = self._outputs.local.kept
        return Captured(*(kept.pop(stream, "") for stream in self._outputs.streams))

    def disabled(self) -> Any:
        pytest.fail("capsys.disabled() does not work in a rank", pytrace=False)


class RankMonkeyPatch:
    """`monkeypatch` in a rank, whose environment and working directory are its own.

    They end with the rank. The rest is undone after the test, the last change first.
    """

    def __init__(self, shared: pytest.MonkeyPatch) -> None:
        self._shared = shared
        own = pytest.MonkeyPatch()
        self.setenv, self.delenv, self.chdir = own.setenv, own.delenv, own.chdir

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)


class MarkedTest(RankedTest):
    """A test function of pytest on its ranks."""

    def __init__(self, item: pytest.Function, mark: RanksMark) -> None:
        funcargs = item.funcargs
        self.given = {name: funcargs[name] for name in item._fixtureinfo.argnames}
        super().__init__(mark, count_of(item, mark), keep="capsys" in self.given)
        self.item = item
        self.function: Callable[..., Any] = item.obj

    def execute(self) -> None:
        self.arguments = [self.arguments_of(rank) for rank in range(self.count)]
        super().execute()

    def body(self, rank: int) -> Any:
        return self.function(**self.arguments[rank])

    def fail(self, text: str) -> NoReturn:
        pytest.fail(text, pytrace=False)

    def arguments_of(self, rank: int) -> dict[str, Any]:
        """The test's arguments, as a process of this rank would have them."""
        memo: dict[int, Any] = {}
        own: dict[str, Any] = {}
        for name, value in self.given.items():
            if name == "rank" and has_own_rank(self.item):
                value = rank
            elif name == "capsys":
                value = RankCapsys(self.outputs)
            elif isinstance(value, pytest.MonkeyPatch):
                if self.mark.axis is None and self.mark.schedule == "turns":
                    value = RankMonkeyPatch(value)
            elif holds_data(value):
                value, why = deep_copy(value, memo)
                if why:
                    pytest.fail(f"the argument {name!r} has no copy for each rank: {why}", False)
            own[name] = value
        return own

    def conclude(self, error: GpusimError | None) -> None:
        super().conclude(error)
        returned = next((value for value in self.passed.values() if value is not None), None)
        if returned is not None:
            warnings.warn(
                pytest.PytestReturnNotNoneWarning(
                    f"{self.item.nodeid} returned {type(returned)!r}; did you mean `assert`?"
                ),
                stacklevel=1,
            )
