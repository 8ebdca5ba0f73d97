"""`pytest.mark.ranks`: its arguments, and the tests that it cannot be on."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpusim.reduction import as_reduction
from gpusim.runtime import environment

if TYPE_CHECKING:
    import pytest

__all__ = ["RanksMark", "count_of", "has_own_rank", "mark_of", "parametrize", "prepare"]

ENGINES = ("nccl", "gloo")
"""Whose rules `check` can name: those of `gpusim.torch.distributed.checks`."""

SHARED_BY_RANKS = ("capfd", "capfdbinary", "capsysbinary", "capteesys", "subtests")
"""pytest's fixtures that ranks cannot share."""


@dataclass(frozen=True)
class RanksMark:
    """The arguments of `pytest.mark.ranks`.

    **Attributes**: `reduction` is what `order` or `reduction` say; None for the default. The others
    are as given.

    **Raises**: TypeError or ValueError for arguments that the mark does not take.
    """

    count: int | Sequence[int]
    order: str | None = None
    reduction: Any = None
    schedule: str = "turns"
    init: bool | str = True
    axis: str | None = None
    processes: bool = False
    equals: int | None = None
    check: bool | str = True
    device: str | None = None

    def __post_init__(self) -> None:
        counts = self.counts
        if not counts or any(type(n) is not int or n < 1 for n in counts):
            raise ValueError(f"count={self.count!r}: expected an integer from 1, or a list of them")
        if len(set(counts)) < len(counts):
            raise ValueError(f"count={self.count!r}: expected different numbers of ranks")
        if self.schedule not in ("turns", "free"):
            raise ValueError(f"schedule={self.schedule!r}: expected 'turns' or 'free'")
        if not isinstance(self.init, (bool, str)):
            raise TypeError(
                f"init={self.init!r}: expected True, False, or the backend's name for "
                "init_process_group"
            )
        if not isinstance(self.processes, bool):
            raise TypeError(f"processes={self.processes!r}: expected True or False")
        if self.axis is not None and not isinstance(self.axis, str):
            raise TypeError(f"axis={self.axis!r}: expected the name of an axis")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: expected None, 'cpu' or 'cuda'")
        for name, chosen in (("axis", self.axis is not None), ("processes", self.processes)):
            if chosen and self.init is not True:
                raise ValueError(f"init={self.init!r}: expected no {name}; it is torch's")
            if chosen and self.device is not None:
                raise ValueError(f"device={self.device!r}: expected no {name}; it is torch's")
        if self.processes and self.axis is not None:
            raise ValueError(f"axis={self.axis!r}: expected no processes=True")
        if self.processes and self.schedule != "turns":
            raise ValueError(f"schedule={self.schedule!r}: expected no processes=True")
        if not (isinstance(self.check, bool) or self.check in ENGINES):
            raise ValueError(f"check={self.check!r}: expected True, False, 'nccl' or 'gloo'")
        if self.equals is not None:
            self._check_equals()
        self._check_reduction()

    def _check_equals(self) -> None:
        if type(self.equals) is not int or self.equals < 1:
            raise ValueError(f"equals={self.equals!r}: expected a number of ranks from 1")
        for name, chosen in (("axis", self.axis is not None), ("processes", self.processes)):
            if chosen:
                raise ValueError(f"equals={self.equals!r}: expected no {name}; it is torch's")
        if self.schedule != "turns":
            raise ValueError(f"equals={self.equals!r}: expected schedule='turns'")
        if self.device is not None and self.device != "cpu":
            raise ValueError(f"equals={self.equals!r}: expected device=None or 'cpu'")

    def _check_reduction(self) -> None:
        if self.order is not None and self.reduction is not None:
            raise ValueError(
                f"order={self.order!r}, reduction={self.reduction!r}: expected one of them"
            )
        if self.order is not None and not isinstance(self.order, str):
            raise TypeError(f"order={self.order!r}: expected a name; reduction= takes a Reduction")
        name = "reduction" if self.order is None else "order"
        given: Any = getattr(self, name)
        of_torch = self.axis is None and not self.processes
        if given is not None and not (of_torch and callable(given)):
            given = as_reduction(given, name)
        object.__setattr__(self, "reduction", given)

    def on(self, count: int, **changes: Any) -> RanksMark:
        """The same on this number of ranks."""
        return replace(self, count=count, order=None, **changes)  # `reduction` has what order says

    @property
    def counts(self) -> tuple[Any, ...]:
        many = isinstance(self.count, (list, tuple))
        return tuple(self.count) if many else (self.count,)  # type: ignore[arg-type]


def mark_of(item: Any) -> RanksMark | None:
    """The arguments of the mark of a test; None if it has none.

    **Raises**: pytest's Failed, without a traceback, for wrong arguments.
    """
    mark = item.get_closest_marker("ranks")
    if mark is None:
        return None
    try:
        return RanksMark(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        import pytest

        text = str(error).replace("RanksMark.__init__()", "ranks()")
        pytest.fail(f"{item.nodeid}: pytest.mark.ranks: {text}", pytrace=False)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test for each of several counts."""
    mark = mark_of(metafunc.definition)
    if mark is None or not isinstance(mark.count, (list, tuple)):
        return
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", mark.counts, ids=[f"ranks{n}" for n in mark.counts])


def count_of(item: pytest.Function, mark: RanksMark) -> int:
    """The number of ranks of one test."""
    if isinstance(mark.count, int):
        return mark.count
    found: Any = item.callspec.params["world_size"]
    return int(found)


def prepare(item: pytest.Item) -> None:
    """Refuse tests that cannot run on ranks, before their fixtures are evaluated."""
    import pytest

    mark = mark_of(item)
    assert mark is not None

    def refuse(why: str) -> None:
        pytest.fail(f"{item.nodeid}: pytest.mark.ranks: {why}", pytrace=False)

    function = getattr(item, "obj", None)
    if type(item).__name__ == "TestCaseFunction":
        refuse(
            f"{item.name} is a method of a unittest.TestCase; decorate the class or the method "
            f"with `@ranks({mark.count})`, from gpusim.testing, in place of the mark"
        )
    if type(item) is not pytest.Function or function is None:
        refuse(f"expected a test function, got a {type(item).__name__}")
        return
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        refuse("expected a test function, got an async one")
    if getattr(function, "is_hypothesis_test", False):
        refuse(
            "hypothesis would draw other examples on each rank; call "
            "gpusim.torch.distributed.launch or gpusim.pmap in the test"
        )
    if item.config.getoption("trace", False):
        refuse("--trace works with one rank; use breakpoint() or --pdb")
    if not mark.processes:
        for name in item._fixtureinfo.argnames:
            if name in SHARED_BY_RANKS:
                refuse(f"ranks cannot share the fixture {name!r}; capsys works for each rank")
    if has_own_rank(item):
        # Is not evaluated then: it is another value in each rank.
        item.funcargs["rank"] = environment.read().instance if mark.processes else None


def has_own_rank(item: pytest.Function) -> bool:
    """Whether the test has the plugin's fixture `rank` as an argument."""
    fixtures = item._fixtureinfo.name2fixturedefs.get("rank", ())
    return (
        "rank" in item._fixtureinfo.argnames
        and bool(fixtures)
        and fixtures[-1].func.__module__ == "pytest_gpusim"
    )
